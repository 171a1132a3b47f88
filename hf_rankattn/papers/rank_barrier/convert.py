"""Quality of a checkpoint against the query-key rank it is cut to: weights only, calibrated, calibrated and distilled."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, BertConfig, BertModel, PreTrainedTokenizerFast

from ...convert.checkpoint import own_ranks, token_limit
from ...convert.curve import rank_curve
from ...files.checkpoints import readable
from ...files.texts import package_text
from ...probe import measure_logits, measure_weights
from ...probe.survey import load_checkpoint, load_tokenizer, read_texts, text_batches
from ...report.plots import literal, new_figure
from ..drawing import DASHED
from ..sweep.grid import Cell
from ..sweep.judging import Claim, every, judge, unpublished
from ._drawing import style


SHOWS = "quality of a checkpoint against the rank it is cut to, three ways, and how much rank its logits use"
OPTIONS = ("checkpoint", "text")

# Without --checkpoint the weights are random, and so large that attention is sharp and a cut has an effect.
OWN, SHARP = "own", 0.25
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"model": {"hidden": 32, "heads": 2, "layers": 1}, "shares": [4, 8], "distil_steps": 2, "seeds": 1},
    "laptop": {"model": {"hidden": 128, "heads": 4, "layers": 3}, "distil_steps": 30, "seeds": 3}
    | {"shares": [1, 2, 4, 6, 8]},
    "paper": {"model": {"hidden": 768, "heads": 12, "layers": 12}, "distil_steps": 200, "seeds": 3}
    | {"shares": [1, 2, 3, 4, 5, 6, 7, 8]},
}
WAYS = ("weights only", "calibrated", "calibrated and distilled")


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    """One cell for a random model, which the cell makes; one for each rank of a checkpoint that was given."""
    setting, given = SETTINGS[scale], options.get("checkpoint")
    common = {"distil_steps": setting["distil_steps"], "calibration": str(options.get("text") or "package")}
    many = range(seeds or setting["seeds"])
    if not given:
        own = {"checkpoint": OWN, **setting["model"], "shares": setting["shares"], **common}
        return [Cell({**own, "seed": seed}) for seed in many]
    return [
        Cell({"checkpoint": str(given), "shares": [share], **common, "seed": seed}, cost=share)
        for share in setting["shares"]
        for seed in many
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """Rows `curve` (way, rank, cosine of embeddings to the original's) and rows `energy` of weights and logits."""
    source = parameters["checkpoint"]
    if source == OWN:
        source = str(own_checkpoint(work / "bert", parameters))
    width = head_width(source)
    ranks = sorted({max(1, width * share // 8) for share in parameters["shares"]})
    how = {name: parameters[name] for name in ("calibration", "distil_steps", "seed")}
    curve = rank_curve(source, ranks=ranks, objective="logits", **how)
    rows: list[dict[str, Any]] = [{"what": "curve", "width": width, **row} for row in curve]
    if max(parameters["shares"]) == 8:
        rows += energy_rows(source, width)
    return rows


def head_width(source: str) -> int:
    """The largest query-key rank that a head of a checkpoint has."""
    with readable(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return max(own_ranks(config))


def energy_rows(source: str, width: int, examples: int = 16) -> list[dict[str, Any]]:
    """How many directions hold 90 % of the energy of the query-key weights, and of row-centred logits, a row a head."""
    model, rows = load_checkpoint(source), []
    limit = token_limit(model, 128)
    batches = text_batches(load_tokenizer(source), read_texts(examples=examples)[0], model.config, limit)
    for of, table in (("weights", measure_weights(model)), ("logits", measure_logits(model, batches))):
        ranks = table[table.metric == "energy_rank"].groupby(["layer", "head"]).value.mean()
        about = {"what": "energy", "width": width, "of": of}
        for (layer, head), value in ranks.items():
            rows.append({**about, "layer": int(layer), "head": int(head), "energy_rank": float(value)})
    return rows


def own_checkpoint(folder: Path, parameters: Mapping[str, Any]) -> Path:
    """A small BERT of random weights, with a tokenizer of the words of the package's text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    cut = pre_tokenizers.BertPreTokenizer()
    found = sorted({word for text in package_text() for word, _ in cut.pre_tokenize_str(text.lower())})
    ids = {word: place for place, word in enumerate([*special, *found])}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), cut
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **dict(zip(names, special, strict=True)))
    torch.manual_seed(parameters["seed"])
    hidden, heads, layers = (parameters[name] for name in ("hidden", "heads", "layers"))
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": 2 * hidden}
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    BertModel(BertConfig(**sizes, **text, num_hidden_layers=layers, initializer_range=SHARP)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def figures(table: pd.DataFrame, scale: str) -> dict[str, Figure]:
    """Quality against rank, a line a way; and how many directions weights and logits use, head by head."""
    curves, energy = table[table.what == "curve"], table[table.what == "energy"]
    width = int(table["width"].iloc[0])
    figure, axes = new_figure(1, 2 if len(energy) else 1, 12.0 if len(energy) else 6.5, 4.8)
    left, right = axes[0, 0], axes[0, -1]
    for place, (way, rows) in zip((6, 1, 8), curves.groupby("way", sort=False), strict=False):
        points = rows.groupby("rank").embedding_cosine.mean()
        left.plot(points.index, points, **style(place), label=way)
    left.axvline(width, **DASHED, label="rank of the original")
    left.set_xticks(sorted({int(rank) for rank in curves["rank"]}))
    left.set(xlabel="query-key rank of a head", ylabel="cosine to the original's mean-pooled embedding")
    left.legend(loc="lower right", bbox_to_anchor=(0.95, 0.0))
    for place, (of, rows) in zip((0, 6), energy.groupby("of"), strict=False):
        share = rows.energy_rank.sort_values().to_numpy()
        name = "row-centred logits on text" if of == "logits" else "weights W_Q W_K^T"
        right.plot(share, np.linspace(0, 100, len(share) + 1)[1:], **style(place, markersize=3), label=name)
        xlabel = f"directions for 90 % of the energy (of {width})"
        right.set(xlim=(0, width), xlabel=xlabel, ylabel="heads that need no more (%)")
        right.legend(loc="upper left")
    source = str(table.checkpoint.iloc[0])
    name = "a small BERT of random weights, logits sharp" if source == OWN else source.rstrip("/").split("/")[-1]
    figure.suptitle(f"How far can the query-key rank be cut? {literal(name)}")
    return {"convert": figure}


def claims(table: pd.DataFrame, scale: str) -> Iterator[Claim]:
    curve = table[table.what == "curve"]
    by_seed = curve.pivot_table(index="seed", columns=["way", "rank"], values="embedding_cosine")
    curves = by_seed.mean()
    width = int(table["width"].iloc[0])
    ranks = sorted({int(rank) for _, rank in curves.index})
    cut = [rank for rank in ranks if rank < width]
    own = bool(table.checkpoint.iloc[0] == OWN)
    name = "random BERT" if own else Path(table.checkpoint.iloc[0]).name
    weights, calibrated, distilled = WAYS
    if width in ranks:
        whole = min(curves[weights, width], curves[calibrated, width])
        claim = f"{name}: at the old rank conversion changes nothing"
        yield unpublished(claim, f"{whole:.6f}", whole > 1 - 1e-4, "Required: a cosine above 0.9999.")
    if cut:
        half, low = min(cut, key=lambda rank: abs(rank - width / 2)), cut[0]
        gains = {rank: by_seed[calibrated, rank] - by_seed[weights, rank] for rank in cut}
        required = (
            judge(f"cosine calibrated minus weights only (rank {rank})", gain, 0) for rank, gain in gains.items()
        )
        yield every(required).unpublished(
            f"{name}: at rank {half} of {width}, calibration keeps more than the weights alone",
            "ours; A3 and KQ-SVD report the same of logits",
            ", ".join(f"{way} {curves[way, half]:.3f}" for way in WAYS),
            "Cosine of mean-pooled embeddings to the original's on 40 paragraphs that calibration has not seen; judged at "
            "every rank below the old.",
            no="At some rank the weights alone keep more.",
        )
        repaired = by_seed[distilled, low] - by_seed[calibrated, low]
        yield judge("cosine distilled minus calibrated", repaired, least=0).unpublished(
            f"{name}: distillation repairs part of what a cut to rank {low} breaks",
            "ours",
            f"calibrated {curves[calibrated, low]:.3f}, distilled {curves[distilled, low]:.3f}",
            "Distilled on 40 paragraphs, judged on 40 others.",
            no="Distillation lowers it.",
        )
    energy = table[table.what == "energy"]
    if len(energy):
        median = energy.groupby("of").energy_rank.median()
        untrained = "Random weights say nothing of trained ones: ask with --checkpoint."
        yield Claim(
            f"{name}: row-centred logits on text need far fewer directions for 90 % of their energy than the weights",
            "Lee, 2604.04384",
            "2 to 11 against 38 to 75 (of 64 or 128; GPT-2 to Mistral-7B)",
            f"median head {median['logits']:.1f} against {median['weights']:.1f} of {width}",
            None if own else bool(median["weights"] / median["logits"] > 1.5),
            untrained if own else "Published factor 5 to 25, of far larger models.",
        )
