"""The command line: parse, call one function, print."""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


app = typer.Typer(
    help="How much rank attention needs, has, and loses.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Json = typer.Option(False, "--json", help="Print JSON.")


class Metrics(StrEnum):
    cheap = "cheap"
    full = "full"


class Dtype(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Callable[[int], Callable[[], object]]]:
    """Gives a function that takes a total and returns what to call at every step; drawn on stderr, gone when done."""
    columns = TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total} " + unit), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def start(total: int) -> Callable[[], object]:
            task = progress.add_task(what, total=total)
            return lambda: progress.advance(task)

        yield start


def print_version(wanted: bool) -> None:
    if wanted:
        print(version("hf_rankattn"))
        raise typer.Exit


@app.callback()
def commands(
    _: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


@app.command(epilog="Example: rankattn demo")
def demo(as_json: bool = Json) -> None:
    """Train heads of three ranks at one budget, and show rank as a config field. A minute or two, offline."""
    from . import demo as demonstration

    start = time.perf_counter()
    with progress_bar("training", "steps") as start_progress:
        claims = demonstration.run_demo(progress=start_progress(demonstration.TOTAL_STEPS))
    if as_json:
        print(json.dumps([claim.as_dict() for claim in claims], indent=2))
        return
    table = Table("claim", "measured", "to compare", show_lines=True)
    for claim in claims:
        table.add_row(claim.claim, claim.measured, claim.compare)
    console = Console()
    console.print(table)
    console.print(f"Measured here, in {time.perf_counter() - start:.0f} seconds.", highlight=False)


@app.command(epilog="Example: rankattn env --json")
def env(as_json: bool = Json) -> None:
    """Print the versions that a bug report needs."""
    import torch

    names = (
        "hf_rankattn",
        "torch",
        "transformers",
        "huggingface_hub",
        "datasets",
        "accelerate",
        "evaluate",
        "safetensors",
    )
    report: dict[str, str | int] = {name: version(name) for name in names}
    report["python"] = platform.python_version()
    report["platform"] = platform.platform()
    report["threads"] = torch.get_num_threads()
    report["accelerator"] = str(torch.accelerator.current_accelerator() or "none")
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for name, value in report.items():
        print(f"- {name}: {value}")


@app.command(epilog="Example: rankattn measure sentence-transformers/all-MiniLM-L6-v2 --out measured")
def measure(
    model: str = typer.Argument(help="A folder or a Hub repository with safetensors."),
    out: Path = typer.Option(help="Folder to make, for table.parquet and the figures."),
    text: Path | None = typer.Option(None, help="Text file: paragraphs between blank lines, or a text a line."),
    dataset: str | None = typer.Option(None, help="A dataset on the Hub or in a folder, instead of a text file."),
    split: str = typer.Option("test", help="Split of the dataset."),
    column: str | None = typer.Option(None, help="Column of the dataset; not needed if one column is text."),
    random_inputs: bool = typer.Option(False, "--random-inputs", help="Random ids, images or points, not text."),
    examples: int = typer.Option(32, help="How many texts to use."),
    length: int = typer.Option(128, help="Tokens a text is cut to."),
    batch_size: int = typer.Option(8, help="Texts a batch."),
    variants: str | None = typer.Option(None, help="Of san,san+mlp,san+skip,transformer; default: all that can be."),
    metrics: Metrics = typer.Option(Metrics.full, help="full: singular values of every map; cheap: none."),
    random_init: bool = typer.Option(False, "--random-init", help="Take the config only and draw fresh weights."),
    dtype: Dtype = typer.Option(Dtype.float32, help="Precision to run in; float64 sees collapse ten digits deeper."),
    seed: int = typer.Option(0, min=0, help="Seed of fresh weights and random inputs."),
    revision: str | None = typer.Option(None, help="Branch, tag or commit on the Hub."),
    device_map: str | None = typer.Option(None, help="As in from_pretrained: auto for models too big for one device."),
    offload_folder: str | None = typer.Option(None, help="Where weights go that fit no device."),
    processes: int | None = typer.Option(None, help="Stop unless torchrun started so many processes."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace measurements in --out."),
    as_json: bool = Json,
) -> None:
    """Measure a checkpoint: do tokens stay apart, how much rank has attention, how much query-key rank is used."""
    from .folders import fresh_folder
    from .processes import join_processes, leave_processes
    from .report.summary import findings
    from .survey import measure_checkpoint, write_survey

    first = join_processes(processes)
    with ExitStack() as stack:
        start_progress: Callable[[int], Callable[[], object]] = lambda total: lambda: None  # noqa: E731
        if first:
            folder = stack.enter_context(fresh_folder(out, overwrite, marker="table.parquet", what="measurements"))
            start_progress = stack.enter_context(progress_bar("measuring", "batches"))
        table, facts = measure_checkpoint(
            model, text=text, dataset=dataset, split=split, column=column, random_inputs=random_inputs,
            examples=examples, length=length, batch_size=batch_size, metrics=metrics.value, random_init=random_init,
            variants=None if variants is None else [name.strip() for name in variants.split(",")], dtype=dtype.value,
            seed=seed, revision=revision, device_map=device_map, offload_folder=offload_folder,
            start_progress=start_progress,
        )  # fmt: skip
        leave_processes()
        if not first:
            return
        files = write_survey(table, facts, folder)
    found = findings(table, facts)
    if as_json:
        print(json.dumps({"facts": facts, "findings": [entry.as_dict() for entry in found], "files": files}, indent=2))
        return
    answers = Table("question", "answer", "to compare", show_lines=True, title=facts["title"])
    for entry in found:
        answers.add_row(entry.question, entry.answer, entry.compare)
    console = Console()
    console.print(answers)
    console.print(
        f"{facts['family']}, {facts['layers']} layers of {facts['heads']} heads, {facts['dtype']}; {facts['examples']} "
        f"examples from {facts['source']}; {facts['seconds']} s.\nIn {out}: {', '.join(files)}",
        highlight=False,
    )


@app.command("make-data", epilog="Example: rankattn make-data farthest_neighbor --config d64_n16 --out farthest")
def make_data(
    task: str = typer.Argument(help="Name of the task; a wrong one lists them all."),
    out: str = typer.Option(..., help="Folder to write, which must not exist."),
    config: Annotated[list[str] | None, typer.Option(help="Named config; may be given several times.")] = None,
    dim: int | None = typer.Option(None, help="Dimension of the points."),
    num_points: int | None = typer.Option(None, help="Points in a row."),
    num_queries: int | None = typer.Option(None, help="Queries in a row."),
    distribution: str | None = typer.Option(None, help="uniform, orthogonal or doubled."),
    length: int | None = typer.Option(None, help="Tokens in a row."),
    num_values: int | None = typer.Option(None, help="Numbers to sort, or values to retrieve."),
    num_keys: int | None = typer.Option(None, help="Keys that exist."),
    layout: str | None = typer.Option(None, help="joint or pairs."),
    angles: str | None = typer.Option(None, help="grid or uniform."),
    text_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Text to memorize.")] = None,
    tokenizer: str | None = typer.Option(None, help="words, bytes, or a tokenizer of transformers."),
    max_length: int | None = typer.Option(None, help="Tokens in a row of text."),
    num_examples: int | None = typer.Option(None, help="Train rows."),
    num_eval_examples: int | None = typer.Option(None, help="Validation rows, and test rows."),
    seed: int | None = typer.Option(None, help="Seed of all splits."),
    license: str | None = typer.Option(None, help="Licence of the data, for the card."),
    push: str | None = typer.Option(None, help="Dataset repository of the Hub to send the same to."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a folder of such data."),
    as_json: bool = Json,
) -> None:
    """Write a synthetic task as Parquet with a dataset card, for datasets.load_dataset."""
    from .tasks.publishing import make_data as write

    texts = text_file.read_text(encoding="utf-8") if text_file else None
    progress = Progress(
        TextColumn("writing"), BarColumn(), TextColumn("{task.completed} rows"), console=Console(stderr=True),
        transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with progress:
        written = progress.add_task("writing", total=None)
        made = write(
            task, out, config or (), push=push, overwrite=overwrite, license=license, dim=dim, num_points=num_points,
            num_queries=num_queries, distribution=distribution, length=length, num_values=num_values, num_keys=num_keys,
            layout=layout, angles=angles, texts=texts, tokenizer=tokenizer, max_length=max_length,
            num_examples=num_examples, num_eval_examples=num_eval_examples, seed=seed,
            progress=lambda rows: progress.advance(written, rows),
        )  # fmt: skip
    if as_json:
        print(json.dumps(asdict(made), indent=2))
        return
    for name, rows in made.rows.items():
        print(f"{made.folder}: {name}, " + ", ".join(f"{count:,} {split}" for split, count in rows.items()) + " rows")
    if made.pushed:
        print(f"pushed: {made.pushed}")


def main() -> None:
    try:
        app()
    except ValueError as error:
        print(f"rankattn: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
