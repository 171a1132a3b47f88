"""Claims and their verdicts: yes, no, undecided or not testable."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ...report.verdicts import NOT_JUDGED
from .tolerances import CONFIDENCE


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, or of ours, beside what was measured.

    Args:
        claim: One plain sentence.
        source: A theorem, figure or section of a paper, or "ours".
        published: The published number, as text, or an empty text.
        measured: Our number, as text.
        holds: Whether the claim holds here; None if it is undecided or cannot be tested.
        why: The reason of the verdict.
        interval: The confidence interval over seeds on which the verdict is based, if it is based on one.
        judged: False for a run that is too short for verdicts.
    """

    claim: str
    source: str
    published: str
    measured: str
    holds: Any
    why: str = ""
    interval: tuple[float, float] | None = None
    judged: bool = True

    def __post_init__(self) -> None:
        if self.holds is not None:
            object.__setattr__(self, "holds", bool(self.holds))  # comparisons of tables are of numpy's own type

    @property
    def verdict(self) -> str:
        if not self.judged:
            return NOT_JUDGED
        if self.holds is None:
            return "not testable" if self.interval is None else "undecided"
        return "yes" if self.holds else "no"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def unpublished(claim: str, measured: str, holds: Any, why: str, source: str = "ours") -> Claim:
    """A claim without a published number, by default of this package."""
    return Claim(claim, source, "", measured, holds, why)


@dataclass(frozen=True)
class Judgement:
    """The result of a requirement on the values of several seeds; [`Judgement.claim`] makes a claim of it."""

    holds: bool | None
    rule: str
    interval: tuple[float, float] | None = None

    def claim(self, claim: str, source: str, published: str, measured: str, why: str = "", *, no: str = "") -> Claim:
        """The claim with this verdict. `why` stands with every verdict, `no` only with a no."""
        reasons = " ".join(filter(None, (why, no if self.holds is False else "", self.rule)))
        return Claim(claim, source, published, measured, self.holds, reasons, self.interval)

    def unpublished(self, claim: str, source: str, measured: str, why: str = "", *, no: str = "") -> Claim:
        """The same for a claim without a published number."""
        return self.claim(claim, source, "", measured, why, no=no)


def not_testable(why: str) -> Judgement:
    return Judgement(None, why)


def mean_interval(values: Iterable[float]) -> tuple[float, float]:
    """Student's confidence interval of the mean of independent values, one for each seed.

    >>> [round(end, 2) for end in mean_interval([1.0, 2.0, 3.0])]
    [-0.48, 4.48]
    """
    from scipy.stats import t

    found = [float(value) for value in values]
    mean, count = math.fsum(found) / len(found), len(found)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in found) / (count - 1) / count)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return mean - reach, mean + reach


def judge(
    what: str, values: Iterable[float], least: float = -math.inf, most: float = math.inf, *, ratio: bool = False
) -> Judgement:
    """Whether the mean of a quantity over seeds is at least `least` and at most `most`.

    The verdict is yes if the whole confidence interval of the mean is within these bounds, no if all of it is outside, and
    undecided if it contains a bound. One seed has no interval, so nothing can be tested.

    Args:
        what: The name of the quantity in the explanation of the verdict.
        values: One for each seed, paired where two settings are compared.
        least, most: Fixed before the run; most of them are in tolerances.py.
        ratio: Whether the values are ratios; then the geometric mean is judged.
    """
    found = [float(value) for value in values]
    if len(found) < 2:
        return not_testable("One seed says nothing about noise: run it with --seeds 3 or more.")
    if not all(math.isfinite(value) and (value > 0 or not ratio) for value in found):
        return not_testable(f"Of {len(found)} seeds some did not end in a number.")
    low, high = map(math.exp, mean_interval(map(math.log, found))) if ratio else mean_interval(found)
    holds = True if least <= low and high <= most else False if high < least or low > most else None
    bounds = [f"at {word} {end:.3g}" for word, end in (("least", least), ("most", most)) if math.isfinite(end)]
    rule = (
        f"{what[:1].upper()}{what[1:]}: {low:.3g} to {high:.3g} ({CONFIDENCE:.0%} interval, {len(found)} seeds), required "
        f"{' and '.join(bounds)}."
    )
    return Judgement(holds, rule, (low, high))


def every(judgements: Iterable[Judgement]) -> Judgement:
    """All requirements of one claim: a single no is a no, then not testable counts before undecided before yes."""
    found = list(judgements)

    def certainty(one: Judgement) -> int:
        return 0 if one.holds is False else 3 if one.holds else 1 if one.interval is None else 2

    least = min(map(certainty, found))
    chosen = [one for one in found if certainty(one) == least]
    return Judgement(chosen[0].holds, " ".join(one.rule for one in chosen), chosen[0].interval)
