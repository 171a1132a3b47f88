"""What importing the package adds to what a user of BertModel imports anyway."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.timing import Row, at_most


SECONDS = 0.3
# each import in a fork of a process that has imported transformers, which takes ten times as long as what is measured
MEASURED = """
import json, os, sys, time
from transformers import BertModel

def imported():
    heavy = ("datasets", "evaluate", "matplotlib", "pandas", "scipy", "accelerate", "sklearn", "pyarrow")
    before, busy, start = set(sys.modules), time.process_time(), time.perf_counter()
    import hf_rankattn
    busy, start = time.process_time() - busy, time.perf_counter() - start
    return {"busy": busy, "clock": start, "heavy": [name for name in heavy if name in set(sys.modules) - before]}

for _ in range(int(sys.argv[1])):
    if not (child := os.fork()):
        print(json.dumps(imported()), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


def run(repeats: int) -> Iterator[Row]:
    command = [sys.executable, "-c", MEASURED, str(repeats + 1)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines][1:]  # the first one may have to compile and to read from disk
    busy, clock = (statistics.median(entry[name] for entry in found) for name in ("busy", "clock"))
    note = f"{clock:.2f} s by the clock"
    yield at_most("import hf_rankattn after BertModel, seconds of CPU", "one second", busy, SECONDS, note)
    heavy = sorted({name for entry in found for name in entry["heavy"]})
    note = ", ".join(heavy) or "neither datasets nor pandas, scipy, matplotlib, accelerate"
    what = "import hf_rankattn after BertModel, heavy packages that it loads"
    yield at_most(what, "none", len(heavy), 0, note).counted(0)
