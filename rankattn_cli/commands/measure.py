from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from typer import Argument, Option

from ..console import Bar, Json, print_json, print_table, say


EXAMPLE = "rankattn measure sentence-transformers/all-MiniLM-L6-v2 --out measured"


def measure(
    model: str = Argument(help="A folder or a Hub repository with safetensors."),
    out: Path = Option(help="Folder to write table.parquet and the figures to."),
    text: Path | None = Option(None, help="UTF-8 text file: blank lines between texts, or one text per line."),
    dataset: str | None = Option(None, help="A dataset on the Hub or in a folder, instead of a text file."),
    split: str = Option("test", help="Split of the dataset."),
    column: str | None = Option(None, help="Column of the texts; needed if several columns are text."),
    random_inputs: bool = Option(False, "--random-inputs", help="Use random ids, images or points, not text."),
    examples: int = Option(32, help="Number of texts."),
    length: int = Option(128, help="Tokens per text; longer texts are cut."),
    batch_size: int = Option(8, help="Texts per batch."),
    variants: str | None = Option(
        None, help="Comma-separated, of san, san+mlp, san+skip, transformer. Default: all that the model allows."
    ),
    metrics: Literal["cheap", "full"] = Option(
        "full", help="full computes the singular values of every map, cheap does without them."
    ),
    random_init: bool = Option(False, "--random-init", help="Read the config only and draw new random weights."),
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Option(
        "float32", help="Precision of the model; float64 shows collapse to 4e-16, float32 to 2e-7."
    ),
    seed: int = Option(0, min=0, help="Seed of random weights and random inputs."),
    revision: str | None = Option(None, help="Branch, tag or commit on the Hub."),
    device_map: str | None = Option(None, help="As in from_pretrained: auto for a model larger than one device."),
    offload_folder: str | None = Option(None, help="Folder for weights that fit on no device."),
    processes: int | None = Option(None, help="Stop unless torchrun started this number of processes."),
    overwrite: bool = Option(False, "--overwrite", help="Replace earlier measurements in --out."),
    as_json: bool = Json,
) -> None:
    """Measure the rank that a checkpoint has, uses and loses.

    It answers three questions: Do tokens stay apart? How much rank do attention maps have? How much query-key rank is used?
    """
    from hf_rankattn.files.atomic import fresh_folder
    from hf_rankattn.probe.survey import measure_checkpoint
    from hf_rankattn.report.results import write_survey
    from hf_rankattn.report.summary import findings
    from hf_rankattn.training.processes import join_processes, leave_processes

    read: dict = {"text": text, "dataset": dataset, "split": split, "column": column, "random_inputs": random_inputs}
    sizes: dict = {"examples": examples, "length": length, "batch_size": batch_size}
    loading: dict = {"random_init": random_init, "dtype": dtype, "seed": seed, "revision": revision}
    devices: dict = {"device_map": device_map, "offload_folder": offload_folder}
    wanted = None if variants is None else [name.strip() for name in variants.split(",")]
    measured: dict = {"metrics": metrics, "variants": wanted}
    first = join_processes(processes)
    with ExitStack() as stack:
        bar = stack.enter_context(Bar("{task.completed}/{task.total} batches", shown=first))
        if first:
            folder = stack.enter_context(fresh_folder(out, overwrite, marker="table.parquet", what="measurements"))

        def start(total: int) -> Callable[[], object]:
            task = bar.add_task("measuring", total=total)
            return lambda: bar.advance(task)

        table, facts = measure_checkpoint(
            model, **read, **sizes, **loading, **devices, **measured, start_progress=start
        )
        leave_processes()
        if not first:
            return
        files = write_survey(table, facts, folder)
    found = findings(table, facts, model)
    if as_json:
        print_json({"facts": facts, "findings": [entry.as_dict() for entry in found], "files": files})
        return
    rows = [(entry.question, entry.answer, entry.compare) for entry in found]
    print_table(["question", "answer", "to compare"], rows, title=facts["title"], show_lines=True)
    for entry in found:
        if entry.next_step:
            say(entry.next_step)
    say(
        f"{facts['model_type']}, {facts['layers']} layers of {facts['heads']} heads, {facts['dtype']}; {facts['examples']} "
        f"examples from {facts['source']}; {facts['seconds']} s.\nIn {out}: {', '.join(files)}"
    )
