"""The experiments, a folder for each paper; `sweep/runner.py` runs an experiment by its name."""

from .sweep.judging import Claim as Claim
from .sweep.runner import EXPERIMENTS as EXPERIMENTS
from .sweep.runner import SCALES as SCALES
from .sweep.runner import Outcome as Outcome
from .sweep.runner import reproduce as reproduce
from .sweep.runner import reproduce_all as reproduce_all
