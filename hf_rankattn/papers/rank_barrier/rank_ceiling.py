"""Rank of attention maps of random heads against their width: where the ceiling of 0.63 n shows, and where it does not."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell, grid
from ..sweep.judging import Claim
from ..sweep.tolerances import CEILING, POLYNOMIAL_RANK


NAME = "rank-ceiling"
SHOWS = (
    "rank of random attention maps against head width: hard and soft, free, causal, windowed, with and without QK-norm"
)
REVISION = 1
SOURCE = "A Rank Perspective"

WIDTHS = [1, 2, 4, 8, 16, 32, 64, 128, 192]
SHARPNESS = [0.1, 0.3, 0.5, 1, 3, 10, 30, 100, 300, 1000, 3000]
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {
        "hard": {"n": [64, 128], "widths": [2, 8, 32, 128], "columns": 5120},
        "masked": {"n": 256, "windows": [32], "widths": [8], "columns": 5120},
        "spectrum": {"n": 512, "draws": 2}, "paper": {"widths": [1, 8, 64], "draws": 1},
        "sharpness": {"n": [128, 256], "values": [0.5, 1, 3000], "draws": 1},
        "width": {"n": [64], "values": [1.0], "widths": [2, 8], "draws": 1}, "soft": {"n": 128, "draws": 1},
    },
    "laptop": {
        "hard": {"n": [64, 128, 256, 512, 1024, 2048, 4096], "widths": [*WIDTHS[1:], 384], "columns": 20480},
        "masked": {"n": 512, "windows": [32, 128], "widths": [2, 4, 8, 16, 32, 64, 128], "columns": 20480},
        "spectrum": {"n": 512, "draws": 10}, "paper": {"widths": WIDTHS, "draws": 10},
        "sharpness": {"n": [256], "values": SHARPNESS, "draws": 5},
        "width": {"n": [64, 128, 256, 512], "values": [1.0, 3.0], "widths": [1, 2, 4, 8, 16, 32, 64, 128], "draws": 2},
        "soft": {"n": 512, "draws": 2},
    },
    "paper": {
        "hard": {"n": [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384], "widths": [*WIDTHS[1:], 384], "columns": 65536},
        "masked": {"n": 4096, "windows": [32, 128, 1024], "widths": WIDTHS[1:], "columns": 65536},
        "spectrum": {"n": 2048, "draws": 10}, "paper": {"widths": [*range(1, 17), *range(24, 193, 8)], "draws": 50},
        "sharpness": {"n": [256, 1024], "values": SHARPNESS, "draws": 10},
        "width": {"n": [64, 128, 256, 512, 1024, 2048], "values": [1.0, 3.0], "widths": WIDTHS, "draws": 5},
        "soft": {"n": 1024, "draws": 5},
    },
}  # fmt: skip
# the set-up in which the published picture is found again; the published text names n and the largest width only
PAPER_N, PAPER_MODEL = 100, 512
SOFT = 0.05  # standard deviation of the logits in the soft regime


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    hard, masked, width = setting["hard"], setting["masked"], setting["width"]
    found: list[dict[str, Any]] = []
    for axis in grid(n=hard["n"], keys=["gaussian", "unit", "free"]):
        widths = [1] if axis["keys"] == "free" else hard["widths"]
        draws = max(2, hard["columns"] // axis["n"])
        found.append(
            {"kind": "hard", **axis, "mask": "none", "window": 0, "widths": widths, "draws": max(2, min(50, draws))}
        )
    masks = [("causal", 0), *(("window", window) for window in masked["windows"])]
    for (mask, window), keys in ((pair, keys) for pair in masks for keys in ("gaussian", "unit", "free")):
        widths, draws = ([1] if keys == "free" else masked["widths"]), max(2, masked["columns"] // masked["n"])
        found.append({"kind": "hard", "n": masked["n"], "keys": keys, "mask": mask, "window": window,
                      "widths": widths, "draws": draws})  # fmt: skip
    found.append({"kind": "spectrum", **setting["spectrum"]})
    found += [
        {"kind": "paper", "n": PAPER_N, "model_width": PAPER_MODEL, **axis, **setting["paper"]}
        for axis in grid(inputs=["gaussian", "orthonormal"], temperature=[1.0, 0.01])
    ]
    for axis in grid(n=setting["sharpness"]["n"], mask=["none", "causal"]):
        values, draws = setting["sharpness"]["values"], setting["sharpness"]["draws"]
        found.append({"kind": "sharpness", **axis, "values": values, "draws": draws})
    for axis in grid(n=width["n"], keys=["gaussian", "unit"], sharpness=width["values"], mask=["none", "causal"]):
        found.append({"kind": "width", **axis, "widths": width["widths"], "draws": width["draws"]})
    found.append({"kind": "soft", **setting["soft"], "sharpness": SOFT, "widths": [1, 2, 3, 4]})
    return [
        Cell({**parameters, "seed": seed}, cost=parameters["n"] ** (2 if parameters["kind"] == "hard" else 3))
        for parameters in found
        for seed in range(seeds or 1)
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    return RUNS[parameters["kind"]](parameters)


def run_hard(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Share of the columns that hard attention hits: its rank, divided by n."""
    import numpy as np

    from ._random_maps import KEYS, MASKS, generator, hard_columns

    n, keys, mask, window = (parameters[name] for name in ("n", "keys", "mask", "window"))
    rows = []
    for width in parameters["widths"]:
        rng = generator(parameters["seed"], n, width, KEYS.index(keys), MASKS.index(mask), window)
        hits = [hard_columns(n, width, keys, rng, mask, window) / n for _ in range(parameters["draws"])]
        rows.append({"width": width, "coverage": float(np.mean(hits)), "deviation": float(np.std(hits))})
    return rows


def run_spectrum(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hard maps of free choices, by singular values: they are the roots of how often columns are chosen."""
    import torch

    from ._random_maps import generator, map_metrics, mean_metrics

    n, rng, draws = parameters["n"], generator(parameters["seed"], parameters["n"], 1), []
    for _ in range(parameters["draws"]):
        chosen = torch.randint(n, (n,), generator=rng)
        maps = torch.nn.functional.one_hot(chosen, n).double()
        counts = torch.bincount(chosen, minlength=n).double().sqrt().sort(descending=True).values
        error = (torch.linalg.svdvals(maps) - counts).abs().max().item()
        rank = torch.linalg.matrix_rank(maps).item()
        draws.append({**map_metrics(maps), "matrix_rank": rank, "columns": int((counts > 0).sum()), "error": error})
    worst = {"error": max(draw["error"] for draw in draws)}
    unequal = {"unequal": sum(draw["matrix_rank"] != draw["columns"] for draw in draws)}
    return [mean_metrics(draws) | worst | unequal]


def run_paper(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens X, weights of variance 1, logits over sqrt(width), as far as the published set-up is known."""
    import torch

    from ._random_maps import generator, map_metrics, mean_metrics, soft_map, tolerance

    n, d, rows = parameters["n"], parameters["model_width"], []
    for width in parameters["widths"]:
        rng, draws = generator(parameters["seed"], n, width, 2), []
        for _ in range(parameters["draws"]):
            tokens = torch.randn(n, d, generator=rng, dtype=torch.float64)
            if parameters["inputs"] == "orthonormal":
                tokens = torch.linalg.qr(tokens.T).Q.T
            query, key = (tokens @ torch.randn(d, width, generator=rng, dtype=torch.float64) for _ in range(2))
            scores = query @ key.T
            logits = scores / (parameters["temperature"] * math.sqrt(width))
            singular = torch.linalg.svdvals(scores)
            draws.append(
                map_metrics(soft_map(logits))
                | {
                    "logit_rank": int((singular > tolerance("float32", n) * singular[0]).sum()),
                    "sharpness": logits.std().item(),
                }
            )
        rows.append({"width": width, **mean_metrics(draws)})
    return rows


def run_sharpness(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Independent normal logits of a given standard deviation: what the widest heads tend to."""
    import torch

    from ._random_maps import generator, map_metrics, mean_metrics, soft_map

    n, rows = parameters["n"], []
    for value in parameters["values"]:
        rng = generator(parameters["seed"], n, round(1000 * value), 3)
        maps = (
            soft_map(value * torch.randn(n, n, generator=rng, dtype=torch.float64), parameters["mask"])
            for _ in range(parameters["draws"])
        )
        rows.append({"sharpness": value, **mean_metrics([map_metrics(each) for each in maps])})
    return rows


def run_width(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Soft maps of random heads whose logits have a given standard deviation; the soft regime is one of these."""
    import torch

    from ._random_maps import generator, map_metrics, mean_metrics, random_heads, soft_map

    n, keys, mask, rows = parameters["n"], parameters.get("keys", "gaussian"), parameters.get("mask", "none"), []
    for width in parameters["widths"]:
        rng, draws = generator(parameters["seed"], n, width, 4, keys == "unit"), []
        for _ in range(parameters["draws"]):
            query, key = random_heads(n, width, keys, rng, torch.float64)
            draws.append(map_metrics(soft_map(parameters["sharpness"] * query @ key.T, mask)))
        rows.append({"width": width, **mean_metrics(draws)})
    return rows


RUNS = {
    "hard": run_hard, "spectrum": run_spectrum, "paper": run_paper, "sharpness": run_sharpness, "width": run_width,
    "soft": run_width,
}  # fmt: skip


def complete(table):
    """The laws beside what was simulated."""
    from ...theory import causal_columns, coverage, distinct_columns, windowed_columns

    def ceiling(row):
        if row["mask"] == "window":
            return windowed_columns(int(row["n"]), int(row["window"])) / row["n"]
        return (causal_columns if row["mask"] == "causal" else distinct_columns)(int(row["n"])) / row["n"]

    def law(row):
        if row["kind"] != "hard" or row["mask"] != "none" or row["keys"] == "free" or row["width"] < 2:
            return math.nan
        return coverage(int(row["n"]), int(row["width"]), row["keys"])

    hard = table["kind"] == "hard"
    return table.assign(
        ceiling=table[hard].apply(ceiling, axis=1).reindex(table.index),
        law=table[hard].apply(law, axis=1).reindex(table.index),
    )


def figures(table, scale: str):
    from ._figures import ceiling_figure, soft_figure

    return {"rank-ceiling": ceiling_figure(table), "rank-ceiling-soft": soft_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    return [
        *ceiling_claims(table),
        *masked_claims(table),
        *width_claims(table),
        *paper_claims(table),
        *soft_claims(table),
    ]


def ceiling_claims(table) -> Sequence[Claim]:
    hard = table[(table.kind == "hard") & (table["mask"] == "none")]
    free = hard[hard["keys"] == "free"].groupby("n").coverage.mean()
    spectrum = table[table.kind == "spectrum"]
    n = int(spectrum.n.iloc[0])
    shares = spectrum[["effective_rank", "effective_rank_of_squares", "participation_ratio"]].mean() / n
    return [
        Claim(
            "Hard attention of independent scores has a rank of 0.63 n, for every n",
            f"{SOURCE}, Theorem 1 (occupancy)",
            "0.63 n",
            ", ".join(f"n {n}: {value:.3f}" for n, value in free.items()),
            bool(((free - 0.632).abs() < 0.015).all()),
            "Required: within 0.015 of 0.632. n(1 - (1 - 1/n)^n) is 0.635 n at 64 and tends to 1 - 1/e.",
        ),
        Claim(
            "The rank of a hard map is the number of its columns that are chosen, its singular values the roots of how often",
            "ours",
            "",
            f"n {n}: {int(spectrum.unequal.sum())} maps unequal, singular values off by {spectrum.error.max():.0e} at most",
            bool(spectrum.unequal.sum() == 0 and spectrum.error.max() < 1e-9),
            "Required: equal, and within 1e-9.",
        ),
        Claim(
            "Other measures of the same maps have other ceilings: effective rank 0.615, of squares 0.564, participation "
            "ratio 0.500 of n",
            "ours",
            "",
            ", ".join(f"{value:.3f}" for value in shares) + f" (n {n})",
            bool((shares - [0.6153, 0.5636, 0.5]).abs().max() < 0.015),
            "Required: within 0.015.",
        ),
    ]


def masked_claims(table) -> Sequence[Claim]:
    masked = table[(table.kind == "hard") & (table["mask"] != "none") & (table["keys"] == "free")]
    found = []
    for (mask, window, n), rows in masked.groupby(["mask", "window", "n"]):
        value, law = rows.coverage.mean(), rows.ceiling.iloc[0]
        what = "Causal hard attention" if mask == "causal" else f"Hard attention to the last {int(window)} tokens"
        found.append(
            Claim(
                f"{what} has a rank of {law:.3f} n",
                "ours; the barrier as published knows no mask",
                "0.63 n",
                f"n {n}: {value:.3f}",
                bool(abs(value - law) < 0.01),
                "Required: within 0.01."
                + (" The published number does not carry over to decoders." if mask == "causal" else ""),
            )
        )
    return found


def width_claims(table) -> Sequence[Claim]:
    hard = table[(table.kind == "hard") & (table["mask"] == "none") & (table["keys"] != "free")]
    share = hard.assign(share=hard.coverage / hard.ceiling).groupby(["keys", "n", "width"]).share.mean()
    widest, sizes = int(hard["width"].max()), sorted(hard.n.unique())
    small = 8
    seen = share["gaussian"].unstack()
    grows = bool((seen.diff(axis=1).iloc[:, 1:] > -0.02).all().all())
    wide = hard[hard["width"] >= 8]
    error = (wide.coverage - wide.law).abs().max()
    return [
        Claim(
            "The rank of hard maps grows with the width of a head up to its ceiling and not beyond (Gaussian keys)",
            f"{SOURCE}, Section 2.1 (rank against head dimension)",
            "rises to 0.63 n",
            f"share of the ceiling at width {small} and {widest}: "
            + ", ".join(f"n {n}: {seen.loc[n, small]:.2f}, {seen.loc[n, widest]:.2f}" for n in (sizes[0], sizes[-1])),
            bool(grows and seen.max().max() < 1.03),
            "Required: no step down by more than 0.02, and at most 1.03 of the ceiling.",
        ),
        Claim(
            f"With keys of unit length (QK-norm) width {small} is enough for 96 % of the ceiling, whatever n",
            "ours",
            "",
            ", ".join(f"n {n}: {share['unit', n, small]:.2f}" for n in sizes),
            bool(all(share["unit", n, small] > 0.96 for n in sizes)),
            "What keeps narrow heads low is the spread of the lengths of their keys.",
        ),
        Claim(
            "Mean-field coverage predicts the simulated rank, widths from 8",
            "ours",
            "",
            f"at most {error:.3f} n off",
            bool(error < 0.02),
            "Required: at most 0.02 n.",
        ),
    ]


def paper_claims(table) -> Sequence[Claim]:
    rows = table[table.kind == "paper"].groupby(["inputs", "temperature", "width"]).mean(numeric_only=True)
    n, widths = PAPER_N, sorted(table[table.kind == "paper"]["width"].dropna().unique())
    last = widths[-1]
    loud, quiet = rows.loc["gaussian", 1.0], rows.loc["orthonormal", 1.0]
    cold = rows.loc["orthonormal", 0.01]
    curve = ", ".join(f"{int(width)}: {loud.rank_float32[width] / n:.2f}" for width in widths)
    return [
        Claim(
            "Softmax maps of random weights have a rank that rises with head width and stops near 0.63 n (n = 100, widths "
            "up to 192)",
            f"{SOURCE}, Section 2.1",
            "0.63 n",
            f"{curve} (float32 tolerance, logits of deviation {loud.sharpness[last]:.0f})",
            bool(abs(loud.rank_float32[last] / n - 0.63) < CEILING and loud.rank_float32[widths[0]] / n < 0.2),
            f"Required: within {CEILING}. X and W of variance 1, unscaled, model width 512: the logits are so large that softmax is nearly hard. The "
            "published text does not give dtype, tolerance, temperature or scale of weights.",
        ),
        Claim(
            "The barrier holds for almost orthonormal tokens, the assumption of the theorem, at temperature sqrt(width)",
            f"{SOURCE}, Theorem 1 (proved for temperature to zero)",
            "0.63 n",
            f"width {int(last)}: {quiet.rank_float32[last] / n:.2f} n (float32 tolerance), {quiet['rank_0.01'][last] / n:.2f} n "
            f"(0.01); with a hundredth of the temperature {cold.rank_float32[last] / n:.2f} n; hard {quiet.argmax_coverage[last] / n:.2f} n",
            bool(abs(quiet.rank_float32[last] / n - 0.63) < CEILING),
            f"Required: within {CEILING} of 0.63 n at float32 tolerance. With orthonormal tokens the logits have deviation 1, and softmax maps have full rank: the theorem is about hard "
            "maps, and Lemma 1 needs a temperature far below the usual one.",
        ),
        Claim(
            "Without softmax the rank of the scores is the width of the head, up to n",
            f"{SOURCE}, a reviewer's remark",
            "min(n, width)",
            ", ".join(f"{int(width)}: {loud.logit_rank[width]:.0f}" for width in widths),
            bool(all(abs(loud.logit_rank[width] - min(n, width)) < 0.5 for width in widths)),
            "Required: equal.",
        ),
        Claim(
            "At width 1 softmax lifts rank 1 to n, then comes a dip, then growth to 0.63 n",
            f"{SOURCE}, a reviewer's remark",
            "n, dip, 0.63 n",
            f"width 1: {loud.rank_float64[widths[0]] / n:.2f} n at float64 tolerance, {loud.rank_float32[widths[0]] / n:.2f} n at "
            f"float32, and growth from there",
            bool(loud.rank_float64[widths[0]] > 0.9 * n),
            "Required: above 0.9 n at width 1. True in exact arithmetic only: exp(qk) is totally positive, but its singular values fall below any tolerance.",
        ),
    ]


def soft_claims(table) -> Sequence[Claim]:
    from ._random_maps import TOLERANCES

    rows = table[(table.kind == "sharpness") & (table["mask"] == "none")]
    rows = rows.groupby(["n", "sharpness"]).mean(numeric_only=True)
    sizes = sorted({n for n, _ in rows.index})
    one = {n: rows.loc[(n, 1.0)] for n in sizes}
    sharpest = {n: max(s for size, s in rows.index if size == n) for n in sizes}
    named = {f"rank_{name}": name for name in TOLERANCES}
    sharp = {n: rows.loc[(n, sharpest[n])][list(named)].rename(named) / n for n in sizes}
    stable = rows.loc[(sizes[-1], 0.5)]
    edge = 2 * math.sqrt((math.exp(0.25) - 1) / sizes[-1])
    soft = table[table.kind == "soft"].groupby("width").rank_float64.mean()
    powers = {width: math.comb(int(width) + 7, 7) for width in soft.index}
    return [
        Claim(
            "At the usual sharpness (logits of deviation 1) softmax maps have full rank at float32 tolerance",
            "ours; against the barrier as published",
            "0.63 n",
            ", ".join(
                f"n {n}: {one[n].rank_float32 / n:.3f}, at tolerance 0.1 {one[n]['rank_0.1'] / n:.2f}" for n in sizes
            ),
            bool(all(one[n].rank_float32 >= 0.99 * n for n in sizes)),
            "Required: at least 0.99 n. A rank of soft maps is a statement about a tolerance.",
        ),
        Claim(
            "Sharper logits bring every tolerance to 0.63 n",
            f"{SOURCE}, Lemma 1 (softmax near hardmax)",
            "0.63 n",
            "; ".join(
                f"n {n}, deviation {sharpest[n]:g}: " + ", ".join(f"{name} {share:.3f}" for name, share in own.items())
                for n, own in sharp.items()
            ),
            bool(all((own - 0.63).abs().max() < CEILING for own in sharp.values())),
            f"Required: within {CEILING}, at the tolerances of both dtypes, 0.001, 0.01 and 0.1.",
        ),
        Claim(
            "Soft maps (deviation s of the logits, s^2 < ln n) have stable rank e^(s^2) and second singular value "
            "2 sqrt((e^(s^2) - 1)/n)",
            "ours",
            "",
            f"{stable.stable_rank:.3f} ({math.exp(0.25):.3f}), {stable.second_singular:.4f} ({edge:.4f}) at s 0.5, n {sizes[-1]}",
            bool(
                abs(stable.stable_rank / math.exp(0.25) - 1) < 0.02 and abs(stable.second_singular / edge - 1) < 0.07
            ),
            "Required: within 2 % and 7 %. In brackets the law.",
        ),
        Claim(
            f"Very soft maps (deviation {SOFT}) have the rank of a polynomial: C(width + 7, 7) at float64 tolerance",
            "ours",
            "",
            ", ".join(f"{int(width)}: {rank:.0f} of {powers[width]}" for width, rank in soft.items()),
            all(abs(soft[width] - count) <= max(1, POLYNOMIAL_RANK * count) for width, count in powers.items()),
            f"Required: within {POLYNOMIAL_RANK:.0%} or 1 at every width. It says why the rank of soft maps grows fast with width, but "
            "from width 3 on part of the monomials of the highest degrees are below the tolerance.",
        ),
    ]
