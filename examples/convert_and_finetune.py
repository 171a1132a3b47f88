"""Cut the query-key rank of a checkpoint of BERT, its relatives, XLNet or GPT-2, and go on training the narrow model with Trainer.

    python examples/convert_and_finetune.py --model path/to/checkpoint --qk_rank 8 --output_dir runs/narrow
    python examples/convert_and_finetune.py --model path/to/checkpoint --qk_rank 8 --dataset path/to/csv_files --output_dir runs/mine
    python examples/convert_and_finetune.py config.yaml --qk_rank 4 --output_dir runs/narrower
    python examples/convert_and_finetune.py config.yaml --resume
    torchrun --nproc_per_node 2 examples/convert_and_finetune.py config.yaml --expect_processes 2

Without `--dataset` nothing is downloaded: rows are pieces of the package's own texts, and their class says whether the words
stand in their order or have been shuffled. The checkpoint is calibrated on texts of the training rows. Dropout is 0 by default, so
that any number of processes gives the same losses. The folder holds checkpoints, `losses.csv`, `results.json`, and in `model/` the
model with its tokenizer and card.
"""

from dataclasses import dataclass, field

from transformers import set_seed

from hf_rankattn import convert_rank, export_model, package_text, parameter_counts, push_to_hub
from hf_rankattn.files.batches import padded_batches
from hf_rankattn.hub.sharing import card_of
from hf_rankattn.training.arguments import parse_arguments, refusals
from hf_rankattn.training.processes import check_processes, leave_processes, process_state
from hf_rankattn.training.runs import begin_run, train
from hf_rankattn.training.texts import (
    TRAIN_TEXTS,
    TextArguments,
    base_name,
    classifier,
    majority,
    text_data,
    text_results,
    text_trainer,
    tokenizer_for,
    write_results,
)


@dataclass(kw_only=True)
class Arguments(TextArguments):
    model: str = field(
        metadata={"help": "folder or Hub name of a checkpoint with its tokenizer, of a family with a rank model"}
    )
    output_dir: str = field(
        default="runs/converted", metadata={"help": "folder of the run: its checkpoints and its model"}
    )
    steps: int = field(default=60, metadata={"help": "training steps; the schedule spans all of them"})
    save_every: int = field(default=20, metadata={"help": "steps between checkpoints; a multiple of log_every"})
    qk_rank: int = field(default=8, metadata={"help": "new query-key rank of each head"})
    calibration_texts: int = field(default=40, metadata={"help": "texts to calibrate on; 0: cut by the weights alone"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibration_texts < 0:
            raise ValueError(f"--calibration_texts must not be negative, got {self.calibration_texts}.")


def main() -> None:
    arguments = parse_arguments(Arguments, __doc__)

    state = process_state()
    log = state.print
    log(f"processes: {state.num_processes}, batch of all together: {arguments.batch_size}")

    with refusals():
        check_processes(state.num_processes, arguments.expect_processes, "examples/convert_and_finetune.py ...")
        set_seed(arguments.seed)
        data = text_data(arguments, default="word-order")
        wide = classifier(arguments.model, data.labels, arguments)
        tokenizer = tokenizer_for(wide, arguments.model, data, arguments)
        # whole paragraphs tell more than the pieces they are cut into
        whole = package_text()[:TRAIN_TEXTS] if data.name == "word-order" else data.train["text"][:]
        texts = whole[: arguments.calibration_texts]
        calibration = padded_batches(tokenizer, texts, arguments.max_length)
        model = convert_rank(wide, arguments.qk_rank, calibration=calibration or None)
        run = begin_run(arguments, script="convert_and_finetune")
    if run.checkpoint:
        log(f"going on at step {run.step} of {arguments.steps}")
    live = parameter_counts(model).live
    log(f"qk_rank {arguments.qk_rank}: {live:,} parameters, {wide.num_parameters() - live:,} fewer than before")

    # Not `trainer.evaluate()` before training: Accelerate then takes the model for prepared, and processes would train it apart.
    trainer = text_trainer(model, tokenizer, data, arguments, run, eval_on_start=run.checkpoint is None)
    if not train(trainer, run):
        log(f"stopped at step {trainer.state.global_step} of {arguments.steps}: go on with --resume")
        leave_processes()
        return

    before = next(entry["eval_accuracy"] for entry in trainer.state.log_history if "eval_accuracy" in entry)
    metrics = {"accuracy": trainer.evaluate()["eval_accuracy"]}
    write_results(run, metrics | {"accuracy_before": before})

    if run.is_main:
        card = card_of(
            model,
            arguments.push_to or run.folder.resolve().name,
            base_model=base_name(arguments.model),
            how=f"Converted to `qk_rank={arguments.qk_rank}`, calibrated on {len(texts)} texts, then fine-tuned on {data.name} by "
            f"`examples/convert_and_finetune.py`: {arguments.steps} steps of {arguments.batch_size} texts, learning rate "
            f"{arguments.learning_rate:g}, seed {arguments.seed}. The commonest class alone has an accuracy of {majority(data):.3f}.",
            results=text_results(data, metrics),
        )
        folder = export_model(model, run.folder / "model", tokenizer=tokenizer, card=card, overwrite=True)
        accuracy = f"{before:.4f} before fine-tuning, {metrics['accuracy']:.4f} after"
        log(f"accuracy on held-out rows: {accuracy}; the commonest class alone: {majority(data):.4f}")
        log(f"saved in {folder}")

        if arguments.push_to:
            log(push_to_hub(model, arguments.push_to, tokenizer=tokenizer, card=card))
    leave_processes()


if __name__ == "__main__":
    main()
