"""The result of a conversion in numbers and in words: for the command, its JSON and the card."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from . import LayerReport
from .damage import describe


@dataclass
class Outcome:
    """The result of a conversion: layer by layer, in numbers, and its folder. A number that was not measured is None."""

    layers: list[LayerReport]
    parameters_before: int
    parameters_after: int
    weight_bytes_before: int
    weight_bytes_after: int
    base_model: str | None
    load: str
    folder: str
    objective: str = "logits"
    calibrated_on: str | None = None
    distilled_on: str | None = None
    damage: dict[str, float] = field(default_factory=dict)
    judged_on: str | None = None
    can_weigh: bool = False  # whether the family can be converted with objective="attention"
    not_judged: str = "no tokenizer of the checkpoint can read texts"
    judged_texts_seen: int = 0  # the number of judging texts that were used in calibration as well
    latency: dict[str, Any] | None = None

    @property
    def parameters_saved(self) -> int:
        return sum(layer.parameters_saved for layer in self.layers)

    @property
    def share_saved(self) -> float:
        """The share of the model's parameters that the conversion saved."""
        return 1 - self.parameters_after / self.parameters_before

    def as_dict(self) -> dict[str, Any]:
        sums = {"parameters_saved": self.parameters_saved, "share_saved": self.share_saved}
        return {**asdict(self), **sums, "layers": [layer.as_dict() for layer in self.layers]}

    def lines(self) -> list[str]:
        """The sentences that the command prints below its tables."""
        lines = [f"{describe(name)}: {value:.3f}" for name, value in self.damage.items()]
        lines.append(self.judged_line())
        if self.calibrated_on is None:
            lines.append("From the weights alone. Calibration (--calibration) loses far less.")
        else:
            own_texts = " Text of another kind loses more: calibrate on yours with --calibration FILE."
            packaged = own_texts if self.calibrated_on.endswith("of the package") else ""
            lines.append(f"Calibrated on {self.calibrated_on}, objective {self.objective}.{packaged}")
        if self.distilled_on is not None:
            lines.append(f"Distilled on {self.distilled_on}.")
        # these options need texts
        weighted = " --objective attention," if self.can_weigh and self.objective != "attention" else ""
        distilled = " --distil-text FILE --distil-steps 600," if self.distilled_on is None else ""
        of_texts = self.calibrated_on is not None and " texts of " in self.calibrated_on
        with_texts = f"{weighted}{distilled}" if of_texts else weighted if self.calibrated_on else ""
        lines.append(f"To lose less: larger widths,{with_texts} or more training.")
        if self.base_model is None:
            lines.append("The card names no base model: give its Hub repository with --base-model.")
        return [*lines, f"Written to {self.folder}.", f"To load it: {self.load}"]

    def judged_line(self) -> str:
        """The texts that the damage was measured on, with a warning if they flatter the result."""
        if self.judged_on is None:
            missing = "damage was" if self.latency else "damage and the latency were"
            return f"The {missing} not measured: {self.not_judged}."
        line = f"Judged on {self.judged_on}."
        if self.judged_texts_seen:
            line += f" {self.judged_texts_seen} of these were used in calibration, which flatters the result."
        own_texts = self.calibrated_on and not self.calibrated_on.endswith("of the package")
        if own_texts and "hf_rankattn" in self.judged_on:
            line += " They may be of another kind than yours: judge on texts of your own with --dataset."
        return line


@dataclass
class Judged:
    """The texts that a conversion is judged on, their labels if they have some, and their source."""

    texts: Sequence[Any]
    labels: list[Any] | None
    source: str
    dataset: str
    split: str
    media: list[Any] = field(default_factory=list)  # batches of images or sounds instead of texts


def changed_widths(layers: Sequence[LayerReport]) -> list[tuple[str, list[str]]]:
    """The widths before and after, layer by layer, of each kind that changed somewhere."""
    kinds = {
        "query-key ranks": [(layer.old_rank, layer.rank) for layer in layers],
        "value widths": [(layer.old_v_head_dim, layer.v_head_dim) for layer in layers],
    }
    changed = {kind: pairs for kind, pairs in kinds.items() if any(old != new for old, new in pairs)} or kinds
    return [(kind, [f"{old} to {new}" for old, new in pairs]) for kind, pairs in changed.items()]


def story(outcome: Outcome, source: str, distil_steps: int, seed: int) -> str:
    """How a model was made and how much smaller it is, for its card."""
    changes = [f"{kind}, layer by layer: {', '.join(steps)}" for kind, steps in changed_widths(outcome.layers)]
    lines = [f"Converted by `rankattn convert` (seed {seed}); {'; '.join(changes)}."]
    if outcome.base_model is None:
        lines.append(f"The source was a local folder named `{Path(source).resolve().name}`.")
    if outcome.calibrated_on is None:
        lines.append("From the weights alone: truncated singular values of the forms of each head, with biases.")
    else:
        weighted = outcome.objective == "attention"
        what = "logits, weighted by the attention they meet," if weighted else "row-centred logits"
        if any(layer.rank < layer.old_rank for layer in outcome.layers):
            lines.append(
                f"Queries and keys were fitted by alternating least squares, layer by layer, to the {what} of "
                f"{outcome.calibrated_on}. The fit can be a local minimum of the error."
            )
        if any(layer.v_head_dim < layer.old_v_head_dim for layer in outcome.layers):
            lines.append(f"Values were fitted in closed form to what the heads write on {outcome.calibrated_on}.")
        kind = "Text" if " texts of " in outcome.calibrated_on else "Inputs"
        lines.append(f"{kind} of another kind {'loses' if kind == 'Text' else 'lose'} more.")
    if outcome.judged_texts_seen:
        lines.append(f"{outcome.judged_texts_seen} of the inputs that judge it were used in calibration as well.")
    if distil_steps:
        lines.append(
            f"Then {distil_steps} steps of distillation towards the hidden states of the original, on {outcome.distilled_on}."
        )
    table = ["", "| | before | after |", "|---|---|---|"]
    table += [f"| {' | '.join(row)} |" for row in size_rows(outcome)]
    return " ".join(lines) + "\n" + "\n".join(table)


def size_rows(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Parameters, weight files and latency: what, before, after."""
    saved = outcome.share_saved
    share = f"{abs(saved):.1%} {'fewer' if saved >= 0 else 'more'}"
    before, after = (f"{size / 1e6:,.1f} MB" for size in (outcome.weight_bytes_before, outcome.weight_bytes_after))
    rows = [
        ("parameters", f"{outcome.parameters_before:,}", f"{outcome.parameters_after:,} ({share})"),
        ("weight files", before, after),
    ]
    if outcome.latency:
        times = outcome.latency
        what = f"latency, shortest of {times['passes']} passes ({times['batch']})"
        rows.append((what, f"{times['before_ms']:.1f} ms", f"{times['after_ms']:.1f} ms (ratio {times['ratio']:.2f})"))
    return rows


def results_of(outcome: Outcome, hub_name: str, judged: Judged | None) -> list[EvalResult]:
    """The rows of the card: the damage, and the shares of energy kept, their means over layers."""
    rows = []
    if judged is not None:
        of: dict[str, Any] = {"task_type": hub_name, "dataset_name": judged.source}
        of |= {"dataset_type": judged.dataset, "dataset_split": judged.split}
        for metric, value in outcome.damage.items():
            measured = {**of, "metric_type": metric, "metric_name": describe(metric)}
            rows.append(EvalResult(**measured, metric_value=round(value, 4)))
    kept = {"energy_kept": ("logits", "query-key logits", "logit energy", [at.energy_kept for at in outcome.layers])}
    if any(at.v_head_dim < at.old_v_head_dim for at in outcome.layers):
        shares = [at.value_energy_kept for at in outcome.layers]
        kept["value_energy_kept"] = ("values", "mixed values", "the energy of what heads write", shares)
    for metric, (data, source, what, shares) in kept.items():
        rows.append(
            EvalResult(
                task_type=hub_name,
                dataset_type=data,
                dataset_name=f"{source}, as the conversion met them",
                metric_type=metric,
                metric_name=f"share of {what} kept, mean over layers",
                metric_value=round(sum(shares) / len(shares), 4),
            )
        )
    return rows
