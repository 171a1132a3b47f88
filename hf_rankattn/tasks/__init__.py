"""The papers' synthetic tasks as `datasets` builders, with their metrics and baselines."""

from .baselines import baselines as baselines
from .loading import TASKS as TASKS
from .loading import load_task as load_task
from .loading import task_builder as task_builder
from .metrics import HullVertexF1 as HullVertexF1
from .metrics import InvertedPairs as InvertedPairs
from .metrics import NeighborAccuracy as NeighborAccuracy
from .metrics import NeighborError as NeighborError
from .metrics import SequenceAccuracy as SequenceAccuracy
from .metrics import TokenAccuracy as TokenAccuracy
from .metrics import trainer_metrics as trainer_metrics
from .stream import start_at as start_at
