"""The demonstration: four parts, six claims with the papers' numbers beside ours, one page."""

from .measuring import Settings
from .telling import Demo, demo_folder, run_demo, write_demo


__all__ = ["Demo", "Settings", "demo_folder", "run_demo", "write_demo"]
