"""Short training of what a conversion cut, towards the hidden states of the original."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from ..families.architectures import base_of
from ..files.running import Inputs, evaluating, training_only
from .calibration import calibration_batches, real_tokens, same_draws


WARMUP = 10


def endless(base: PreTrainedModel, batches: Inputs, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The batches without end. Those of a list come in a new order on each pass, which `seed` determines."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(batches, Iterator):
        yield from calibration_batches(base, batches)
        raise ValueError(
            "the iterator of batches ended before `distil_steps`: give more batches, a list or a DataLoader."
        )
    while True:
        if isinstance(batches, Sequence):
            order = torch.randperm(len(batches), generator=generator).tolist()
            yield from calibration_batches(base, [batches[place] for place in order])
        else:
            yield from calibration_batches(base, batches)


def state_loss(student: torch.Tensor, teacher: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The error of hidden states (batch, n, d) on real tokens (batch, n), plus that of the mean state of each text.

    Both are squared errors as a share of the energy of the teacher. The second term is small for errors that cancel over the
    tokens of a text, and large for those that its embedding keeps.
    """
    student, teacher = (states.float() * real[..., None] for states in (student, teacher))
    tokens = (student - teacher).square().sum() / teacher.square().sum()
    count = real.sum(1, keepdim=True).clamp(min=1)
    student, teacher = student.sum(1) / count, teacher.sum(1) / count
    return tokens + (student - teacher).square().sum() / teacher.square().sum()


def layer_states(base: PreTrainedModel, batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The states (batch, n, d) after every layer, of an encoder and then of its decoder, each with its real tokens (batch, n)."""
    output = base(**batch, output_hidden_states=True)
    stacks = {"hidden_states": "attention_mask"}
    if "encoder_hidden_states" in output:
        stacks = {"encoder_hidden_states": "attention_mask", "decoder_hidden_states": "decoder_attention_mask"}
    found = []
    for name, mask in stacks.items():
        _, *states = output[name]
        real = real_tokens(batch, tuple(states[0].shape[:2]), mask).to(states[0].device)
        found += [(layer, real) for layer in states]
    return found


def optimizer_and_schedule(weights: list[Any], steps: int, learning_rate: float) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW for weights or groups of them, with a short warm-up and then a cosine to zero."""
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return optimizer, LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2
    )


def of_new_width(student: PreTrainedModel, teacher: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters whose shape is not that of the original: those that read or write queries, keys or values of a new width."""
    shapes = {name: weight.shape for name, weight in teacher.named_parameters()}
    return {name: weight for name, weight in student.named_parameters() if weight.shape != shapes.get(name)}


def distil(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batches: Inputs,
    steps: int,
    *,
    seed: int = 0,
    learning_rate: float = 1e-3,
    progress: Callable[[int], Any] = lambda step: None,
) -> None:
    """Train what was cut in `student` for `steps` batches, in place, towards the states of `teacher`.

    The loss is the error of the hidden states after every layer, of tokens and of texts. Only parameters of a new width are trained: queries and
    keys, and values with their output projection where values were cut. Weights of less than 32 bits are trained in float32
    and cast back: in float16 the updates overflow.
    """
    own = of_new_width(student, teacher)
    if not own:
        return
    if any(weight.dtype.itemsize < 4 for weight in own.values()):
        wide = copy.deepcopy(student).float()
        distil(wide, teacher, batches, steps, seed=seed, learning_rate=learning_rate, progress=progress)
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(wide.get_parameter(name))
        return
    learner, original = base_of(student), base_of(teacher)
    optimizer, schedule = optimizer_and_schedule(list(own.values()), steps, learning_rate)
    stream = endless(original, batches, seed)
    with evaluating(teacher), evaluating(student), training_only(own.values(), student):
        for step in range(steps):
            batch = next(stream)
            with same_draws():
                targets = layer_states(original, batch)
            with torch.enable_grad():
                floats = {name: x.to(learner.dtype) for name, x in batch.items() if x.is_floating_point()}
                with same_draws():
                    states = layer_states(learner, {**batch, **floats})
                triples = zip(states, targets, strict=True)
                loss = sum(state_loss(ours, theirs, real) for (ours, _), (theirs, real) in triples)
                if not bool(torch.isfinite(loss)):  # type: ignore[arg-type]
                    raise ValueError(
                        f"the loss of distillation is not finite at step {step + 1}: on the batches of texts the states of "
                        "the model are NaN, Inf or all zero. Use float32 or bfloat16, or leave `distil_steps` out."
                    )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[union-attr]
            optimizer.step()
            schedule.step()
            progress(step + 1)
