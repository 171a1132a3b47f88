"""Checks of arguments that several folders share."""

import operator
from typing import Any


def whole(name: str, value: Any, least: int, reason: str = "", most: int | None = None) -> int:
    """`value` as an int from `least` to `most`, or a `ValueError` with its name and, if given, the reason of the lower limit."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"`{name}` must be a whole number, got {value!r}.") from None
    if number < least:
        raise ValueError(f"`{name}` must be at least {least}{reason and ': ' + reason}, got {number}.")
    if most is not None and number > most:
        raise ValueError(f"`{name}` must be at most {most}, got {number}.")
    return number
