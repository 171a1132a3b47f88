"""Run jobs in processes of one thread each, or one after the other in this process; the rows are the same."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from multiprocessing import get_context
from typing import Any

import torch
from transformers.utils import logging

from ..sweep.engines import cores, deaf_to_interrupts, leave_with_parent, worker_pool
from .measuring import Job, Row, Settings, run_job


# each worker may hold a model of base size in float64
MOST_WORKERS = 4
TOLD_EVERY = 0.2
# called with a job, the seconds of its cost that were done since the last call, and whether it is over
Progress = Callable[[Job, float, bool], object]
channel: Any = None


def usual_workers() -> int:
    """One process per core, at most four; on one core only this process."""
    return 0 if cores() == 1 else min(cores(), MOST_WORKERS)


def run_jobs(jobs: Sequence[Job], settings: Settings, workers: int, progress: Progress) -> list[Row]:
    """The rows of all jobs, in the order of the jobs. With no workers the jobs run in this process."""
    if workers == 0:
        return run_here(jobs, settings, progress)
    queue = get_context("spawn").SimpleQueue()
    slower = "Run the demo with --workers 0, which needs the least memory and takes twice as long."
    with worker_pool(min(workers, len(jobs)), slower, enter_worker, queue) as pool:
        with deaf_to_interrupts():
            futures = {pool.submit(run_in_worker, place, job, settings): job for place, job in enumerate(jobs)}
        running = set(futures)
        while running:
            done, running = wait(running, timeout=TOLD_EVERY, return_when=FIRST_COMPLETED)
            while not queue.empty():
                place, seconds = queue.get()
                progress(jobs[place], seconds, False)
            for future in done:
                future.result()
                progress(futures[future], 0.0, True)
    return [row for future in futures for row in future.result()]


def run_here(jobs: Sequence[Job], settings: Settings, progress: Progress) -> list[Row]:
    threads, rows = torch.get_num_threads(), []
    state = torch.get_rng_state()
    # Matrices of this size are slower on two threads, and sums would be rounded in another way than in workers.
    torch.set_num_threads(1)
    try:
        for job in jobs:
            rows += run_job(job, settings, lambda share, job=job: progress(job, share * job.cost, False))
            progress(job, 0.0, True)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    return rows


def enter_worker(queue: Any) -> None:
    global channel
    channel = queue
    leave_with_parent()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run_in_worker(place: int, job: Job, settings: Settings) -> list[Row]:
    waiting, told = 0.0, time.perf_counter()

    def advance(share: float) -> None:
        nonlocal waiting, told
        waiting += share * job.cost
        if time.perf_counter() - told > TOLD_EVERY:
            channel.put((place, waiting))
            waiting, told = 0.0, time.perf_counter()

    rows = run_job(job, settings, advance)
    channel.put((place, waiting))
    return rows
