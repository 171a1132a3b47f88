"""How much rank attention needs, has, and loses.

Importing this package registers the rank models with transformers' Auto classes.
"""

from .models import *  # noqa: F403
from .version import __version__ as __version__
