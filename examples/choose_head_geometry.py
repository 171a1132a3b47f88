"""Train a small BERT at several query-key ranks with Trainer, and see what each rank costs and gives.

    python examples/choose_head_geometry.py
    python examples/choose_head_geometry.py --ranks 1 8 --steps 200 --output_dir runs

The task is made here, so nothing is downloaded: a sequence is a key and then tokens that each carry a key and a value,
and its class is the value that goes with the first key. To solve it a head has to match keys, which is what query-key
rank is for. The smallest rank with the best accuracy is saved in `--output_dir`, ready for `AutoModelForSequenceClassification.from_pretrained`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import evaluate
import numpy as np
from datasets import Dataset, Features, Value
from huggingface_hub import EvalResult
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

from hf_rankattn import RankBertConfig, RankBertForSequenceClassification, export_model, parameter_counts
from hf_rankattn.hub.sharing import card_of
from hf_rankattn.training.runs import FiniteLosses


KEYS, CLASSES, PAIRS = 32, 4, 8


@dataclass
class Arguments:
    ranks: list[int] = field(default_factory=lambda: [1, 2, 4, 16], metadata={"help": "query-key ranks to try"})
    steps: int = field(default=600, metadata={"help": "training steps for each rank"})
    seed: int = field(default=0, metadata={"help": "seed of data, weights and batches"})
    output_dir: str = field(default="runs/geometry", metadata={"help": "where the best model is saved"})
    overwrite: bool = field(default=False, metadata={"help": "whether the output folder may be replaced"})


class Accuracy(evaluate.Metric):
    """Importable, so it needs no network: `evaluate.load("accuracy")` would."""

    def _info(self):
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": float(np.mean(np.array(predictions) == np.array(references)))}


def retrieval(num_examples: int, seed: int) -> Dataset:
    """Rows `key (key, value) (key, value) ...`, labelled with the value that goes with the first key."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, num_examples]))
    keys = np.argsort(rng.random((num_examples, KEYS)), axis=1)[:, :PAIRS]
    values = rng.integers(CLASSES, size=(num_examples, PAIRS))
    asked = rng.integers(PAIRS, size=num_examples)
    rows = np.arange(num_examples)
    ids = np.concatenate([1 + keys[rows, asked][:, None], 1 + KEYS + keys * CLASSES + values], axis=1)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": values[rows, asked].tolist()})


def compute_metrics(prediction):
    return Accuracy().compute(predictions=prediction.predictions.argmax(-1), references=prediction.label_ids)


def train(rank: int, arguments: Arguments) -> tuple[Trainer, float]:
    set_seed(arguments.seed)
    config = RankBertConfig(
        vocab_size=1 + KEYS + KEYS * CLASSES,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        qk_rank=rank,
    )
    training = TrainingArguments(
        output_dir=f"{arguments.output_dir}-checkpoints",
        max_steps=arguments.steps,
        per_device_train_batch_size=128,
        per_device_eval_batch_size=512,
        learning_rate=3e-3,
        warmup_steps=50,
        seed=arguments.seed,
        report_to="none",
        save_strategy="no",
        dataloader_pin_memory=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
    )
    trainer = Trainer(
        model=RankBertForSequenceClassification(config),
        args=training,
        train_dataset=retrieval(20_000, arguments.seed),
        eval_dataset=retrieval(2_000, arguments.seed + 1),
        compute_metrics=compute_metrics,
        callbacks=[FiniteLosses()],
    )
    trainer.train()
    return trainer, trainer.evaluate()["eval_accuracy"]


def main() -> None:
    parser = HfArgumentParser(Arguments)
    (arguments,) = parser.parse_args_into_dataclasses()
    if Path(arguments.output_dir).exists() and not arguments.overwrite:
        parser.error(f"{arguments.output_dir} exists already: choose another --output_dir, or add --overwrite.")
    results = {}
    for rank in arguments.ranks:
        trainer, accuracy = train(rank, arguments)
        counts = parameter_counts(trainer.model)
        results[rank] = accuracy, trainer.model
        print(f"qk_rank {rank:3d}: accuracy {accuracy:.3f}, {counts.query_key[0]:,} query-key weights per layer")
    best = max(results, key=lambda rank: (results[rank][0], -rank))
    accuracy, model = results[best]
    card = card_of(
        model,
        Path(arguments.output_dir).name,
        how=f"Trained from scratch by `examples/choose_head_geometry.py` on made-up key-value retrieval: {arguments.steps} "
        f"steps, seed {arguments.seed}. The best of ranks {', '.join(map(str, arguments.ranks))}.",
        results=[
            EvalResult(
                task_type="text-classification",
                dataset_type="key-value-retrieval",
                dataset_name=f"{KEYS} keys, {PAIRS} pairs, 2000 fresh rows",
                dataset_split="validation",
                metric_type="accuracy",
                metric_value=accuracy,
            )
        ],
    )
    folder = export_model(model, arguments.output_dir, card=card, overwrite=arguments.overwrite)
    print(f"saved qk_rank {best} in {folder}; guessing gives {1 / CLASSES:.3f}")


if __name__ == "__main__":
    main()
