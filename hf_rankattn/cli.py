"""The command line: parse, call one function, print.

Shells ask this module for completions at every key, so nothing heavy is imported before a command runs.
"""

import ast
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.progress import BarColumn, TimeRemainingColumn

from .console import demo_bar, open_console, open_progress, open_table, progress_bar, sweep_bar


app = typer.Typer(
    help="How much rank attention needs, has, and loses.",
    pretty_exceptions_enable=False,
    # plain help reads the same in a terminal, a pipe and a log
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
Json = typer.Option(False, "--json", help="Print JSON.")
# what shells report of a program that Ctrl-C ended: 128 + SIGINT
INTERRUPTED = 130
LONGEST_ERROR = 1500


class Metrics(StrEnum):
    cheap = "cheap"
    full = "full"


class Dtype(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


def names_in(file: str, dictionary: str) -> list[str]:
    """The keys of a dictionary in a module of this package, which is read and not run."""
    for node in ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            if [target.id for target in node.targets if isinstance(target, ast.Name)] == [dictionary]:
                return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise LookupError(f"{file} has no dictionary {dictionary}.")


def complete_experiment(incomplete: str) -> list[str]:
    names = [*names_in("experiments/runner.py", "EXPERIMENTS"), "all"]
    return [name for name in names if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    return [name for name in names_in("tasks/loading.py", "TASKS") if name.startswith(incomplete)]


def print_version(wanted: bool) -> None:
    if wanted:
        print(version("hf_rankattn"))
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog="Example: rankattn demo")
def commands(
    context: typer.Context,
    _: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command(epilog="Example: rankattn demo")
def demo(
    out: Path | None = typer.Option(
        None, help="Folder to make; by default demo, which is replaced if a demo made it."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a demo in --out."),
    checkpoint: str | None = typer.Option(None, help="A folder or Hub name: your own model on the page."),
    random_inputs: bool = typer.Option(False, "--random-inputs", help="Measure it on random inputs, not on text."),
    workers: int | None = typer.Option(
        None, min=0, help="Processes; 0: none but this. Default: one a core, at most 4."
    ),
    seed: int = typer.Option(0, min=0, help="Seed of weights, data and maps."),
    as_json: bool = Json,
) -> None:
    """Six claims on rank, measured here beside the papers' numbers, and a page of them. A minute or two, offline."""
    from . import demo as demonstration
    from .demo.checkpoint import measure_own
    from .demo.measuring import Job, jobs_of
    from .demo.running import usual_workers

    if random_inputs and checkpoint is None:
        raise ValueError("--random-inputs says what a checkpoint reads: give --checkpoint as well.")
    settings, own = demonstration.Settings(seed=seed), None
    yours = Job("your model", {}, 15.0)
    jobs = [*([yours] if checkpoint else []), *jobs_of(settings)]
    with demonstration.demo_folder(out, overwrite) as folder, demo_bar(jobs) as progress:
        if checkpoint is not None:
            own = measure_own(
                checkpoint, random_inputs=random_inputs, seed=seed,
                start_progress=lambda total: lambda: progress(yours, yours.cost / total, False),
            )  # fmt: skip
            progress(yours, 0.0, True)
        found = demonstration.run_demo(
            settings, workers=usual_workers() if workers is None else workers, checkpoint=own, progress=progress
        )
        files = demonstration.write_demo(found, folder)
    shown = out or Path("demo")
    if as_json:
        print(json.dumps(found.as_dict() | {"folder": str(shown), "files": files}, indent=2))
        return
    table = open_table("claim", "here", "published", "source", "holds", show_lines=True)
    for claim in found.claims:
        table.add_row(claim.claim, claim.measured, claim.published, claim.source, claim.verdict)
    console = open_console()
    console.print(table)
    console.print(f"Measured here, in {found.seconds:.0f} seconds. To read: {shown / files[0]}", highlight=False, soft_wrap=True)  # fmt: skip


@app.command(epilog="Example: rankattn report runs --out runs.html")
def report(
    folder: Path = typer.Argument(help="What rankattn reproduce or rankattn measure wrote, or a folder of such."),
    out: Path = typer.Option(help="The page to write, .html."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the page if it exists."),
    as_json: bool = Json,
) -> None:
    """Put results and their figures on one page that needs nothing but itself."""
    from .report.html import check_writable, write_page
    from .report.results import report_page

    check_writable(out, overwrite)
    page = write_page(report_page(folder), out, overwrite)
    size = page.stat().st_size
    print(json.dumps({"page": str(page), "bytes": size}, indent=2) if as_json else f"{page}: {size / 1024:.0f} kB")


@app.command(epilog="Example: rankattn env --json")
def env(as_json: bool = Json) -> None:
    """Print what a bug report needs, without paths and tokens. Versions, machine, backends, settings."""
    from .environment import describe_environment

    report = describe_environment()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for name, value in report.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {entry}" for key, entry in value.items()) or "none"
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
    """Measure the rank that a checkpoint has, uses and loses.

    Do tokens stay apart, how much rank has attention, how much query-key rank is used?
    """
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
    answers = open_table("question", "answer", "to compare", show_lines=True, title=facts["title"])
    for entry in found:
        answers.add_row(entry.question, entry.answer, entry.compare)
    console = open_console()
    console.print(answers)
    console.print(
        f"{facts['family']}, {facts['layers']} layers of {facts['heads']} heads, {facts['dtype']}; {facts['examples']} "
        f"examples from {facts['source']}; {facts['seconds']} s.\nIn {out}: {', '.join(files)}",
        highlight=False,
    )


@app.command("make-data", epilog="Example: rankattn make-data farthest_neighbor --config d64_n16 --out farthest")
def make_data(
    task: str = typer.Argument(help="Name of the task; a wrong one lists them all.", autocompletion=complete_task),
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
    """Write a synthetic task as Parquet with a dataset card. It is read by datasets.load_dataset."""
    from .tasks.publishing import make_data as write

    texts = text_file.read_text(encoding="utf-8") if text_file else None
    with open_progress("writing", BarColumn(), "{task.completed} rows") as progress:
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
    """Give a checkpoint another query-key rank. The damage to its logits is the least possible."""
    from . import converting

    if auto and qk_rank is not None:
        raise ValueError(f"--auto and --qk-rank {qk_rank} are two answers to one question: give one of them.")

    columns = "converting", BarColumn(), "{task.completed}/{task.total}", TimeRemainingColumn()
    with open_progress(*columns) as progress:
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
        table = open_table("way", "rank", "cosine to the original")
        for row in rows:
            table.add_row(row["way"], str(row["rank"]), f"{row['embedding_cosine']:.4f}")
        open_console().print(table)
        print(f"Drawn in {file}.")
        return
    table = open_table("layer", "rank", "of", "logit energy kept", "parameters saved")
    for layer in outcome.layers:
        table.add_row(
            str(layer.layer),
            str(layer.rank),
            str(layer.old_rank),
            f"{layer.energy_kept:.4f}",
            f"{layer.parameters_saved:,}",
        )
    open_console().print(table)
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
    name: str = typer.Argument(
        None, help="An experiment, or all; --list shows them.", autocompletion=complete_experiment
    ),
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
    """Run an experiment of the papers. A table, figures, and each claim beside its number."""
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
    console = open_console()
    table = open_table("claim", "published", "ours", "holds", show_lines=True, title=f"{name}, {scale.value} scale")
    for outcome in outcomes:
        for claim in outcome.claims:
            table.add_row(claim.claim, claim.published or "-", claim.measured, claim.verdict)
    console.print(table)
    for outcome in outcomes:
        console.print(f"{outcome.folder}: {', '.join(outcome.files)}", highlight=False, soft_wrap=True)
    verdicts = [claim.verdict for outcome in outcomes for claim in outcome.claims]
    held = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("yes", "no", "not testable here"))
    console.print(
        f"{len(verdicts)} claims: {held}. {sum(outcome.computed for outcome in outcomes)} cells in "
        f"{time.perf_counter() - start:.0f} s.",
        highlight=False,
    )


def fail(message: str, code: int = 2) -> NoReturn:
    """End with one line on stderr, however many, or however long, another library made the message."""
    line = " ".join(message.split())
    print(f"rankattn: {line if len(line) < LONGEST_ERROR else line[:LONGEST_ERROR] + ' ...'}", file=sys.stderr)
    sys.exit(code)


def given_value(error: Exception) -> str:
    """What was given, where the message of a usage error does not repeat it."""
    errors: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    given = errors[0].get("input") if errors else None
    if not isinstance(given, str) or repr(given) in str(error):
        return ""
    return f", got {given if len(given) < 80 else given[:77] + '...'!r}"


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        code = app(args=arguments, prog_name="rankattn", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "rankattn"
        # pydantic, which checks values for typer, puts its own words before ours
        message = error.format_message().replace("Value error, ", "") + given_value(error)
        stop = "" if message.endswith((".", "?")) else "."
        fail(f"{message}{stop} See {path} --help.", error.exit_code)
    except BrokenPipeError:
        # as for `| head -1`: what is still buffered has no reader, and Python would complain of it on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, MemoryError) as error:
        unsaid = "there is not enough memory for this." if isinstance(error, MemoryError) else repr(error)
        fail(str(error) or unsaid)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        fail("interrupted.", INTERRUPTED)
    sys.exit(code)


if __name__ == "__main__":
    main()
