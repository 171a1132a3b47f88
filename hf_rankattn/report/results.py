"""One page from the result folders of `rankattn reproduce`, `rankattn measure` and `rankattn need`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..files.atomic import finish_replacement
from ..files.companions import read_json
from .drawings import curves, heat_map
from .html import Grid, Section, claims_grid, png_picture, render_page
from .need import MARKER, read_need
from .plots import FIGURES, VARIANTS
from .summary import comparison, findings, opening_sentences
from .verdicts import count_verdicts


MANIFEST, CLAIMS, TABLE, PAGE = "experiment.json", "claims.json", "table.parquet", "report.html"
FIELDS = ("claim", "source", "published", "measured", "verdict")
DEPTH = 2  # runs/NAME/SCALE
# the questions that each figure of FIGURES shows; it is drawn if one of them was measured
FIGURE_QUESTIONS = {
    "residuals": ("collapse",),
    "attention_rank": ("attention",),
    "query_key_spectra": ("weights", "logits"),
}
SURVEY_FIGURES = {
    "residuals": "Relative residual by layer, with and without skips and MLPs",
    "attention_rank": "Rank of the attention maps by layer and head",
    "query_key_spectra": "Energy of the query-key weights and of the logits by components kept, a panel a layer",
}


def report_page(folder: str | Path) -> str:
    """The page of all results in a folder: of one run or measurement, or of those up to two levels below it."""
    folder = Path(folder)
    finish_replacement(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give one that rankattn reproduce, measure or need wrote.")
    found: dict[str, list[Path]] = {"run": [], "survey": [], "need": [], "unfinished": []}
    for path, kind in result_folders(folder, DEPTH):
        found[kind].append(path)
    runs, surveys, needs, unfinished = found.values()
    told, sections = set(), []
    for path in runs:
        manifest = read_json(path / MANIFEST)
        if not has_texts(manifest, ("experiment", "scale")):
            raise ValueError(f"{path / MANIFEST} is not the manifest of an experiment.")
        told.add((manifest["experiment"], manifest["scale"]))
        sections.append(run_section(path, manifest))
    for summary in sorted(folder.glob("claims-*.json")):
        sections += summary_sections(summary, told)
    experiments = len(sections)
    for path in surveys:
        sections += stored_sections(path)
    for path in needs:
        sections += read_need(path) or ()
    if not sections:
        message = (
            f"{folder} holds no results of rankattn reproduce ({CLAIMS}), or of rankattn measure or need ({TABLE})."
        )
        if unfinished:
            message += f" {unfinished[0]} is of a run that has not ended: the same command goes on with it."
        raise ValueError(message)
    footer = [f"Written by rankattn report from {folder.resolve().name}."]
    footer += [f"Left out, as the run has not ended: {path.relative_to(folder)}." for path in unfinished]
    what = " and ".join(
        f"{count} {name}{'' if count == 1 else 's'}"
        for count, name in ((experiments, "experiment"), (len(surveys) + len(needs), "measured model"))
        if count
    )
    lead = f"{what}, published numbers beside ours."
    return render_page("Rank of attention: results", lead, sections, footer=footer)


def stored_sections(folder: Path) -> list[Section]:
    """The sections of a folder of `rankattn measure`."""
    table, facts = read_survey(folder)
    try:
        parts = surveys_of(table, facts)
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{folder / TABLE} is not a table of rankattn measure: {type(error).__name__} {error}."
        ) from error
    if len(parts) == 1:
        return [survey_section(*parts[0], read_figures(folder))]
    return [comparison_section(parts), *(opening_section(*part) for part in parts)]


def result_folders(folder: Path, depth: int) -> Iterator[tuple[Path, str]]:
    """Folders of results and their kinds, in the order of their names."""
    if (folder / MANIFEST).is_file():
        yield folder, "run" if (folder / CLAIMS).is_file() else "unfinished"
    elif (folder / MARKER).is_file():
        yield folder, "need" if (folder / TABLE).is_file() else "unfinished"
    elif (folder / TABLE).is_file() and survey_facts(folder / TABLE) is not None:
        yield folder, "survey"
    elif depth:
        for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from result_folders(below, depth - 1)


def has_texts(value: Any, fields: Sequence[str]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(field), str) for field in fields)


def read_claims(path: Path) -> list[Mapping[str, Any]]:
    claims = read_json(path)
    if not isinstance(claims, list) or not all(has_texts(claim, FIELDS) for claim in claims):
        fields = ", ".join(FIELDS)
        raise ValueError(f"{path} does not hold claims of rankattn reproduce: each has {fields}, all of them text.")
    return claims


def read_figures(folder: Path) -> dict[str, bytes]:
    """The figures of a run. Hidden files are parts of figures, which a killed run left."""
    paths = sorted(path for path in folder.glob("*.png") if path.is_file() and not path.name.startswith("."))
    return {path.stem: path.read_bytes() for path in paths}


def run_section(folder: Path, manifest: Mapping[str, Any]) -> Section:
    claims, name, scale = read_claims(folder / CLAIMS), manifest["experiment"], manifest["scale"]
    pictures = [
        png_picture(data, f"Figure {figure} of the experiment {name}; its numbers are in the table above.", figure)
        for figure, data in read_figures(folder).items()
    ]
    # readers copy commands, so only plain names become part of one
    plain = all(re.fullmatch("[a-z][a-z-]*", word) for word in (name, scale))
    commands = [f"rankattn reproduce {name} --scale {scale}"] if plain else []
    counts = count_verdicts(claim["verdict"] for claim in claims) + "."
    tables = [claims_grid(claims)] if claims else []
    return Section(f"{name}, {scale} scale", [counts], tables, pictures, commands)


def summary_sections(path: Path, told: set[tuple[str, str]]) -> list[Section]:
    """The claims of a summary whose experiments have no folder of their own."""
    scale = path.stem.removeprefix("claims-")
    missing: dict[str, list[Mapping[str, Any]]] = {}
    for claim in read_claims(path):
        name = str(claim.get("experiment", "experiment"))
        if (name, scale) not in told:
            missing.setdefault(name, []).append(claim)
    return [
        Section(f"{name}, {scale} scale", [f"From {path.name}; its figures are not there."], [claims_grid(own)])
        for name, own in missing.items()
    ]


def survey_facts(path: Path) -> dict[str, Any] | None:
    """The facts that `rankattn measure` keeps in the metadata of its table; None for any other table."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        facts = json.loads(metadata[b"hf_rankattn"]) if b"hf_rankattn" in metadata else None
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from error
    return facts if isinstance(facts, dict) else None


def write_survey(table: pd.DataFrame, facts: dict[str, Any] | list[dict[str, Any]], folder: Path) -> list[str]:
    """Write `table.parquet`, the figures and `report.html` to a folder; returns the names of the files.

    With a list of facts, the column `checkpoint` of the table names the checkpoint of each.
    """
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    told = facts if isinstance(facts, dict) else {"checkpoints": facts}
    metadata = {**(arrow.schema.metadata or {}), b"hf_rankattn": json.dumps(told).encode()}
    pq.write_table(arrow.replace_schema_metadata(metadata), folder / TABLE)
    parts = surveys_of(table, told)
    for part, own in parts:
        label = f"{re.sub('[^A-Za-z0-9._-]+', '-', own['checkpoint'])}-" if "checkpoint" in own else ""
        for name, draw in FIGURES.items():
            if set(part.question) & set(FIGURE_QUESTIONS[name]):
                draw(part, own).savefig(folder / f"{label}{name}.png")
    (folder / PAGE).write_text(survey_page(parts), encoding="utf-8")
    return sorted(path.name for path in folder.iterdir())


def surveys_of(table: pd.DataFrame, facts: dict[str, Any]) -> list[tuple[pd.DataFrame, dict[str, Any]]]:
    """The table and the facts of each checkpoint of a table of `rankattn measure`."""
    if "checkpoints" not in facts:
        return [(table, facts)]
    return [(table[table.checkpoint == own["checkpoint"]], own) for own in facts["checkpoints"]]


def survey_page(parts: Sequence[tuple[pd.DataFrame, dict[str, Any]]]) -> str:
    """The page of measurements: several checkpoints side by side, then two drawings and three sentences of each, then all answers."""
    sections = [comparison_section(parts)] if len(parts) > 1 else []
    sections += [opening_section(table, facts) for table, facts in parts]
    sections += [survey_section(table, facts, {}, "All answers") for table, facts in parts]
    lead = "How much rank the attention has and uses, and how apart the tokens stay."
    versions = parts[0][1].get("versions", {})
    footer = ["Written by rankattn measure. The numbers are in table.parquet."]
    footer += [", ".join(f"{name} {number}" for name, number in versions.items()) + "."] if versions else []
    return render_page("Rank of attention, measured", lead, sections, footer=footer, kind="measure")


def opening_section(table: pd.DataFrame, facts: dict[str, Any]) -> Section:
    sentences = opening_sentences(findings(table, facts))
    rows = table[(table.question == "collapse") & (table.metric == "relative_residual")]
    lines = {
        label: rows[rows.variant == variant].groupby("layer").value.mean().tolist()
        for variant, (label, *_) in VARIANTS.items()
        if (rows.variant == variant).any()
    }
    said = " ".join(sentences)
    caption = (
        "Relative residual of the tokens by layer, mean over the examples. 1: nothing is shared; 0: all are equal."
    )
    pictures = [curves(lines, facts["precision_floor"], f"{caption} {said}", caption)] if lines else []
    maps = table[(table.question == "attention") & table.metric.isin(["effective_rank", "participation_ratio"])]
    if len(maps):
        metric = "effective_rank" if (maps.metric == "effective_rank").any() else "participation_ratio"
        word = metric.replace("_", " ")
        values = maps[maps.metric == metric].groupby(["layer", "head"]).value.mean().unstack()
        tokens = float(table[table.metric == "tokens"].value.mean())
        caption = (
            f"{word.capitalize()} of each attention map, mean over the examples; the most is {tokens:.0f}, the number of "
            "tokens. Rest the pointer on a cell to see its value."
        )

        def title(layer: int, head: int, value: float, word: str = word) -> str:
            return f"layer {layer}, head {head}: {word} " + ("not measured" if pd.isna(value) else f"{value:.1f}")

        pictures.append(heat_map(values, tokens, f"{caption} {said}", caption, title))
    return Section(facts["title"], sentences, (), pictures)


def comparison_section(parts: Sequence[tuple[pd.DataFrame, dict[str, Any]]]) -> Section:
    rows = comparison([findings(table, facts) for table, facts in parts])
    return Section("Side by side", (), [Grid(["question", *(facts["checkpoint"] for _, facts in parts)], rows)])


def read_survey(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    path = folder / TABLE
    try:
        return pd.read_parquet(path), survey_facts(path) or {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from error


def survey_section(
    table: pd.DataFrame, facts: Mapping[str, Any], figures: Mapping[str, bytes], title: str = "Measured"
) -> Section:
    """What `rankattn measure` found, in words and figures."""
    try:
        found = findings(table, dict(facts))
        about = (
            f"{facts['model_type']}, {facts['layers']} layers of {facts['heads']} heads, {facts['dtype']}; "
            f"{facts['examples']} examples from {facts['source']}."
        )
        heading = f"{title}: {facts['title']}"
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"this is not a table of rankattn measure: {type(error).__name__} {error}.") from error
    answers = Grid(["question", "answer", "to compare"], [[f.question, f.answer, f.compare] for f in found])
    said = " ".join(f"{f.question} {f.answer}." for f in found)
    pictures = [
        png_picture(data, f"{SURVEY_FIGURES.get(name, name)}. {said}", SURVEY_FIGURES.get(name, name))
        for name, data in figures.items()
    ]
    return Section(heading, [about, *(f.next_step for f in found if f.next_step)], [answers], pictures)
