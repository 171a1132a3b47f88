"""Speed of hf_rankattn against what it replaces: ratios of medians, measured in one process, on one thread."""

import os


# Before torch is imported: its profiler, which counts bytes here, tells stderr of every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
