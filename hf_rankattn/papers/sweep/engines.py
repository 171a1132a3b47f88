"""Who runs the cells: processes on this machine, or the jobs of a cluster."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

from .grid import Cell
from .results import read_json, write_whole


# what is called for every cell when it is over: the cell, and what went wrong with it, if anything did
Report = Callable[[Cell, BaseException | None], Any]
ENGINES = ("local", "slurm")
SLURM_OPTIONS = {
    "cluster": "slurm", "partition": None, "minutes": 240, "requeues": 20, "parallel": 64, "cells_per_job": 1, "cpus": 1,
}  # fmt: skip
# a job is told to stop up to a minute before its time is up, and must have loaded torch by then
SLURM_LEAST = {"minutes": 2, "requeues": 1, "parallel": 1, "cells_per_job": 1, "cpus": 1}
POLL_SECONDS = 1.0
QUEUE_SECONDS = 10.0
# between the end of a job and its result on this side of a shared disk
RESULT_SECONDS = 15.0
# of Slurm, those from which a job does not come back
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
JOB_NAME = "rankattn"
ERRORS = "the errors of a job"
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


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """For processes that are started inside: a terminal sends Ctrl-C to all of them, and this one answers for the rest."""
    if threading.current_thread() is not threading.main_thread():  # elsewhere Python does not let signals be changed
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
            try:
                run(cell)
            except Exception as error:
                report(cell, error)
            else:
                report(cell, None)
        return
    workers = min(workers or cores(), len(waiting))
    others = set(active_children())
    context = get_context("spawn")  # a forked process would share the threads of torch, and hang
    with (
        one_thread_each(),
        ProcessPoolExecutor(workers, mp_context=context, initializer=leave_with_parent) as pool,
    ):
        with deaf_to_interrupts():
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
            for worker in set(active_children()) - others:
                worker.terminate()  # in the midst of a cell, of which nothing is kept
            raise


class CellJob:
    """Some cells as one job of submitit. When its time is up, the job is queued again and goes on where it was.

    The job writes what went wrong with its cells as JSON. submitit keeps the returned value as a pickle, and the process that
    waits for the job opens no pickle: whoever sends a folder of results could have put it there.
    """

    time_is_up = False

    def __init__(self, run: Callable[[Cell], None]):
        self.run = run

    def __call__(self, cells: Sequence[Cell]) -> None:
        from submitit import JobEnvironment

        job = JobEnvironment()
        write_whole(errors_file(job.paths.folder, job.job_id), json.dumps(self.errors(cells)))

    def errors(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Run the cells; the id of each that failed -> why."""
        errors: dict[str, str] = {}
        for number, cell in enumerate(cells):
            try:
                self.run(cell)
            except Exception as error:
                if self.time_is_up:
                    # raised by submitit in the midst of the cell: there is no time to begin another
                    text = f"its job was out of time and could not be queued again ({error}); more minutes or requeues help."
                    return errors | {left.id: text for left in cells[number:]}
                errors[cell.id] = f"{type(error).__name__}: {error}"
        return errors

    def checkpoint(self, cells: Sequence[Cell]) -> Any:
        from submitit.helpers import DelayedSubmission

        self.time_is_up = True
        return DelayedSubmission(CellJob(self.run), cells)


def cells_file(folder: Path, job_id: str) -> Path:
    """Which cells a job runs: a list of their ids."""
    return folder / f"{job_id}_cells.json"


def errors_file(folder: Path, job_id: str) -> Path:
    """Written by a job at its end: the ids of cells that failed, and why."""
    return folder / f"{job_id}_errors.json"


def run_slurm(
    run: Callable[[Cell], None],
    cells: Sequence[Cell],
    report: Report,
    folder: Path,
    options: dict[str, Any] | None = None,
) -> None:
    """Run cells as an array of Slurm jobs through submitit, and wait for them.

    Jobs of an earlier call that are still there are waited for, not submitted a second time.

    Args:
        folder: Where submitit keeps its files; on a cluster, a folder that all nodes see.
        options: Of [`SLURM_OPTIONS`]: `cluster` ("slurm", or "local" for processes of this machine), `partition`,
            `minutes` for each job, after which it is queued again and goes on, at most `requeues` times; `parallel` jobs at
            a time; `cells_per_job`; `cpus` for each job.
    """
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise ValueError("--engine slurm needs submitit: pip install 'hf_rankattn[slurm]'.") from None
    chosen = slurm_options(options or {})
    on_cluster = chosen["cluster"] == "slurm"
    running = jobs_left(folder, cells) if on_cluster else []
    held = {cell.id for _, part in running for cell in part}
    running += submit_jobs(run, [cell for cell in cells if cell.id not in held], folder, chosen)
    watch = QueueWatch(folder) if on_cluster else ProcessWatch()
    try:
        while running:
            watch.look()
            ended = [(job, part) for job, part in running if watch.ended(job)]
            for job, part in ended:
                running.remove((job, part))
                errors = watch.errors(job, part)
                for cell in part:
                    report(cell, CellFailed(errors[cell.id]) if cell.id in errors else None)
            if running and not ended:
                time.sleep(POLL_SECONDS)
    except BaseException:
        cancel_jobs([job for job, _ in running], on_cluster)
        raise


def submit_jobs(
    run: Callable[[Cell], None], cells: Sequence[Cell], folder: Path, chosen: dict[str, Any]
) -> list[tuple[Any, Sequence[Cell]]]:
    """Jobs and their cells, the dear ones first."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if not cells:
        return []
    parameters = {"timeout_min": chosen["minutes"], "cpus_per_task": chosen["cpus"], "name": JOB_NAME}
    if chosen["cluster"] == "slurm":
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise ValueError(
                "--engine slurm needs the commands of Slurm, and there is no sbatch or srun on this machine."
            )
        parameters |= {
            "slurm_array_parallelism": chosen["parallel"],
            "slurm_signal_delay_s": min(90, 15 * chosen["minutes"]),
            # many clusters refuse to queue a job again that did not ask for it beforehand
            "slurm_additional_parameters": {"requeue": True},
        }
        if chosen["partition"]:
            parameters["slurm_partition"] = chosen["partition"]
    size = chosen["cells_per_job"]
    waiting = sorted(cells, key=lambda cell: -cell.cost)
    parts = [waiting[start : start + size] for start in range(0, len(waiting), size)]
    with one_thread_each():
        executor = submitit.AutoExecutor(
            folder=folder, cluster=chosen["cluster"], **{f"{chosen['cluster']}_max_num_timeout": chosen["requeues"]}
        )
        executor.update_parameters(**parameters)
        try:
            jobs = executor.map_array(CellJob(run), parts)
        except (FailedJobError, FailedSubmissionError) as error:
            raise ValueError(
                f"Slurm did not take {len(parts)} jobs of {chosen['minutes']} minutes in the "
                f"{'partition ' + str(chosen['partition']) if chosen['partition'] else 'default partition'}: "
                f"{' '.join(str(error).split())}. Mend the engine's options, or SBATCH_ variables; a larger cells_per_job makes fewer jobs."
            ) from None
    for job, part in zip(jobs, parts, strict=True):
        write_whole(cells_file(folder, job.job_id), json.dumps([cell.id for cell in part]))
    return list(zip(jobs, parts, strict=True))


def jobs_left(folder: Path, cells: Sequence[Cell]) -> list[tuple[Any, Sequence[Cell]]]:
    """Jobs on these cells that an earlier sweep submitted and was not there to see the end of."""
    from submitit import SlurmJob

    found: list[tuple[Any, Sequence[Cell]]] = []
    for name, state in (queue_states() or {}).items():
        path = cells_file(folder, name)
        if state not in ENDED and path.is_file():
            ids = read_json(path, list, "a list of cells")
            part = [cell for cell in cells if cell.id in ids]
            if part:
                found.append((SlurmJob(folder, name), part))
    return found


def queue_states() -> dict[str, str] | None:
    """The state of each job of this user that the controller remembers; None if it cannot be asked now."""
    command = ["squeue", "--me", "--name", JOB_NAME, "--noheader", "--array", "--states", "all", "--format", "%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else dict(line.split() for line in done.stdout.splitlines())


class QueueWatch:
    """Which jobs are over, with a result or without.

    submitit asks `sacct`, which needs a database that small clusters do not have, and asks the more seldom the longer it
    waits: a cancelled job would be waited for ten minutes, or for ever. The controller itself always answers.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: set[str] = set()
        self.asked = float("-inf")
        self.states: dict[str, str] | None = None
        self.since: dict[str, float] = {}

    def look(self) -> None:
        # a network disk remembers that a file was absent for longer than it remembers a listing
        self.files = set(os.listdir(self.folder))
        if time.monotonic() - self.asked > QUEUE_SECONDS:
            self.states, self.asked = queue_states(), time.monotonic()

    def has_result(self, job: Any) -> bool:
        return errors_file(self.folder, job.job_id).name in self.files

    def state(self, job: Any) -> str | None:
        # jobs of an array that are cancelled before they start are one entry, under the name of the array
        states = self.states or {}
        return states.get(job.job_id) or states.get(job.job_id.split("_")[0])

    def ended(self, job: Any) -> bool:
        if self.has_result(job):
            return True
        if self.states is None or self.state(job) not in (None, *ENDED):
            self.since.pop(job.job_id, None)
            return False
        now = time.monotonic()
        return now - self.since.setdefault(job.job_id, now) > RESULT_SECONDS

    def errors(self, job: Any, part: Sequence[Cell]) -> dict[str, str]:
        if self.has_result(job):
            return read_json(errors_file(self.folder, job.job_id), dict, ERRORS)
        state = self.state(job)
        return lost(job, part, f"ended as {state}" if state else "is not known to Slurm any more")


class ProcessWatch:
    """The same for processes of this machine."""

    def look(self) -> None:
        pass

    def ended(self, job: Any) -> bool:
        return job.done()

    def errors(self, job: Any, part: Sequence[Cell]) -> dict[str, str]:
        path = errors_file(job.paths.folder, job.job_id)
        return read_json(path, dict, ERRORS) if path.is_file() else lost(job, part, "ended")


def cancel_jobs(jobs: Sequence[Any], on_cluster: bool) -> None:
    if on_cluster:
        # one command for all, which does not stop at a job that has ended meanwhile
        subprocess.run(["scancel", *(job.job_id for job in jobs)], capture_output=True)
    else:
        for job in jobs:
            job.cancel()


def lost(job: Any, part: Sequence[Cell], fate: str) -> dict[str, str]:
    text = f"the job {job.job_id} was lost: it {fate} and left no result; its log is {job.paths.stderr}."
    return {cell.id: text for cell in part}


def slurm_options(given: dict[str, Any]) -> dict[str, Any]:
    strangers = set(given) - set(SLURM_OPTIONS)
    if strangers:
        raise ValueError(
            f"the engine slurm has no option {', '.join(sorted(strangers))}; it has {', '.join(SLURM_OPTIONS)}."
        )
    chosen = SLURM_OPTIONS | given
    for name, least in SLURM_LEAST.items():
        try:
            chosen[name] = int(chosen[name])
        except (TypeError, ValueError):
            chosen[name] = 0
        if chosen[name] < least:
            raise ValueError(
                f"the option {name} of the engine slurm must be a whole number from {least}, got {given[name]!r}."
            )
    if chosen["cluster"] not in ("slurm", "local"):
        raise ValueError(f"the option cluster of the engine slurm is 'slurm' or 'local', got {chosen['cluster']!r}.")
    return chosen
