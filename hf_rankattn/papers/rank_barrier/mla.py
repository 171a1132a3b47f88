"""Multi-head latent attention with random weights: ranks of its logits by the rule, ranks of its maps by its latents."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import DeepseekV3Config, DeepseekV3Model

from ...files.running import evaluating
from ...probe import measure_weights
from ...probe.logits import recording
from ...report.plots import new_figure
from ...theory import mla_ranks, saturation_width
from ..drawing import level
from ..sweep.grid import Cell
from ..sweep.judging import Claim, every, judge, unpublished
from ..sweep.tolerances import CEILING
from . import SOURCE, published
from ._drawing import finish, style
from ._random_maps import map_metrics, mean_metrics, soft_map
from .saturation import crossing


SHOWS = "DeepSeek-V3 attention with random weights: logit rank against the rule, map rank against its latent ranks"

# content width, rotary width, latent of keys, latent of queries
RULES = [(32, 16, 24, 64), (32, 16, 100, 200), (32, 16, 100, 20), (8, 16, 100, None), (32, 16, 8, None), (4, 4, 2, 3)]
VALUES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
BASE = {"nope": 64, "rope": 4, "kv": 128, "q": 192}
V3 = {"nope": 128, "rope": 64, "kv": 512, "q": 1536}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"n": 96, "hidden": 128, "heads": 2, "rules": RULES[:3], "values": [2, 16], "seeds": 1, "v3": None},
    "laptop": {"n": 256, "hidden": 320, "heads": 4, "rules": RULES, "values": VALUES[:8], "seeds": 3}
    | {"v3": {"n": 512, "hidden": 7168, "heads": 2}},
    "paper": {"n": 1024, "hidden": 1280, "heads": 8, "rules": RULES, "values": VALUES, "seeds": 5}
    | {"v3": {"n": 4096, "hidden": 7168, "heads": 2}},
}
SWEPT = {"kv": "kv_lora_rank", "q": "q_lora_rank", "nope": "qk_nope_head_dim"}
FIELDS = SWEPT | {"rope": "qk_rope_head_dim"}
SHARPNESS = (1.0, 3.0)


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    shape = {name: setting[name] for name in ("n", "hidden", "heads")}
    rules = [dict(zip(("nope", "rope", "kv", "q"), rule, strict=True)) for rule in setting["rules"]]
    found: list[dict[str, Any]] = [{"kind": "rule", "swept": None, **shape, **rule} for rule in rules]
    for swept in SWEPT:
        found += [{"kind": "sweep", "swept": swept, **shape, **BASE, swept: value} for value in setting["values"]]
    if setting["v3"]:
        found.append({"kind": "v3", "swept": None, **setting["v3"], **V3})
    return [
        Cell({**parameters, "seed": seed}, cost=parameters["heads"] * parameters["n"] ** 3)
        for parameters in found
        for seed in range(seeds or setting["seeds"])
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """One row: ranks of the form, of the logits and of all keys with their rules, and of the maps, mean over heads."""
    model, n = latent_attention(parameters), parameters["n"]
    ids = torch.from_numpy(np.random.default_rng(parameters["seed"]).permutation(4 * n)[:n])
    shown: list[tuple[torch.Tensor, torch.Tensor]] = []
    with evaluating(model), recording(model, lambda query, key: shown.append((query[0], key[0]))):
        model(ids[None])
    query, key = shown[0]
    logits = query @ key.transpose(-1, -2)
    form = measure_weights(model, rtol=1e-9)
    rule = mla_ranks(n, num_heads=parameters["heads"], **widths_of(parameters))
    row = {
        "form_rank": int(form[form.metric == "numerical_rank"].value.max()),
        "logit_rank": max(exact_rank(head) for head in logits),
        "key_rank": exact_rank(torch.cat(list(key), -1)),
        **{f"{name}_rule": value for name, value in rule.items()},
    }
    centred = logits - logits.mean(-1, keepdim=True)
    logits = logits / centred.std((-2, -1), keepdim=True)
    for mask in ("none", "causal"):
        for sharpness in SHARPNESS:
            found = mean_metrics([map_metrics(soft_map(sharpness * head, mask)) for head in logits])
            names = ("rank_float32", "rank_0.01", "effective_rank", "argmax_coverage")
            row |= {f"{name}_{mask}_{sharpness:g}": found[name] for name in names}
    return [row]


def widths_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {field: parameters[name] for name, field in FIELDS.items()}


def exact_rank(matrix: torch.Tensor) -> int:
    """The rank of a float64 matrix: its rounding is far below the tolerance, its signal far above."""
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-9))


def latent_attention(parameters: Mapping[str, Any]) -> DeepseekV3Model:
    """One layer of DeepSeek-V3 with these widths, all else small, in float64, with weights as it initialises them."""
    n, heads = parameters["n"], parameters["heads"]
    torch.manual_seed(parameters["seed"])
    sizes: dict[str, Any] = {"hidden_size": parameters["hidden"], "v_head_dim": 16, "intermediate_size": 16}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    sizes |= {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 4 * n, "max_position_embeddings": n}
    return DeepseekV3Model(DeepseekV3Config(**sizes, **widths_of(parameters))).double().eval()


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """Logit rank against the rule, and map rank against each of the three widths."""
    figure, axes = new_figure(2, 2, 12.5, 9.0)
    draw_rule(axes[0, 0], table)
    rows = table[table.kind == "sweep"]
    n = int(rows.n.iloc[0])
    curves = (
        ("argmax_coverage_none_1", "hard, no mask", 0),
        ("argmax_coverage_causal_1", "hard, causal", 5),
        ("effective_rank_none_3", "softmax s = 3, effective rank, no mask", 1),
        ("effective_rank_causal_3", "softmax s = 3, effective rank, causal", 6),
        ("effective_rank_none_1", "softmax s = 1, effective rank, no mask", 4),
        ("rank_0.01_none_1", "softmax s = 1, rank at tolerance 0.01, no mask", 7),
    )
    for axis, (swept, name) in zip(axes.flat[1:], SWEPT.items(), strict=True):
        part = rows[rows.swept == swept]
        means = part.groupby(swept).mean(numeric_only=True) / n
        for column, label, place in curves:
            axis.plot(means.index, means[column], **style(place), label=label)
        level(axis, 0.632, "0.63 n: free hard choice")
        level(axis, 0.5, "0.50 n: causal hard choice")
        others = ", ".join(f"{SWEPT[key]} {int(part[key].iloc[0])}" for key in SWEPT if key != swept)
        title = f"{others}, qk_rope_head_dim {int(part.rope.iloc[0])}, n {n}"
        finish(axis, title, part[swept], name, ylim=(0, 1.05), ylabel="rank / n, mean head")
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("Latent attention of DeepSeek-V3, random weights (s: standard deviation of the logits)")
    return {"mla": figure}


def draw_rule(axis: Axes, table: pd.DataFrame) -> None:
    top = table[["form_rule", "head_rule", "keys_rule"]].max().max() * 1.3
    axis.plot([1, top], [1, top], color="0.5", linewidth=0.9, label="rule = measured")
    kinds = (
        ("form_rule", "form_rank", "form of a head (one distance)", "o", 0, 11, "none"),
        ("head_rule", "logit_rank", "logits of a head (with rotary positions)", "s", 5, 8, "none"),
        ("keys_rule", "key_rank", "keys of all heads", "^", 6, 5, None),
    )
    for rule, column, name, marker, place, size, face in kinds:
        look = style(place, marker=marker, markersize=size, markerfacecolor=face, linestyle="none")
        axis.plot(table[rule], table[column], **look, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    ylabel = "rank measured (float64, tolerance 1e-9)"
    finish(axis, f"{len(table)} random models", xlabel="rank by the rule", ylabel=ylabel)
    axis.legend(loc="upper left")


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:

    checked, swept = table[table.kind != "sweep"], table[table.kind == "sweep"]
    fits = (table.form_rank == table.form_rule) & (table.logit_rank == table.head_rule)
    content = checked[checked.logit_rank > checked.form_rank]
    yield unpublished(
        "The form of a head has rank min(q latent, min(content, kv latent) + rotary width), all keys side by side "
        "min(heads x content, kv latent) + rotary width",
        ", ".join(
            f"({row.nope}, {row.rope}, {row.kv}, {'-' if row.q != row.q else int(row.q)}): {row.form_rank} of {row.form_rule}"
            for row in checked.drop_duplicates(["nope", "rope", "kv", "q"]).itertuples()
        ),
        (fits & (table.key_rank == table.keys_rule)).all(),
        f"Required: equal in all {len(table)} random models. In brackets content, rotary, kv latent, q latent.",
    )
    yield unpublished(
        "Rotary positions raise the rank of the logits above that of the form where the query latent is narrow",
        ", ".join(
            f"{row.logit_rank} against {row.form_rank}" for row in content.drop_duplicates("logit_rank").itertuples()
        )
        or "no narrow latent here",
        len(content),
        "Required: a model with a higher rank. They turn the queries after their latent, so it bounds the content part alone.",
    )
    n, column = int(swept.n.iloc[0]), "argmax_coverage_none_1"
    for name, title in SWEPT.items():
        rows = swept[swept.swept == name]
        curve = rows.groupby(name)[[column, "argmax_coverage_causal_1"]].mean() / n
        ends = rows.pivot(index="seed", columns=name, values=column) / n
        required = (
            judge("rank over n at the largest value", ends.iloc[:, -1], 0.63 - CEILING, 0.63 + CEILING),
            judge("rise over n", ends.iloc[:, -1] - ends.iloc[:, 0], least=0),
        )
        yield every(required).claim(
            f"The rank of hard maps rises with {title} and stops at 0.63 n",
            f"{SOURCE}, MLA",
            "same picture as for ordinary heads",
            ", ".join(f"{int(value)}: {share:.2f}" for value, share in curve[column].items())
            + f"; causal {curve.argmax_coverage_causal_1.iloc[-1]:.2f}",
            "Without the causal mask that the model has; with it the ceiling is 0.50 n.",
            no="It rises, and stops lower: the two widths that are not varied limit the rank as well.",
        )
    kv = swept[swept.swept == "kv"].groupby("kv")[column].mean() / n
    widths = [int(width) for width in kv.index]
    shares = (0.5, 0.75, 0.9)
    half, most, nearly = (crossing(widths, kv.tolist(), share * kv.iloc[-1]) or float("nan") for share in shares)
    ordinary = [f"{saturation_width(n, share):.0f}" for share in shares]
    yield published(
        "Rank saturates in kv_lora_rank, far below the widths that are used",
        "MLA (model reduction)",
        "",
        f"half, 75 % and 90 % of the rank at {widths[-1]} from {half:.0f}, {most:.0f} and {nearly:.0f} on",
        nearly < widths[-1] / 2,
        "Required: 90 % below half of the largest. No earlier than ordinary heads, which by the mean-field law need widths "
        f"of {ordinary[0]}, {ordinary[1]} and {ordinary[2]} for these shares of the ceiling at n = {n}.",
    )
    for row in table[table.kind == "v3"].groupby("n").mean(numeric_only=True).reset_index().itertuples():
        free, causal = row.argmax_coverage_none_1 / row.n, row.argmax_coverage_causal_1 / row.n
        yield unpublished(
            "At DeepSeek-V3's own widths (128 + 64, latents 512 and 1536, hidden 7168) a head has query-key rank 192",
            f"{row.logit_rank:.0f}; hard maps {free:.2f} n, causal {causal:.2f} n (n {int(row.n)})",
            row.logit_rank == 192,
            "Required: 192. kv_lora_rank limits the keys of all heads together, not those of one.",
        )
