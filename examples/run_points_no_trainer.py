"""Train an encoder on a task on points with Accelerate and a loop of one's own: the twin of run_points.py.

    python examples/run_points_no_trainer.py --dim 16 --num_points 8 --intermediate_size 256 --qk_norm --steps 1000 --output_dir runs/full
    python examples/run_points_no_trainer.py config.yaml --seed 1 --output_dir runs/seed1
    python examples/run_points_no_trainer.py config.yaml --resume
    torchrun --nproc_per_node 2 examples/run_points_no_trainer.py config.yaml --expect_processes 2

It takes the same arguments and YAML files as run_points.py and gives the same losses. Start several processes with torchrun:
`accelerate launch --cpu --num_processes 2` starts one, which is what `--expect_processes` is there to catch. The folder holds
checkpoints, `losses.csv`, `results.json`, and in `model/` the model with its card.
"""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import set_seed

from hf_rankattn import export_model, parameter_counts, push_to_hub
from hf_rankattn.hub.sharing import card_of
from hf_rankattn.tasks import load_stream, score
from hf_rankattn.training.arguments import parse_arguments, refusals
from hf_rankattn.training.optimizers import point_optimizer, warmup_cosine
from hf_rankattn.training.points import PointArguments, fresh_rows, point_model, point_report, point_task
from hf_rankattn.training.processes import check_processes, leave_processes, on_cpu, process_state
from hf_rankattn.training.runs import begin_run, check_finite, check_weights, complete_checkpoint, drop_checkpoints


def main() -> None:
    arguments = parse_arguments(PointArguments, __doc__)

    state = process_state()
    log = state.print
    log(f"processes: {state.num_processes}, batch of all together: {arguments.batch_size}")

    with refusals():
        check_processes(state.num_processes, arguments.expect_processes, "examples/run_points_no_trainer.py ...")
        builder = point_task(arguments)
        set_seed(arguments.seed)
        model = point_model(arguments, builder)
        optimizer = point_optimizer(model, arguments.learning_rate, arguments.temperature_lr_factor)
        run = begin_run(arguments, script="run_points_no_trainer", rows=builder.hash)
    if run.checkpoint:
        log(f"going on at step {run.step} of {arguments.steps}")
    log(f"{builder.task_name()} {builder.config.name}; {parameter_counts(model).live:,} parameters")

    accelerator = Accelerator(
        cpu=on_cpu(),
        # one batch is drawn and split: without this each process would draw a whole one, and schedules would step once for each
        dataloader_config=DataLoaderConfiguration(split_batches=True, dispatch_batches=True),
        log_with=None if arguments.report_to == "none" else arguments.report_to,
    )
    accelerator.init_trackers("run_points_no_trainer", config=arguments.settings())
    schedule = warmup_cosine(optimizer, arguments.steps, arguments.warmup)
    loader = DataLoader(fresh_rows(builder, run.step * arguments.batch_size), batch_size=arguments.batch_size)
    held_out = DataLoader(load_stream(builder, "test"), batch_size=256 * run.processes)
    model, optimizer, schedule, loader, held_out = accelerator.prepare(model, optimizer, schedule, loader, held_out)
    history = []
    if run.checkpoint:
        accelerator.load_state(str(run.checkpoint))
        history = json.loads((run.checkpoint / "history.json").read_text())

    step, last = run.step, min(arguments.steps, arguments.stop_at or arguments.steps)
    losses = torch.zeros((), device=accelerator.device)
    model.train()
    for batch in loader if step < last else ():
        step += 1
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        rate = schedule.get_last_lr()[0]
        schedule.step()
        optimizer.zero_grad()
        losses += loss.detach()
        if step % arguments.log_every == 0:
            mean = accelerator.reduce(losses, "mean").item() / arguments.log_every
            with refusals():
                check_finite({"loss": mean}, step)
            history.append({"step": step, "loss": mean, "learning_rate": rate})
            log(f"step {step}: loss {mean:.4f}, learning rate {rate:.2g}")
            accelerator.log({"loss": mean, "learning_rate": rate}, step=step)
            losses.zero_()
        if step % arguments.save_every == 0 or step == last:
            checkpoint = run.folder / f"checkpoint-{step}"
            accelerator.save_state(str(checkpoint))
            if run.is_main:
                (checkpoint / "history.json").write_text(json.dumps(history))
            complete_checkpoint(checkpoint)
            drop_checkpoints(run, keep=2)
        if step == last:
            break
    run.write_history(history)
    with refusals():
        check_weights(model, step)
    if step < arguments.steps:
        log(f"stopped at step {step} of {arguments.steps}: go on with --resume")
        leave_processes()
        return

    model.eval()
    parts: list[list[torch.Tensor]] = []
    for batch in held_out:
        with torch.no_grad():
            predictions = model(**batch).logits
        gathered = accelerator.gather_for_metrics((predictions, batch["labels"], batch["points"]))
        parts.append([tensor.float().cpu() for tensor in gathered])
    predictions, labels, points = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
    if predictions.ndim > labels.ndim:
        predictions = predictions.argmax(-1)
    metrics = score(arguments.task, predictions, labels, points)
    with refusals():
        check_finite(metrics, step)
    run.write("results.json", json.dumps(metrics, indent=2) + "\n")

    if run.is_main:
        model = accelerator.unwrap_model(model)
        report = point_report(arguments, builder, metrics)
        card = card_of(model, arguments.push_to or run.folder.resolve().name, **report)
        folder = export_model(model, run.folder / "model", card=card, overwrite=True)
        log(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        log(report["how"].splitlines()[-1])
        log(f"saved in {folder}")

        if arguments.push_to:
            log(push_to_hub(model, arguments.push_to, card=card))
    for tracker in accelerator.trackers:
        tracker.finish()
    leave_processes()


if __name__ == "__main__":
    main()
