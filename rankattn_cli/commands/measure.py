from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from typer import Argument, Option

from ..console import Bar, Json, print_json, print_table, say


EXAMPLE = "rankattn measure sentence-transformers/all-MiniLM-L6-v2 --out measured"


def measure(
    model: list[str] = Argument(help="A folder or a Hub repository with safetensors; several are compared."),
    out: Path = Option(help="Folder to write table.parquet and the figures to."),
    text: Path | None = Option(None, help="UTF-8 text file: blank lines between texts, or one text per line."),
    dataset: str | None = Option(
        None,
        help="A dataset on the Hub or in a folder, instead of a text file; for images and sounds also a folder of their files.",
    ),
    split: str = Option("test", help="Split of the dataset."),
    column: str | None = Option(None, help="Column of the texts, images or sounds; needed if several fit."),
    random_inputs: bool = Option(False, "--random-inputs", help="Use random ids, images, sounds or points."),
    examples: int = Option(32, help="Number of texts, images or sounds."),
    length: int | None = Option(
        None, help="Tokens per text; longer texts are cut. Default: 128, or fewer if the model has fewer positions."
    ),
    batch_size: int = Option(8, help="Texts per batch."),
    tower: str | None = Option(
        None, help="One side of a model with several: encoder, decoder, text, vision, audio, ... (errors list them)."
    ),
    gguf: str | None = Option(
        None, help="A GGUF file of the checkpoint, instead of safetensors; needs the package gguf."
    ),
    variants: str | None = Option(
        None, help="Comma-separated, of san, san+mlp, san+skip, transformer. Default: all that the model allows."
    ),
    metrics: Literal["cheap", "full"] = Option(
        "full", help="full computes the singular values of every map; cheap needs no singular values."
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
    """Measure the rank that a checkpoint has, uses and loses, or compare several checkpoints.

    Do tokens stay apart? How much rank do attention maps have? How much query-key and value rank is there, and how much is used?
    """
    from hf_rankattn.files.atomic import fresh_folder
    from hf_rankattn.probe.survey import measure_checkpoint, measure_checkpoints
    from hf_rankattn.report.results import surveys_of, write_survey
    from hf_rankattn.report.summary import comparison, findings
    from hf_rankattn.training.processes import join_processes, leave_processes

    read: dict = {"text": text, "dataset": dataset, "split": split, "column": column, "random_inputs": random_inputs}
    sizes: dict = {"examples": examples, "length": length, "batch_size": batch_size}
    loading: dict = {"random_init": random_init, "dtype": dtype, "seed": seed}
    chosen: dict = {"revision": revision, "tower": tower, "gguf": gguf}
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

        settings = {**read, **sizes, **loading, **chosen, **devices, **measured, "start_progress": start}
        facts: dict[str, Any] | list[dict[str, Any]]
        if len(model) == 1:
            table, facts = measure_checkpoint(model[0], **settings)
        else:
            table, facts = measure_checkpoints(model, **settings)
        leave_processes()
        if not first:
            return
        files = write_survey(table, facts, folder)
    told, each = (facts, [facts]) if isinstance(facts, dict) else ({"checkpoints": facts}, facts)
    found = [findings(*part, name) for part, name in zip(surveys_of(table, told), model, strict=True)]
    if as_json:
        as_dicts = [[entry.as_dict() for entry in entries] for entries in found]
        parts = [{"facts": own, "findings": entries} for own, entries in zip(each, as_dicts, strict=True)]
        print_json({**(parts[0] if len(parts) == 1 else {"checkpoints": parts}), "files": files})
        return
    if len(each) > 1:
        print_table(["question", *(own["checkpoint"] for own in each)], comparison(found), show_lines=True)
    else:
        rows = [(entry.question, entry.answer, entry.compare) for entry in found[0]]
        print_table(["question", "answer", "to compare"], rows, title=each[0]["title"], show_lines=True)
        for entry in found[0]:
            if entry.next_step:
                say(entry.next_step)
    for own in each:
        say(run_line(own))
    say(f"In {out}: {', '.join(files)}")


def run_line(facts: dict[str, Any]) -> str:
    name = f"{facts['checkpoint']}: " if "checkpoint" in facts else ""
    return (
        f"{name}{facts['model_type']}, {facts['layers']} layers of {facts['heads']} heads, {facts['dtype']}; "
        f"{facts['examples']} examples from {facts['source']}; {facts['seconds']} s."
    )
