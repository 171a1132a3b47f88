"""Values read from the published figures: one CSV file per figure, in the folder of its paper."""

from ..report.plots import published_table as published_table
