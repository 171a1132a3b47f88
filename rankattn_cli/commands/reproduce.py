import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from typer import Argument, Option

from ..completion import complete_experiment
from ..console import PLAIN_EVERY, Bar, Json, print_json, print_table, say


EXAMPLE = "rankattn reproduce rank-separation --scale laptop --out runs"


@contextmanager
def sweep_bar() -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """A bar for each experiment, with cells done and time left; without a terminal, a line every `PLAIN_EVERY` seconds."""
    last = time.perf_counter()
    with Bar("{task.completed}/{task.total} cells", transient=False, plain_every=float("inf")) as bar:

        def start(name: str, total: int) -> Callable[[], object]:
            task = bar.add_task(name, total=total)
            begun, done = time.perf_counter(), 0

            def advance() -> None:
                nonlocal done, last
                done += 1
                bar.advance(task)
                now = time.perf_counter()
                if now - last >= PLAIN_EVERY:
                    last, spent = now, now - begun
                    left = spent / done * (total - done)
                    bar.print_line(f"{name}: {done}/{total} cells, {spent:.0f} s, about {left:.0f} s left")

            return advance

        yield start


def reproduce(
    name: str | None = Argument(
        None, help="Name of an experiment, or all; --list shows the names.", autocompletion=complete_experiment
    ),
    list_all: bool = Option(False, "--list", help="List the experiments and exit."),
    scale: Literal["smoke", "laptop", "paper"] = Option(
        "laptop", help="smoke takes seconds, laptop takes minutes, paper is the published size, for clusters."
    ),
    seeds: int | None = Option(
        None, min=1, help="Number of seeds of weights and data. Default: depends on the scale."
    ),
    out: Path = Option(
        Path("runs"), help="Results are written to OUT/NAME/SCALE; an interrupted run continues from there."
    ),
    as_published: bool = Option(False, "--as-published", help="Reproduce the errors of the published code as well."),
    checkpoint: str | None = Option(
        None, help="Folder or Hub name of a model to measure as well, in experiments that measure models."
    ),
    text: str | None = Option(
        None, help="UTF-8 text file to measure the checkpoint on. Default: text in the package."
    ),
    dataset: str | None = Option(None, help="Dataset to measure the checkpoint on (its test split)."),
    engine: Literal["local", "slurm"] = Option(
        "local", help="local runs processes on this machine, slurm submits job arrays with submitit."
    ),
    engine_option: list[str] | None = Option(
        None, help="Option of the engine slurm, such as partition=gpu or minutes=60; can be given several times."
    ),
    workers: int | None = Option(
        None, min=0, help="Number of worker processes of the engine local. Default: one per core."
    ),
    as_json: bool = Json,
) -> None:
    """Run an experiment of the papers. Writes a table, figures, and each claim beside its published number."""
    from hf_rankattn.papers import EXPERIMENTS, reproduce_all
    from hf_rankattn.papers.sweep.runner import find_experiment, key_values
    from hf_rankattn.report.verdicts import count_verdicts

    if list_all or name is None:
        shown = {known: find_experiment(known).SHOWS for known in EXPERIMENTS}
        if as_json:
            print_json(shown)
        else:
            say("\n".join(f"{known}: {text}" for known, text in shown.items()))
        return
    names = list(EXPERIMENTS) if name == "all" else [name]
    given = {"as_published": as_published, "checkpoint": checkpoint, "text": text, "dataset": dataset}
    options = {key: value for key, value in given.items() if value}
    how: dict = {"engine": engine, "workers": workers, "engine_options": key_values(engine_option or ())}
    start = time.perf_counter()
    with sweep_bar() as bar:
        run = reproduce_all(names, out, scale=scale, seeds=seeds, options=options, start_progress=bar, **how)
        outcomes = list(run)
    if as_json:
        print_json([outcome.as_dict() for outcome in outcomes])
        return
    claims = [claim for outcome in outcomes for claim in outcome.claims]
    rows = [(claim.claim, claim.published or "-", claim.measured, claim.verdict) for claim in claims]
    print_table(["claim", "published", "ours", "verdict"], rows, title=f"{name}, {scale} scale", show_lines=True)
    for outcome in outcomes:
        say(f"{outcome.folder}: {', '.join(outcome.files)}")
    counted = count_verdicts(claim.verdict for claim in claims)
    say(f"{counted}. {sum(outcome.computed for outcome in outcomes)} cells in {time.perf_counter() - start:.0f} s.")
    if scale == "smoke":
        say(
            f"The smoke scale only checks that an experiment runs. For verdicts: rankattn reproduce {name} --scale laptop"
        )
