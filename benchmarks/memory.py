"""Peaks of memory: what the process holds, and what the tensors of a call hold."""

import json
import tempfile
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def high_water_mark(reset: bool) -> float:
    """Peak resident megabytes. ru_maxrss is inherited from the parent process, so Linux's own mark is reset and read."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def live_peak(call: Callable[[], object]) -> float:
    """Peak megabytes of the tensors that a call makes, by the book of torch's allocator: exact, whatever the heap does."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        record.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = [event for event in json.load(trace)["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak / 2**20
