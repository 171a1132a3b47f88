"""Training of small classifiers whose query-key rank is what differs, followed by rank metrics, to rows of a table."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

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


FOLLOWED = (
    "effective_rank", "numerical_rank", "stable_rank", "argmax_coverage", "row_entropy", "logits/logit_std",
    "logits/energy_rank",
)  # fmt: skip
WATCHED = 16
Batch = dict[str, torch.Tensor]


class ShuffledBatches(IterableDataset):
    """Batches of rows in a new order each time around, without end."""

    def __init__(self, rows: Batch, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed

    def __iter__(self) -> Iterator[Batch]:
        rng, size = np.random.default_rng(self.seed), len(next(iter(self.rows.values())))
        while True:
            order = torch.from_numpy(rng.permutation(size))
            for chosen in order.split(self.batch_size):
                yield {name: column[chosen] for name, column in self.rows.items()}


class BatchTrainer(Trainer):
    """Trainer on a stream of whole batches."""

    def __init__(self, model, arguments: TrainingArguments, stream: IterableDataset, **kwargs):
        self.stream = stream
        super().__init__(model, arguments, train_dataset=stream, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.stream, batch_size=None)


def retrieval(parameters: Mapping[str, Any]) -> tuple[PreTrainedModel, IterableDataset, Batch]:
    """A rank BERT that looks up values by their keys, a stream of rows, and rows to judge it on."""
    builder = task_builder(
        "token_retrieval", length=parameters["n"], num_values=parameters["num_values"], seed=parameters["seed"]
    )
    torch.manual_seed(parameters["seed"])
    config = RankBertConfig(
        **builder.model_arguments(), **geometry(parameters), max_position_embeddings=parameters["n"], pad_token_id=0,
    )  # fmt: skip
    held_out = {
        name: torch.from_numpy(array) for name, array in builder.sample("test", parameters["held_out"]).items()
    }
    return RankBertForTokenClassification(config), BatchStream(builder, parameters["batch_size"]), held_out


def pictures(parameters: Mapping[str, Any]) -> tuple[PreTrainedModel, IterableDataset, Batch]:
    """A rank encoder that names what is in an image, from every one of its patches."""
    found = load_images(parameters["images"], parameters["size"], parameters["train_rows"])
    tokens = {split: patches(images, parameters["patch"]) for split, (images, _) in found.items()}
    mean, deviation = tokens["train"].mean((0, 1)), tokens["train"].std((0, 1)) + 1e-6
    splits: dict[str, Batch] = {}
    for split, (_, classes) in found.items():
        points = torch.from_numpy((tokens[split] - mean) / deviation).float()
        labels = torch.from_numpy(classes).long()[:, None].expand(-1, points.shape[1]).contiguous()
        splits[split] = {"points": points, "labels": labels}
    torch.manual_seed(parameters["seed"])
    classes_of: dict[str, Any] = {"num_labels": int(found["train"][1].max()) + 1}
    config = RankEncoderConfig(
        input_dim=splits["train"]["points"].shape[-1], input_map="linear", position="additive", norm="layer",
        max_position_embeddings=splits["train"]["points"].shape[1], **classes_of, **geometry(parameters),
    )  # fmt: skip
    stream = ShuffledBatches(splits["train"], parameters["batch_size"], parameters["seed"])
    return RankEncoderForTokenClassification(config), stream, splits["test"]


def geometry(parameters: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = parameters["hidden"], parameters["heads"]
    return {
        "hidden_size": hidden, "num_hidden_layers": parameters["layers"], "num_attention_heads": heads,
        "qk_rank": parameters["qk_rank"], "v_head_dim": hidden // heads, "qk_norm": parameters["qk_norm"],
        "intermediate_size": 2 * hidden, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


TASKS = {"token_retrieval": retrieval, "images": pictures}


def train_classifier(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """A row `trace` for each time the ranks were measured, and a row `end` with the accuracy on held-out rows."""
    model, stream, held_out = TASKS[parameters["task"]](parameters)
    optimizer = point_optimizer(model, parameters["learning_rate"])
    arguments = TrainingArguments(
        output_dir=str(work), max_steps=parameters["steps"], per_device_train_batch_size=parameters["batch_size"],
        logging_steps=max(1, parameters["steps"] // 10), save_strategy="no", max_grad_norm=0.0, seed=parameters["seed"],
        disable_tqdm=True, report_to="none", dataloader_pin_memory=False, logging_nan_inf_filter=False,
    )  # fmt: skip
    watched = {name: column[:WATCHED] for name, column in held_out.items() if name != "labels"}
    every = max(1, parameters["steps"] // parameters.get("measured", 10))
    follow = RankCallback(every=every, inputs=watched, metrics=FOLLOWED, per_layer=False)
    trainer = BatchTrainer(
        model, arguments, stream, callbacks=[FiniteLosses(), follow],
        optimizers=(optimizer, warmup_cosine(optimizer, parameters["steps"])),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    check_weights(model, trainer.state.global_step)
    tokens = next(iter(watched.values())).shape[1]
    ranks = {
        entry["step"]: {name.split("/")[-1]: entry[f"rank/{name}"] for name in FOLLOWED}
        for entry in trainer.state.log_history
        if f"rank/{FOLLOWED[0]}" in entry
    }
    # both the map and the logits have an energy rank; the map's is not followed
    rows = [{"what": "trace", "tokens": tokens, "step": step, **values} for step, values in ranks.items()]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    end = {"what": "end", "tokens": tokens, "step": parameters["steps"], **ranks[parameters["steps"]]}
    vote = parameters["task"] == "images"
    return [*rows, {**end, "loss": losses[-1], **accuracy(model, held_out, vote)}]


@torch.no_grad()
def accuracy(model: PreTrainedModel, rows: Batch, vote: bool, batch: int = 128) -> dict[str, float]:
    """Share of labelled tokens that get their class; where all tokens of a row have one class, they vote."""
    model.eval()
    right = total = 0
    for start in range(0, len(rows["labels"]), batch):
        part = {name: column[start : start + batch].to(model.device) for name, column in rows.items()}
        labels = part.pop("labels")
        logits = model(**part).logits
        if vote:
            logits, labels = logits.mean(1), labels[:, 0]
        counted = labels != -100
        right += int((logits.argmax(-1) == labels)[counted].sum())
        total += int(counted.sum())
    return {"accuracy": right / total, "judged": total}
