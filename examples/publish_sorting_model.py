"""Train the sorting model of the paper on rank collapse, measure it and its paths, and share it with a card.

    python examples/publish_sorting_model.py --output_dir runs/sorting
    python examples/publish_sorting_model.py --output_dir runs/sorting --push_to my-name

Six layers of two heads without MLPs, which put eight numbers in order. A second run at the published learning rate stands
beside it. The folder gets `table.parquet`, the rows of both runs, and what stands in the card is read from there. The card
in `model_cards/` is the one that this script wrote.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from huggingface_hub import EvalResult
from transformers import PreTrainedModel

from hf_rankattn.papers.rank_collapse import path_effectiveness
from hf_rankattn.papers.sweep.results import running_versions
from hf_rankattn.tasks import score, task_baselines
from hf_rankattn.training.arguments import check_counts, parse_arguments, refusals
from hf_rankattn.training.publishing import PublishingArguments, publish_model, save_table


NAME = "rank-encoder-sorting"
HOW = """Trained from scratch on sorting: 8 numbers from 0 to 9, drawn with repeats, each position labelled with the number that
stands there in ascending order. The geometry is that of Dong, Cordonnier and Loukas (2103.03404): {layers} layers of {heads} heads,
hidden size {hidden}, learned positions, skips, norms, no MLPs, dropout {config.hidden_dropout_prob}. {train} rows in all, {epochs} epochs of them in batches of
{batch_size}, in another order each epoch ({steps:.0f} steps); Adam at a constant rate of {learning_rate:g}; seed {seed} of weights,
rows and order. {cpu_seconds:.0f} seconds of one CPU core, with torch {torch} and transformers {transformers}. The loss over the
last tenth of training was {train_loss:.4f}.

To compare, on the same fresh rows: the commonest number at each position, whatever the row, is right for
{baseline_position_only:.4f} of the tokens, so the published line for guessing, at 0.1, is no baseline. The rate in the published
README does not get there: at {published.learning_rate:g}, with rows in one order as published and all else equal, token accuracy
was {published.token_accuracy:.4f}, and {published.sequence_accuracy:.4f} of the rows were right as a whole.

### What its paths are worth

Token accuracy on the same rows by path length, the number of layers in which a path goes through a head.

{accuracies}

Isolated paths are drawn at random and summed, each run as a network of its own from the embeddings on, as in the paper; mean of
{repetitions} draws. Exact terms are parts of the model's own output (`path_lengths` of the package), and all of them together
are the output.

The model answers no other question, and is meant to be measured, not used."""


@dataclass(kw_only=True)
class Arguments(PublishingArguments):
    epochs: int = field(default=65, metadata={"help": "times that training goes through its rows"})
    train: int = field(default=1000, metadata={"help": "rows to train on"})
    scored: int = field(default=1000, metadata={"help": "fresh rows to measure on"})
    repetitions: int = field(default=5, metadata={"help": "how often isolated paths are drawn"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "epochs", "train", "repetitions")
        if self.scored < 64:
            raise ValueError(
                f"--scored must be at least 64, the fewest rows that the baselines are measured on; got {self.scored}."
            )


def setting(arguments: Arguments, as_published: bool) -> dict[str, Any]:
    """The sorting cell of the experiment on paths, with the numbers that were asked for."""
    cells = path_effectiveness.cells("paper", 1, {"as_published": as_published})
    cell = next(cell for cell in cells if cell.parameters["task"] == "sorting")
    chosen = {name: getattr(arguments, name) for name in ("epochs", "train", "scored", "repetitions", "seed")}
    return cell.parameters | chosen


def train_sorter(parameters: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, torch.Tensor], dict[str, Any]]:
    """A trained model, the fresh rows it was scored on, and a row of the table about the whole of it."""
    builder = path_effectiveness.task_of(parameters)
    start = time.process_time()
    with TemporaryDirectory() as work:
        model, row = path_effectiveness.trained_model(parameters, builder, Path(work))
    row["cpu_seconds"] = time.process_time() - start
    scored = path_effectiveness.scored_rows(parameters, builder)
    with torch.no_grad():
        predictions = model(**scored).logits.argmax(-1)
    row |= score("sorting", predictions.numpy(), scored["labels"].numpy())
    for name, metrics in task_baselines(builder, max(parameters["train"], parameters["scored"])).items():
        row[f"baseline_{name}"] = metrics["token_accuracy"]
    return model, scored, {"way": "whole", **row}


def train_and_measure(arguments: Arguments) -> tuple[PreTrainedModel, pd.DataFrame]:
    ours, published = (setting(arguments, as_published) for as_published in (False, True))
    model, scored, whole = train_sorter(ours)
    rows = [ours | row for row in (whole, *path_effectiveness.path_rows(ours, model, scored))]
    rows.append(published | train_sorter(published)[2])
    return model, pd.DataFrame(rows).assign(**running_versions())


def path_table(table: pd.DataFrame) -> str:
    """Markdown: accuracy by path length, of isolated paths of each number, and of exact terms."""
    rows = table[table.way != "whole"].assign(drawn=lambda rows: rows.drawn.fillna(0).astype(int))
    means = rows.groupby(["way", "drawn", "length"]).accuracy.mean()
    titles = {("isolated", n): f"{n} isolated paths" for n in sorted(rows.drawn[rows.drawn > 0].unique())}
    titles |= {("only", 0): "exact terms of this length alone", ("up_to", 0): "exact terms up to this length"}
    lines = [f"| length | {' | '.join(titles.values())} |", "|---" * (len(titles) + 1) + "|"]
    for length in sorted(rows.length.astype(int).unique()):
        lines.append(f"| {length} | {' | '.join(f'{means[(*column, length)]:.3f}' for column in titles)} |")
    return "\n".join(lines)


def result(row: pd.Series, metric: str, title: str) -> EvalResult:
    return EvalResult(
        task_type="other",
        task_name="sorting",
        dataset_type="sorting",
        dataset_name=f"sorting, 8 numbers from 0 to 9, {row.scored} fresh rows",
        dataset_split="test",
        metric_type=metric,
        metric_name=title,
        metric_value=round(row[metric], 4),
    )


def main() -> None:
    arguments = parse_arguments(Arguments, __doc__)
    torch.set_num_threads(1)
    with refusals():
        model, table = train_and_measure(arguments)
    save_table(table, arguments)
    whole = table[table.way == "whole"].set_index("as_published")
    ours, published = whole.loc[False], whole.loc[True]
    how = HOW.format(**ours, config=model.config, published=published, accuracies=path_table(table))
    title = f"token accuracy (position only: {ours.baseline_position_only:.4f})"
    results = [result(ours, "token_accuracy", title), result(ours, "sequence_accuracy", "whole rows right")]
    print(publish_model(model, NAME, how, results, arguments))


if __name__ == "__main__":
    main()
