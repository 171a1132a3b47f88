"""Training of small classifiers that differ in query-key rank; rank metrics are measured on the way."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from ...models import (
    RankBertConfig,
    RankBertForTokenClassification,
    RankEncoderConfig,
    RankEncoderForTokenClassification,
)
from ...probe import RankCallback
from ...tasks import BatchStream, task_builder
from ...training.optimizers import point_optimizer, warmup_cosine
from ...training.runs import FiniteLosses, check_weights
from ..rank_barrier._images import load_images, patches
from ..training import Batch, StreamTrainer, in_parts, tensors_of


# both the map and the logits have an energy rank; that of the map is not followed
OF_MAPS = ("effective_rank", "numerical_rank", "stable_rank", "argmax_coverage", "row_entropy")
FOLLOWED = (*OF_MAPS, "logits/logit_std", "logits/energy_rank")
WATCHED = 16


class ShuffledBatches(IterableDataset):
    """Endless batches of rows, in a new order in each epoch."""

    def __init__(self, rows: Batch, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed

    def __iter__(self) -> Iterator[Batch]:
        rng, size = np.random.default_rng(self.seed), len(next(iter(self.rows.values())))
        while True:
            order = torch.from_numpy(rng.permutation(size))
            for chosen in order.split(self.batch_size):
                yield {name: column[chosen] for name, column in self.rows.items()}


def retrieval(parameters: Mapping[str, Any]) -> tuple[PreTrainedModel, IterableDataset, Batch]:
    """A rank BERT that looks up values by their keys, a stream of training rows, and held-out rows."""
    builder = task_builder(
        "token_retrieval", length=parameters["n"], num_values=parameters["num_values"], seed=parameters["seed"]
    )
    torch.manual_seed(parameters["seed"])
    sizes = {"max_position_embeddings": parameters["n"], "pad_token_id": 0}
    config = RankBertConfig(**builder.model_arguments(), **geometry(parameters), **sizes)
    held_out = tensors_of(builder.sample("test", parameters["held_out"]))
    return RankBertForTokenClassification(config), BatchStream(builder, parameters["batch_size"]), held_out


def pictures(parameters: Mapping[str, Any]) -> tuple[PreTrainedModel, IterableDataset, Batch]:
    """The same for a rank encoder that predicts the class of an image from each of its patches."""
    found = load_images(parameters["images"], parameters["size"], parameters["train_rows"])
    tokens = {split: patches(images, parameters["patch"]) for split, (images, _) in found.items()}
    mean, deviation = tokens["train"].mean((0, 1)), tokens["train"].std((0, 1)) + 1e-6
    splits: dict[str, Batch] = {}
    for split, (_, classes) in found.items():
        points = torch.from_numpy((tokens[split] - mean) / deviation).float()
        labels = torch.from_numpy(classes).long()[:, None].expand(-1, points.shape[1]).contiguous()
        splits[split] = {"points": points, "labels": labels}
    torch.manual_seed(parameters["seed"])
    _, tokens_of_image, input_dim = splits["train"]["points"].shape
    sizes = {"input_dim": input_dim, "max_position_embeddings": tokens_of_image}
    sizes["num_labels"] = int(found["train"][1].max()) + 1
    layer: dict[str, Any] = {"input_map": "linear", "position": "additive", "norm": "layer", **geometry(parameters)}
    config = RankEncoderConfig(**sizes, **layer)
    stream = ShuffledBatches(splits["train"], parameters["batch_size"], parameters["seed"])
    return RankEncoderForTokenClassification(config), stream, splits["test"]


def geometry(parameters: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = parameters["hidden"], parameters["heads"]
    sizes = {"hidden_size": hidden, "num_hidden_layers": parameters["layers"], "num_attention_heads": heads}
    widths = {"intermediate_size": 2 * hidden, "v_head_dim": hidden // heads, "qk_rank": parameters["qk_rank"]}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {**sizes, **widths, **dropout, "qk_norm": parameters["qk_norm"]}


TASKS = {"token_retrieval": retrieval, "images": pictures}


def train_classifier(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """A row `trace` for each time the ranks were measured, and a row `end` with the accuracy on held-out rows."""
    model, stream, held_out = TASKS[parameters["task"]](parameters)
    steps = parameters["steps"]
    watched = {name: column[:WATCHED] for name, column in held_out.items() if name != "labels"}
    every = max(1, steps // parameters.get("measured", 10))
    callbacks = [FiniteLosses(), RankCallback(every=every, inputs=watched, metrics=FOLLOWED, per_layer=False)]
    optimizer = point_optimizer(model, parameters["learning_rate"])
    how = (model, stream, optimizer, warmup_cosine(optimizer, steps), work, callbacks)
    sizes = {"per_device_train_batch_size": parameters["batch_size"], "seed": parameters["seed"]}
    trainer = StreamTrainer(*how, steps=steps, save_strategy="no", **sizes)
    losses = trainer.resume()
    check_weights(model, trainer.state.global_step)
    tokens = next(iter(watched.values())).shape[1]
    ranks = {
        entry["step"]: {name.split("/")[-1]: entry[f"rank/{name}"] for name in FOLLOWED}
        for entry in trainer.state.log_history
        if f"rank/{FOLLOWED[0]}" in entry
    }
    rows = [{"what": "trace", "tokens": tokens, "step": step, **values} for step, values in ranks.items()]
    end = {"what": "end", "tokens": tokens, "step": steps, **ranks[steps], "loss": losses[-1]}
    return [*rows, {**end, **accuracy(model, held_out, vote=parameters["task"] == "images")}]


@torch.no_grad()
def accuracy(model: PreTrainedModel, rows: Batch, vote: bool, batch: int = 128) -> dict[str, float]:
    """Share of labelled tokens whose class is predicted; with `vote`, of rows, by the mean logits of their tokens."""
    model.eval()
    right = total = 0
    for part in in_parts(rows, batch, model.device):
        labels = part.pop("labels")
        logits = model(**part).logits
        if vote:
            logits, labels = logits.mean(1), labels[:, 0]
        counted = labels != -100
        right += int((logits.argmax(-1) == labels)[counted].sum())
        total += int(counted.sum())
    return {"accuracy": right / total, "judged": total}
