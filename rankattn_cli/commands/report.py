from pathlib import Path

from typer import Argument, Option

from ..console import Json, print_json, say


EXAMPLE = "rankattn report runs --out runs.html"


def report(
    folder: Path = Argument(
        help="A folder that rankattn reproduce, measure or need wrote, or a folder of such folders."
    ),
    out: Path = Option(help="HTML file to write."),
    overwrite: bool = Option(False, "--overwrite", help="Replace the page if it exists."),
    as_json: bool = Json,
) -> None:
    """Write results and figures to one HTML page. The page loads nothing else."""
    from hf_rankattn.report.html import check_writable, write_page
    from hf_rankattn.report.results import report_page

    check_writable(out, overwrite)
    page = write_page(report_page(folder), out, overwrite)
    size = page.stat().st_size
    if as_json:
        print_json({"page": str(page), "bytes": size})
    else:
        say(f"{page}: {size / 1024:.0f} kB")
