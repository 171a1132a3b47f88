"""What the scripts that publish models share: their arguments, a table of the runs, and a card that is read from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import EvalResult
from transformers import PreTrainedModel

from ..hub.sharing import card_of, export_model, push_to_hub
from .arguments import check_seeds, option


if TYPE_CHECKING:
    import pandas as pd


@dataclass(kw_only=True)
class PublishingArguments:
    """What every script that publishes models takes. A script adds its own fields."""

    output_dir: str = field(metadata={"help": "folder for the models and their table"})
    seed: int = option(0, "seed of weights and data")
    cards: str | None = option(None, "also write the cards to this folder")
    push_to: str | None = option(None, "Hub name under which to push them")
    overwrite: bool = option(False, "whether the model folders may be replaced")

    def __post_init__(self) -> None:
        check_seeds(self, "seed")
        if Path(self.output_dir).exists() and not self.overwrite:
            raise ValueError(f"{self.output_dir} exists already: choose another --output_dir, or add --overwrite.")
        for folder in filter(None, (self.output_dir, self.cards)):
            if Path(folder).exists() and not Path(folder).is_dir():
                raise ValueError(f"{folder} is no folder: choose another one.")


def save_table(table: "pd.DataFrame", arguments: PublishingArguments) -> None:
    Path(arguments.output_dir).mkdir(parents=True, exist_ok=True)
    table.to_parquet(Path(arguments.output_dir) / "table.parquet")


def publish_model(
    model: PreTrainedModel, name: str, how: str, results: Sequence[EvalResult], arguments: PublishingArguments
) -> str:
    """Export a model with its source and card, write the card elsewhere and push all where that was asked for.

    Returns a line that says where it is and what was measured.
    """
    repo_id = f"{arguments.push_to}/{name}" if arguments.push_to else name
    card = card_of(model, repo_id, how=how, results=results, license="apache-2.0", remote_code=True)
    folder = Path(arguments.output_dir) / name
    export_model(model, folder, card=card, remote_code=True, overwrite=arguments.overwrite)
    places = [str(folder)]
    if arguments.cards:
        Path(arguments.cards).mkdir(parents=True, exist_ok=True)
        card.save(Path(arguments.cards) / f"{name}.md")
    if arguments.push_to:
        places.append(push_to_hub(model, repo_id, card=card, remote_code=True))
    measured = ", ".join(f"{result.metric_name} {result.metric_value}" for result in results)
    return f"{' and '.join(places)}: {measured}"
