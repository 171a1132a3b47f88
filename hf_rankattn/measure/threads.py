"""One thread for batches of small decompositions: on shared CPUs two are 10 to 40 times slower."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(tensor: torch.Tensor) -> Iterator[None]:
    """Run on one thread where the tensor lives on the CPU; the number of threads is restored afterwards."""
    threads = torch.get_num_threads()
    if tensor.device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
