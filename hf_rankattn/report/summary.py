"""A table of measurements in plain words."""

from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from ..measure import collapse_rate
from .plots import PUBLISHED_NAMES, content_free_share, published_residuals


@dataclass
class Finding:
    """One question, what was measured, and what to compare it with."""

    question: str
    answer: str
    compare: str

    def as_dict(self) -> dict[str, str]:
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


def number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.0e}"


def collapse_findings(table: pd.DataFrame, facts: dict[str, Any]) -> list[Finding]:
    rows = table[(table.question == "collapse") & (table.metric == "relative_residual")]
    published = published_residuals(facts["model_type"], facts["random_init"])
    findings = []
    for variant, question in QUESTIONS.items():
        values = rows[rows.variant == variant].groupby("layer").value.mean()
        if not len(values):
            continue
        floor, last = facts["precision_floor"], len(values) - 1
        rate = collapse_rate(values.tolist(), floor=floor)
        course = f"{number(values.iloc[0])} at the input, {number(values.iloc[-1])} after layer {last}"
        if rate.used <= last:
            answer = f"no: {number(values.iloc[0])} at the input, equal within precision from layer {rate.used} on"
            if rate.at_least and rate.kind != "doubly_exponential":
                answer += " (too fast to tell the rate in this precision)"
            elif rate.kind != "none":
                answer += f" ({KINDS[rate.kind]})"
        elif values.iloc[-1] < 0.1:
            answer = f"hardly: {course} ({KINDS[rate.kind]})"
        else:
            answer = f"yes: {course}"
        curve = published[published.variant == variant].set_index("layer").value
        compare = "1: nothing shared, 0: all equal"
        if len(curve):
            end = f"{number(curve[12])} after 12 layers" if 12 in curve.index else "equal within precision after 12"
            name = PUBLISHED_NAMES[facts["model_type"].removeprefix("rank_")]
            kind = "random weights" if facts["random_init"] else "pretrained"
            compare = f"published, {name}, {kind}: {number(curve[0])} at the input, {end}"
            if name.startswith("albert") and variant in ("san", "san+skip"):
                compare += " (with an activation, a skip and a norm of the MLPs left in)"
        findings.append(Finding(question, answer, compare))
    return findings


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
            f"How many directions does an attention map of {n:.0f} tokens use?",
            f"{heads.mean():.1f} ({name}, mean head; {heads.min():.1f} to {heads.max():.1f})",
            f"looking at no content: {free:.1f}; {law}",
        ),
        Finding(
            "How many tokens are somebody's first choice?",
            f"{coverage.mean():.0f} of {n:.0f} (mean head; {coverage.min():.0f} to {coverage.max():.0f})",
            law,
        ),
    ]


def spectra_findings(table: pd.DataFrame, facts: dict[str, Any]) -> list[Finding]:
    findings = []
    for question, asked, compare in (
        (
            "weights",
            "How much query-key rank do the weights hold?",
            "the more, the less a cut in the weights alone can take",
        ),
        ("logits", "How much of it do the logits use on these inputs?", "what a cut made for such inputs has to keep"),
    ):
        rows = table[table.question == question]
        ranks = rows[rows.metric == "energy_rank"].groupby(["layer", "head"]).value.mean()
        if not len(ranks):
            continue
        limit = rows[rows.metric == "rank_limit"].value.max()
        answer = (
            f"90 % of the energy in {ranks.median():.0f} of {limit:.0f} directions (median head; "
            f"{ranks.min():.0f} to {ranks.max():.0f})"
        )
        findings.append(Finding(asked, answer, compare))
    return findings


def findings(table: pd.DataFrame, facts: dict[str, Any]) -> list[Finding]:
    """What a table of [`survey`] says, a question a row."""
    return [*collapse_findings(table, facts), *attention_findings(table, facts), *spectra_findings(table, facts)]
