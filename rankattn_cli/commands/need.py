from pathlib import Path
from typing import Literal

from typer import Argument, Option

from ..console import Bar, Json, print_json, print_table, say


EXAMPLE = "rankattn need Qwen/Qwen3-0.6B --target-loss 1% --out needed"


def need(
    model: str = Argument(help="A folder or a Hub repository with safetensors, or with GGUF files."),
    out: Path = Option(help="Folder of the measurements, table.parquet, need.png and report.html."),
    text: Path | None = Option(
        None, help="UTF-8 text file to measure quality on: blank lines between texts, or one text per line."
    ),
    calibration: str | None = Option(
        None,
        help="What limits are fitted to: a file of texts, 'package' (default) for texts that come with the package, or a folder of "
        "images or sounds.",
    ),
    dataset: str | None = Option(
        None,
        help="A dataset on the Hub or in a folder, instead of --text; for images and sounds also a folder of their files.",
    ),
    split: str = Option("test", help="Split of the dataset."),
    column: str | None = Option(None, help="Column of its texts, images or sounds; needed if several fit."),
    label_column: str | None = Option(None, help="Column of its labels, for the accuracy of a classifier."),
    random_inputs: bool = Option(False, "--random-inputs", help="Use random ids, images, sounds or points."),
    examples: int = Option(16, help="Number of texts, images or sounds to measure quality on."),
    length: int | None = Option(
        None, help="Tokens per text; longer texts are cut. Default: 128, or fewer if the model has fewer positions."
    ),
    batch_size: int = Option(8, help="Texts per batch."),
    widths: str | None = Option(
        None,
        help="Comma-separated widths of queries, keys and values to measure. Default: 1, 2, 3, 4 and 6 eighths of a head.",
    ),
    target_loss: str = Option("1%", help="Share of the quality that may be lost, as 1% or 0.01."),
    layers: bool = Option(True, "--layers/--no-layers", help="Also limit one layer at a time."),
    tower: str | None = Option(
        None, help="One side of a model with several: encoder, decoder, text, vision, audio, ... (errors list them)."
    ),
    gguf: str | None = Option(
        None, help="A GGUF file of the checkpoint, instead of safetensors; needs the package gguf."
    ),
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Option("float32", help="Precision of the model."),
    seed: int = Option(0, min=0, help="Seed of the fits and of random inputs."),
    revision: str | None = Option(None, help="Branch, tag or commit on the Hub."),
    overwrite: bool = Option(False, "--overwrite", help="Measure again, and replace what --out holds."),
    as_json: bool = Json,
) -> None:
    """Measure how much rank a model needs: its quality with fewer query-key directions, and with narrower values.

    Quality is perplexity for language models, accuracy where a dataset has labels, and the cosine of embeddings elsewhere, always
    compared with the whole model. Weights do not change. A stopped run goes on where it was: give the same command again.
    """
    from hf_rankattn.limit.checkpoint import need_of_checkpoint
    from hf_rankattn.report.need import Need, grid, write_need

    read: dict = {"text": text, "calibration": calibration, "dataset": dataset, "split": split, "column": column}
    data: dict = {"label_column": label_column, "random_inputs": random_inputs, "examples": examples, "length": length}
    limits: dict = {"widths": parsed_widths(widths), "target_loss": parsed_share(target_loss), "by_layer": layers}
    loading: dict = {"tower": tower, "gguf": gguf, "dtype": dtype, "seed": seed, "revision": revision}
    with Bar("{task.completed}/{task.total} limits") as bar:
        task = bar.add_task("measuring", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        more: dict = {"batch_size": batch_size, "overwrite": overwrite, "progress": advance}
        table, facts = need_of_checkpoint(model, out, **read, **data, **limits, **loading, **more)
    files = write_need(table, facts, out)
    found = Need(table, facts)
    if as_json:
        print_json({"facts": facts, "needed": found.found(), "sentences": found.sentences(), "files": files})
        return
    for kind in ("qk", "v"):
        shown = grid(found, kind)
        print_table(shown.columns, shown.rows, title=shown.caption)
    for line in [*found.refused(), found.about(), f"In {out}: {', '.join(files)}", *reversed(found.sentences())]:
        say(line)


def parsed_widths(widths: str | None) -> list[int] | None:
    if widths is None:
        return None
    try:
        return [int(part) for part in widths.split(",")]
    except ValueError:
        raise ValueError(
            f"`widths` must be whole numbers with commas between them, such as 8,16,32, got {widths!r}."
        ) from None


def parsed_share(share: str) -> float:
    """A share as 1% or 0.01.

    >>> parsed_share("1%"), parsed_share("0.05")
    (0.01, 0.05)
    """
    try:
        return float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"`target_loss` must be a share such as 1% or 0.01, got {share!r}.") from None
