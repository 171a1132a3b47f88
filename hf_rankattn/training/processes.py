"""Join the processes that torchrun started, and refuse to run with fewer than are expected."""

import os
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from accelerate import PartialState


def join_processes(expected: int | None = None) -> bool:
    """Set up the group of processes if there is one; returns whether this is the first of them.

    `expected` is how many there should be: some launchers run a single process in silence where several were asked for.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_processes(world, expected, "-m hf_rankattn ...")
    return True if world == 1 else process_state().is_main_process


def process_state() -> "PartialState":
    """The group of processes as Accelerate sees it, made if need be.

    Where there is no GPU, Accelerate joins processes only if it is told to use the CPU: `PartialState()` alone, and `Trainer`
    without `use_cpu=True`, would let each of them run for itself in silence.
    """
    from accelerate import PartialState

    state = PartialState(cpu=on_cpu())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise ValueError(f"{started} processes were started, and only {state.num_processes} of them are connected.")
    return state


def on_cpu() -> bool:
    """Whether there is nothing but the CPU to train on."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # processes on Apple's GPUs cannot talk to each other
    return device is None or (device.type == "mps" and int(os.environ.get("WORLD_SIZE", "1")) > 1)


def check_processes(world: int, expected: int | None, command: str) -> None:
    """Raise a ValueError unless as many processes are running as are expected, if a number is given."""
    if expected is not None and expected != world:
        raise ValueError(
            f"{expected} processes are expected and {world} are running: start with "
            f"torchrun --nproc_per_node {expected} {command}"
        )


def leave_processes() -> None:
    """Wait for the others and take the group down: who leaves first would break the connection of who is last."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
