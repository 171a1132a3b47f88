"""Values read from the published figures: one CSV file per figure, in the folder of its paper."""

from pathlib import Path

import pandas as pd


HERE = Path(__file__).parent


def published_table(name: str) -> pd.DataFrame:
    """Values read from a published figure; the column `partly_hidden` marks points that other curves partly cover.

    `rankattn measure` shows the published residuals too, so their file is in the package `report`.
    """
    return pd.read_csv(next(path for root in (HERE, HERE.parent / "report") for path in root.glob(f"**/{name}.csv")))
