"""One module for each family of figures; runner.py goes from a name to a table, figures and claims."""

from .runner import EXPERIMENTS as EXPERIMENTS
from .runner import SCALES as SCALES
from .runner import Claim as Claim
from .runner import Outcome as Outcome
from .runner import reproduce as reproduce
from .runner import reproduce_all as reproduce_all
