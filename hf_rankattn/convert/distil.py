"""Short training on the calibration texts and variations of them, towards the hidden states of the original."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ..families.architectures import base_of
from ..files.running import Inputs, evaluating
from .calibration import calibration_batches, real_keys


WARMUP = 10
# at most this share of a text is replaced, so that most of every context stays real
REPLACED = 0.3
# flattens the head of the distribution of replacements: without it, one word in ten would be the commonest
FLAT = 20


def varied(
    ids: torch.Tensor, real: torch.Tensor, vocabulary: int, generator: torch.Generator, ends: tuple[int, int] = (1, 2)
) -> torch.Tensor:
    """Texts (batch, n) rotated by a random number of tokens, with some `real` tokens drawn from the vocabulary.

    The first and last tokens of a text, `ends` of them, stay in place, as special tokens are there.

    >>> ids = torch.arange(10, 20)[None]
    >>> new = varied(ids, ids > 0, 100, torch.Generator().manual_seed(0))
    >>> new.shape, new[0, 0].item(), new[0, -2:].tolist(), bool((new != ids).any())
    (torch.Size([1, 10]), 10, [18, 19], True)
    """
    new = ids.clone()
    if not bool(real.any()):
        return new
    # The vocabularies of all three families list their words from frequent to rare, after special tokens and, in BERT's,
    # single characters. A quarter of the tokens of a text are marks and endings, with ids below its common words.
    lowest = int(ids[real].sort().values[int(real.sum()) // 4])
    weights = 1 / (torch.arange(max(vocabulary - lowest, 1), dtype=torch.float32) + FLAT)
    for text, mask in zip(new, real, strict=True):
        places = mask.nonzero()[:, 0]
        places = places[ends[0] : len(places) - ends[1]]
        if len(places) < 2:
            continue
        words = text[places].roll(int(torch.randint(len(places), (), generator=generator)))
        share = REPLACED * torch.rand((), generator=generator, dtype=torch.float32)
        replaced = torch.rand(len(words), generator=generator, dtype=torch.float32) < share
        drawn = torch.multinomial(weights, len(words), replacement=True, generator=generator) + lowest
        text[places] = torch.where(replaced, drawn.to(words.dtype), words)
    return new


def endless(base: PreTrainedModel, calibration: Inputs, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The calibration batches without end; about half of them are varied, as the calibration has few texts."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for batch in calibration_batches(base, calibration):
            ids = batch.get("input_ids")
            if ids is not None and torch.rand((), generator=generator, dtype=torch.float32) < 0.5:
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

    The loss is the error of the hidden states after every layer. Only queries and keys are trained: the rest of the model
    would overfit to the few texts. Weights of less than 32 bits are trained in float32 and cast back: in float16 the
    updates overflow.
    """
    own = {name: weight for name, weight in student.named_parameters() if is_query_or_key(name)}
    if any(weight.dtype.itemsize < 4 for weight in own.values()):
        wide = copy.deepcopy(student).float()
        distil(wide, teacher, calibration, steps, seed=seed, learning_rate=learning_rate, progress=progress)
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(wide.get_parameter(name))
        return
    learner, original = base_of(student), base_of(teacher)
    weights = list(own.values())
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
                    floats = {name: x.to(learner.dtype) for name, x in batch.items() if x.is_floating_point()}
                    states = learner(**{**batch, **floats}, output_hidden_states=True).hidden_states
                    real = real_keys(batch, False, tuple(targets[0].shape[:2])).to(targets[0].device)
                    pairs = zip(states[1:], targets[1:], strict=True)
                    loss = sum(state_loss(ours, theirs, real) for ours, theirs in pairs)
                    if not bool(torch.isfinite(loss)):  # type: ignore[arg-type]
                        raise ValueError(
                            f"the loss of distillation is not finite at step {step + 1}: on the calibration batches the "
                            "states of the model are NaN, Inf or all zero. Use float32 or bfloat16, or leave `distil_steps` out."
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
