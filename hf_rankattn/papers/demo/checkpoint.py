"""The user's own model on the page of the demonstration."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from transformers import AutoConfig

from ...files.batches import longest
from ...files.checkpoints import readable
from ...limit.checkpoint import need_of_checkpoint
from ...probe.survey import measure_checkpoint
from ...report.html import Section
from ...report.need import Need, pictures
from ...report.plots import FIGURES
from ...report.results import survey_section
from ...report.summary import findings


EXAMPLES, LENGTH = 16, 128
FEW, SHORT = 4, 64  # texts and tokens for the rank that is needed, which takes about thirty passes


@dataclass
class Measured:
    """The table and the facts of [`survey`] for one checkpoint, and how much rank it needs or why that was not measured."""

    table: pd.DataFrame
    facts: dict[str, Any]
    need: Need | str

    def as_dict(self) -> dict[str, Any]:
        need = {"not_measured": self.need} if isinstance(self.need, str) else self.need.found()
        told = [entry.as_dict() for entry in findings(self.table, self.facts)]
        return {"facts": self.facts, "findings": told, "need": need}

    def sections(self) -> list[Section]:
        title = "How much rank your model needs"
        if isinstance(self.need, str):
            needed = Section(title, [f"Not measured: {self.need}"])
        else:
            needed = Section(title, [*self.need.sentences(), self.need.about()], (), pictures(self.need))
        return [self.measured(), needed]

    def measured(self) -> Section:
        figures = {}
        for name, draw in FIGURES.items():
            file = io.BytesIO()
            draw(self.table, self.facts).savefig(file, format="png", dpi=110)
            figures[name] = file.getvalue()
        return survey_section(self.table, self.facts, figures, "Your model")


def measure_own(
    name: str,
    *,
    random_inputs: bool = False,
    seed: int = 0,
    start_progress: Callable[[int], Callable[[], object]] = lambda total: lambda: None,
) -> Measured:
    """Residuals, rank of attention, query-key rank and the rank that a checkpoint needs, on the package's text or random inputs."""
    with readable(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    length = min(LENGTH, longest(config) or LENGTH)
    table, facts = measure_checkpoint(
        name, random_inputs=random_inputs, examples=EXAMPLES, length=length, seed=seed, start_progress=start_progress
    )
    try:
        sizes: dict[str, Any] = {"examples": FEW, "length": min(SHORT, length), "by_layer": False}
        need: Need | str = Need(*need_of_checkpoint(name, random_inputs=random_inputs, seed=seed, **sizes))
    except ValueError as error:  # not every model that can be measured can be limited
        need = str(error)
    return Measured(table, facts, need)
