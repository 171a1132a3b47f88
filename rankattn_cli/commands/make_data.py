from dataclasses import asdict
from pathlib import Path

from typer import Argument, Option

from ..completion import complete_task
from ..console import Bar, Json, print_json, say


EXAMPLE = "rankattn make-data farthest_neighbor --config d64_n16 --out farthest"


def make_data(
    task: str = Argument(help="Name of the task; a wrong name lists all tasks.", autocompletion=complete_task),
    out: str = Option(help="Folder to write; it must not exist unless --overwrite is given."),
    config: list[str] | None = Option(None, help="Named config of the task; can be given several times."),
    dim: int | None = Option(None, help="Dimension of each point."),
    num_points: int | None = Option(None, help="Points per row."),
    num_queries: int | None = Option(None, help="Queries per row."),
    distribution: str | None = Option(None, help="Distribution of the points: uniform, orthogonal or doubled."),
    length: int | None = Option(None, help="Tokens per row."),
    num_values: int | None = Option(None, help="Numbers to sort, or values to retrieve."),
    num_keys: int | None = Option(None, help="Number of different keys."),
    layout: str | None = Option(None, help="Layout of the tokens: joint or pairs."),
    angles: str | None = Option(None, help="Angles on the circle: grid or uniform."),
    text_file: Path | None = Option(None, help="UTF-8 text file to memorize."),
    tokenizer: str | None = Option(None, help="words, bytes, or the folder or Hub name of a tokenizer."),
    max_length: int | None = Option(None, help="Tokens per row of text."),
    num_examples: int | None = Option(None, help="Rows of the train split."),
    num_eval_examples: int | None = Option(None, help="Rows of the validation split, and of the test split."),
    seed: int | None = Option(None, help="Seed of all splits."),
    license: str | None = Option(None, help="License of the data, for the dataset card."),
    push: str | None = Option(None, help="Dataset repository on the Hub to upload the data to."),
    overwrite: bool = Option(False, "--overwrite", help="Replace an earlier dataset in --out."),
    as_json: bool = Json,
) -> None:
    """Write a synthetic task as Parquet files. With a dataset card; datasets.load_dataset reads the folder."""
    from hf_rankattn.files.texts import utf8_text
    from hf_rankattn.tasks import make_data as write

    points: dict = {"dim": dim, "num_points": num_points, "num_queries": num_queries, "distribution": distribution}
    tokens: dict = {"length": length, "num_values": num_values, "num_keys": num_keys}
    shapes: dict = {"layout": layout, "angles": angles}
    texts = utf8_text(text_file) if text_file else None
    text: dict = {"texts": texts, "tokenizer": tokenizer, "max_length": max_length}
    rows: dict = {"num_examples": num_examples, "num_eval_examples": num_eval_examples, "seed": seed}
    written: dict = {"push": push, "overwrite": overwrite, "license": license}
    with Bar("{task.completed} rows", time_left=False) as bar:
        bar_task = bar.add_task("writing", total=None)

        def advance(count: int) -> None:
            bar.advance(bar_task, count)

        parameters = {**points, **tokens, **shapes, **text, **rows}
        made = write(task, out, config or (), progress=advance, **written, **parameters)
    if as_json:
        print_json(asdict(made))
        return
    for name, counts in made.rows.items():
        say(f"{made.folder}: {name}, " + ", ".join(f"{count:,} {split}" for split, count in counts.items()) + " rows")
    if made.pushed:
        say(f"pushed: {made.pushed}")
