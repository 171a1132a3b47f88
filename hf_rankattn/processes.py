"""Join the processes that torchrun started, and refuse to run with fewer than were promised."""

import os


def join_processes(expected: int | None = None) -> bool:
    """Set up the group of processes if there is one; returns whether this is the first of them.

    Args:
        expected: How many there should be. Some launchers run a single process in silence where several were asked for.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if expected is not None and expected != world:
        raise ValueError(
            f"{expected} processes were promised and {world} are running: start with "
            f"torchrun --nproc_per_node {expected} -m hf_rankattn ..."
        )
    if world == 1:
        return True
    from accelerate import PartialState

    return PartialState().is_main_process


def leave_processes() -> None:
    """Wait for the others and take the group down: who leaves first would break the connection of who is last."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
