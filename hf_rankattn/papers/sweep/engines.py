"""Engines that run cells: processes on this machine, or jobs of a cluster."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any

from ...files.atomic import write_whole
from .grid import Cell
from .results import read_json


# called at the end of every cell with the cell and its error, if there was one
Report = Callable[[Cell, BaseException | None], Any]
ENGINES = ("local", "slurm")
# default and least value; Slurm signals a job up to a minute before its time limit, and torch must be loaded by then
SLURM_NUMBERS = {"minutes": (240, 2), "requeues": (20, 1), "parallel": (64, 1)}
SLURM_NUMBERS |= {"cells_per_job": (1, 1), "cpus": (1, 1)}
SLURM_OPTIONS = {"cluster": "slurm", "partition": None} | {name: number for name, (number, _) in SLURM_NUMBERS.items()}
POLL_SECONDS = 1.0
QUEUE_SECONDS = 10.0
RESULT_SECONDS = 15.0  # between the end of a job and its result on this side of a shared disk
# the states of Slurm after which a job does not run again
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
ENDED |= {"REVOKED", "TIMEOUT"}
JOB_NAME = "rankattn"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
Jobs = list[tuple[Any, Sequence[Cell]]]  # jobs of submitit, each with its cells


class CellFailed(RuntimeError):
    """The error of a cell in another process, as text: not every exception can be pickled."""


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Set the environment for processes that are started inside: libraries read it when they are loaded."""
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
    """Processes that are started inside ignore Ctrl-C, which a terminal sends to all of them; this process ends them."""
    if threading.current_thread() is not threading.main_thread():  # other threads cannot change signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave_with_parent() -> None:
    """End this process when its parent process ends: after a kill, workers would wait for cells for ever."""
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def worker_pool(count: int, killed: str, begin: Callable[..., None], *given: Any) -> Iterator[ProcessPoolExecutor]:
    """Processes of one thread each. An error inside ends them at once.

    Args:
        count: How many.
        killed: The rest of the error message if one of them is killed.
        begin, given: What a process calls when it starts, and with what.
    """
    others = set(active_children())
    # a forked process would share the threads of torch, and hang
    how: dict[str, Any] = {"mp_context": get_context("spawn"), "initializer": begin, "initargs": given}
    with one_thread_each(), ProcessPoolExecutor(count, **how) as pool:
        try:
            yield pool
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(active_children()) - others:
                worker.terminate()  # rows are written at the end of a cell, so nothing is left half written
            if isinstance(error, BrokenProcessPool):
                raise ValueError(f"a process was killed, by hand or for lack of memory. {killed}") from error
            raise


def run_local(run: Callable[[Cell], None], cells: Sequence[Cell], report: Report, workers: int | None = None) -> None:
    """Run cells in processes of one thread each, by default one per core; expensive cells start first.

    With 0 workers the cells run in this process, one after the other: slower, and easier to debug.
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
    kept = "Finished cells are kept: the same command goes on from there; --workers 1 needs the least memory."
    with worker_pool(min(workers or cores(), len(waiting)), kept, leave_with_parent) as pool:
        with deaf_to_interrupts():
            running = {pool.submit(run, cell): cell for cell in waiting}
        for future in as_completed(running):
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                raise error
            report(running[future], error)


class CellJob:
    """Some cells as one job of submitit. When its time is up, the job is queued again and continues.

    The job writes the errors of its cells as JSON. submitit stores the returned value as a pickle, which the waiting process
    never opens: a results folder from another person could contain a pickle that runs code.
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
                    # submitit raised this error within the cell: there is no time to begin another cell
                    text = f"its job was out of time and could not be queued again ({error}); more minutes or requeues help."
                    return errors | {left.id: text for left in cells[number:]}
                errors[cell.id] = f"{type(error).__name__}: {error}"
        return errors

    def checkpoint(self, cells: Sequence[Cell]) -> Any:
        from submitit.helpers import DelayedSubmission

        self.time_is_up = True
        return DelayedSubmission(CellJob(self.run), cells)


def cells_file(folder: Path, job_id: str) -> Path:
    """The list of the ids of the cells of a job."""
    return folder / f"{job_id}_cells.json"


def errors_file(folder: Path, job_id: str) -> Path:
    """A job writes this file at its end: the ids of cells that failed, and their errors."""
    return folder / f"{job_id}_errors.json"


def run_slurm(
    run: Callable[[Cell], None],
    cells: Sequence[Cell],
    report: Report,
    folder: Path,
    options: dict[str, Any] | None = None,
) -> None:
    """Run cells as an array of Slurm jobs through submitit, and wait for them.

    Jobs of an earlier call that are still in the queue are not submitted a second time.

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
    watch = QueueWatch(folder) if chosen["cluster"] == "slurm" else ProcessWatch(folder)
    running = watch.jobs_left(cells)
    held = {cell.id for _, part in running for cell in part}
    running += submit_jobs(run, [cell for cell in cells if cell.id not in held], folder, chosen)
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
        watch.cancel([job for job, _ in running])
        raise


def submit_jobs(run: Callable[[Cell], None], cells: Sequence[Cell], folder: Path, chosen: dict[str, Any]) -> Jobs:
    """Submit the cells, the expensive ones first."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if not cells:
        return []
    cluster, minutes, partition = chosen["cluster"], chosen["minutes"], chosen["partition"]
    parameters = {"timeout_min": minutes, "cpus_per_task": chosen["cpus"], "name": JOB_NAME}
    if cluster == "slurm":
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise ValueError(
                "--engine slurm needs the commands of Slurm, and there is no sbatch or srun on this machine."
            )
        parameters |= {
            "slurm_array_parallelism": chosen["parallel"],
            "slurm_signal_delay_s": min(90, 15 * minutes),
            # many clusters refuse to queue a job again that did not ask for it beforehand
            "slurm_additional_parameters": {"requeue": True},
        }
        if partition:
            parameters["slurm_partition"] = partition
    size, waiting = chosen["cells_per_job"], sorted(cells, key=lambda cell: -cell.cost)
    parts = [waiting[start : start + size] for start in range(0, len(waiting), size)]
    requeues = {f"{cluster}_max_num_timeout": chosen["requeues"]}
    with one_thread_each():
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **requeues)
        executor.update_parameters(**parameters)
        try:
            jobs = executor.map_array(CellJob(run), parts)
        except (FailedJobError, FailedSubmissionError) as error:
            raise ValueError(
                f"Slurm did not take {len(parts)} jobs of {minutes} minutes in the "
                f"{f'partition {partition}' if partition else 'default partition'}: {' '.join(str(error).split())}. "
                "Mend the engine's options, or SBATCH_ variables; a larger cells_per_job makes fewer jobs."
            ) from None
    for job, part in zip(jobs, parts, strict=True):
        write_whole(cells_file(folder, job.job_id), json.dumps([cell.id for cell in part]))
    return list(zip(jobs, parts, strict=True))


class ProcessWatch:
    """Which jobs have ended, with a result or without, where jobs are processes of this machine."""

    def __init__(self, folder: Path):
        self.folder = folder

    def jobs_left(self, cells: Sequence[Cell]) -> Jobs:
        return []

    def look(self) -> None:
        pass

    def ended(self, job: Any) -> bool:
        return job.done()

    def fate(self, job: Any) -> str:
        return "ended"

    def errors(self, job: Any, part: Sequence[Cell]) -> dict[str, str]:
        """The errors of a job that has ended; all of its cells have one if the job left no result."""
        path = errors_file(self.folder, job.job_id)
        if path.name in os.listdir(self.folder):
            return read_json(path, dict, "the errors of a job")
        lost = f"the job {job.job_id} was lost: it {self.fate(job)} and left no result; its log is {job.paths.stderr}."
        return {cell.id: lost for cell in part}

    def cancel(self, jobs: Sequence[Any]) -> None:
        for job in jobs:
            job.cancel()


class QueueWatch(ProcessWatch):
    """The same for jobs of Slurm.

    submitit asks `sacct`, which needs a database that small clusters do not have, and it asks less often the longer it waits:
    it would notice a cancelled job after ten minutes, or never. `squeue` asks the controller, which always answers.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.files: set[str] = set()
        self.asked = float("-inf")
        self.states: dict[str, str] | None = None
        self.since: dict[str, float] = {}

    def jobs_left(self, cells: Sequence[Cell]) -> Jobs:
        """Jobs on these cells that an earlier sweep submitted and that have not ended."""
        from submitit import SlurmJob

        found: Jobs = []
        for name, state in (queue_states() or {}).items():
            path = cells_file(self.folder, name)
            if state not in ENDED and path.is_file():
                ids = read_json(path, list, "a list of cells")
                part = [cell for cell in cells if cell.id in ids]
                if part:
                    found.append((SlurmJob(self.folder, name), part))
        return found

    def look(self) -> None:
        # a network disk caches the absence of a file for longer than a listing
        self.files = set(os.listdir(self.folder))
        if time.monotonic() - self.asked > QUEUE_SECONDS:
            self.states, self.asked = queue_states(), time.monotonic()

    def state(self, job: Any) -> str | None:
        # jobs of an array that are cancelled before they start are one entry, under the name of the array
        states = self.states or {}
        return states.get(job.job_id) or states.get(job.job_id.split("_")[0])

    def ended(self, job: Any) -> bool:
        if errors_file(self.folder, job.job_id).name in self.files:
            return True
        if self.states is None or self.state(job) not in (None, *ENDED):
            self.since.pop(job.job_id, None)
            return False
        now = time.monotonic()
        return now - self.since.setdefault(job.job_id, now) > RESULT_SECONDS

    def fate(self, job: Any) -> str:
        return f"ended as {self.state(job)}" if self.state(job) else "is not known to Slurm any more"

    def cancel(self, jobs: Sequence[Any]) -> None:
        # one command for all, which does not stop at a job that has ended meanwhile
        subprocess.run(["scancel", *(job.job_id for job in jobs)], capture_output=True)


def queue_states() -> dict[str, str] | None:
    """The state of each job of this user in the queue; None if Slurm does not answer."""
    command = ["squeue", "--me", "--name", JOB_NAME, "--noheader", "--array", "--states", "all", "--format", "%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else dict(line.split() for line in done.stdout.splitlines())


def slurm_options(given: dict[str, Any]) -> dict[str, Any]:
    strangers = ", ".join(sorted(set(given) - set(SLURM_OPTIONS)))
    if strangers:
        raise ValueError(f"the engine slurm has no option {strangers}; it has {', '.join(SLURM_OPTIONS)}.")
    chosen = SLURM_OPTIONS | given
    for name, (_, least) in SLURM_NUMBERS.items():
        if not str(chosen[name]).isdecimal() or int(chosen[name]) < least:
            raise ValueError(
                f"the option {name} of the engine slurm must be a whole number from {least}, got {given[name]!r}."
            )
        chosen[name] = int(chosen[name])
    if chosen["cluster"] not in ("slurm", "local"):
        raise ValueError(f"the option cluster of the engine slurm is 'slurm' or 'local', got {chosen['cluster']!r}.")
    return chosen
