"""The papers' synthetic tasks as `datasets` builders, with their metrics and baselines."""

from ._baselines import task_baselines as task_baselines
from ._building import TaskBuilder as TaskBuilder
from ._building import TaskConfig as TaskConfig
from ._loading import TASKS as TASKS
from ._loading import baselines as baselines
from ._loading import load_stream as load_stream
from ._loading import load_task as load_task
from ._loading import score as score
from ._loading import task_builder as task_builder
from ._loading import trainer_metrics as trainer_metrics
from ._metrics import NeighborAccuracy as NeighborAccuracy
from ._metrics import NeighborError as NeighborError
from ._metrics import SequenceAccuracy as SequenceAccuracy
from ._metrics import TokenAccuracy as TokenAccuracy
from ._publishing import make_data as make_data
from ._sampling import orthonormal_vectors as orthonormal_vectors
from ._sampling import random_generator as random_generator
from ._stream import BatchStream as BatchStream
from ._stream import start_at as start_at
from .convex_hull import HullVertexF1 as HullVertexF1
from .sorting import InvertedPairs as InvertedPairs
