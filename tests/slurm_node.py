"""A Slurm cluster of one node, this machine: munged, slurmctld and slurmd in a temporary folder, on ports of their own.

There is no accounting database, as on many small clusters: `sacct` fails, and jobs are known to the controller alone.
`JobRequeue=0` is the setting that is hardest on jobs which want to be queued again.
"""

import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


DAEMONS = ("munged", "slurmctld", "slurmd")
PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin"
SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
OverTimeLimit=0
KillWait=5
JobRequeue=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={megabytes} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNotAvailable(RuntimeError):
    """Says which part of Slurm is absent or did not start, and what it said."""


def die_with_parent() -> None:
    """For a child before it becomes a daemon: a test that is killed must leave nothing behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class SlurmNode:
    """A running cluster. `environment` is what makes the commands of Slurm speak to it."""

    folder: Path
    environment: Mapping[str, str]

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            arguments, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """Every job that the controller remembers -> its state."""
        lines = self.command("squeue", "--noheader", "--array", "--states", "all", "--format", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def restarts(self, job: str) -> int:
        shown = self.command("scontrol", "show", "job", job)
        return int(shown.split("Restarts=")[1].split()[0])


@contextmanager
def slurm_node(requeue_seconds: int = 5) -> Iterator[SlurmNode]:
    """Start a cluster and stop it again, with all that runs on it.

    Args:
        requeue_seconds: How long Slurm holds a job back that is queued again; 120 by its own default.
    """
    found = {name: shutil.which(name, path=PLACES) for name in (*DAEMONS, "sbatch", "srun")}
    absent = [name for name, path in found.items() if path is None]
    if absent:
        raise SlurmNotAvailable(f"not installed: {', '.join(absent)} (on Debian: apt-get install slurm-wlm munge)")
    # not a folder of pytest: the path of a socket may have no more than 107 characters
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    processes: list[subprocess.Popen] = []
    try:
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "slurm.conf").write_text(
            SETTINGS.format(
                host=socket.gethostname().split(".")[0],
                controller_port=free_port(),
                node_port=free_port(),
                user=getpass.getuser(),
                folder=folder,
                cpus=os.cpu_count(),
                megabytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**21,
                requeue_seconds=requeue_seconds,
            )
        )
        node = SlurmNode(folder, {"SLURM_CONF": str(folder / "slurm.conf")})
        options = ["--foreground", "--force", f"--socket={folder}/munge.socket"]
        options += [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        start(node, processes, [str(found["munged"]), *options])
        wait_for(node, processes, lambda: (folder / "munge.socket").exists(), "munged made no socket")
        start(node, processes, [str(found["slurmctld"]), "-D", "-i"])
        start(node, processes, [str(found["slurmd"]), "-D"])
        wait_for(node, processes, lambda: is_idle(node), "the node did not become idle")
        yield node
    finally:
        if len(processes) == len(DAEMONS):
            empty(node)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def start(node: SlurmNode, processes: list[subprocess.Popen], command: list[str]) -> None:
    with (node.folder / f"{Path(command[0]).name}.out").open("wb") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        environment = {**os.environ, **node.environment}
        processes.append(subprocess.Popen(command, env=environment, preexec_fn=die_with_parent, **streams))


def is_idle(node: SlurmNode) -> bool:
    try:
        return node.command("sinfo", "--noheader", "--format", "%T").strip() == "idle"
    except RuntimeError:
        return False


def wait_for(node: SlurmNode, processes: list[subprocess.Popen], ready, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            names = ", ".join(f"{Path(process.args[0]).name} ended with {process.returncode}" for process in ended)
            raise SlurmNotAvailable(f"{names or f'{what} in {seconds:.0f} s'}; {last_words(node.folder)}")
        time.sleep(0.2)


def last_words(folder: Path) -> str:
    """Of each daemon, the last line that says why it ended, or that it had an error, or the last of all."""
    found = []
    for path in sorted((*folder.glob("*.out"), *folder.glob("*.log"))):
        lines = path.read_text(errors="replace").splitlines()
        if lines:
            telling = next((some for word in ("fatal", "rror") if (some := [x for x in lines if word in x])), lines)
            found.append(f"{path.name}: {telling[-1]}")
    return "; ".join(found)


def empty(node: SlurmNode, seconds: float = 30.0) -> None:
    """Cancel what is left, since the steps of a job outlive the daemon that started them."""
    try:
        node.command("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + seconds
        while node.command("squeue", "--noheader").strip() and time.monotonic() < deadline:
            time.sleep(0.5)
    except (RuntimeError, subprocess.TimeoutExpired):
        pass
