"""Quality of a checkpoint against the query-key rank it is cut to: weights only, calibrated, calibrated and distilled."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..sweep.grid import Cell
from ..sweep.judging import Claim, every, judge


NAME = "convert"
SHOWS = "quality of a checkpoint against the rank it is cut to, three ways, and how much rank its logits use"
REVISION = 1
OPTIONS = ("checkpoint", "text")

# random weights, so large that attention is sharp and its cut is felt; with --checkpoint real ones take their place
OWN, SHARP = "own", 0.25
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {"model": {"hidden": 32, "heads": 2, "layers": 1}, "shares": [4, 8], "distil_steps": 2, "seeds": 1},
    "laptop": {
        "model": {"hidden": 128, "heads": 4, "layers": 3}, "shares": [1, 2, 4, 6, 8], "distil_steps": 30, "seeds": 3,
    },
    "paper": {
        "model": {"hidden": 768, "heads": 12, "layers": 12}, "shares": [1, 2, 3, 4, 5, 6, 7, 8], "distil_steps": 200, "seeds": 3,
    },
}  # fmt: skip
WAYS = ("weights only", "calibrated", "calibrated and distilled")


def cells(scale: str, seeds: int | None, options: Mapping[str, Any]) -> Sequence[Cell]:
    """One cell for a model of our own, which is made there; one for each rank of a checkpoint that was given."""
    setting, given = SETTINGS[scale], options.get("checkpoint")
    common = {"distil_steps": setting["distil_steps"], "calibration": str(options.get("text") or "package")}
    many = range(seeds or setting["seeds"])
    if not given:
        return [
            Cell({"checkpoint": OWN, **setting["model"], "shares": setting["shares"], **common, "seed": seed})
            for seed in many
        ]
    return [
        Cell({"checkpoint": str(given), "shares": [share], **common, "seed": seed}, cost=share)
        for share in setting["shares"]
        for seed in many
    ]


def run(parameters: Mapping[str, Any], work: Path) -> list[dict[str, Any]]:
    """Rows `curve` (way, rank, cosine of embeddings to the original's) and rows `energy` of weights and logits."""
    from ...convert.checkpoint import rank_curve

    source = parameters["checkpoint"]
    if source == OWN:
        source = str(own_checkpoint(work / "bert", parameters))
    width = head_width(source)
    ranks = sorted({max(1, width * share // 8) for share in parameters["shares"]})
    curve = rank_curve(
        source, ranks=ranks, calibration=parameters["calibration"], objective="logits",
        distil_steps=parameters["distil_steps"], seed=parameters["seed"],
    )  # fmt: skip
    rows: list[dict[str, Any]] = [{"what": "curve", "width": width, **row} for row in curve]
    if max(parameters["shares"]) == 8:
        rows += energy_rows(source, width)
    return rows


def head_width(source: str) -> int:
    """The largest query-key rank that a head of a checkpoint has."""
    from transformers import AutoConfig

    from ...convert.checkpoint import own_ranks
    from ...files.checkpoints import readable

    with readable(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return max(own_ranks(config))


def energy_rows(source: str, width: int, examples: int = 16) -> list[dict[str, Any]]:
    """How many directions hold 90 % of the energy of the query-key weights, and of row-centred logits, a row a head."""
    from ...convert.checkpoint import token_limit
    from ...probe import measure_logits, measure_weights
    from ...probe.survey import load_checkpoint, load_tokenizer, read_texts, text_batches

    model, rows = load_checkpoint(source), []
    limit = token_limit(model, 128)
    batches = text_batches(load_tokenizer(source), read_texts(examples=examples)[0], model.config, limit)
    for of, table in (("weights", measure_weights(model)), ("logits", measure_logits(model, batches))):
        ranks = table[table.metric == "energy_rank"].groupby(["layer", "head"]).value.mean()
        rows += [
            {
                "what": "energy",
                "width": width,
                "of": of,
                "layer": int(layer),
                "head": int(head),
                "energy_rank": float(value),
            }
            for (layer, head), value in ranks.items()
        ]
    return rows


def own_checkpoint(folder: Path, parameters: Mapping[str, Any]) -> Path:
    """A small BERT of random weights, with a tokenizer of the words of the package's text."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from ...files.texts import package_text

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    cut = pre_tokenizers.BertPreTokenizer()
    found = sorted({word for text in package_text() for word, _ in cut.pre_tokenize_str(text.lower())})
    ids = {word: place for place, word in enumerate([*special, *found])}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), cut
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **dict(zip(names, special, strict=True)))
    torch.manual_seed(parameters["seed"])
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=parameters["hidden"], num_attention_heads=parameters["heads"],
        num_hidden_layers=parameters["layers"], intermediate_size=2 * parameters["hidden"], max_position_embeddings=64,
        initializer_range=SHARP,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def figures(table, scale: str):
    from ._figures_training import convert_figure

    return {"convert": convert_figure(table)}


def claims(table, scale: str) -> Sequence[Claim]:
    by_seed = table[table.what == "curve"].pivot_table(
        index="seed", columns=["way", "rank"], values="embedding_cosine"
    )
    curves = by_seed.mean()
    width = int(table["width"].iloc[0])
    ranks = sorted({int(rank) for _, rank in curves.index})
    cut = [rank for rank in ranks if rank < width]
    own = bool(table.checkpoint.iloc[0] == OWN)
    name = "random BERT" if own else Path(table.checkpoint.iloc[0]).name
    found = []
    if width in ranks:
        whole = min(curves[way, width] for way in WAYS[:2])
        found.append(
            Claim(
                f"{name}: at the old rank conversion changes nothing",
                "ours",
                "",
                f"{whole:.6f}",
                bool(whole > 1 - 1e-4),
                "Required: a cosine above 0.9999.",
            )
        )
    if cut:
        half = min(cut, key=lambda rank: abs(rank - width / 2))
        text = ", ".join(f"{way} {curves[way, half]:.3f}" for way in WAYS)
        found.append(
            every(
                judge(
                    f"cosine calibrated minus weights only (rank {rank})",
                    by_seed[WAYS[1], rank] - by_seed[WAYS[0], rank],
                    0,
                )
                for rank in cut
            ).claim(
                f"{name}: at rank {half} of {width}, calibration keeps more than the weights alone",
                "ours; A3 and KQ-SVD report the same of logits",
                "",
                text,
                "Cosine of mean-pooled embeddings to the original's on 40 paragraphs that calibration has not seen; judged at every "
                "rank below the old.",
                no="At some rank the weights alone keep more.",
            )
        )
        low = cut[0]
        repaired = by_seed[WAYS[2], low] - by_seed[WAYS[1], low]
        found.append(
            judge("cosine distilled minus calibrated", repaired, least=0).claim(
                f"{name}: distillation repairs part of what a cut to rank {low} breaks",
                "ours",
                "",
                f"calibrated {curves[WAYS[1], low]:.3f}, distilled {curves[WAYS[2], low]:.3f}",
                "Distilled on 40 paragraphs, judged on 40 others.",
                no="Distillation lowers it.",
            )
        )
    energy = table[table.what == "energy"]
    if len(energy):
        median = energy.groupby("of").energy_rank.median()
        ratio = median["weights"] / median["logits"]
        found.append(
            Claim(
                f"{name}: row-centred logits on text need far fewer directions for 90 % of their energy than the weights",
                "Lee, 2604.04384",
                "2 to 11 against 38 to 75 (of 64 or 128; GPT-2 to Mistral-7B)",
                f"median head {median['logits']:.1f} against {median['weights']:.1f} of {width}",
                None if own else bool(ratio > 1.5),
                "Random weights say nothing of trained ones: ask with --checkpoint."
                if own
                else "Published factor 5 to 25, of far larger models.",
            )
        )
    return found
