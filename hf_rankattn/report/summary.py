"""The answers that a table of measurements gives, as prose and as named numbers."""

import math
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from ..families.slots import CONVERTIBLE
from ..measure import collapse_rate
from .plots import PUBLISHED_NAMES, content_free_share, published_residuals


@dataclass
class Finding:
    """One question, what was measured, and what to compare it with.

    `name` is `<question>/<metric>` of the table, and for residuals `collapse/<variant>`. `answer`, `compare` and
    `next_step` are prose, and `values` holds every number of the prose by name.
    """

    name: str
    question: str
    answer: str
    compare: str
    values: dict[str, Any] = field(default_factory=dict)
    next_step: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


QUESTIONS = {
    "transformer": "Do tokens stay apart from layer to layer?",
    "san+skip": "... without the MLPs, skips kept?",
    "san+mlp": "... without the skips around attention, MLPs kept?",
    "san": "... without both: attention alone?",
}
KINDS = {
    "doubly_exponential": "doubly exponentially",
    "geometric": "by a constant factor a layer",
    "unclear": "too few layers to tell the rate",
    "none": "slowly",
}
ENERGY, SHARE = 0.9, "90 %"  # of `energy_rank` in the tables of `rankattn measure`


# question of the table -> question to the reader, what to compare the answer with
SPECTRA = {
    "weights": (
        "How much query-key rank do the weights hold?",
        "a cut by the weights alone loses less if this is low",
    ),
    "logits": (
        "How much of it do the logits use on these inputs?",
        "a cut calibrated on such inputs has to keep these",
    ),
}


def number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.0e}"


def finite(value: float) -> float | None:
    """A number that JSON can hold."""
    return float(value) if math.isfinite(value) else None


def collapse_findings(table: pd.DataFrame, facts: dict[str, Any]) -> list[Finding]:
    rows = table[(table.question == "collapse") & (table.metric == "relative_residual")]
    published = published_residuals(facts["model_type"], facts["random_init"])
    findings = []
    for variant, question in QUESTIONS.items():
        name = f"collapse/{variant}"
        if reason := facts.get("not_measured", {}).get(variant):
            values: dict[str, Any] = {"relative_residual": None, "reason": reason}
            findings.append(Finding(name, question, f"not measured: {reason}", "-", values))
            continue
        residuals = rows[rows.variant == variant].groupby("layer").value.mean()
        if not len(residuals):
            continue
        answer, values = collapse_answer(residuals.tolist(), facts["precision_floor"])
        compare = "1: tokens share nothing; 0: all tokens are equal"
        curve = published[published.variant == variant].set_index("layer").value
        if len(curve):
            course, values["published"] = published_course(curve, variant, facts)
            compare = f"{course} ({compare})"
        findings.append(Finding(name, question, answer, compare, values))
    return findings


def collapse_answer(residuals: list[float], floor: float) -> tuple[str, dict[str, Any]]:
    """Whether tokens stay apart, from the relative residuals of layers 0 (embeddings) to L."""
    last, rate = len(residuals) - 1, collapse_rate(residuals, floor=floor)
    equal = rate.used <= last
    values = {
        "relative_residual": residuals,
        "input": residuals[0],
        "last": residuals[-1],
        "last_layer": last,
        "equal_from_layer": rate.used if equal else None,
        "rate": rate.kind,
        "exponent": finite(rate.exponent),
        "factor": finite(rate.factor),
        "precision_floor": floor,
    }
    start = f"relative residual {number(residuals[0])} at the input"
    if equal:
        answer = f"no: {start}, tokens equal within precision from layer {rate.used} on"
        if rate.at_least and rate.kind != "doubly_exponential":
            answer += " (too fast to tell the rate in this precision)"
        elif rate.kind != "none":
            answer += f" ({KINDS[rate.kind]})"
        return answer, values
    course = f"{start}, {number(residuals[-1])} after layer {last}"
    return (f"hardly: {course} ({KINDS[rate.kind]})" if residuals[-1] < 0.1 else f"yes: {course}"), values


def published_course(curve: pd.Series, variant: str, facts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A published curve in words and numbers. Values at the floor of float32 are missing from the curve."""
    name = PUBLISHED_NAMES[facts["model_type"].removeprefix("rank_")]
    kind = "random weights" if facts["random_init"] else "pretrained"
    last = float(curve[12]) if 12 in curve.index else None
    end = "equal within precision after 12 layers" if last is None else f"{number(last)} after 12 layers"
    compare = f"published, {name}, {kind}: {number(curve[0])} at the input, {end}"
    if name.startswith("albert") and variant in ("san", "san+skip"):
        compare += " (with an activation, a skip and a norm of the MLPs left in)"
    return compare, {"model": name, "weights": kind, "input": float(curve[0]), "last": last, "last_layer": 12}


def attention_findings(table: pd.DataFrame, facts: dict[str, Any]) -> list[Finding]:
    rows = table[table.question == "attention"]
    if not len(rows):
        return []
    n, causal = float(table[table.metric == "tokens"].value.mean()), facts["causal"]
    full = (rows.metric == "effective_rank").any()
    metric, name = ("effective_rank", "effective rank") if full else ("participation_ratio", "participation ratio")
    heads = rows[rows.metric == metric].groupby(["layer", "head"]).value.mean()
    coverage = rows[rows.metric == "argmax_coverage"].groupby(["layer", "head"]).value.mean()
    ceiling = (n + 1) / 2 if causal else n * (1 - (1 - 1 / n) ** n)
    law = f"rows that pick one token{' of their past' if causal else ''} at random: {ceiling:.0f}"
    free = n * content_free_share(metric, n, causal)
    return [
        Finding(
            f"attention/{metric}",
            f"How many directions does an attention map of {n:.0f} tokens use?",
            f"{heads.mean():.1f} of {n:.0f} directions ({name}, mean head; {heads.min():.1f} to {heads.max():.1f})",
            f"a map that looks at no content: {free:.1f}; {law}",
            {**spread(heads), "tokens": n, "content_free": free, "random_choice": ceiling},
        ),
        Finding(
            "attention/argmax_coverage",
            "How many tokens are somebody's first choice?",
            f"{coverage.mean():.0f} of {n:.0f} tokens (mean head; {coverage.min():.0f} to {coverage.max():.0f})",
            law,
            {**spread(coverage), "tokens": n, "random_choice": ceiling},
        ),
    ]


def spread(heads: pd.Series) -> dict[str, float]:
    return {name: float(getattr(heads, name)()) for name in ("mean", "median", "min", "max")}


def spectra_findings(table: pd.DataFrame, facts: dict[str, Any], given: str) -> list[Finding]:
    findings = []
    for question, (asked, compare) in SPECTRA.items():
        rows = table[table.question == question]
        ranks = rows[rows.metric == "energy_rank"].groupby(["layer", "head"]).value.mean()
        if not len(ranks):
            continue
        limit = float(rows[rows.metric == "rank_limit"].value.max())
        answer = (
            f"{ranks.median():.0f} of {limit:.0f} directions hold {SHARE} of the energy (median head; "
            f"{ranks.min():.1f} to {ranks.max():.1f})"
        )
        values = {**spread(ranks), "rank_limit": limit, "energy": ENERGY}
        findings.append(Finding(f"{question}/energy_rank", asked, answer, compare, values))
        if question != "logits":
            continue
        if reason := why_no_cut(facts, findings):
            findings[-1].next_step = f"No cut is suggested: {reason}."
        else:
            values["keep"] = keep = math.ceil(ranks.max())
            findings[-1].next_step = cut_command(given, keep, int(limit))
    return findings


def why_no_cut(facts: dict[str, Any], spectra: list[Finding]) -> str:
    """Why these measurements are no basis for `rankattn convert`; empty if they are one."""
    if not any(facts["model_type"] in family.model_types for family in CONVERTIBLE):
        return f"models of type {facts['model_type']} cannot be converted yet"
    if facts["random_init"]:
        return "the weights are random"
    if facts.get("source") == "random inputs":
        return "the inputs are random. Measure on text"
    if len({finding.values["rank_limit"] for finding in spectra}) > 1:
        return "the texts have fewer tokens than a head has directions. Measure with a larger --length"
    return ""


def cut_command(given: str, keep: int, limit: int) -> str:
    name, source = given.rstrip("/").split("/")[-1], shlex.quote(given)
    if keep < limit:
        out = shlex.quote(f"{name}-rank-{keep}")
        return (
            f"{keep} of {limit} directions hold {SHARE} of the energy in every head. "
            f"Keep {keep}: `rankattn convert {source} --qk-rank {keep} --out {out}`"
        )
    return (
        f"Some heads need all {limit} directions. Choose a rank for each layer: `rankattn convert {source} --auto "
        f"--energy {ENERGY} --out {shlex.quote(f'{name}-narrow')}`"
    )


def findings(table: pd.DataFrame, facts: dict[str, Any], given: str | None = None) -> list[Finding]:
    """The findings of a table of [`survey`], one for each question.

    `given` is the checkpoint as the user named it, for the command of the next step; by default the name in `facts`.
    """
    spectra = spectra_findings(table, facts, given or facts["name"])
    return [*collapse_findings(table, facts), *attention_findings(table, facts), *spectra]
