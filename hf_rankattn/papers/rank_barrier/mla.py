"""Multi-head latent attention with random weights: ranks of its logits by the rule, ranks of its maps by its latents."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell
from ..sweep.judging import Claim, every, judge
from ..sweep.tolerances import CEILING


NAME = "mla"
SHOWS = "DeepSeek-V3 attention with random weights: logit rank against the rule, map rank against its latent ranks"
REVISION = 1
SOURCE = "A Rank Perspective"

# content width, rotary width, latent of keys, latent of queries
RULES = [(32, 16, 24, 64), (32, 16, 100, 200), (32, 16, 100, 20), (8, 16, 100, None), (32, 16, 8, None), (4, 4, 2, 3)]
BASE = {"nope": 64, "rope": 4, "kv": 128, "q": 192}
V3 = {"nope": 128, "rope": 64, "kv": 512, "q": 1536}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"n": 96, "hidden": 128, "heads": 2, "rules": RULES[:3], "values": [2, 16], "seeds": 1, "v3": None},
    "laptop": {
        "n": 256, "hidden": 320, "heads": 4, "rules": RULES, "values": [1, 2, 4, 8, 16, 32, 64, 128], "seeds": 3,
        "v3": {"n": 512, "hidden": 7168, "heads": 2},
    },
    "paper": {
        "n": 1024, "hidden": 1280, "heads": 8, "rules": RULES, "values": [1, 2, 4, 8, 16, 32, 64, 128, 256], "seeds": 5,
        "v3": {"n": 4096, "hidden": 7168, "heads": 2},
    },
}  # fmt: skip
SWEPT = {"kv": "kv_lora_rank", "q": "q_lora_rank", "nope": "qk_nope_head_dim"}
SHARPNESS = (1.0, 3.0)


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    setting = SETTINGS[scale]
    shape = {name: setting[name] for name in ("n", "hidden", "heads")}
    found: list[dict[str, Any]] = [
        {"kind": "rule", "swept": None, **shape, **dict(zip(("nope", "rope", "kv", "q"), rule, strict=True))}
        for rule in setting["rules"]
    ]
    for swept in SWEPT:
        for value in setting["values"]:
            found.append({"kind": "sweep", "swept": swept, **shape, **BASE, swept: value})
    if setting["v3"]:
        found.append({"kind": "v3", "swept": None, **setting["v3"], **V3})
    return [
        Cell({**parameters, "seed": seed}, cost=parameters["heads"] * parameters["n"] ** 3)
        for parameters in found
        for seed in range(seeds or setting["seeds"])
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """One row: ranks of the form, of the logits and of all keys with their rules, and of the maps, mean over heads."""
    import numpy as np
    import torch

    from ...files.running import evaluating
    from ...probe import measure_weights
    from ...probe.logits import recording
    from ...theory import mla_ranks
    from ._random_maps import map_metrics, mean_metrics, soft_map

    model = latent_attention(parameters)
    ids = torch.from_numpy(
        np.random.default_rng(parameters["seed"]).permutation(4 * parameters["n"])[: parameters["n"]]
    )
    shown: list[tuple[torch.Tensor, torch.Tensor]] = []
    with evaluating(model), recording(model, lambda query, key: shown.append((query[0], key[0]))):
        model(ids[None])
    query, key = shown[0]
    logits = query @ key.transpose(-1, -2)
    form = measure_weights(model, rtol=1e-9)
    rule = mla_ranks(
        parameters["n"], num_heads=parameters["heads"], qk_nope_head_dim=parameters["nope"],
        qk_rope_head_dim=parameters["rope"], kv_lora_rank=parameters["kv"], q_lora_rank=parameters["q"],
    )  # fmt: skip
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


def exact_rank(matrix) -> int:
    """The rank of a float64 matrix, whose rounding is far below what counts and whose signal is far above."""
    import torch

    return int(torch.linalg.matrix_rank(matrix, rtol=1e-9))


def latent_attention(parameters: Mapping[str, Any]):
    """One layer of DeepSeek-V3 with these widths and nothing else of its size, float64, weights as it initialises them."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3Model

    torch.manual_seed(parameters["seed"])
    config = DeepseekV3Config(
        hidden_size=parameters["hidden"], num_hidden_layers=1, num_attention_heads=parameters["heads"],
        num_key_value_heads=parameters["heads"], qk_nope_head_dim=parameters["nope"], qk_rope_head_dim=parameters["rope"],
        kv_lora_rank=parameters["kv"], q_lora_rank=parameters["q"], v_head_dim=16, intermediate_size=16,
        first_k_dense_replace=1, vocab_size=4 * parameters["n"], max_position_embeddings=parameters["n"],
    )  # fmt: skip
    return DeepseekV3Model(config).double().eval()


def figures(table, scale: str):
    from ._figures_models import mla_figure

    return {"mla": mla_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    from ...theory import saturation_width
    from .saturation import crossing

    checked = table[table.kind != "sweep"]
    fits = (checked.form_rank == checked.form_rule) & (checked.logit_rank == checked.head_rule)
    swept = table[table.kind == "sweep"]
    fits_all = (
        (table.form_rank == table.form_rule)
        & (table.logit_rank == table.head_rule)
        & (table.key_rank == table.keys_rule)
    )
    content = checked.logit_rank > checked.form_rank
    found = [
        Claim(
            "The form of a head has rank min(q latent, min(content, kv latent) + rotary width), all keys side by side "
            "min(heads x content, kv latent) + rotary width",
            "ours",
            "",
            ", ".join(
                f"({row.nope}, {row.rope}, {row.kv}, {'-' if row.q != row.q else int(row.q)}): {row.form_rank} of {row.form_rule}"
                for row in checked.drop_duplicates(["nope", "rope", "kv", "q"]).itertuples()
            ),
            bool(fits.all() and fits_all.all()),
            f"Content, rotary, kv latent, q latent; all {len(table)} random models agree exactly.",
        ),
        Claim(
            "Rotary positions raise the rank of the logits above that of the form where the query latent is narrow",
            "ours",
            "",
            ", ".join(
                f"{row.logit_rank} against {row.form_rank}"
                for row in checked[content].drop_duplicates("logit_rank").itertuples()
            )
            or "no narrow latent here",
            bool(content.any()),
            "They turn the queries after their latent, so it bounds the content part alone.",
        ),
    ]
    n = int(swept.n.iloc[0])
    column = "argmax_coverage_none_1"
    for name, title in SWEPT.items():
        curve = swept[swept.swept == name].groupby(name)[[column, "argmax_coverage_causal_1"]].mean() / n
        values = curve[column]
        ends = swept[swept.swept == name].pivot(index="seed", columns=name, values=column) / n
        found.append(
            every(
                (
                    judge("rank over n at the largest value", ends.iloc[:, -1], 0.63 - CEILING, 0.63 + CEILING),
                    judge("rise over n", ends.iloc[:, -1] - ends.iloc[:, 0], least=0),
                )
            ).claim(
                f"The rank of hard maps rises with {title} and stops at 0.63 n",
                f"{SOURCE}, MLA",
                "same picture as for ordinary heads",
                ", ".join(f"{int(value)}: {share:.2f}" for value, share in values.items())
                + f"; causal {curve.argmax_coverage_causal_1.iloc[-1]:.2f}",
                "Without the causal mask that the model has; with it the ceiling is 0.50 n.",
                no="It rises, and stops lower: the two widths that are not varied limit the rank as well.",
            )
        )
    kv = swept[swept.swept == "kv"].groupby("kv")[column].mean() / n
    widths = [int(width) for width in kv.index]
    reached = [crossing(widths, kv.tolist(), share * kv.iloc[-1]) or float("nan") for share in (0.5, 0.75, 0.9)]
    ordinary = [saturation_width(n, share) for share in (0.5, 0.75, 0.9)]
    found.append(
        Claim(
            "Rank saturates in kv_lora_rank, far below the widths that are used",
            f"{SOURCE}, MLA (model reduction)",
            "",
            f"half, 75 % and 90 % of the rank at {widths[-1]} from {reached[0]:.0f}, {reached[1]:.0f} and {reached[2]:.0f} on",
            bool(reached[2] < widths[-1] / 2),
            f"Required: 90 % below half of the largest. No earlier than ordinary heads, which by the mean-field law need widths of {ordinary[0]:.0f}, {ordinary[1]:.0f} and "
            f"{ordinary[2]:.0f} for these shares of the ceiling at n = {n}.",
        )
    )
    for row in table[table.kind == "v3"].groupby("n").mean(numeric_only=True).reset_index().itertuples():
        free, causal = row.argmax_coverage_none_1 / row.n, row.argmax_coverage_causal_1 / row.n
        found.append(
            Claim(
                "At DeepSeek-V3's own widths (128 + 64, latents 512 and 1536, hidden 7168) a head has query-key rank 192",
                "ours",
                "",
                f"{row.logit_rank:.0f}; hard maps {free:.2f} n, causal {causal:.2f} n (n {int(row.n)})",
                bool(row.logit_rank == 192),
                "kv_lora_rank limits the keys of all heads together, not those of one.",
            )
        )
    return found
