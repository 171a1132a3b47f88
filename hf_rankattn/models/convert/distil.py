"""A short training on the calibration texts, towards the hidden states of the original."""

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from transformers import PreTrainedModel

from ...probe.architectures import base_of
from ...probe.batches import Inputs, evaluating
from .calibration import calibration_batches, real_keys
from .variation import varied


WARMUP = 10


def endless(base: PreTrainedModel, calibration: Inputs, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The calibration again and again, about every other batch of it as other texts made of the same words."""
    generator = torch.Generator().manual_seed(seed)
    for _ in count():
        for batch in calibration_batches(base, calibration):
            ids = batch.get("input_ids")
            if ids is not None and torch.rand((), generator=generator) < 0.5:
                real = real_keys(batch, False, tuple(ids.shape))
                new = varied(ids.cpu(), real, base.config.vocab_size, generator)
                batch = {**batch, "input_ids": new.to(ids.device)}
            yield batch


def state_loss(student: torch.Tensor, teacher: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The squared error of hidden states (batch, n, d) on real tokens (batch, n), as a share of their energy."""
    student, teacher = student[real].float(), teacher[real].float()
    return (student - teacher).square().sum() / teacher.square().sum()


def is_query_or_key(name: str) -> bool:
    """Whether a parameter makes queries or keys, by its name in the three families."""
    module, _, leaf = name.rpartition(".")
    relative = ("q", "k", "r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")
    return module.endswith((".query", ".key")) or (module.endswith("rel_attn") and leaf in relative)


def distil(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    calibration: Inputs,
    steps: int,
    *,
    seed: int = 0,
    learning_rate: float = 1e-3,
    progress: Callable[[int], Any] = lambda step: None,
) -> None:
    """Train the queries and keys of `student` for `steps` batches, in place, towards the states of `teacher`.

    The loss is the error of the hidden states after every layer, so that each layer is told what the next one expects.
    Only queries and keys learn: they are what was cut, and the rest of the model fits other texts than these few. Of the
    texts themselves there are few, so half of the batches are variations of them, drawn with `seed`.
    """
    learner, original = base_of(student), base_of(teacher)
    weights = [weight for name, weight in student.named_parameters() if is_query_or_key(name)]
    trainable = {weight: weight.requires_grad for weight in student.parameters()}
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    batches = endless(original, calibration, seed)
    with evaluating(teacher), evaluating(student):
        try:
            for weight in trainable:
                weight.requires_grad_(any(weight is own for own in weights))
            for step in range(steps):
                batch = next(batches)
                targets = original(**batch, output_hidden_states=True).hidden_states
                with torch.enable_grad():
                    states = learner(**batch, output_hidden_states=True).hidden_states
                    real = real_keys(batch, False, tuple(targets[0].shape[:2])).to(targets[0].device)
                    loss = sum(
                        state_loss(ours, theirs, real) for ours, theirs in zip(states[1:], targets[1:], strict=True)
                    )
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[union-attr]
                optimizer.step()
                schedule.step()
                progress(step + 1)
        finally:
            for weight, flag in trainable.items():
                weight.requires_grad_(flag)
                weight.grad = None
