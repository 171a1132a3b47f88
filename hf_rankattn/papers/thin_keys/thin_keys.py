"""How many query-key dimensions does it take to select one of N tokens: about log2 N, or all d of the space they are in?

"Thin Keys, Full Values" and "On the Benefits of Rank in Attention Layers" answer differently, on different selections. Here one
model is trained on all of them at each width, and once at full rank to be limited afterwards. The least width that reaches the goal is
compared with both answers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...report.plots import STYLES, new_figure, published_table
from ..drawing import DASHED, Style, band, level, log_ticks, plural
from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim, every, judge, not_testable, unpublished
from ..sweep.tolerances import CLOSE, SAME_WIDTH, SOLVES, TRAINED_ACCURACY
from ._selecting import TASKS, VALUES, limit_selection, train_selection


SHOWS = "least qk_rank that selects one of N tokens by its key, its position, or as the nearest point, against log2 N and d"

TRAINING = {"how": "trained", "hidden": 64, "learning_rate": 0.01}
# d of learned keys is the number of keys, that of positions the number of tokens
KEYS = {"task": "keys", "num_keys": 256, "d": 256}
RANDOM = {"task": "random keys", "num_keys": 4095, "d": 64}
POSITIONS = {"task": "positions", "num_keys": 255}
POINTS = {"task": "points", "num_keys": 255}
FEW = [1, 2, 3, 4, 6, 8]
LAPTOP = [
    POINTS | {"n": [4, 16], "heads": 1, "d": 8, "qk_rank": [4, 7, 8]},
    POINTS | {"n": 16, "heads": 1, "d": 16, "qk_rank": [4, 15, 16]},
    POSITIONS | {"n": [4, 16, 64], "heads": 1, "qk_rank": FEW[:4]},
    # no width for which the law puts the accuracy next to the goal: the one of the law, and the one below
    RANDOM | {"n": 4, "heads": 1, "qk_rank": [9, 12]},
    RANDOM | {"n": 16, "heads": 1, "qk_rank": [12, 15]},
    RANDOM | {"n": 64, "heads": 1, "qk_rank": [15, 18]},
    POINTS | {"n": 64, "heads": 1, "d": 8, "qk_rank": [7, 8]},
    POINTS | {"n": 16, "heads": 4, "d": 8, "qk_rank": [7, 8]},
    POSITIONS | {"n": 16, "heads": 4, "qk_rank": FEW[:2]},
    KEYS | {"n": [4, 16, 64], "heads": 1, "qk_rank": FEW[1:]},
    KEYS | {"n": 16, "heads": 4, "qk_rank": [2, 4]},
]
SMOKE = [
    KEYS | {"num_keys": 16, "d": 16, "n": 4, "heads": [1, 4], "qk_rank": [1, 4]},
    POSITIONS | {"n": 4, "heads": [1, 4], "qk_rank": [1, 4]},
    RANDOM | {"n": 4, "heads": 1, "qk_rank": [6, 12]},
    POINTS | {"n": 4, "heads": [1, 4], "d": 4, "qk_rank": [2, 4]},
]
PAPER = [
    KEYS | {"num_keys": 4095, "d": 4095, "n": [4, 16, 64, 256], "heads": [1, 4], "qk_rank": [*FEW, 10, 12, 16]},
    POSITIONS | {"n": [4, 16, 64, 256], "heads": [1, 4], "qk_rank": [*FEW, 10, 12, 16]},
    RANDOM | {"n": [4, 16, 64, 256], "heads": 1, "qk_rank": [6, 9, 12, 15, 18, 21, 24]},
    POINTS | {"n": [4, 16, 64, 256], "heads": [1, 4], "d": 16, "qk_rank": [4, 8, 12, 14, 15, 16]},
    POINTS | {"n": [16, 64], "heads": [1, 4], "d": 32, "qk_rank": [8, 16, 24, 28, 31, 32]},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"series": SMOKE, "seeds": 1, "steps": 20, "queries": 64, "circle": [4, 16]},
    "laptop": {"series": LAPTOP, "seeds": 3, "steps": 300, "queries": 512, "circle": [4, 16, 64, 256, 1024]},
    "paper": {"series": PAPER, "seeds": 5, "steps": 20_000, "queries": 4096, "circle": [4, 16, 64, 256, 1024]},
}
# the ranks to which a model of full rank is limited
LIMITS = [1, 2, 3, 4, 6, 7, 8, 12, 15, 16, 20, 24, 32, 48]
SERIES = ["task", "d", "n", "heads"]
YAO, AMSEL = "Yao et al.", "Amsel et al."


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    training = TRAINING | {"steps": setting["steps"]}
    found = [Cell({"how": "constructed", "task": "circle", "n": n, "seed": 0}) for n in setting["circle"]]
    limited: dict[str, Cell] = {}  # one for each model of full rank
    for series in setting["series"]:
        for axis in grid(**training, **series, seed=list(range(seeds or setting["seeds"]))):
            sizes = {"batch_size": max(1, setting["queries"] // axis["n"]), "d": axis.get("d", axis["n"])}
            cost = axis["steps"] * setting["queries"]
            found.append(Cell(axis | sizes, cost))
            if axis["heads"] == 1:
                full = {"how": "limited", "qk_rank": min(sizes["d"], axis["hidden"])}
                cell = Cell(axis | sizes | full, 2 * cost)
                limited[cell.id] = cell
    return [*found, *limited.values()]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """One row of a trained model or of codes on a circle, or one for each rank to which a trained model is limited."""
    if parameters["how"] == "constructed":
        return [{"status": "finished", **circle(parameters["n"])}]
    if parameters["how"] == "limited":
        return limit_selection(parameters, work, LIMITS)
    return [train_selection(parameters, work)[1]]


def circle(n: int, weight: float = 0.99) -> dict[str, float]:
    """N equally spaced codes of two dimensions: the logit with which a token puts a weight on itself, and that weight.

    >>> found = circle(64)
    >>> bool(found["weight"] >= 0.99), round(found["logit"] / 64**2, 1)
    (True, 0.4)
    """
    logit = math.log((n - 1) * weight / (1 - weight)) / (1 - math.cos(2 * math.pi / n))
    angles = 2 * math.pi * np.arange(n) / n
    codes = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    logits = logit * codes @ codes.T
    maps = np.exp(logits - logits.max(1, keepdims=True))
    return {"logit": logit, "weight": float((maps.diagonal() / maps.sum(1)).min())}


def recall_law(n: int, width: int, d: int, draws: int = 4001) -> float:
    """Share of queries whose value a random projection of random keys finds, if each takes the key with the largest logit.

    With P the projection and k, l two of N random unit vectors of R^d, the square of |Pk| follows Beta(width/2, (d-width)/2),
    and l beats k if its coordinate along Pk is larger than |Pk|. A wrong token has the right value once in [`VALUES`] times.

    >>> [round(recall_law(16, width, 64), 3) for width in (8, 12, 16)]
    [0.895, 0.978, 0.996]
    """
    from scipy.special import betainc
    from scipy.stats import beta

    if width >= d:
        return 1.0
    squares = beta.ppf((np.arange(draws) + 0.5) / draws, width / 2, (d - width) / 2)
    beaten = (1 - betainc(0.5, (d - 1) / 2, squares)) / 2
    right = float(((1 - beaten) ** (n - 1)).mean())
    return right + (1 - right) / VALUES


def complete(table: pd.DataFrame) -> pd.DataFrame:
    """The accuracy of full rank beside each run on points and each limit, if full rank has trained, and whether the goal is reached."""
    compared = (table["task"] == "points") | (table["how"] == "limited")
    names = ["how", *SERIES, "seed"]
    full = table[compared & (table.qk_rank == table.d.clip(upper=TRAINING["hidden"]))].set_index(names).accuracy
    full = full.where(full >= TRAINED_ACCURACY)
    goal = full.reindex(pd.MultiIndex.from_frame(table[names])).to_numpy()
    reference = np.where(compared, goal, np.where(table["task"].isin(TASKS), 1.0, np.nan))
    return table.assign(reference=reference, reaches=table.accuracy >= SOLVES * reference)


def least_ranks(table: pd.DataFrame) -> pd.Series:
    """The least rank of each series and seed that reaches the goal; infinite if none does."""
    rows = table[table.task.isin(TASKS)]
    reached = rows.qk_rank.where(rows.reaches, math.inf)
    return reached.groupby([rows[name] for name in (*SERIES, "seed")]).min()


def shown(values: pd.Series) -> str:
    """`6`, `6 or 8` where seeds differ, and `none tested` for a seed that does not reach the goal at any rank of its series."""
    return " or ".join("none tested" if math.isinf(rank) else f"{rank:.0f}" for rank in sorted(values.unique()))


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """The least rank against N, and for one N the accuracy against the rank, of training and of limits."""
    figure, (axes,) = new_figure(1, 3, 17.0, 4.8)
    rows, limited = (table[table.how == how] for how in ("trained", "limited"))
    chosen = 16 if 16 in set(rows.n) else int(rows.n.max())
    draw_least_ranks(axes[0], rows)
    draw_accuracies(axes[1], rows[rows.n == chosen], f"N = {chosen}, trained at each rank")
    draw_accuracies(axes[2], limited[limited.n == chosen], f"N = {chosen}, trained at full rank, then limited")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle("How many query-key dimensions does it take to select one of N tokens?")
    figure.supxlabel(
        f"one layer, at most {int(rows.steps.iloc[0])} steps; lines: mean of {plural(rows.seed.nunique(), 'seed')}, bands: least "
        f"to largest. The goal is {SOLVES:.0%} of right values, for points {SOLVES:.0%} of those of full rank; what does not "
        "reach it in every seed has no mark at the left."
    )
    return {"thin-keys": figure}


def named_series(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, Style, dict[str, Any]]]:
    """All N of a task, of a number of heads and, for points, of a dimension: name, rows, style, and hollow marks for many heads."""
    styles = iter(STYLES)
    for task in TASKS:
        of_task = rows[rows.task == task]
        for d in sorted(of_task.d.unique()) if task == "points" else [None]:
            style = next(styles)
            for heads, own in of_task[(of_task.d == d) | (d is None)].groupby("heads"):
                name = f"points of R^{int(d)}" if d else "learned keys" if task == "keys" else task
                look = {} if heads == 1 else {"markerfacecolor": "white", "markersize": 8}
                yield f"{name}, {plural(int(heads), 'head')}", own, style, look


def draw_least_ranks(axis: Axes, rows: pd.DataFrame) -> None:
    sizes = sorted(rows.n.unique())
    grown = np.array([min(sizes), max(sizes)])
    axis.plot(grown, np.log2(grown), **DASHED, label="log2 N")
    for name, series, style, look in named_series(rows):
        least = least_ranks(series).groupby("n")
        band(axis, least.filter(lambda ranks: np.isfinite(ranks).all()).groupby("n"), style, name, **look)
        task, d = series.task.iloc[0], int(series.d.iloc[0])
        if task == "points" and not look:
            level(axis, d, f"d = {d}")
        if task == "random keys":
            law = [law_rank(n, series) for n in sizes]
            axis.plot(sizes, law, "x", color=style[2], markersize=9, label="law of random projections")
    log_ticks(axis, sizes)
    axis.set(ylim=(0, None), xlabel="tokens to select from, N", ylabel=f"least qk_rank that reaches {SOLVES:.0%}")


def draw_accuracies(axis: Axes, rows: pd.DataFrame, title: str) -> None:
    for name, series, style, look in named_series(rows):
        band(axis, series.groupby("qk_rank").accuracy, style, name, **look)
    level(axis, SOLVES, f"{SOLVES:.0%}")
    log_ticks(axis, [2**power for power in range(int(rows.qk_rank.max()).bit_length())])
    axis.set(ylim=(0, 1.03), xlabel="qk_rank", ylabel="right values, held out")
    axis.set_title(title)


def law_rank(n: int, series: pd.DataFrame) -> float:
    """The least width of the ladder that reaches the goal by the law."""
    ranks = sorted(series.qk_rank.unique())
    return next((rank for rank in ranks if recall_law(n, int(rank), int(series.d.iloc[0])) >= SOLVES), math.nan)


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    published = published_table("thin_keys").set_index("statement")
    rows = table[table.how == "trained"]
    least = least_ranks(rows)
    yield from position_claims(rows, least, published)
    yield from recall_claims(rows, least, published)
    yield from point_claims(rows, least)
    yield from limit_claims(least, table[table.how == "limited"])
    yield circle_claim(table[table.task == "circle"])
    for statement, row in published.iterrows():
        if not row.quantity.startswith("dimensions"):
            number = f"{row.quantity} {row.value:g}" + (f" against {row.reference:g}" if row.reference > 0 else "")
            judgement = not_testable("It needs language models, their training text and a cluster.")
            yield judgement.claim(str(statement), f"{YAO}, language models", f"{number} ({row.provenance})", "-")


def position_claims(rows: pd.DataFrame, least: pd.Series, published: pd.DataFrame) -> Iterator[Claim]:
    number = f"{published.value['selection by position']:g} dimension a head"
    for heads, series in rows[rows.task == "positions"].groupby("heads"):
        one = series[series.qk_rank == 1].set_index("seed").groupby("n").accuracy
        least_of_n = least["positions"].xs(heads, level="heads").groupby("n")
        yield every(judge(f"accuracy at rank 1 (N {n})", values, SOLVES) for n, values in one).claim(
            f"{plural(int(heads), 'head')} of one dimension can select by position",
            f"{YAO}, selection by position",
            number,
            "; ".join(
                f"N {n}: accuracy {one.get_group(n).mean():.3f} at rank 1, least rank {shown(values)}"
                for n, values in least_of_n
            ),
            no="The logits of one dimension are monotone in the key, so a head prefers the first or the last of the keys and "
            "none between them.",
        )


def recall_claims(rows: pd.DataFrame, least: pd.Series, published: pd.DataFrame) -> Iterator[Claim]:
    times = published.value["retrieval by content"]
    number = f"about {'' if times == 1 else f'{times:g} '}log2 N"
    for task, keys in (("keys", "learned"), ("random keys", "random")):
        for heads, own in least[task].groupby("heads"):
            of_n = own.groupby("n")
            bounds = (1 / SAME_WIDTH, SAME_WIDTH)
            ratios = {n: values / math.log2(n) for n, values in of_n}
            first = rows[rows.task == task].iloc[0]
            yield every(
                judge(f"least rank over log2 N (N {n})", values, *bounds, ratio=True) for n, values in ratios.items()
            ).claim(
                f"Recall by {keys} keys needs about log2 N dimensions ({plural(int(heads), 'head')})",
                f"{YAO}, retrieval by content",
                number,
                "; ".join(f"N {n}: {shown(values)} (log2 N {math.log2(n):g})" for n, values in of_n)
                + f"; the keys are {int(first.num_keys)} vectors of {int(first.d)} dimensions",
                no="A projection of random keys must keep the right one ahead of N - 1 others in 99 of 100 rows, which needs "
                "a multiple of log2 N and a constant."
                if task == "random keys"
                else "Training places learned keys so that fewer dimensions than log2 N tell them apart.",
            )
    series = rows[rows.task == "random keys"]
    own = least["random keys"].groupby("n")
    law = {n: law_rank(n, series) for n, _ in own}
    ratios = {n: values / law[n] for n, values in own}
    yield every(
        judge(f"least rank over that of the law (N {n})", values, 1 / CLOSE, CLOSE, ratio=True)
        for n, values in ratios.items()
    ).unpublished(
        "Random keys need the width at which a random projection keeps them apart, which is of order log N",
        "ours, the law of random projections",
        "; ".join(f"N {n}: {shown(values)} (law {law[n]:.0f})" for n, values in own),
        no="Training finds a better or a worse form than a projection.",
    )


def point_claims(rows: pd.DataFrame, least: pd.Series) -> Iterator[Claim]:
    points = rows[rows.task == "points"]
    for (d, heads), series in points.groupby(["d", "heads"]):
        full = series[series.qk_rank == d].groupby("n").accuracy
        own = least["points"].xs((d, heads), level=("d", "heads")).groupby("n")
        text = "; ".join(f"N {n}: least rank {shown(values)}" for n, values in own)
        text += f"; accuracy of full rank {full.mean().min():.3f} to {full.mean().max():.3f}"
        judgement = not_testable(f"Full rank has not trained: its accuracy is {full.min().min():.2f} in one run.")
        if full.min().min() >= TRAINED_ACCURACY:
            judgement = every(judge(f"least rank over d (N {n})", values / d, 1) for n, values in own)
        yield judgement.claim(
            f"{plural(int(heads), 'head')} below rank d = {int(d)} cannot select the nearest of N points",
            f"{AMSEL}, Theorem 2",
            "rank below d: very many heads; rank d: one head",
            text,
            no=f"A rank below d reaches {SOLVES:.0%} of the accuracy of full rank.",
        )
        sized = [n for n in own.groups if math.log2(n) < d]
        if not sized or full.min().min() < TRAINED_ACCURACY:
            continue
        shares = series.assign(share=series.accuracy / series.reference)
        found = {}
        for n in sized:
            of_n = shares[shares.n == n]
            rank = int(of_n.qk_rank[of_n.qk_rank >= math.log2(n)].min())
            found[n, rank] = of_n[of_n.qk_rank == rank].share
        yield every(
            judge(f"accuracy over that of full rank (N {n}, rank {rank})", share, SOLVES, ratio=True)
            for (n, rank), share in found.items()
        ).claim(
            f"About log2 N dimensions select the nearest of N points of R^{int(d)} ({plural(int(heads), 'head')})",
            f"{YAO}, O(log N) for every selection",
            "O(log N) dimensions",
            "; ".join(f"N {n}: rank {rank} has {share.mean():.3f} of it" for (n, rank), share in found.items()),
            no="All d coordinates decide which point is nearest, and a head sees as many of them as its rank.",
        )


def limit_claims(trained: pd.Series, rows: pd.DataFrame) -> Iterator[Claim]:
    """What a limit of a layer that was trained at full rank needs, beside training at that rank."""
    least = least_ranks(rows)
    for task, of_task in least.groupby("task"):
        pairs = pd.concat([of_task, trained.reindex(of_task.index)], axis=1, keys=["limited", "trained"])
        ds = pairs.index.get_level_values("d")
        for d, of_d in pairs.groupby(ds if task == "points" else np.zeros(len(ds), dtype=int)):
            text = "; ".join(
                f"N {n}: {shown(own.limited)} (trained {shown(own.trained)})" for n, own in of_d.groupby("n")
            )
            own_rows = rows[(rows.task == task) & ((rows.d == d) | (task != "points"))]
            if own_rows.reference.isna().any():
                judgement = not_testable("Full rank has not trained in one run.")
            elif task == "points":
                judgement = every(
                    judge(f"least rank over d (N {n})", own.limited / d, 1) for n, own in of_d.groupby("n")
                )
            else:
                # an N for which a seed reaches the goal at no tested rank has no ratio
                ratios = (
                    (of_d.limited / of_d.trained).groupby("n").filter(lambda own: (np.isfinite(own) & (own > 0)).all())
                )
                judgement = not_testable("Training reaches the goal at no tested rank.")
                if len(ratios):
                    judgement = every(
                        judge(f"limited over trained (N {n})", own, most=SAME_WIDTH, ratio=True)
                        for n, own in ratios.groupby("n")
                    )
            statement = (
                f"A limit below rank d = {int(d)} loses the nearest of N points"
                if task == "points"
                else f"A limit of a layer of full rank needs no more dimensions than training at that rank ({task})"
            )
            yield judgement.unpublished(
                statement,
                "ours, trained and limited",
                text,
                no="Training places the addresses for the rank that it has; at full rank it has no reason to put them in few dimensions.",
            )


def circle_claim(rows: pd.DataFrame) -> Claim:
    first, last = rows.iloc[0], rows.iloc[-1]
    return unpublished(
        "Two dimensions can select among any number of learned keys: log2 N is no lower bound",
        f"weight {rows.weight.min():.4f} or more for N {int(first.n)} to {int(last.n)}, with logits up to {first.logit:.3g} and "
        f"{last.logit:.3g}",
        (rows.weight >= SOLVES - 1e-9).all(),
        f"Required: a weight of {SOLVES:g} on the right token. Keys lie on a circle, and the logits grow as N^2 ln N, which "
        "training reaches slowly. The paper is known by its abstract only.",
        "Maselko, 10.5281/zenodo.19422845",
    )
