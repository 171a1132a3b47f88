from pathlib import Path

from typer import Argument, Option

from ..console import PLAIN_EVERY, Bar, Json, print_json, print_table, say


EXAMPLE = "rankattn convert path/to/bert --qk-rank 16 --v-head-dim 32 --out narrow-bert"


def convert(
    model: str = Argument(
        help="A folder or Hub name of a checkpoint. A rank model is made of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, "
        "DistilBERT, ALBERT, XLNet and GPT-2, and a stock model of one width of ViT, DeiT, DINOv2, I-JEPA, BEiT, ViT-MAE, AST, "
        "T5, mT5 and UMT5."
    ),
    qk_rank: int | None = Option(None, min=1, help="The new query-key rank of every head."),
    v_head_dim: int | None = Option(None, min=1, help="The new value width of every head."),
    auto: bool = Option(False, "--auto", help="Choose a query-key rank for each layer, by --energy or --mean-rank."),
    auto_values: bool = Option(
        False, "--auto-values", help="Choose a value width for each layer; with --auto, both kinds share --mean-rank."
    ),
    energy: float | None = Option(None, help="With --auto: share of energy to keep (0.95)."),
    mean_rank: float | None = Option(None, help="With --auto: mean of the widths."),
    ranks: str = Option(
        "spectra",
        help="What spreads --mean-rank over the layers: 'spectra' of the logits, or 'damage', measured on the calibration "
        "texts with one layer cut at a time (slower).",
    ),
    calibration: str | None = Option(
        None,
        help="What to calibrate on: a file of paragraphs of your kind of text, or a folder of images; 'package' (default) for "
        "texts that come with the package; 'none' for the weights alone, which loses far more.",
    ),
    objective: str = Option(
        None,
        help="'attention' weights errors by attention and loses less (default for heads of up to 32 dimensions, not possible for "
        "XLNet, T5 and BEiT); 'logits' is faster (default elsewhere).",
    ),
    distil_steps: int = Option(0, help="Steps of distillation: training of what was cut, towards the original."),
    distil_text: str | None = Option(
        None, help="A file of texts for distillation, 2,000 or more (default: the few texts of the calibration)."
    ),
    out: str | None = Option(None, help="Where to write: a folder, with --curve a PNG or PDF file."),
    overwrite: bool = Option(False, "--overwrite", help="Replace the output if it exists."),
    stream: bool = Option(False, "--stream", help="Weights only, shard by shard, in bounded memory."),
    remote_code: bool = Option(
        False, "--remote-code", help="Add source files, so that trust_remote_code=True loads it without this package."
    ),
    base_model: str | None = Option(None, help="The Hub repository that the card names as base model."),
    dataset: str | None = Option(None, help="Judge the damage on this dataset, and on its labels."),
    split: str = Option("test", help="Split of the dataset."),
    column: str | None = Option(None, help="Column of its texts; two with a comma for pairs."),
    label_column: str | None = Option(None, help="Column of its labels."),
    examples: int = Option(200, help="Rows of the dataset to read."),
    limit: str | None = Option(
        None, help="Put a saved rank limit into the weights: its folder or Hub name. No other choice goes with it."
    ),
    curve: bool = Option(False, "--curve", help="Draw quality against rank; no model is written."),
    seed: int = Option(0, help="Seed of new dimensions and of distillation."),
    as_json: bool = Json,
) -> None:
    """Cut the rank of a checkpoint: give its heads other widths. Calibrates on texts or images, and measures the damage."""
    from hf_rankattn.convert.checkpoint import convert_checkpoint
    from hf_rankattn.convert.curve import curve_to_file
    from hf_rankattn.convert.outcome import size_rows
    from hf_rankattn.limit.permanent import write_permanent
    from hf_rankattn.report.plots import draw_rank_curve

    if auto and qk_rank is not None:
        raise ValueError(f"--auto and --qk-rank {qk_rank} cannot be combined: give one of them.")
    if auto_values and v_head_dim is not None:
        raise ValueError(f"--auto-values and --v-head-dim {v_head_dim} cannot be combined: give one of them.")
    chosen = (
        qk_rank,
        v_head_dim,
        auto,
        auto_values,
        energy,
        mean_rank,
        stream,
        remote_code,
        base_model,
        dataset,
        column,
        label_column,
    )
    if curve and (ranks != "spectra" or any(option not in (None, False) for option in chosen)):
        raise ValueError(
            "--curve tries several ranks on the package's text and writes no model: leave --qk-rank, --v-head-dim, --auto, its budgets, --ranks, "
            "--stream, --remote-code, --base-model, --dataset and its columns out."
        )
    if limit is not None:
        fits = (curve, calibration, objective, distil_steps or None, distil_text, label_column, ranks != "spectra")
        if any(option not in (None, False) for option in (*chosen, *fits)):
            raise ValueError(
                "--limit puts a fitted limit into the weights: leave every option but --out, --overwrite and --json out."
            )
        if out is None:
            raise ValueError("give --out, the folder to write to.")
        new = write_permanent(model, limit, out, overwrite)
        told = {
            "folder": str(Path(out).resolve()),
            "model_class": type(new).__name__,
            "parameters": new.num_parameters(),
        }
        if as_json:
            print_json(told)
        else:
            say(f"{told['model_class']} of {told['parameters']:,} parameters in {out}.")
        return
    fitting: dict = {"calibration": calibration, "objective": objective, "distil_steps": distil_steps, "seed": seed}
    fitting["distil_text"] = distil_text
    budget: dict = {
        "v_head_dim": "auto" if auto_values else v_head_dim,
        "qk_rank": "auto" if auto else qk_rank,
        "energy": energy,
        "mean_rank": mean_rank,
        "ranks": ranks,
    }
    data: dict = {"dataset": dataset, "split": split, "examples": examples}
    columns: dict = {"column": column, "label_column": label_column}
    written: dict = {"stream": stream, "base_model": base_model, "remote_code": remote_code}
    # the conversions of a curve are few, and each may take minutes
    with Bar("{task.completed}/{task.total}", plain_every=0.0 if curve else PLAIN_EVERY) as bar:
        task = bar.add_task("converting", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        common: dict = {**fitting, "overwrite": overwrite, "progress": advance}
        if curve:
            rows, file = curve_to_file(model, out, draw_rank_curve, **common)
        else:
            outcome = convert_checkpoint(model, out, **budget, **data, **columns, **written, **common)
    if curve:
        if as_json:
            print_json({"rows": rows, "file": str(file)})
            return
        measures = list(rows[0])[2:]
        cells = [[row["way"], str(row["rank"]), *(f"{row[name]:.4f}" for name in measures)] for row in rows]
        print_table(["way", "rank", *(name.replace("_", " ") for name in measures)], cells)
        say(f"Drawn in {file}.")
        return
    if as_json:
        print_json(outcome.as_dict())
        return
    header = ["layer", "rank", "of", "logit energy kept", "parameters saved"]
    layers = [
        [str(at.layer), str(at.rank), str(at.old_rank), f"{at.energy_kept:.4f}", f"{at.parameters_saved:,}"]
        for at in outcome.layers
    ]
    if any(at.v_head_dim != at.old_v_head_dim for at in outcome.layers):
        header[4:4] = ["value width", "of", "value energy kept"]
        for row, at in zip(layers, outcome.layers, strict=True):
            row[4:4] = [str(at.v_head_dim), str(at.old_v_head_dim), f"{at.value_energy_kept:.4f}"]
    print_table(header, layers)
    print_table(["", "before", "after"], size_rows(outcome))
    for line in outcome.lines():
        say(line)
