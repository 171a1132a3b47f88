"""Cut the query-key rank of a BERT checkpoint, and go on training the narrow model with Trainer.

    python examples/convert_and_finetune.py --model path/to/bert --qk_rank 8
    python examples/convert_and_finetune.py --model path/to/bert --qk_rank 8 --steps 200 --output_dir runs/narrow

Nothing is downloaded: the texts are the package's own, and the task is made of them. A row is half a paragraph, and its
class says whether its words stand in their order or have been shuffled. The checkpoint is calibrated on texts of the
training split, fine-tuned, and saved with its tokenizer and a card.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from huggingface_hub import EvalResult
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_rankattn import convert_rank, export_model, parameter_counts
from hf_rankattn.sharing import card_of
from hf_rankattn.texts import package_text


@dataclass
class Arguments:
    model: str = field(
        metadata={"help": "folder or Hub name of a BERT, ALBERT or XLNet checkpoint with its tokenizer"}
    )
    qk_rank: int = field(default=8, metadata={"help": "new query-key rank of each head"})
    steps: int = field(default=60, metadata={"help": "training steps"})
    seed: int = field(default=0, metadata={"help": "seed of shuffling, head and batches"})
    output_dir: str = field(default="runs/converted", metadata={"help": "where the fine-tuned model is saved"})
    overwrite: bool = field(default=False, metadata={"help": "whether the output folder may be replaced"})


def shuffled_or_not(texts: list[str], seed: int, tokenizer) -> Dataset:
    """Halves of the texts, each as it is (label 0) and with its words shuffled (label 1)."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, len(texts)]))
    rows = []
    for text in texts:
        words = text.split()
        for half in (words[: len(words) // 2], words[len(words) // 2 :]):
            rows.append({"text": " ".join(half), "labels": 0})
            rows.append({"text": " ".join(rng.permutation(half)), "labels": 1})
    data = Dataset.from_list(rows)
    return data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=128), remove_columns="text")


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = HfArgumentParser(Arguments)
    (arguments,) = parser.parse_args_into_dataclasses()
    if Path(arguments.output_dir).exists() and not arguments.overwrite:
        parser.error(f"{arguments.output_dir} exists already: choose another --output_dir, or add --overwrite.")
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    stock = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=2, use_safetensors=True)
    texts = package_text()
    calibration = [
        tokenizer(texts[start : start + 8], padding=True, truncation=True, max_length=128, return_tensors="pt")
        for start in range(0, 40, 8)
    ]
    model = convert_rank(stock, arguments.qk_rank, calibration=calibration)
    live = parameter_counts(model).live
    print(f"qk_rank {arguments.qk_rank}: {live:,} parameters, {stock.num_parameters() - live:,} fewer than before")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"{arguments.output_dir}-checkpoints",
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            learning_rate=2e-4,
            warmup_steps=5,
            seed=arguments.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            dataloader_pin_memory=False,
        ),
        train_dataset=shuffled_or_not(texts[:60], arguments.seed, tokenizer),
        eval_dataset=shuffled_or_not(texts[60:], arguments.seed + 1, tokenizer),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on unseen paragraphs: {before:.3f} before fine-tuning, {after:.3f} after")
    card = card_of(
        model,
        Path(arguments.output_dir).name,
        base_model=Path(arguments.model).name if Path(arguments.model).exists() else arguments.model,
        how=f"Converted to `qk_rank={arguments.qk_rank}` with calibration, then fine-tuned for {arguments.steps} steps by "
        "`examples/convert_and_finetune.py`.",
        results=[
            EvalResult(
                task_type="text-classification",
                dataset_type="shuffled-or-not",
                dataset_name="halves of 40 paragraphs, in order or shuffled",
                dataset_split="validation",
                metric_type="accuracy",
                metric_value=round(after, 4),
            )
        ],
    )
    folder = export_model(model, arguments.output_dir, tokenizer=tokenizer, card=card, overwrite=arguments.overwrite)
    print(f"saved in {folder}")


if __name__ == "__main__":
    main()
