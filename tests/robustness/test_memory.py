"""A thousand measurements in one process take the memory of a hundred."""

import gc
from pathlib import Path

import pytest
import torch
from testing_common import small_bert
from testing_probe import hook_counts

from hf_rankattn import ablate, measure_attention, measure_collapse, path_lengths


CALLS, WARM = 1000, 100
MARGIN = 8 * 2**20  # bytes; a leaked batch of 24 x 4 x 30 floats a call would be ten megabytes


def resident() -> int:
    """Bytes in memory, by the kernel's count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel gives no VmRSS")


def live_tensors() -> int:
    return sum(1 for thing in gc.get_objects() if isinstance(thing, torch.Tensor))


def ablated(model, batch):
    with ablate(model, mlp=True, attention_skip=True):
        model(**batch)
    with pytest.raises(ZeroDivisionError), ablate(model, norm=True):
        raise ZeroDivisionError


MEASUREMENTS = {
    "measure_attention": lambda model, batch: measure_attention(model, batch, "full"),
    "measure_collapse": lambda model, batch: measure_collapse(model, batch),
    "ablate": ablated,
    "path_lengths": lambda model, batch: path_lengths(model, batch),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the resident size is read from /proc")
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_memory_is_bounded(name):
    model = small_bert(layers=2, heads=2)
    batch = {"input_ids": torch.randint(5, 40, (4, 10))}
    with torch.no_grad():
        for call in range(1, CALLS + 1):
            MEASUREMENTS[name](model, batch)
            if call == WARM:
                gc.collect()
                warm = resident(), live_tensors(), sum(hook_counts(model))
    gc.collect()
    end = resident(), live_tensors(), sum(hook_counts(model))
    print(name, "bytes, tensors, hooks:", warm, "->", end)
    assert end[0] - warm[0] < MARGIN
    assert end[1] <= warm[1]
    assert end[2] == warm[2] == 0
