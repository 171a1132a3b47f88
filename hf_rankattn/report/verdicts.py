"""The verdicts on claims, and their counts in words."""

from collections.abc import Iterable


VERDICTS = ("yes", "no", "undecided", "not testable")
NOT_JUDGED = "not judged at this scale"


def verdict_counts(verdicts: Iterable[str]) -> dict[str, int]:
    """How often each of the four verdicts occurs, and how many claims were not judged if there are some.

    >>> verdict_counts(["yes", "no", "yes"])
    {'yes': 2, 'no': 1, 'undecided': 0, 'not testable': 0}
    """
    found = list(verdicts)
    named = (*VERDICTS, NOT_JUDGED) if NOT_JUDGED in found else VERDICTS
    return {verdict: found.count(verdict) for verdict in named}


def count_verdicts(verdicts: Iterable[str]) -> str:
    """The same in words.

    >>> count_verdicts(["yes", "no", "yes", "undecided"])
    '4 claims: 2 yes, 1 no, 1 undecided, 0 not testable'
    >>> count_verdicts(["not judged at this scale"] * 3)
    '3 claims, not judged at this scale'
    """
    found = list(verdicts)
    many = f"{len(found)} claim{'' if len(found) == 1 else 's'}"
    if found and set(found) == {NOT_JUDGED}:
        return f"{many}, {NOT_JUDGED}"
    return f"{many}: " + ", ".join(f"{count} {verdict}" for verdict, count in verdict_counts(found).items())
