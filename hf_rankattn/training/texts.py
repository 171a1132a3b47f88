"""What the scripts that fine-tune text classifiers share: their arguments, their data, their Trainer, and their results."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from huggingface_hub import EvalResult
from transformers import DataCollatorWithPadding, PreTrainedModel, Trainer, TrainingArguments

from ..families.architectures import TABLE
from ..files.batches import check_tokens, longest, padded_batches
from ..files.checkpoints import data_source, load_config, load_model, load_tokenizer
from ..files.texts import package_text
from ..files.texts.key_value import VALUES, key_value_rows
from ..files.texts.word_order import LABELS, word_order_rows
from ..models.registration import auto_classes, rank_twin
from ..tasks import TokenAccuracy
from .arguments import RunArguments, option
from .processes import process_state
from .runs import Run, RunCallback, training_arguments


# paragraphs of the package's own text that are trained on; the others are held out
TRAIN_TEXTS = 60
DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "classifier_dropout_prob"),
    *("dropout", "summary_last_dropout", "summary_first_dropout", "summary_dropout"),
    *("attention_dropout", "seq_classif_dropout", "qa_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
)


@dataclass(kw_only=True)
class TextArguments(RunArguments):
    output_dir: str = option("runs/text", "folder of the run: its checkpoints and its model")
    steps: int = option(300, "training steps; the schedule spans all of them")
    batch_size: int = option(32, "rows of one step over ALL processes together")
    learning_rate: float = option(2e-4, "highest learning rate")
    save_every: int = option(100, "steps between checkpoints; a multiple of log_every")
    dataset: str | None = option(None, "folder or Hub name of a data set, or word-order or key-value, made here")
    dataset_config: str | None = option(None, "config of that data set")
    text_column: str = option("text", "column of the texts")
    label_column: str = option("label", "column of the classes")
    max_length: int = option(128, "tokens of a text at most")
    dropout: float = option(0.0, "dropout in training; above 0, another number of processes gives other losses")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 3:
            raise ValueError(f"--max_length must be at least 3, or no word fits; got {self.max_length}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must be at least 0 and below 1, got {self.dropout}.")

    def settings(self) -> dict[str, Any]:
        # each process draws dropout of its own
        processes = {"processes": process_state().num_processes} if self.dropout else {}
        return super().settings() | processes


class TextData(NamedTuple):
    name: str
    train: datasets.Dataset
    test: datasets.Dataset
    labels: list[str]


def text_data(arguments: TextArguments, default: str) -> TextData:
    """Columns `text` and `label`, in rows to train on and rows that are held out."""
    name, seed = arguments.dataset or default, int(arguments.data_seed or 0)
    if name == "word-order":
        texts = package_text()
        parts = [word_order_rows(part, seed) for part in (texts[:TRAIN_TEXTS], texts[TRAIN_TEXTS:])]
        labels = list(LABELS)
    elif name == "key-value":
        parts = [key_value_rows(20_000, seed), key_value_rows(2_000, seed, "test")]
        labels = [f"is{value}" for value in range(VALUES)]
    else:
        with process_state().main_process_first():  # it fills the caches that the others read
            return stored_data(name, arguments)
    train, test = map(datasets.Dataset.from_list, parts)
    return TextData(name, train, test, labels)


def stored_data(name: str, arguments: TextArguments) -> TextData:
    try:
        splits = datasets.load_dataset(data_source(name), arguments.dataset_config)
    except Exception as error:  # of datasets, in many types
        raise ValueError(f"--dataset {name} cannot be loaded: {error}") from error
    held_out = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits:
        raise ValueError(f"--dataset {name} has no train split; it has {', '.join(splits)}.")
    if held_out is None:
        splits, held_out = splits["train"].train_test_split(test_size=0.2, seed=arguments.data_seed), "test"
    columns = splits["train"].column_names
    for key in ("text_column", "label_column"):
        if getattr(arguments, key) not in columns:
            raise ValueError(f"--{key} {getattr(arguments, key)} is no column of {name}; it has {', '.join(columns)}.")
    feature = splits["train"].features[arguments.label_column]
    parts = [splits[split] for split in ("train", held_out)]
    values = sorted({value for part in parts for value in part[arguments.label_column]}, key=str)
    classed = isinstance(feature, datasets.ClassLabel)
    names = list(feature.names) if classed else list(map(str, values))
    number = {value: index for index, value in enumerate(range(len(names)) if classed else values)}
    if not set(values) <= set(number) or isinstance(values[0], float) or len(names) < 2:
        raise ValueError(
            f"--label_column {arguments.label_column} must hold two or more classes and no gaps, got {values[:5]}."
        )
    columns = (
        {"text": part[arguments.text_column][:], "label": [number[value] for value in part[arguments.label_column]]}
        for part in parts
    )
    train, test = map(datasets.Dataset.from_dict, columns)
    return TextData(name, train, test, names)


def encode(rows: datasets.Dataset, tokenizer, max_length: int) -> datasets.Dataset:
    encoded = tokenizer(rows["text"][:], truncation=True, max_length=max_length)
    return datasets.Dataset.from_dict({**encoded, "labels": rows["label"][:]})


def rows_of_run(rows: datasets.Dataset, arguments: RunArguments) -> datasets.Dataset:
    """All rows of a run in the order of training: one shuffled pass after the other.

    With a sampler, the last batch of a pass is what is left, and several processes fill it up with rows of the first batch:
    not the batch that one process sees. Here batches reach across the end of a pass and all have one size.
    """
    rng = np.random.default_rng(arguments.data_seed)
    wanted = arguments.steps * arguments.batch_size
    passes = [rng.permutation(len(rows)) for _ in range(-(-wanted // len(rows)))]
    return rows.select(np.concatenate(passes)[:wanted])


def classifier(name: str, labels: list[str], arguments: TextArguments) -> PreTrainedModel:
    """A checkpoint of a family with rank models, stock or with a rank of its own, as a rank model that classifies texts."""
    config = load_config(name)
    config_class = rank_twin(type(config)) or type(config)
    kind = auto_classes(config_class).get("AutoModelForSequenceClassification")
    if kind is None or not hasattr(config_class, "head_geometry"):
        known = ", ".join(stock for family in TABLE for stock in family.rank_types)
        raise ValueError(f"--model {name} is a {config.model_type}; one of these is needed, stock or rank: {known}.")
    if (limit := longest(config)) and limit < arguments.max_length:
        raise ValueError(f"--max_length {arguments.max_length} exceeds --model {name}, which has {limit} positions.")
    fields: dict[str, Any] = {key: arguments.dropout for key in DROPOUT if getattr(config, key, None) is not None}
    fields |= {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
    needed = f"{kind.base_model_prefix}."
    return load_model(name, config, kind, needed=lambda key: key.startswith(needed) and "pooler" not in key, **fields)


def tokenizer_for(model: PreTrainedModel, name: str, data: TextData, arguments: TextArguments):
    """The tokenizer of a checkpoint, tried on some of the texts."""
    tokenizer = load_tokenizer(name, padding_side=None)
    check_tokens(tokenizer, padded_batches(tokenizer, data.train["text"][:64], arguments.max_length), model.config)
    return tokenizer


def accuracy(prediction) -> dict[str, float]:
    chosen, true = prediction.predictions.argmax(-1)[:, None], prediction.label_ids[:, None]
    return {"accuracy": TokenAccuracy.measure(chosen, true)["token_accuracy"]}


def text_trainer(
    model: PreTrainedModel, tokenizer, data: TextData, arguments: TextArguments, run: Run, eval_on_start: bool = False
) -> Trainer:
    """A `Trainer` for a run on texts, with the same losses on any number of processes."""
    return Trainer(
        model=model,
        args=TrainingArguments(
            **training_arguments(arguments, run),
            per_device_eval_batch_size=64,
            eval_on_start=eval_on_start,
            lr_scheduler_type="linear",
            # one pass over rows that stand in the order of training
            train_sampling_strategy="sequential",
            # The loss of these models is a mean over texts. Trainer takes any model with further keyword arguments for one
            # that divides by the batch of all processes, and would multiply the loss by their number.
            average_tokens_across_devices=False,
        ),
        train_dataset=rows_of_run(encode(data.train, tokenizer, arguments.max_length), arguments),
        eval_dataset=encode(data.test, tokenizer, arguments.max_length),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        callbacks=[RunCallback(arguments)],
    )


def text_results(data: TextData, metrics: dict[str, float]) -> list[EvalResult]:
    of: dict[str, Any] = {"task_type": "text-classification", "dataset_split": "test"}
    of |= {
        "dataset_type": data.name.rsplit("/", 1)[-1],
        "dataset_name": f"{data.name}, {len(data.test)} held-out rows",
    }
    return [EvalResult(**of, metric_type=key, metric_value=round(value, 6)) for key, value in metrics.items()]


def base_name(model: str | None) -> str | None:
    """What a card calls the checkpoint that a model was made from: nobody else has the folders of this machine."""
    return Path(model).resolve().name if model and Path(model).exists() else model


def majority(data: TextData) -> float:
    """Accuracy of answering with the commonest class of the train rows."""
    train, test = (np.bincount(part["label"][:], minlength=len(data.labels)) for part in (data.train, data.test))
    return float(test[train.argmax()] / test.sum())


def write_results(run: Run, metrics: dict[str, float]) -> None:
    run.write("results.json", json.dumps(metrics, indent=2) + "\n")
