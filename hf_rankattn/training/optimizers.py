"""How the point tasks are trained: the optimizer and the schedule of the published runs, and a faster step for temperatures."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_schedule_with_warmup


def point_optimizer(model: nn.Module, learning_rate: float, temperature_lr_factor: float = 3.0) -> torch.optim.AdamW:
    """AdamW with betas (0.9, 0.95) and no weight decay, in which log-temperatures learn faster than the rest.

    The logits of a trained point model are some hundred times those of a fresh one. With `qk_norm` that growth is left to
    one number per head, which at the learning rate of the weights would be what all others wait for. The parameters called
    `log_temperature` form the second group if there are any, with `temperature_lr_factor` times the `learning_rate`.

    >>> from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression
    >>> model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=8, num_attention_heads=2, qk_norm=True))
    >>> [(len(group["params"]), round(group["lr"], 6)) for group in point_optimizer(model, 0.01).param_groups]
    [(14, 0.01), (1, 0.03)]
    """
    for name, value in (("learning_rate", learning_rate), ("temperature_lr_factor", temperature_lr_factor)):
        if not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be a positive finite number, got {value}.")
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = []
    for is_temperature, rate in ((False, learning_rate), (True, learning_rate * temperature_lr_factor)):
        own = [weight for name, weight in trained if (name.split(".")[-1] == "log_temperature") == is_temperature]
        groups.append({"params": own, "lr": rate})
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), weight_decay=0.0)


def warmup_cosine(optimizer: torch.optim.Optimizer, steps: int, warmup: float = 0.05) -> LambdaLR:
    """Linear warm-up over a share `warmup` of the steps, then a cosine to zero, stepped after every batch.

    As in the published runs the first step of a warm-up has rate zero; those stepped once in 100 batches.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> schedule, rates = warmup_cosine(optimizer, steps=40), []
    >>> for _ in range(41):
    ...     rates.append(schedule.get_last_lr()[0])
    ...     optimizer.step()
    ...     schedule.step()
    >>> [round(rates[step], 3) for step in (0, 1, 2, 21, 40)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    if not 0 <= warmup < 1:
        raise ValueError(f"`warmup` is a share of the steps, at least 0 and below 1; got {warmup}.")
    # whole steps, rounded down, but not because 0.29 * 100 is 28.999999999999996
    warmup_steps = int(round(warmup * steps, 6))
    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=warmup_steps, num_training_steps=steps)
