"""Train heads to find the farthest of 16 points, and follow the rank of their attention. Offline, about a minute.

What is learned is a choice, and maps of n random choices have 0.63 n directions: 10 of 16. `--qk_rank` narrows the heads at one
budget; everything else is `Trainer`.
"""

import argparse
import sys
import tempfile

import torch
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments, set_seed

from hf_rankattn import RankCallback, RankEncoderConfig, RankEncoderForPointRegression


COUNT, DIM = 16, 8


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Points, and for each of them the farthest of the others."""
    points = torch.stack([row[0] for row in rows])
    farthest = (points @ points.transpose(1, 2)).argmin(-1)
    return {"points": points, "labels": torch.gather(points, 1, farthest[..., None].expand_as(points))}


def train(config: RankEncoderConfig, callback: RankCallback, arguments: argparse.Namespace, folder: str) -> Trainer:
    training = TrainingArguments(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=128,
        learning_rate=0.01,
        warmup_steps=arguments.steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=arguments.every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=arguments.seed,
    )
    data = TensorDataset(torch.nn.functional.normalize(torch.randn(20_000, COUNT, DIM), dim=-1))
    trainer = Trainer(RankEncoderForPointRegression(config), training, collate, data)
    callback.add_to(trainer)
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--qk_rank", type=int, default=DIM, help=f"query/key width of each head, up to {DIM}")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100, help="measure every so many steps")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    set_seed(arguments.seed)
    try:
        heads = max(1, DIM // max(1, arguments.qk_rank))  # one budget
        config = RankEncoderConfig(
            input_dim=DIM, num_attention_heads=heads, qk_rank=arguments.qk_rank, v_head_dim=DIM, qk_norm=True
        )
        metrics = ["effective_rank", "argmax_coverage", "logits/energy_rank", "logits/logit_std"]
        callback = RankCallback(every=arguments.every, metrics=metrics, per_layer=False)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        history = train(config, callback, arguments, folder).state.log_history
    errors = {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
    print(f"{'step':>6}{'error':>8}{'map rank':>10}{'first choices':>15}{'logit rank':>12}{'logit std':>11}")
    for entry in history:
        if "rank/effective_rank" in entry:
            map_rank, choices, logit_rank, spread = (entry[f"rank/{name}"] for name in metrics)
            ranks = f"{map_rank:>10.1f}{choices:>15.1f}{logit_rank:>12.1f}{spread:>11.1f}"
            print(f"{entry['step']:>6}{errors[entry['step']]:>8.3f}{ranks}")


if __name__ == "__main__":
    main()
