import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer import Option

from ..console import Bar, Json, print_json, print_table, say


EXAMPLE = "rankattn demo"


@contextmanager
def demo_bar(jobs: Sequence[Any]) -> Iterator[Callable[[Any, float, bool], object]]:
    """The share of the work that is done and the time left; without a terminal, a plain line for each part."""
    begun, over = time.perf_counter(), 0
    with Bar("{task.percentage:>3.0f} %", plain_every=float("inf")) as bar:
        task = bar.add_task("demo", total=sum(job.cost for job in jobs))

        def advance(job: Any, seconds: float, done: bool) -> None:
            nonlocal over
            over += done
            bar.update(task, advance=seconds, description=f"demo: {over} of {len(jobs)} parts")
            if done:
                bar.print_line(f"demo: {job.part}, {over}/{len(jobs)} parts, {time.perf_counter() - begun:.0f} s")

        yield advance


def demo(
    out: Path | None = Option(None, help="Folder to write. Default: demo, where an earlier demo is replaced."),
    overwrite: bool = Option(False, "--overwrite", help="Replace the demo in --out."),
    checkpoint: str | None = Option(None, help="Folder or Hub name of your own model, to add to the page."),
    random_inputs: bool = Option(False, "--random-inputs", help="Measure your model on random inputs, not on text."),
    workers: int | None = Option(
        None, min=0, help="Number of worker processes; 0 uses this process only. Default: one per core, at most 4."
    ),
    seed: int = Option(0, min=0, help="Seed of weights, data and maps."),
    as_json: bool = Json,
) -> None:
    """Measure six claims of the papers. Writes a page with the results in one or two minutes, and works offline."""
    from hf_rankattn.papers import demo as demonstration
    from hf_rankattn.papers.demo.checkpoint import measure_own
    from hf_rankattn.papers.demo.measuring import Job, jobs_of
    from hf_rankattn.papers.demo.running import usual_workers

    if random_inputs and checkpoint is None:
        raise ValueError("--random-inputs is for the model of --checkpoint: give --checkpoint as well.")
    settings, own = demonstration.Settings(seed=seed), None
    yours = Job("your model", {}, 30.0)
    jobs = [*([yours] if checkpoint else []), *jobs_of(settings)]
    with demonstration.demo_folder(out, overwrite) as folder, demo_bar(jobs) as progress:
        if checkpoint is not None:

            def start(total: int) -> Callable[[], object]:
                return lambda: progress(yours, yours.cost / total, False)

            own = measure_own(checkpoint, random_inputs=random_inputs, seed=seed, start_progress=start)
            progress(yours, 0.0, True)
        workers = usual_workers() if workers is None else workers
        found = demonstration.run_demo(settings, workers=workers, checkpoint=own, progress=progress)
        files = demonstration.write_demo(found, folder)
    shown = out or Path("demo")
    if as_json:
        print_json(found.as_dict() | {"folder": str(shown), "files": files})
        return
    rows = [(claim.claim, claim.measured, claim.published, claim.source, claim.verdict) for claim in found.claims]
    print_table(["claim", "here", "published", "source", "verdict"], rows, show_lines=True)
    say(f"Measured here, in {found.seconds:.0f} seconds. To read: {shown / files[0]}")
