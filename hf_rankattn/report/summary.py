"""The answers that a table of measurements gives, as prose and as named numbers."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from ..families.slots import CONVERTIBLE
from ..measure import collapse_rate
from ..measure.spectrum import SINK
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
CAUSAL_COLLAPSE = (
    "0: all tokens equal the first one, which sees only itself. Causal maps that ignore content come to a factor of 0.5 a "
    "layer, so the fall is geometric; without a mask it can be doubly exponential"
)
ENERGY, SHARE = 0.9, "90 %"  # of `energy_rank` in the tables of `rankattn measure`


# questions that name the number of tokens, where checkpoints differ in it
SHORT = dict.fromkeys(
    ("attention/effective_rank", "attention/participation_ratio"), "How many directions does an attention map use?"
)


SPECTRA = {
    "weights": (
        "How much query-key rank do the weights hold?",
        "a cut by the weights alone loses less if this is low",
    ),
    "logits": (
        "How much of it do the logits use on these inputs?",
        "a cut that is calibrated on such inputs has to keep these directions",
    ),
}
NOT_MEASURED = {"attention": "How much rank do the attention maps have?"}
NOT_MEASURED |= {question: asked for question, (asked, _) in SPECTRA.items()}


def number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.0e}"


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
        if facts["causal"] and variant in ("san", "san+mlp"):
            compare = CAUSAL_COLLAPSE
            values["content_free_factor"] = 0.5
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
    if residuals[-1] < 0.1:
        return f"hardly: {course} ({KINDS[rate.kind]})", values
    return f"yes: {course}", values  # a fall of less than a decade says little of its rate


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


def states_findings(table: pd.DataFrame, facts: dict[str, Any]) -> list[Finding]:
    """The effective rank of the token states of the whole model, and the layers that have no attention."""
    rows = table[(table.question == "collapse") & (table.metric == "effective_rank")]
    findings = []
    if len(rows):
        ranks, n = rows.groupby("layer").value.mean(), float(table[table.metric == "tokens"].value.mean())
        lowest, last = int(ranks.idxmin()), int(ranks.index.max())
        answer = (
            f"{ranks.iloc[0]:.1f} at the input, {ranks.iloc[-1]:.1f} after layer {last} (effective rank; lowest "
            f"{ranks.min():.1f} after layer {lowest})"
        )
        values = {"effective_rank": ranks.tolist(), "input": ranks.iloc[0], "last": ranks.iloc[-1], "last_layer": last}
        values |= {"lowest": ranks.min(), "lowest_layer": lowest, "tokens": n}
        compare = f"{n:.0f}, if {n:.0f} tokens have orthogonal states of equal size; 1, if all are multiples of one"
        asked = "How many directions do the token states of the whole model have?"
        findings.append(Finding("collapse/effective_rank", asked, answer, compare, values))
    if missing := facts.get("without_attention"):
        layers = ", ".join(map(str, missing))
        counts = {"without_attention": missing, "count": len(missing), "layers": facts["layers"]}
        answer = f"{len(missing)} of {facts['layers']}: {layers}"
        asked = "Which layers have no softmax attention?"
        compare = "they do not change in the variant with attention alone"
        findings.append(Finding("layers/without_attention", asked, answer, compare, counts))
    return findings


def by_head(table: pd.DataFrame, question: str, metric: str) -> pd.Series:
    """The mean over the examples of a metric of each head."""
    rows = table[(table.question == question) & (table.metric == metric)]
    return rows.groupby(["layer", "head"]).value.mean()


def attention_findings(table: pd.DataFrame, facts: dict[str, Any]) -> list[Finding]:
    metric, name = "effective_rank", "effective rank"
    heads = by_head(table, "attention", metric)
    if not len(heads):
        metric, name = "participation_ratio", "participation ratio"
        heads = by_head(table, "attention", metric)
    if not len(heads):
        return []
    n, causal = float(table[table.metric == "tokens"].value.mean()), facts["causal"]
    coverage = by_head(table, "attention", "argmax_coverage")
    ceiling = (n + 1) / 2 if causal else n * (1 - (1 - 1 / n) ** n)
    law = f"rows that pick one token{' of their past' if causal else ''} at random: {ceiling:.0f}"
    free = n * content_free_share(metric, n, causal)
    return [
        Finding(
            f"attention/{metric}",
            f"How many directions does an attention map of {n:.0f} tokens use?",
            f"{heads.mean():.1f} of {n:.0f} directions ({name}, mean head; {heads.min():.1f} to {heads.max():.1f})",
            f"a map that ignores content: {free:.1f}; {law}",
            {**spread(heads), "tokens": n, "content_free": free, "random_choice": ceiling},
        ),
        Finding(
            "attention/argmax_coverage",
            "How many tokens get the largest weight of at least one token?",
            f"{coverage.mean():.0f} of {n:.0f} tokens (mean head; {coverage.min():.0f} to {coverage.max():.0f})",
            law,
            {**spread(coverage), "tokens": n, "random_choice": ceiling},
        ),
        *sink_findings(table, n, causal),
    ]


def sink_findings(table: pd.DataFrame, n: float, causal: bool) -> list[Finding]:
    sinks, masses = (by_head(table, "attention", name) for name in ("sink_rate", "sink_mass"))
    if not len(sinks):
        return []
    even = sum(1 / row for row in range(1, round(n) + 1)) / n if causal else 1 / n
    values = {"sink_rate": float(sinks.mean()), "sink_mass": float(masses.mean()), "largest_mass": float(masses.max())}
    answer = (
        f"{number(values['sink_rate'])} of the heads (sink rate); the mean weight on the first token is "
        f"{number(values['sink_mass'])}, in the strongest head {number(values['largest_mass'])}"
    )
    asked = f"How many heads give the first token a mean weight above {SINK}?"
    compare = f"mean weight of a map that ignores content: {number(even)}"
    values |= {"threshold": SINK, "content_free": even}
    return [Finding("attention/sink_rate", asked, answer, compare, values)]


def spread(heads: pd.Series) -> dict[str, float]:
    return {name: float(getattr(heads, name)()) for name in ("mean", "median", "min", "max")}


def spectra_findings(table: pd.DataFrame, facts: dict[str, Any], given: str) -> list[Finding]:
    findings = []
    for question, (asked, compare) in SPECTRA.items():
        ranks = by_head(table, question, "energy_rank")
        if not len(ranks):
            continue
        limit = float(by_head(table, question, "rank_limit").max())
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


def value_findings(table: pd.DataFrame) -> list[Finding]:
    ranks = by_head(table, "weights", "value_energy_rank")
    if not len(ranks):
        return []
    answer = f"{ranks.median():.0f} directions hold {SHARE} of the energy (median head; {ranks.min():.1f} to {ranks.max():.1f})"
    asked, values = (
        "How many directions do the value-output weights of a head write?",
        spread(ranks) | {"energy": ENERGY},
    )
    return [Finding("weights/value_energy_rank", asked, answer, "at most the width of the values of a head", values)]


def why_no_cut(facts: dict[str, Any], spectra: list[Finding]) -> str:
    """Why these measurements are no basis for `rankattn convert`; empty if they are one."""
    family = next((family for family in CONVERTIBLE if facts["model_type"] in family.model_types), None)
    if family is None:
        return f"models of type {facts['model_type']} cannot be cut. To find out how much rank such a model needs, use `rankattn need`"
    if family.stock_width is not None:
        return (
            f"a config of type {facts['model_type']} holds one width for queries, keys and values, and these are the spectra "
            "of queries and keys. Choose one width for both: `rankattn convert ... --qk-rank N --v-head-dim N`"
        )
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
    collapse, attention = collapse_findings(table, facts), attention_findings(table, facts)
    spectra = [*value_findings(table), *spectra_findings(table, facts, given or facts["name"])]
    missing = [
        Finding(f"{question}/not_measured", asked, f"not measured: {reason}", "-", {"reason": reason})
        for question, asked in NOT_MEASURED.items()
        if (reason := facts.get("not_measured", {}).get(question))
    ]
    return [*collapse, *states_findings(table, facts), *attention, *spectra, *missing]


def opening_sentences(found: Sequence[Finding]) -> list[str]:
    """Three sentences on tokens, maps and query-key directions; fewer where something was not measured."""
    answers = {entry.name: entry.values for entry in found if entry.values.get("reason") is None}
    sentences = []
    if whole := answers.get("collapse/transformer"):
        text = (
            f"The relative residual of the tokens, which is 0 if all of them are equal, goes from {number(whole['input'])} at "
            f"the input to {number(whole['last'])} after layer {whole['last_layer']} of the whole model"
        )
        alone = answers.get("collapse/san")
        sentences.append(f"{text}, and to {number(alone['last'])} with attention alone." if alone else f"{text}.")
    maps = answers.get("attention/effective_rank") or answers.get("attention/participation_ratio")
    if maps:
        sentences.append(
            f"An attention map of {maps['tokens']:.0f} tokens uses {maps['mean']:.1f} directions in the mean over the heads, "
            f"from {maps['min']:.1f} to {maps['max']:.1f}."
        )
    weights, logits = answers.get("weights/energy_rank"), answers.get("logits/energy_rank")
    if weights and logits:
        sentences.append(
            f"In the median head, {weights['median']:.0f} of {weights['rank_limit']:.0f} query-key directions hold {SHARE} of the "
            f"energy of the weights, and {logits['median']:.0f} hold {SHARE} of the energy of the logits on these inputs."
        )
    elif weights or logits:
        name, values = ("weights", weights) if weights else ("logits", logits)
        assert values is not None
        sentences.append(
            f"In the median head, {values['median']:.0f} of {values['rank_limit']:.0f} query-key directions hold {SHARE} of the "
            f"energy of the {name}."
        )
    return sentences


def comparison(found: Sequence[Sequence[Finding]]) -> list[list[str]]:
    """The findings of several checkpoints as rows: a question, and the answer for each checkpoint."""
    by_name = [{entry.name: entry for entry in findings} for findings in found]
    rows = []
    for name in dict.fromkeys(entry.name for findings in found for entry in findings):
        entries = [answers.get(name) for answers in by_name]
        asked = {entry.question for entry in entries if entry is not None}
        question = asked.pop() if len(asked) == 1 else SHORT[name]
        rows.append([question, *("-" if entry is None else entry.answer for entry in entries)])
    return rows
