"""One layer of attention that selects one of N tokens; the selections differ only in what the address of a token is.

The rows are those of the task `associative_recall`. A pair of a key and a value is one token here, the address beside the value,
so one layer can solve it. A query is an address without a value, and its class is the value of the token that it asks for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, TrainerCallback

from ...limit import limit_rank
from ...models import RankEncoderConfig, RankEncoderForTokenClassification
from ...tasks import BatchStream, TaskBuilder, random_generator, task_builder
from ...training.optimizers import point_optimizer, warmup_cosine
from ...training.runs import FiniteLosses, check_weights
from ..training import Batch, StreamTrainer, in_parts, tensors_of


VALUES = 16
# what a query knows of the token that it asks for
TASKS = {
    "keys": "its key, one of a vocabulary with learned embeddings",
    "random keys": "its key, one of very many random vectors",
    "positions": "its position",
    "points": "a point of the sphere, to which the point of the token is nearest",
}
# A run ends before its last step when the accuracy on validation rows has this value, which leaves a margin above the goal
SOLVED = 0.995
CHECKS = 10  # how often a run measures it
VALIDATION, HELD_OUT, CALIBRATION = 2048, 8192, 512  # queries


class Selections(IterableDataset):
    """Endless batches of tokens, queries and labels; `first` returns the number of the first batch."""

    def __init__(self, parameters: Mapping[str, Any]):
        self.parameters = parameters
        self.codes = address_codes(parameters)
        self.builders = row_builders(parameters)
        self.first: Callable[[], int] = lambda: 0

    def __iter__(self) -> Iterator[Batch]:
        size = self.parameters["batch_size"]
        streams = (BatchStream(builder, size, first=self.first) for builder in self.builders)
        for rows in zip(*streams, strict=True):
            yield self.selection(*rows)

    def sample(self, split: str, rows: int) -> Batch:
        return self.selection(*(tensors_of(builder.sample(split, rows)) for builder in self.builders))

    def selection(self, recall: Batch, sphere: Batch | None = None) -> Batch:
        """The rows of the tasks as arguments of the encoder."""
        n, ids, task = self.parameters["n"], recall["input_ids"], self.parameters["task"]
        keys, values = ids[:, 0 : 2 * n : 2], ids[:, 1 : 2 * n : 2] % VALUES
        asked = ids[recall["labels"] != -100].view(-1, n)
        chosen = (asked[:, :, None] == keys[:, None, :]).int().argmax(-1)
        if sphere is not None:
            scale = sphere["points"].shape[-1] ** 0.5
            tokens, queries = scale * sphere["points"], scale * sphere["queries"]
            chosen = (queries @ tokens.transpose(1, 2)).argmax(-1)
        elif task == "positions":
            tokens, queries = self.codes.expand(len(ids), -1, -1), self.codes[chosen]
        else:
            tokens, queries = self.codes[keys - 1], self.codes[asked - 1]
        shown = VALUES**0.5 * nn.functional.one_hot(values, VALUES)
        return {
            "points": torch.cat([tokens, shown], -1),
            "queries": nn.functional.pad(queries, (0, VALUES)),
            "labels": values.gather(1, chosen),
        }


def address_codes(parameters: Mapping[str, Any]) -> torch.Tensor:
    """The vectors of the addresses, with entries of mean square one; those of points are drawn with the rows."""
    d = parameters["d"]
    if parameters["task"] == "random keys":
        rng = random_generator(parameters["seed"], "random keys", d)
        codes = rng.standard_normal((parameters["num_keys"], d), dtype=np.float32)
        return torch.from_numpy(codes * (d**0.5 / np.linalg.norm(codes, axis=1, keepdims=True)))
    return d**0.5 * torch.eye(d)


def row_builders(parameters: Mapping[str, Any]) -> list[TaskBuilder]:
    n, seed = parameters["n"], parameters["seed"]
    sizes = {"vocab_size": 2 * (parameters["num_keys"] + 1), "num_kv_pairs": n, "length": 4 * n}
    found = [task_builder("associative_recall", seed=seed, **sizes)]
    if parameters["task"] == "points":
        sphere = {"dim": parameters["d"], "num_points": n, "num_queries": n, "distribution": "uniform"}
        found.append(task_builder("nearest_neighbor", seed=seed, **sphere))
    return found


def initial_model(parameters: Mapping[str, Any]) -> RankEncoderForTokenClassification:
    """One layer whose values are as wide as the stream, whatever the width of its queries and keys."""
    torch.manual_seed(parameters["seed"])
    hidden, heads = parameters["hidden"], parameters["heads"]
    config = RankEncoderConfig(
        input_dim=parameters["d"] + VALUES,
        input_map="linear",
        hidden_size=hidden,
        num_attention_heads=heads,
        qk_rank=parameters["qk_rank"],
        v_head_dim=hidden // heads,
        intermediate_size=hidden,
        norm="layer",
        num_labels=VALUES,
    )
    return RankEncoderForTokenClassification(config)


class StopWhenSolved(TrainerCallback):
    """Measures the accuracy on validation rows from time to time, and ends a run that has reached [`SOLVED`]."""

    def __init__(self, rows: Batch, every: int):
        self.rows, self.every = rows, every

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 and accuracy(model, self.rows) >= SOLVED:
            control.should_training_stop = True


@torch.no_grad()
def accuracy(model: PreTrainedModel, rows: Batch, batch: int = 128) -> float:
    """Share of the queries whose value is predicted."""
    training = model.training
    model.eval()
    right = 0
    for part in in_parts(rows, batch, model.device):
        labels = part.pop("labels")
        right += int((model(**part).logits.argmax(-1) == labels).sum())
    model.train(training)
    return right / rows["labels"].numel()


def train_selection(
    parameters: Mapping[str, Any], work: Path
) -> tuple[RankEncoderForTokenClassification, dict[str, Any]]:
    """Train one layer from scratch; returns the model, and its accuracy on held-out rows."""
    model, rows, steps = initial_model(parameters), Selections(parameters), parameters["steps"]
    validation, held_out = (
        rows.sample(split, max(1, queries // parameters["n"]))
        for split, queries in (("validation", VALIDATION), ("test", HELD_OUT))
    )
    optimizer = point_optimizer(model, parameters["learning_rate"])
    callbacks = [FiniteLosses(), StopWhenSolved(validation, max(1, steps // CHECKS))]
    how = (model, rows, optimizer, warmup_cosine(optimizer, steps), work, callbacks)
    sizes = {"per_device_train_batch_size": parameters["batch_size"], "seed": parameters["seed"]}
    trainer = StreamTrainer(*how, steps=steps, **sizes)
    trainer.resume()
    check_weights(model, trainer.state.global_step)
    found = {"status": "finished", "steps_done": trainer.state.global_step, "accuracy": accuracy(model, held_out)}
    return model, found


def limit_selection(parameters: Mapping[str, Any], work: Path, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Train one layer of full rank and limit it to each smaller rank; one row for each, that of full rank last."""
    model, found = train_selection(parameters, work)
    rows = Selections(parameters)
    calibration, held_out = (
        rows.sample(split, max(1, queries // parameters["n"]))
        for split, queries in (("validation", CALIBRATION), ("test", HELD_OUT))
    )
    del calibration["labels"]
    model.eval().set_attn_implementation("eager")  # which calls the attention interface
    table = []
    for rank in ranks:
        if rank < parameters["qk_rank"]:
            with limit_rank(model, rank, calibration=calibration):
                table.append({**found, "qk_rank": rank, "accuracy": accuracy(model, held_out)})
    return [*table, found]
