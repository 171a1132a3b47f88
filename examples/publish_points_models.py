"""Train the two encoders that this project publishes, measure them, and share them with cards.

    python examples/publish_points_models.py --output_dir runs/points
    python examples/publish_points_models.py --output_dir runs/points --push_to my-name

One head of full rank against two heads of half rank, at one parameter budget, on farthest neighbour in 16 dimensions.
Each folder loads with this package and, as it carries its source, without it. The cards in `model_cards/` are those
that this script wrote.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import EvalResult
from transformers import HfArgumentParser

from hf_rankattn import RankEncoderConfig, equal_budget_grid, export_model, push_to_hub
from hf_rankattn.demo import train_farthest
from hf_rankattn.sharing import card_of


DIM, COUNT = 16, 8
HOW = """Trained from scratch on farthest neighbour: {count} random unit vectors in {dim} dimensions, the label of each
being the farthest of the others. {steps} steps of AdamW (learning rate 0.01, warm-up and cosine, betas 0.9 and 0.95) on batches of
256 fresh sets, seed {seed}. It answers no other question, and is meant to be measured, not used."""


@dataclass
class Arguments:
    output_dir: str = field(metadata={"help": "folder for the two models"})
    steps: int = field(default=2000, metadata={"help": "training steps for each"})
    seed: int = field(default=0, metadata={"help": "seed of weights and data"})
    cards: str | None = field(default=None, metadata={"help": "also write the cards to this folder"})
    push_to: str | None = field(default=None, metadata={"help": "Hub name under which to push them"})
    overwrite: bool = field(default=False, metadata={"help": "whether the model folders may be replaced"})


def result(error: float) -> EvalResult:
    return EvalResult(
        task_type="other",
        task_name="farthest neighbour",
        dataset_type="farthest_neighbor",
        dataset_name=f"farthest neighbour, d {DIM}, N {COUNT}, 4096 fresh sets",
        dataset_split="test",
        metric_type="squared_error",
        metric_name="squared error per point (predicting zero: 1)",
        metric_value=round(error, 4),
    )


def main() -> None:
    parser = HfArgumentParser(Arguments)
    (arguments,) = parser.parse_args_into_dataclasses()
    if Path(arguments.output_dir).exists() and not arguments.overwrite:
        parser.error(f"{arguments.output_dir} exists already: choose another --output_dir, or add --overwrite.")
    torch.set_num_threads(1)
    for geometry in equal_budget_grid(DIM**2, DIM, ranks=[DIM, DIM // 2]):
        name = f"rank-encoder-farthest-d{DIM}-r{geometry['qk_rank']}"
        config = RankEncoderConfig(input_dim=DIM, intermediate_size=256, qk_norm=True, **geometry)
        model, error = train_farthest(config, count=COUNT, steps=arguments.steps, seed=arguments.seed)
        repo_id = f"{arguments.push_to}/{name}" if arguments.push_to else name
        how = HOW.format(count=COUNT, dim=DIM, steps=arguments.steps, seed=arguments.seed)
        card = card_of(model, repo_id, how=how, results=[result(error)], license="apache-2.0", remote_code=True)
        folder = Path(arguments.output_dir) / name
        export_model(model, folder, card=card, remote_code=True, overwrite=arguments.overwrite)
        print(f"{folder}: error {error:.4f}")
        if arguments.cards:
            Path(arguments.cards).mkdir(parents=True, exist_ok=True)
            card.save(Path(arguments.cards) / f"{name}.md")
        if arguments.push_to:
            print(push_to_hub(model, repo_id, card=card, remote_code=True))


if __name__ == "__main__":
    main()
