"""What the rows of the demonstration say: six claims, a picture, a page."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from ...files.atomic import fresh_folder
from ...measure import collapse_rate
from ...measure.rate import precision_floor
from ...report.html import GENERATOR, Section, claims_grid, render_page, svg_picture
from ...report.plots import published_residuals, published_table
from ...report.summary import number
from ..sweep.results import running_versions
from ..sweep.runner import Claim
from .figures import CUTS, NAMES, demo_figures, overview_figure, part
from .measuring import TRAINED_MODEL, WHEEL, Settings, jobs_of
from .running import Progress, run_jobs


if TYPE_CHECKING:
    from .checkpoint import Measured

PAGE, PICTURE, RESULTS = "report.html", "overview.png", "results.json"
BENEFITS = "Amsel, Yehudai, Bruna, On the Benefits of Rank in Attention Layers (arXiv 2407.16153)"
COLLAPSE = "Dong, Cordonnier, Loukas, Attention is not all you need (arXiv 2103.03404), residuals at initialisation"
BARRIER = (
    "On the Limitation and Redundancy of Transformers: A Rank Perspective (ICLR submission), Theorem 1, Section 2.1"
)
CUT = "Lee, Compressible Softmax-Attended Language (arXiv 2604.04384); the cut is ours"
# The margins of the six claims, each of them part of its sentence.
HALF_RANK_ERROR = 2.0  # error of half rank over that of full rank; 45 was published
UNIT_LENGTH_GAIN = 2.0  # error without QK-norm over that with it
CUBIC, LINEAR = (2.0, 3.5), (0.8, 1.2)  # fitted exponents of collapse: 3 and 1 in theory
RESIDUAL_LEFT = 0.1  # in whole models after the last layer; 0.26 is the least that was published
CEILING_REACHED, CEILING_PASSED = 0.05, 0.03  # share of n, below a ceiling at the widest head and above it at any
COSINE, COSINE_GAIN = 0.95, 0.1  # of a calibrated cut to half rank, and its lead over a cut of the weights
COMMANDS = (
    "rankattn demo --checkpoint path/to/model   # your own model on this page",
    "rankattn measure path/to/model --out measured",
    "rankattn need path/to/model --out needed",
    "rankattn convert path/to/model --qk-rank 16 --calibration package --out narrow",
    "rankattn reproduce rank-separation --out runs && rankattn report runs --out runs.html",
)
# one sentence below each picture of the first screen
PLAINLY = {
    "separation": "At the same number of parameters, one head of full rank makes a much smaller error than many heads of low rank.",
    "collapse": "Attention alone makes all tokens equal, layer by layer. Skip connections, which whole models have, keep them apart.",
    "ceiling": "A wider head gives attention maps more rank, but sharp random maps of n tokens stop near 0.63 n (causal: 0.50 n).",
}
NOT_RUN = f"not run: {TRAINED_MODEL} is not installed. Install it with pip install {WHEEL} and run the demo again"


@dataclass
class Demo:
    """Results of the demonstration: rows with their `part`, claims, and the measurements of the user's own model, if any."""

    table: pd.DataFrame
    claims: Sequence[Claim]
    settings: Settings
    seconds: float
    checkpoint: "Measured | None" = None
    files: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        rows = [{key: value for key, value in row.items() if pd.notna(value)} for row in self.table.to_dict("records")]
        found: dict[str, Any] = {"claims": [claim.as_dict() for claim in self.claims]}
        if self.checkpoint is not None:
            found["checkpoint"] = self.checkpoint.as_dict()
        about = {"settings": asdict(self.settings), "seconds": round(self.seconds, 1), "versions": running_versions()}
        return {**found, **about, "rows": rows}


def run_demo(
    settings: Settings | None = None,
    *,
    workers: int = 0,
    checkpoint: "Measured | None" = None,
    progress: Progress = lambda job, seconds, over: None,
) -> Demo:
    """Run the four parts and judge the six claims.

    Args:
        settings (`Settings`, *optional*): Sizes and seed.
        workers (`int`, *optional*, defaults to 0):
            Number of worker processes; 0 uses this process only. Processes are spawned, so a script that asks for some
            needs the usual `if __name__ == "__main__":`.
        checkpoint (*optional*): The result of [`measure_own`] for the user's own model, to add to the page.
        progress (*optional*): Called with a job, the seconds of its cost done since the last call, and whether it is over.
    """
    if workers < 0:
        raise ValueError(f"`workers` must be at least 0, got {workers}.")
    start, settings = time.perf_counter(), settings or Settings()
    table = pd.DataFrame(run_jobs(jobs_of(settings), settings, workers, progress))
    return Demo(table, six_claims(table, settings), settings, time.perf_counter() - start, checkpoint)


def six_claims(table: pd.DataFrame, settings: Settings) -> list[Claim]:
    return [
        *separation_claims(table[table.part == "separation"], settings),
        *collapse_claims(table[table.part == "collapse"]),
        ceiling_claim(table[table.part == "ceiling"]),
        conversion_claim(table[table.part == "conversion"]),
    ]


def separation_claims(rows: pd.DataFrame, settings: Settings) -> Iterator[Claim]:
    normed = rows.qk_norm.astype(bool)
    error = rows[~normed].set_index("rank").error
    with_norm = float(rows[normed].error.iloc[0])
    published = published_table("rank_separation")
    published = published[(published.layers == 1) & (published.budget == "d^2")].set_index("rank").value
    full, half = settings.ranks[0], settings.ranks[1]
    yield Claim(
        f"At one budget of parameters, two heads of half rank have at least {HALF_RANK_ERROR:g} times the error of one head of "
        "full rank in finding the farthest point.",
        f"{BENEFITS}, one layer, d^2 parameters",
        f"{published[32] / published[64]:.0f} times ({published[32]:.3g} against {published[64]:.3g}; d 64, 1e5 steps)",
        f"{error[half] / error[full]:.1f} times ({error[half]:.3f} against {error[full]:.3f}; d {settings.dim}, "
        f"{settings.steps} steps)",
        bool(error[half] >= HALF_RANK_ERROR * error[full]),
    )
    yield Claim(
        f"Queries and keys of unit length (qk_norm=True) make the error of the head of full rank at least {UNIT_LENGTH_GAIN:g} "
        "times lower after the same steps.",
        f"{BENEFITS} for the head; qk_norm is ours",
        f"{published[64]:.3g} after 1e5 steps, without (d 64)",
        f"{error[full] / with_norm:.0f} times lower: {with_norm:.3f} against {error[full]:.3f} after {settings.steps} steps (d {settings.dim})",
        bool(with_norm <= error[full] / UNIT_LENGTH_GAIN),
    )


def collapse_claims(rows: pd.DataFrame) -> Iterator[Claim]:
    axes = {"index": "layer", "columns": "variant"}
    ours = {family: rows[rows.model == family].pivot(**axes, values="residual") for family in NAMES}
    theirs = {family: published_residuals(family, random_init=True).pivot(**axes, values="value") for family in NAMES}
    last = int(rows.layer.max())
    rates = {family: collapse_rate(ours[family].san.tolist(), precision_floor(torch.float64)) for family in NAMES}
    equal = all(rates[family].used <= last for family in NAMES)
    cubic = all(CUBIC[0] <= rates[family].exponent <= CUBIC[1] for family in ("bert", "albert"))
    yield Claim(
        "Attention alone makes all tokens equal within rounding: in BERT and ALBERT doubly exponentially with depth (exponent "
        f"{CUBIC[0]:g} to {CUBIC[1]:g}), in XLNet by a constant factor for each layer (exponent {LINEAR[0]:g} to {LINEAR[1]:g}).",
        COLLAPSE,
        "residual at layers 0, 1, 2: "
        + each(lambda family: first_layers(theirs[family].san), "; ")
        + " (rounding: that of float32)",
        "residual at layers 0, 1, 2: "
        + each(lambda family: first_layers(ours[family].san), "; ")
        + f"; rounding from layers {', '.join(str(rate.used) for rate in rates.values())} on; exponents "
        + ", ".join(f"{rate.exponent:.1f}" for rate in rates.values()),
        bool(equal and cubic and LINEAR[0] <= rates["xlnet"].exponent <= LINEAR[1]),
        "The paper gives no rate for XLNet, whose relative positions make the difference.",
    )
    yield Claim(
        f"Skip connections keep tokens apart: whole models have a residual of at least {RESIDUAL_LEFT:g} after layer {last}.",
        COLLAPSE,
        each(lambda family: number(theirs[family].transformer[12])) + " (layer 12)",
        each(lambda family: number(ours[family].transformer[last])),
        bool(all(ours[family].transformer[last] >= RESIDUAL_LEFT for family in NAMES)),
    )


def each(value: Callable[[str], str], between: str = ", ") -> str:
    return between.join(f"{name} {value(family)}" for family, name in NAMES.items())


def first_layers(curve: pd.Series) -> str:
    return ", ".join("rounding" if pd.isna(curve[layer]) else f"{curve[layer]:.2g}" for layer in range(3))


def ceiling_claim(rows: pd.DataFrame) -> Claim:
    widest = int(rows.width.max())
    share = rows[rows.width == widest].set_index("maps").share
    ceilings = {"softmax": 0.63, "hard": 0.63, "qk_norm": 0.63, "causal": 0.5}
    above = {maps: float(rows[rows.maps == maps].share.max()) - ceiling for maps, ceiling in ceilings.items()}
    return Claim(
        "An attention map of sharp random scores has rank 0.63 n for n tokens, and 0.50 n under a causal mask: the widest head "
        f"comes within {CEILING_REACHED:g} n of it, and no head passes it by more than {CEILING_PASSED:g} n.",
        f"{BARRIER}; the causal ceiling is ours",
        "0.63 n; no value for masks",
        f"width {widest}: {share['softmax']:.2f} n (softmax, n 100), {share['hard']:.2f} n (hard, n 256); causal "
        f"{share['causal']:.2f} n; farthest above at any width: {max(above.values()):+.2f} n",
        bool(
            all(share[maps] >= ceiling - CEILING_REACHED for maps, ceiling in ceilings.items())
            and max(above.values()) <= CEILING_PASSED
        ),
        "Maps of softer scores have a higher rank.",
    )


def conversion_claim(rows: pd.DataFrame) -> Claim:
    claim = (
        "Text uses at most half of the query-key directions that the weights of a trained model hold, so a cut to half of the "
        f"rank that is calibrated on text keeps a cosine of at least {COSINE:g} to the original, and at least {COSINE_GAIN:g} "
        "more than a cut by the weights."
    )
    published = "90 % of the energy in 2 to 11 directions on text, 38 to 75 in the weights (heads of 64 and 128); no value for the cut"
    if rows.empty:
        return Claim(claim, CUT, published, NOT_RUN, None)
    width, model = int(rows.width.iloc[0]), rows.model.iloc[0]
    cuts = rows[rows.what == "cut"].set_index(["way", "rank"]).embedding_cosine
    energy = rows[rows.what == "energy"].groupby("of").energy_rank.median()
    rank = int(max(rank for _, rank in cuts.index))
    calibrated, weights = cuts["calibrated", rank], cuts["weights only", rank]
    return Claim(
        claim,
        CUT,
        published,
        f"{energy['logits']:.0f} on text, {energy['weights']:.0f} in the weights (heads of {width}); cut to {rank}: cosine "
        f"{calibrated:.2f} calibrated, {weights:.2f} from the weights ({model})",
        bool(calibrated >= max(COSINE, weights + COSINE_GAIN) and energy["logits"] <= energy["weights"] / 2),
    )


def cut_cosines(rows: pd.DataFrame) -> str:
    """The cosine at the largest width, for each line of the figure of cuts."""
    width = int(rows["rank"].max())
    cosine = rows[rows["rank"] == width].set_index(["what", "way"]).embedding_cosine
    found = ", ".join(f"{cosine[key]:.2f} with {name}" for key, (name, _, _) in CUTS.items())
    return f"The cosine to the original at {width} of {int(rows.width.iloc[0])} dimensions is {found}."


@contextmanager
def demo_folder(out: Path | None, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write to. The default, `demo`, is replaced without asking if a demonstration made it."""
    chosen, may_replace = (Path("demo"), True) if out is None else (out, overwrite)
    with fresh_folder(chosen, may_replace, PAGE, "a demonstration", word=f'content="{GENERATOR} demo"') as folder:
        yield folder


def write_demo(demo: Demo, folder: Path) -> list[str]:
    """Write page, picture and numbers to a folder; returns the names of the files."""
    overview_figure(demo.table).savefig(folder / PICTURE, dpi=100)
    (folder / RESULTS).write_text(json.dumps(demo.as_dict(), indent=2), encoding="utf-8")
    (folder / PAGE).write_text(demo_page(demo), encoding="utf-8")
    demo.files = [PAGE, PICTURE, RESULTS]
    return demo.files


def demo_page(demo: Demo) -> str:
    figures, claims, settings = demo_figures(demo.table), demo.claims, demo.settings
    said = [f"{claim.claim} Here: {claim.measured}. Published: {claim.published}." for claim in claims]
    alts = {
        name: f"Relative residual by layer of {NAMES[name]} in four variants. {said[2]} {said[3]}" for name in NAMES
    }
    alts |= {
        "separation": f"Error against rank of a head. {said[0]} {said[1]}",
        "collapse": f"Relative residual by layer of three models, whole and with attention alone. {said[2]} {said[3]}",
        "ceiling": f"Rank of a map against the width of its head. {said[4]}",
        "conversion": f"Quality against rank after a cut. {said[5]}",
    }
    drawn = {
        name: svg_picture(figure, alts[name], f"figure-{name}", PLAINLY.get(name, ""))
        for name, figure in figures.items()
    }
    need = (
        f"Rank is needed. Each of {settings.points} points on a sphere in {settings.dim} dimensions is a token, and the answer is the "
        f"point farthest from it. Every model has {settings.dim**2} parameters in its queries, for one head of full rank "
        f"or for many heads of low rank, and is trained for {settings.steps} steps on fresh points. A model that always answers zero has "
        "the error 1."
    )
    loss = (
        "Depth loses rank. The residual is what is left of the tokens after their mean is subtracted, as a share of their size: 0 if "
        f"all tokens are equal. Weights and tokens are random ({settings.examples} rows of {settings.length} tokens), and numbers are "
        "float64, so that the residual can be followed to very small values. Published values below 5e-7 are left out, because they "
        "are rounding errors of float32. In XLNet, relative positions turn the cubic collapse into a constant factor in each layer. "
        "The published code for ALBERT without MLPs did not remove an activation, a skip and a norm of the MLPs."
    )
    ceiling = (
        "Width does not buy full rank. If every row of an attention map picks one column at random, n rows pick 1 - 1/e = 0.63 of the "
        "n columns, and the rank of the map is the number of columns that are picked. Wider heads come closer to this share and do "
        "not exceed it. With a causal mask, rows pick half of the columns. Keys of unit length reach the ceiling in narrow heads."
    )
    cut = (
        f"convert_rank cuts the queries and keys of {TRAINED_MODEL}, once by the singular values of the weights alone, and once to the "
        "least error of the logits on 60 short texts; it also cuts the values. limit_rank projects queries and keys and does not change "
        "the weights; it reads 16 of the texts and weights errors by attention. All results are judged by their embeddings of 40 other "
        "paragraphs. " + cut_cosines(part(demo.table, "conversion"))
        if "conversion" in drawn
        else f"This part was {NOT_RUN}."
    )
    cuts = [drawn[name] for name in drawn if name == "conversion"]
    sections = [
        Section("Three results in pictures", pictures=[drawn[name] for name in ("separation", "collapse", "ceiling")]),
        Section("Six claims", tables=[claims_grid([claim.as_dict() for claim in claims])]),
        Section("A trained model with less rank", [cut], pictures=cuts),
        Section("How the pictures were made", [need, loss, ceiling], pictures=[drawn[name] for name in NAMES]),
    ]
    if demo.checkpoint is not None:
        sections[2:2] = demo.checkpoint.sections()
    next_steps = "Each experiment of the papers has a command, which writes a table, figures and claims."
    sections.append(Section("What next", [next_steps], commands=COMMANDS))
    versions = ", ".join(f"{name} {value}" for name, value in running_versions().items())
    lead = (
        f"Measured on this machine in {demo.seconds:.0f} seconds, without a network, with seed {settings.seed}. "
        "Filled markers: measured here. Hollow markers and grey: published."
    )
    footer = [f"Written by rankattn demo. {versions}."]
    return render_page(
        "How much rank does attention need, have, and lose?", lead, sections, footer=footer, kind="demo"
    )
