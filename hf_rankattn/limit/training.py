"""Short training of the projections of a limit, towards the outputs of the whole model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import kl_div

from ..convert.distil import endless, optimizer_and_schedule, state_loss
from ..files.running import Inputs, evaluating, training_only
from ..probe.batches import real_tokens


def output_of(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The logits of a model with a vocabulary (True), or its last hidden states."""
    output = model(**batch, return_dict=True)
    logits = output.get("logits")
    if logits is not None and logits.ndim == 3:
        return logits, True
    states = output.get("last_hidden_state")
    if states is None or states.ndim != 3:
        raise ValueError(
            f"{type(model).__name__} returns neither logits of tokens nor last hidden states, towards which a limit is trained: give the "
            "model below its head."
        )
    return states, False


def loss_between(ours: torch.Tensor, theirs: torch.Tensor, logits: bool, real: torch.Tensor) -> torch.Tensor:
    """The mean divergence of the distributions of tokens, or the squared error of states as a share of their energy."""
    if not logits:
        return state_loss(ours, theirs, real)
    ours, theirs = (scores[real].float().log_softmax(-1) for scores in (ours, theirs))
    return kl_div(ours, theirs, log_target=True, reduction="batchmean")


@torch.inference_mode(False)
def distil(
    limit: Any, batches: Inputs, steps: int, learning_rate: float, seed: int, progress: Callable[[int, float], Any]
) -> None:
    """Train the projections of `limit` for `steps` batches, in place; the weights of the model do not change."""
    model, weights = limit.model, list(limit.parameters())
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    if not weights:
        raise ValueError("every layer keeps its full width, so there is nothing to train.")
    if limit.tower is not None or model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has several lists of layers, and a limit of one of them is not trained: limit the part of the model that "
            "runs alone, such as its text model."
        )
    if limit.attached is None:
        raise ValueError("the limit was removed from its model: call attach() before the projections are trained.")
    if any(weight.dtype.itemsize < 4 for weight in weights):
        raise ValueError("the projections are trained in float32: call limit.float() first.")
    groups = [
        {"params": [weight], "lr": learning_rate * float(weight.detach().square().mean().sqrt())} for weight in weights
    ]
    optimizer, schedule = optimizer_and_schedule(groups, steps, learning_rate)
    stream = endless(model, batches, seed)
    before = [weight.detach().clone() for weight in weights]
    with evaluating(model), training_only(weights, model):
        try:
            for step in range(steps):
                batch = next(stream)
                real = real_tokens(model, batch)
                with limit.paused():
                    target, logits = output_of(model, batch)
                real = (
                    torch.ones(target.shape[:2], dtype=torch.bool, device=target.device)
                    if real is None
                    else real.bool()
                )
                with torch.enable_grad():
                    ours, _ = output_of(model, batch)
                    loss = loss_between(ours, target, logits, real)
                    if not bool(torch.isfinite(loss)):
                        raise ValueError(
                            f"the loss is not finite at step {step + 1}: use float32, or a smaller `learning_rate`."
                        )
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
                schedule.step()
                progress(step + 1, float(loss))
        except BaseException:  # nothing half-trained is left
            with torch.no_grad():
                for weight, old in zip(weights, before, strict=True):
                    weight.copy_(old)
            raise
