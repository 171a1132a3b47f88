"""What the trained models say of the claim that short paths carry the power."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .runner import Claim


if TYPE_CHECKING:
    import pandas as pd

FIGURE = "Dong et al., plot of path effectiveness"
TITLES = {"sorting": "Sorting", "convex_hull": "Convex hull", "memorization": "Memorization"}
# the best that a predictor reaches which does not see the other tokens, and what it sees instead
BASELINES = {
    "sorting": ("baseline_position_only", "position only"),
    "convex_hull": ("baseline_majority", "majority"),
    "memorization": ("baseline_own_token", "token only"),
}


def path_claims(table: "pd.DataFrame") -> Sequence[Claim]:
    from ..report.plots import published_table

    published = published_table("path_effectiveness").set_index("task")
    found: list[Claim] = []
    for task, rows in table.groupby("task", sort=False):
        found += [*task_claims(str(task), rows, published.loc[task]), exact_claim(str(task), rows)]
    return found


def listed(values: "pd.Series") -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def task_claims(task: str, rows: "pd.DataFrame", published: "pd.Series") -> Iterator[Claim]:
    title, (column, seen) = TITLES[task], BASELINES[task]
    whole = rows.groupby("seed").whole.first()
    rate = rows.learning_rate.iloc[0]
    as_published = bool(rows.as_published.iloc[0])
    mlp = " with MLPs" if rows.use_mlp.iloc[0] else ""
    yield Claim(
        f"{title}: the whole model{mlp} solves the task (accuracy, learning rate {rate:g})",
        FIGURE,
        f"{published.whole:g}",
        f"{whole.mean():.3f} ({whole.min():.3f} to {whole.max():.3f})",
        bool(whole.mean() > published.whole - 0.05),
        published_why(task, as_published),
    )
    base = rows[column].mean()
    yield Claim(
        f"{title}: what a predictor reaches that sees nothing of the other tokens ({seen})",
        FIGURE + ", reference line",
        f"{published.reference:g} ({published.reference_name})",
        f"{base:.3f}",
        bool(abs(base - published.reference) < 0.02),
        "The published line is hard-coded, and below what such a predictor reaches.",
    )
    isolated = rows[rows.way == "isolated"]
    curves = isolated.groupby(["drawn", "length"]).accuracy.mean().unstack("drawn")
    few, many = int(curves.columns.min()), int(curves.columns.max())
    longest = curves.index.max()
    yield Claim(
        f"{title}: the longer isolated paths are, the worse they are, down to chance",
        FIGURE,
        "accuracy falls with length",
        f"{listed(curves[few])} ({few} paths); {listed(curves[many])} ({many} paths), lengths 0 to {longest}",
        bool(curves[many].loc[1] > curves[many].loc[3:].max() + 0.1) if longest >= 3 else None,
        "Judged from length 1 on: paths of length 0 are copies of the embeddings.",
    )
    yield Claim(
        f"{title}: {many} isolated paths are better than {few} (length 1)",
        FIGURE,
        "more paths are better",
        f"{curves[many].loc[1]:.3f} against {curves[few].loc[1]:.3f}",
        bool(curves[many].loc[1] > curves[few].loc[1]),
    )


def published_why(task: str, as_published: bool) -> str:
    if as_published and task == "memorization":
        return "Fault: a misplaced argument of the published code switches MLPs on in what is called pure attention."
    if as_published:
        return "The learning rate of the published README."
    if task == "memorization":
        return "MLPs off, as the paper says; its code has them on. Other text and fewer rows than there."
    return "The published rate of 1e-5 does not get there in the published number of epochs."


def exact_claim(task: str, rows: "pd.DataFrame") -> Claim:
    """The right version of the experiment: parts of the output instead of networks of their own."""
    cut = rows[rows.way == "up_to"].groupby("length").accuracy.mean()
    share = rows[rows.way == "only"].groupby("length").projection.mean()
    half = int(cut.index.max()) // 2
    enough = int((cut >= cut.iloc[-1] - 0.02).idxmax())
    return Claim(
        f"{TITLES[task]}, exact parts of the output: paths through at most half of the layers are as good as all",
        "Dong et al., Theorem 2.1 (on the published tasks; ours)",
        "",
        f"accuracy {listed(cut)} when lengths up to 0, 1, ... are kept: all there from length {enough} on; lengths up to "
        f"{half} make up {share.loc[:half].sum():.0%} of the output",
        bool(enough <= half),
        "The published experiment runs each path as a network of its own, which is no term of the decomposition.",
    )
