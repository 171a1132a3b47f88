"""Who runs the cells: processes on this machine, or the jobs of a cluster."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from .grid import Cell


# what is called for every cell when it is over: the cell, and what went wrong with it, if anything did
Report = Callable[[Cell, BaseException | None], Any]
ENGINES = ("local", "slurm")
SLURM_OPTIONS = {
    "cluster": "slurm", "partition": None, "minutes": 240, "requeues": 20, "parallel": 64, "cells_per_job": 1, "cpus": 1,
}  # fmt: skip
POLL_SECONDS = 1.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class CellFailed(RuntimeError):
    """What a cell raised in another process, as text: not every exception can be sent from there."""


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Environment for processes that are started inside: the libraries read it when they are loaded."""
    before = {name: os.environ.get(name) for name in (*THREAD_VARIABLES, "TOKENIZERS_PARALLELISM")}
    os.environ |= dict.fromkeys(THREAD_VARIABLES, "1") | {"TOKENIZERS_PARALLELISM": "false"}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def leave_with_parent() -> None:
    """End this process when the one that started it is gone: after a kill, workers would wait for cells for ever."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_local(run: Callable[[Cell], None], cells: Sequence[Cell], report: Report, workers: int | None = None) -> None:
    """Run cells in processes of one thread each, as many as there are cores, the dear ones first.

    With no workers they are run in this process, one after the other: slower, and easier to debug.
    """
    waiting = sorted(cells, key=lambda cell: -cell.cost)
    if workers == 0:
        for cell in waiting:
            run(cell)
            report(cell, None)
        return
    workers = min(workers or cores(), len(waiting))
    context = get_context("spawn")  # a forked process would share the threads of torch, and hang
    with (
        one_thread_each(),
        ProcessPoolExecutor(workers, mp_context=context, initializer=leave_with_parent) as pool,
    ):
        running: dict[Future, Cell] = {pool.submit(run, cell): cell for cell in waiting}
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise ValueError(
                            "a worker was killed, by hand or for want of memory. Finished cells are kept: the same "
                            "command goes on from there; --workers 1 needs the least memory."
                        ) from error
                    report(running.pop(future), error)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class CellJob:
    """Some cells as one job of submitit. When its time is up, the job is queued again and goes on where it was."""

    def __init__(self, run: Callable[[Cell], None]):
        self.run = run

    def __call__(self, cells: Sequence[Cell]) -> list[str | None]:
        errors: list[str | None] = []
        for cell in cells:
            try:
                self.run(cell)
                errors.append(None)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        return errors

    def checkpoint(self, cells: Sequence[Cell]) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(CellJob(self.run), cells)


def run_slurm(
    run: Callable[[Cell], None],
    cells: Sequence[Cell],
    report: Report,
    folder: Path,
    options: dict[str, Any] | None = None,
) -> None:
    """Run cells as an array of Slurm jobs through submitit, and wait for them.

    Args:
        folder: Where submitit keeps its files; on a cluster, a folder that all nodes see.
        options: Of [`SLURM_OPTIONS`]: `cluster` ("slurm", or "local" for processes of this machine), `partition`,
            `minutes` for each job, after which it is queued again and goes on, at most `requeues` times; `parallel` jobs at
            a time; `cells_per_job`; `cpus` for each job.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError("--engine slurm needs submitit: pip install 'hf_rankattn[slurm]'.") from None
    chosen = slurm_options(options or {})
    with one_thread_each():
        executor = submitit.AutoExecutor(
            folder=folder, cluster=chosen["cluster"], **{f"{chosen['cluster']}_max_num_timeout": chosen["requeues"]}
        )
        parameters = {"timeout_min": chosen["minutes"], "cpus_per_task": chosen["cpus"], "name": "rankattn"}
        if chosen["cluster"] == "slurm":
            parameters |= {"slurm_array_parallelism": chosen["parallel"]}
            if chosen["partition"]:
                parameters["slurm_partition"] = chosen["partition"]
        executor.update_parameters(**parameters)
        size = chosen["cells_per_job"]
        waiting = sorted(cells, key=lambda cell: -cell.cost)
        parts = [waiting[start : start + size] for start in range(0, len(waiting), size)]
        jobs = executor.map_array(CellJob(run), parts)
    running = list(zip(jobs, parts, strict=True))
    try:
        while running:
            done = [entry for entry in running if entry[0].done()]
            for job, part in done:
                running.remove((job, part))
                for cell, error in zip(part, job_errors(job, len(part)), strict=True):
                    report(cell, None if error is None else CellFailed(error))
            if running and not done:
                time.sleep(POLL_SECONDS)
    except BaseException:
        for job, _ in running:
            job.cancel()
        raise


def job_errors(job: Any, count: int) -> Sequence[str | None]:
    """What went wrong with each cell of a job; the same with all of them where the job itself was lost."""
    try:
        return job.result()
    except Exception as error:
        return [f"the job {job.job_id} was lost ({type(error).__name__}: {error})"] * count


def slurm_options(given: dict[str, Any]) -> dict[str, Any]:
    strangers = set(given) - set(SLURM_OPTIONS)
    if strangers:
        raise ValueError(
            f"the engine slurm has no option {', '.join(sorted(strangers))}; it has {', '.join(SLURM_OPTIONS)}."
        )
    chosen = SLURM_OPTIONS | given
    for name in ("minutes", "requeues", "parallel", "cells_per_job", "cpus"):
        try:
            chosen[name] = int(chosen[name])
        except (TypeError, ValueError):
            chosen[name] = 0
        if chosen[name] < 1:
            raise ValueError(
                f"the option {name} of the engine slurm must be a whole number from 1, got {given[name]!r}."
            )
    if chosen["cluster"] not in ("slurm", "local"):
        raise ValueError(f"the option cluster of the engine slurm is 'slurm' or 'local', got {chosen['cluster']!r}.")
    return chosen
