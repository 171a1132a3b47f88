"""Fine-tune a checkpoint of a rank family, at any query-key rank on texts, or train a small rank BERT from scratch.

    python examples/run_text_classification.py --qk_rank 16 --learning_rate 3e-3 --batch_size 128 --steps 600 --output_dir runs/scratch
    python examples/run_text_classification.py --model path/to/checkpoint --output_dir runs/tuned
    python examples/run_text_classification.py --model path/to/checkpoint --dataset path/to/csv_files --output_dir runs/mine
    python examples/run_text_classification.py config.yaml --seed 1 --output_dir runs/seed1
    python examples/run_text_classification.py config.yaml --resume
    torchrun --nproc_per_node 2 examples/run_text_classification.py config.yaml --expect_processes 2

Without `--dataset` nothing is downloaded. A checkpoint is trained on `word-order`: pieces of the package's own texts, whose class
says whether the words stand in their order or have been shuffled. That takes a model that knows some language; one from scratch is
trained on `key-value`, made-up lines in which a key has to be looked up. A checkpoint that `rankattn convert` wrote is a checkpoint like any other. Dropout
is 0 by default, so that any number of processes gives the same losses. The folder holds checkpoints, `losses.csv`,
`results.json`, and in `model/` the model with its tokenizer and card.
"""

from dataclasses import dataclass, field

from transformers import set_seed

from hf_rankattn import (
    RankBertConfig,
    RankBertForSequenceClassification,
    export_model,
    parameter_counts,
    push_to_hub,
)
from hf_rankattn.files.texts.word_order import word_tokenizer
from hf_rankattn.hub.sharing import card_of
from hf_rankattn.training.arguments import parse_arguments, refusals
from hf_rankattn.training.processes import check_processes, leave_processes, process_state
from hf_rankattn.training.runs import begin_run, train
from hf_rankattn.training.texts import (
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
    model: str | None = field(
        default=None, metadata={"help": "folder or Hub name of a checkpoint with its tokenizer; none: from scratch"}
    )
    qk_rank: int | None = field(default=None, metadata={"help": "from scratch: query-key rank of each head"})
    hidden_size: int = field(default=64, metadata={"help": "from scratch: width of the stream"})
    num_layers: int = field(default=2, metadata={"help": "from scratch: layers"})
    num_attention_heads: int = field(default=4, metadata={"help": "from scratch: heads"})
    qk_norm: bool = field(default=False, metadata={"help": "from scratch: unit queries and keys"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and self.qk_rank is not None:
            raise ValueError(
                f"--qk_rank {self.qk_rank} is for a model from scratch, and --model {self.model} has its rank: cut it with "
                "examples/convert_and_finetune.py or rankattn convert."
            )


def from_scratch(arguments: Arguments, tokenizer, labels: list[str]) -> RankBertForSequenceClassification:
    config = RankBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=arguments.num_attention_heads,
        intermediate_size=2 * arguments.hidden_size,
        max_position_embeddings=arguments.max_length,
        hidden_dropout_prob=arguments.dropout,
        attention_probs_dropout_prob=arguments.dropout,
        qk_rank=arguments.qk_rank,
        qk_norm=arguments.qk_norm,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    return RankBertForSequenceClassification(config)


def main() -> None:
    arguments = parse_arguments(Arguments, __doc__)

    state = process_state()
    log = state.print
    log(f"processes: {state.num_processes}, batch of all together: {arguments.batch_size}")

    with refusals():
        check_processes(state.num_processes, arguments.expect_processes, "examples/run_text_classification.py ...")
        set_seed(arguments.seed)
        data = text_data(arguments, default="word-order" if arguments.model else "key-value")
        if arguments.model is None:
            tokenizer = word_tokenizer(data.train["text"][:])
            model = from_scratch(arguments, tokenizer, data.labels)
        else:
            model = classifier(arguments.model, data.labels, arguments)
            tokenizer = tokenizer_for(model, arguments.model, data, arguments)
        run = begin_run(arguments, script="run_text_classification")
    if run.checkpoint:
        log(f"going on at step {run.step} of {arguments.steps}")
    log(f"{data.name}: {len(data.train)} rows, {len(data.test)} held out; {parameter_counts(model).live:,} parameters")

    trainer = text_trainer(model, tokenizer, data, arguments, run)
    if not train(trainer, run):
        log(f"stopped at step {trainer.state.global_step} of {arguments.steps}: go on with --resume")
        leave_processes()
        return

    metrics = {"accuracy": trainer.evaluate()["eval_accuracy"]}
    write_results(run, metrics)

    if run.is_main:
        origin = f"`{base_name(arguments.model)}`, fine-tuned" if arguments.model else "Trained from scratch"
        card = card_of(
            model,
            arguments.push_to or run.folder.resolve().name,
            base_model=base_name(arguments.model),
            how=f"{origin} on {data.name} by `examples/run_text_classification.py`: {arguments.steps} steps of {arguments.batch_size} "
            f"texts, learning rate {arguments.learning_rate:g}, seed {arguments.seed}. The commonest class alone has an accuracy "
            f"of {majority(data):.3f}.",
            results=text_results(data, metrics),
        )
        folder = export_model(model, run.folder / "model", tokenizer=tokenizer, card=card, overwrite=True)
        log(f"accuracy {metrics['accuracy']:.4f}; the commonest class alone: {majority(data):.4f}")
        log(f"saved in {folder}")

        if arguments.push_to:
            log(push_to_hub(model, arguments.push_to, tokenizer=tokenizer, card=card))
    leave_processes()


if __name__ == "__main__":
    main()
