"""Train an encoder on a task on points with Trainer: the published recipe, every part of it a flag.

    python examples/run_points.py --dim 16 --num_points 8 --intermediate_size 256 --qk_norm --steps 1000 --output_dir runs/full
    python examples/run_points.py --dim 16 --num_points 8 --intermediate_size 256 --qk_norm --steps 1000 --qk_rank 8 --budget 256 --output_dir runs/half
    python examples/run_points.py config.yaml --seed 1 --output_dir runs/seed1
    python examples/run_points.py config.yaml --resume
    torchrun --nproc_per_node 2 examples/run_points.py config.yaml --expect_processes 2

Rows are drawn while they are needed and never repeat; nothing is downloaded. `--batch_size` is that of all processes
together, so any number of processes gives the same losses. A run that was stopped or killed goes on with `--resume` as if
nothing had happened. The folder holds checkpoints, `losses.csv`, `results.json`, and in `model/` the model with its card.
"""

import json

from transformers import Trainer, TrainingArguments, set_seed

from hf_rankattn import export_model, parameter_counts, push_to_hub
from hf_rankattn.hub.sharing import card_of
from hf_rankattn.tasks import load_stream, trainer_metrics
from hf_rankattn.training.arguments import parse_arguments, refusals
from hf_rankattn.training.optimizers import point_optimizer, warmup_cosine
from hf_rankattn.training.points import PointArguments, fresh_rows, point_model, point_report, point_task
from hf_rankattn.training.processes import check_processes, leave_processes, process_state
from hf_rankattn.training.runs import RunCallback, begin_run, train, training_arguments


def main() -> None:
    arguments = parse_arguments(PointArguments, __doc__)

    state = process_state()
    log = state.print
    log(f"processes: {state.num_processes}, batch of all together: {arguments.batch_size}")

    with refusals():
        check_processes(state.num_processes, arguments.expect_processes, "examples/run_points.py ...")
        builder = point_task(arguments)
        set_seed(arguments.seed)
        model = point_model(arguments, builder)
        optimizer = point_optimizer(model, arguments.learning_rate, arguments.temperature_lr_factor)
        run = begin_run(arguments, script="run_points", rows=builder.hash)
    if run.checkpoint:
        log(f"going on at step {run.step} of {arguments.steps}")
    log(f"{builder.task_name()} {builder.config.name}; {parameter_counts(model).live:,} parameters")

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            **training_arguments(arguments, run),
            per_device_eval_batch_size=256,
            max_grad_norm=0.0,
            ddp_find_unused_parameters=False,
            include_for_metrics=["inputs"],
            # the stream starts at the right row at once; Trainer would draw all rows before it and drop them
            ignore_data_skip=True,
        ),
        train_dataset=fresh_rows(builder, run.step * arguments.batch_size),
        eval_dataset=load_stream(builder, "test"),
        compute_metrics=trainer_metrics(arguments.task),
        optimizers=(optimizer, warmup_cosine(optimizer, arguments.steps, arguments.warmup)),
        callbacks=[RunCallback(arguments)],
    )
    if not train(trainer, run):
        log(f"stopped at step {trainer.state.global_step} of {arguments.steps}: go on with --resume")
        leave_processes()
        return

    measured = trainer.evaluate()
    metrics = {
        name.removeprefix("eval_"): value
        for name, value in measured.items()
        if name.endswith(("_error", "_accuracy", "_f1"))
    }
    run.write("results.json", json.dumps(metrics, indent=2) + "\n")

    if run.is_main:
        report = point_report(arguments, builder, metrics)
        card = card_of(model, arguments.push_to or run.folder.resolve().name, **report)
        folder = export_model(model, run.folder / "model", card=card, overwrite=True)
        log(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        log(report["how"].splitlines()[-1])
        log(f"saved in {folder}")

        if arguments.push_to:
            log(push_to_hub(model, arguments.push_to, card=card))
    leave_processes()


if __name__ == "__main__":
    main()
