"""The user's own model on the page of the demonstration."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from transformers import AutoConfig

from ...files.batches import longest
from ...files.checkpoints import readable
from ...probe.survey import measure_checkpoint
from ...report.html import Section
from ...report.plots import FIGURES
from ...report.results import survey_section
from ...report.summary import findings


EXAMPLES, LENGTH = 16, 128


@dataclass
class Measured:
    """The table and the facts of [`survey`] for one checkpoint."""

    table: pd.DataFrame
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"facts": self.facts, "findings": [entry.as_dict() for entry in findings(self.table, self.facts)]}

    def section(self) -> Section:
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
    """Residuals, rank of attention and query-key rank of a checkpoint, on the package's text or on random inputs."""
    with readable(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    length = min(LENGTH, longest(config) or LENGTH)
    table, facts = measure_checkpoint(
        name, random_inputs=random_inputs, examples=EXAMPLES, length=length, seed=seed, start_progress=start_progress
    )
    return Measured(table, facts)
