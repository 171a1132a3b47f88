"""The command line: parse, call one function, print."""

import json
import platform
import sys
import time
from importlib.metadata import version

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
    progress = Progress(
        TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with progress:
        task = progress.add_task("training", total=demonstration.TOTAL_STEPS)
        claims = demonstration.run_demo(progress=lambda: progress.advance(task))
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
    seed: int = typer.Option(0, "--seed", help="Seed of new dimensions."),
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
    print(f"{outcome.parameters_saved:,} parameters saved. Written to {outcome.folder}.")


def main() -> None:
    try:
        app()
    except ValueError as error:
        print(f"rankattn: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
