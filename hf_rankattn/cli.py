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


@app.command(epilog="Example: rankattn convert path/to/bert --qk-rank 16 --calibration package --out narrow-bert")
def convert(
    model: str = typer.Argument(help="A folder or Hub name of a BERT, ALBERT or XLNet checkpoint, stock or rank."),
    qk_rank: int = typer.Option(None, "--qk-rank", help="The new query-key rank of every head."),
    auto: bool = typer.Option(False, "--auto", help="Choose a rank for each layer, by --energy or --mean-rank."),
    energy: float = typer.Option(None, "--energy", help="With --auto: share of logit energy to keep (0.95)."),
    mean_rank: float = typer.Option(None, "--mean-rank", help="With --auto: mean of the ranks."),
    calibration: str = typer.Option(None, "--calibration", help="Texts: a file of paragraphs, or 'package'."),
    objective: str = typer.Option("logits", "--objective", help="'logits', or 'attention' for errors weighted by it."),
    distil_steps: int = typer.Option(None, "--distil-steps", help="Steps of distillation on the calibration texts."),
    out: str = typer.Option(None, "--out", help="Where to write: a folder, with --curve a PNG or PDF file."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the output if it exists."),
    stream: bool = typer.Option(False, "--stream", help="Weights only, shard by shard, in bounded memory."),
    base_model: str = typer.Option(None, "--base-model", help="What the card names as base model."),
    curve: bool = typer.Option(False, "--curve", help="Draw quality against rank; no model is written."),
    seed: int = typer.Option(0, "--seed", help="Seed of new dimensions and of distillation."),
    as_json: bool = Json,
) -> None:
    """Give a checkpoint another query-key rank, with the least damage to its logits."""
    from . import converting

    if auto and qk_rank is not None:
        raise ValueError(f"--auto and --qk-rank {qk_rank} are two answers to one question: give one of them.")

    progress = Progress(
        TextColumn("converting"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with progress:
        task = progress.add_task("converting", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        if curve:
            rows, file = converting.curve_to_file(
                model, out, calibration=calibration, distil_steps=distil_steps, overwrite=overwrite, seed=seed, progress=advance
            )  # fmt: skip
        else:
            outcome = converting.convert_checkpoint(
                model, out, qk_rank="auto" if auto else qk_rank, calibration=calibration, energy=energy, mean_rank=mean_rank,
                objective=objective, distil_steps=distil_steps or 0, stream=stream, base_model=base_model, overwrite=overwrite,
                seed=seed, progress=advance,
            )  # fmt: skip
    if as_json:
        print(json.dumps({"rows": rows, "file": str(file)} if curve else outcome.as_dict(), indent=2))
        return
    if curve:
        table = Table("way", "rank", "cosine to the original")
        for row in rows:
            table.add_row(row["way"], str(row["rank"]), f"{row['embedding_cosine']:.4f}")
        Console().print(table)
        print(f"Drawn in {file}.")
        return
    table = Table("layer", "rank", "of", "logit energy kept", "parameters saved")
    for layer in outcome.layers:
        table.add_row(
            str(layer.layer),
            str(layer.rank),
            str(layer.old_rank),
            f"{layer.energy_kept:.4f}",
            f"{layer.parameters_saved:,}",
        )
    Console().print(table)
    for name, value in outcome.damage.items():
        print(f"{name.replace('_', ' ')}: {value:.4f}")
    change = "saved" if outcome.parameters_saved >= 0 else "added"
    print(f"{abs(outcome.parameters_saved):,} parameters {change}. Written to {outcome.folder}.")


class Scale(StrEnum):
    smoke = "smoke"
    laptop = "laptop"
    paper = "paper"


class Engine(StrEnum):
    local = "local"
    slurm = "slurm"


@app.command(epilog="Example: rankattn reproduce rank-separation --scale laptop --out runs")
def reproduce(
    name: str = typer.Argument(None, help="An experiment, or all; --list shows them."),
    list_all: bool = typer.Option(False, "--list", help="Show the experiments and stop."),
    scale: Scale = typer.Option(
        Scale.laptop, help="smoke: seconds; laptop: minutes; paper: as published, for clusters."
    ),
    seeds: int = typer.Option(None, min=1, help="Seeds of weights and data; by default as many as the scale has."),
    out: Path = typer.Option(
        Path("runs"), help="Results go to OUT/NAME/SCALE; an interrupted run goes on from there."
    ),
    as_published: bool = typer.Option(False, "--as-published", help="With the faults of the published runs."),
    checkpoint: str = typer.Option(None, help="Of experiments that measure models: a folder or Hub name to add."),
    text: str = typer.Option(None, help="A UTF-8 file to measure the checkpoint on; default: the package's text."),
    dataset: str = typer.Option(None, help="A dataset to measure the checkpoint on (its test split)."),
    engine: Engine = typer.Option(Engine.local, help="local: processes; slurm: job arrays through submitit."),
    engine_option: Annotated[
        list[str] | None,
        typer.Option(help="Of the engine slurm, KEY=VALUE; several times: partition=gpu, minutes=60."),
    ] = None,
    workers: int = typer.Option(None, min=0, help="Processes of the engine local; by default one a core."),
    as_json: bool = Json,
) -> None:
    """Run an experiment of the papers: a table, figures, and each claim beside its number."""
    from .experiments import EXPERIMENTS, reproduce_all
    from .experiments.runner import find_experiment, key_values

    if list_all or name is None:
        shown = {known: find_experiment(known).SHOWS for known in EXPERIMENTS}
        print(
            json.dumps(shown, indent=2) if as_json else "\n".join(f"{known}: {text}" for known, text in shown.items())
        )
        return
    names = list(EXPERIMENTS) if name == "all" else [name]
    outcomes, start = [], time.perf_counter()
    with ExitStack() as stack:
        bar = stack.enter_context(sweep_bar())
        given = {"as_published": as_published, "checkpoint": checkpoint, "text": text, "dataset": dataset}
        options = {key: value for key, value in given.items() if value}
        for outcome in reproduce_all(
            names, out, scale=scale.value, seeds=seeds, engine=engine.value, workers=workers, options=options,
            engine_options=key_values(engine_option or ()), start_progress=bar,
        ):  # fmt: skip
            outcomes.append(outcome)
    if as_json:
        print(json.dumps([outcome.as_dict() for outcome in outcomes], indent=2))
        return
    console = Console()
    table = Table("claim", "published", "ours", "holds", show_lines=True, title=f"{name}, {scale.value} scale")
    for outcome in outcomes:
        for claim in outcome.claims:
            table.add_row(claim.claim, claim.published or "-", claim.measured, claim.verdict)
    console.print(table)
    for outcome in outcomes:
        console.print(f"{outcome.folder}: {', '.join(outcome.files)}", highlight=False, soft_wrap=True)
    console.print(
        f"{sum(outcome.computed for outcome in outcomes)} cells in {time.perf_counter() - start:.0f} s.",
        highlight=False,
    )


@contextmanager
def sweep_bar() -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """A line for each experiment: cells done and time left, on stderr; plain lines where nobody watches a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} cells"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def start(name: str, total: int) -> Callable[[], object]:
            task = progress.add_task(name, total=total)
            begun, done = time.perf_counter(), 0

            def advance() -> None:
                nonlocal done
                done += 1
                progress.advance(task)
                if not console.is_terminal:
                    spent = time.perf_counter() - begun
                    left = spent / done * (total - done)
                    print(
                        f"{name}: {done}/{total} cells, {spent:.0f} s, about {left:.0f} s left",
                        file=sys.stderr,
                        flush=True,
                    )

            return advance

        yield start


def main() -> None:
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:
        # one line, whatever lines an error of another library has
        what = " ".join(str(error).split()) or "there is not enough memory for this."
        print(f"rankattn: {what if len(what) < 1500 else what[:1500] + ' ...'}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
