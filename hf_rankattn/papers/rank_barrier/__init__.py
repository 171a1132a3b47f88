"""Experiments on "On the Limitation and Redundancy of Transformers: A Rank Perspective"."""

from ..sweep.judging import Claim


SOURCE = "A Rank Perspective"


def published(claim: str, where: str, number: str, measured: str, holds: object, why: str) -> Claim:
    """A claim of the paper: where in the paper it is, and the number there as text, empty if there is none."""
    return Claim(claim, f"{SOURCE}, {where}", number, measured, holds, why)
