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


def main() -> None:
    try:
        app()
    except ValueError as error:
        print(f"rankattn: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
