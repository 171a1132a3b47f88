"""One module for each family of figures; runner.py goes from a name to a table, figures and claims."""

from .sweep.judging import Claim as Claim
from .sweep.runner import EXPERIMENTS as EXPERIMENTS
from .sweep.runner import SCALES as SCALES
from .sweep.runner import Outcome as Outcome
from .sweep.runner import reproduce as reproduce
from .sweep.runner import reproduce_all as reproduce_all
