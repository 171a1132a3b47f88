"""How many paths through heads and skips an architecture has, how long they are, and that they add up to its output."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .grid import Cell, grid
from .runner import Claim


NAME = "path-counts"
SHOWS = "the lengths of all paths through named architectures, and small networks taken apart path by path"
REVISION = 1

SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"networks": [{"layers": 2, "heads": 2, "hidden": 8, "tokens": 6}], "seeds": 1},
    "laptop": {
        "networks": [
            {"layers": 4, "heads": 3, "hidden": 24, "tokens": 10},
            {"layers": 6, "heads": 2, "hidden": 48, "tokens": 16},
        ],
        "seeds": 3,
    },
    "paper": {
        "networks": [
            {"layers": 4, "heads": 3, "hidden": 24, "tokens": 10},
            {"layers": 6, "heads": 3, "hidden": 48, "tokens": 32},
        ],
        "seeds": 5,
    },
}


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    from ..theory import ARCHITECTURES

    setting = SETTINGS[scale]
    found = [
        Cell({"kind": "counts", "architecture": name, "layers": layers, "heads": heads})
        for name, (layers, heads) in ARCHITECTURES.items()
    ]
    for axis in grid(network=setting["networks"], skip=[False, True], seed=list(range(seeds or setting["seeds"]))):
        found.append(Cell({"kind": "terms", **axis.pop("network"), **axis}, cost=10.0))
    return found


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    if parameters["kind"] == "counts":
        return counted(parameters["architecture"])
    names = ("layers", "heads", "hidden", "tokens", "skip", "seed")
    return taken_apart(**{name: parameters[name] for name in names})


def counted(architecture: str) -> list[dict[str, Any]]:
    from ..theory import path_counts

    paths = path_counts(architecture)
    summary = {
        "log10_total": paths.log10_total,
        "mean": paths.mean,
        "standard_deviation": paths.standard_deviation,
    }
    return [{"length": k, "share": float(share), **summary} for k, share in enumerate(paths.distribution())]


def taken_apart(layers: int, heads: int, hidden: int, tokens: int, skip: bool, seed: int) -> list[dict[str, Any]]:
    """The residual of the paths of each length, and how far the sum of all paths is from the output."""
    import torch
    from transformers import BertConfig, BertModel

    from ..probe import ablate, path_terms

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=100, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=8,
        initializer_range=0.15,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).double().eval()
    for parameter in model.parameters():  # fresh biases are zero, and would prove nothing
        parameter.data += 0.05 * torch.randn_like(parameter)
    batch = {"input_ids": torch.randint(1, 100, (1, tokens))}
    with ablate(model, mlp=True, norm=True, attention_skip=not skip):
        table = path_terms(model, batch)
    whole = table[table.metric == "reconstruction_error"].value.item()
    rows = table[(table.source == "embeddings") & (table.metric == "relative_residual")]
    stray = table[(table.source == "embeddings") & (table.metric == "row_sum_error")].value.max()
    summary = {"reconstruction_error": whole, "row_sum_error": float(stray), "paths": len(rows)}
    return [
        {"length": int(k), "of_length": len(part), "relative_residual": float(part.value.mean()), **summary}
        for k, part in rows.groupby("length")
    ]


def figures(table, scale: str):
    from ..report.collapse import path_counts_figure

    return {"path-counts": path_counts_figure(table)}


PUBLISHED = {
    "bert-base": "mean 11.08, p(11) = p(12) = .383",
    "t5-11b": "mean 23.81, p(24) = .830",
    "gpt3-175b": "10^190.7 paths, mean 95.01",
    "deit-tiny": "mean 9.00, p(12) = .032",
}


def claims(table, scale: str) -> Sequence[Claim]:
    counts = table[table.kind == "counts"]
    found = []
    for name, published in PUBLISHED.items():
        rows = counts[counts.architecture == name].set_index("length")
        first, depth = rows.iloc[0], int(rows.index.max())
        deep = {"bert-base": (11, 12), "t5-11b": (24,), "deit-tiny": (12,)}.get(name, (depth,))
        shares = ", ".join(f"p({k}) = {rows.share[k]:.4f}" for k in deep)
        short = rows.share[rows.index <= depth / 2].sum()
        found.append(
            Claim(
                f"{name}: by number, nearly all paths are long; short ones matter only by what they carry",
                "Dong et al., plot of path lengths",
                published,
                f"10^{first.log10_total:.2f} paths, mean {first['mean']:.4f}, {shares}; {short:.1e} through half of the "
                "layers or fewer",
                bool(abs(rows.share.sum() - 1) < 1e-12 and short < 0.1),
                "Counts are binomial in closed form; published values are read off the same formula.",
            )
        )
    terms = table[table.kind == "terms"]
    for skip, rows in terms.groupby("skip"):
        expected = (rows.heads + (1 if skip else 0)) ** rows.layers
        right = bool((rows.paths == expected).all())
        found.append(
            Claim(
                f"The output of attention layers {'with' if skip else 'without'} skips is the sum of its paths, each with "
                "a map whose rows sum to one",
                "Dong et al., Theorem 2.1",
                "exact",
                f"{', '.join(str(int(count)) for count in rows.paths.unique())} paths; relative error at most "
                f"{rows.reconstruction_error.max():.0e}, row sums off by {rows.row_sum_error.max():.0e} (float64)",
                right and bool(rows.reconstruction_error.max() < 1e-12 and rows.row_sum_error.max() < 1e-12),
            )
        )
    with_skip = terms[terms.skip.astype(bool)]
    curve = with_skip[with_skip.layers == with_skip.layers.iloc[0]].groupby("length").relative_residual.mean()
    found.append(
        Claim(
            "With skips, a path has the less rank the more heads it goes through",
            "Dong et al., Section 3, paths",
            "",
            ", ".join(f"{value:.2g}" for value in curve) + f" for lengths 0 to {int(curve.index.max())}",
            bool(curve.is_monotonic_decreasing),
        )
    )
    return found
