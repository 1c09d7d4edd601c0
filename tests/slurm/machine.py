"""A real Slurm on this machine: slurmctld, and one slurmd for each node."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxft_launch.processes._ranks import free_ports
from tests import patience

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")
# Without accounting, authentication and cgroups, none of which matters here. A requeued job waits for `cred_expire`
# seconds, which is at least 5; the default is 120. Schedulers look every second, and not every minute.
CONF = """
ClusterName=jaxft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core,CR_LLN
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=300
KillWait=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    missing = [program for program in PROGRAMS if path_of(program) is None]
    if missing:
        return (
            f"{', '.join(missing)} not found. On Debian: apt install --no-install-recommends slurmctld slurmd "
            "slurm-client"
        )
    return "" if os.getuid() == 0 else "slurmd runs only as root"


def path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")


@dataclass
class Slurm:
    """A cluster of two nodes."""

    folder: Path
    # The processors of each node, as far as Slurm knows. The least loaded node is taken first.
    processors: tuple[int, int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """With our own commands first, as in a user's activated environment."""
        here = Path(sys.executable).parent
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "JAXFT_"))}
        return {**own, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{here}:{os.environ['PATH']}"}

    def start(self) -> None:
        """Start it; return when all nodes are there."""
        port, *ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={processors} RealMemory=4000 "
            "State=UNKNOWN"
            for node, port, processors in zip(NODES, ports, self.processors, strict=True)
        )
        (self.folder / "state").mkdir(parents=True)
        text = CONF.format(folder=self.folder, host=host, port=port, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        patience.until(lambda: self.nodes().count("idle") == len(NODES), "the nodes", context=self.logs)

    def start_node(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def _start(self, program: str, *words: str, name: str = "") -> None:
        path = path_of(program)
        assert path is not None
        with (self.folder / f"{name or program}.out").open("ab") as log:
            command = [path, *words, "-f", str(self.folder / "slurm.conf")]
            self.processes[name or program] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
            )

    def ask(self, *words: str, **environment: str) -> str:
        """The output of a command of Slurm."""
        done = patience.run(
            words, capture_output=True, env={**self.environment, **environment}, cwd=self.folder
        )
        assert done.returncode == 0, f"{words}: {done.stderr.decode()}\n{self.logs()}"
        return done.stdout.decode().strip()

    def nodes(self) -> list[str]:
        """The states of the nodes."""
        with contextlib.suppress(AssertionError):  # it does not answer yet
            return self.ask("sinfo", "--noheader", "-N", "-o", "%T").split()
        return []

    def show(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job or an element of an array, by its name for it."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def kill_node(self, node: str) -> None:
        """As if it had lost power: kill -9 of slurmd, and of all that its jobs run. Slurm is not informed."""
        self.processes.pop(node).kill()
        self._kill_jobs(node)

    def _kill_jobs(self, node: str) -> None:
        # What still runs may start another process until the last of them is gone.
        patience.until(lambda: not self._kill_once(node), f"the end of all on {node}")

    def _kill_once(self, node: str) -> int:
        """Kill what runs now, slurmstepd first, which would report the end of the others; return how many."""
        tasks = [pid for pid in _pids() if self._runs_on(pid, node)]
        steps = {parent for parent in map(_parent, tasks) if _is_step(parent)}
        for pid in (*steps, *tasks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(tasks)

    def _runs_on(self, pid: int, node: str) -> bool:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in words
            return ours and f"SLURMD_NODENAME={node}".encode() in words
        return False

    def logs(self) -> str:
        names = sorted(path for path in self.folder.glob("*") if path.suffix in (".log", ".out"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in names)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for node in NODES:
            self._kill_jobs(node)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        # After the name in parentheses: the state, and the parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _is_step(pid: int) -> bool:
    """Whether it is a slurmstepd, which has overwritten its environment with its title."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd: ")
    return False


@contextlib.contextmanager
def slurm(folder: Path, processors: tuple[int, int] = (5, 1)) -> Iterator[Slurm]:
    """Start Slurm; end it, and all that it runs, at the end of the block."""
    if why := why_not():
        pytest.skip(why)
    made = Slurm(folder, processors)
    try:
        made.start()
        yield made
    finally:
        made.stop()
