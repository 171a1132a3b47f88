"""A short training on the calibration texts, towards the hidden states of the original."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel


def distil(student, teacher, calibration, steps: int, *, seed: int = 0, progress: Callable[[int], Any] = lambda step: None) -> None:
    pass
