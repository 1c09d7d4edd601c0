"""The options of `jaxft launch`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Start the replica groups of a job on this machine, and restart each group that ends before its job does.

    Everything after two dashes is the program: jaxft launch --groups 3 -- python my_train.py. It takes its group and
    the coordinator from the environment: leave both out of jaxft.Manager(...), or pass it {coordinator}, {group},
    {rank} and {folder} in its command. docs/clusters.md documents the environment, the exit statuses and the events.

    Exit status 0 if the job is done; 75 if it should be started again; 78 if the job refused the program; otherwise
    the program's.
    """

    groups: int = 1
    """Replica groups to start."""
    group: int | None = None
    """Start only this one group of the job, group-GROUP: for an element of a Slurm array or a Kubernetes Job."""
    nproc: int = 1
    """Processes of each group. If a process ends, its group is restarted."""
    node: str = "0/1"
    """With --group: which of the group's hosts this is, and of how many: 0/2 on the first, 1/2 on the second. On each
    of them, start a launcher with the same --meet."""
    meet: str = ""
    """With several hosts: HOST:PORT where all processes of the group meet, with a free port of the first host."""
    coordinator: str = ""
    """HOST:PORT of the job's coordinator; by default the environment variable JAXFT_COORDINATOR. If neither
    is given, one is started (jaxft-coordinator), and it is restarted if it ends."""
    http: str = ""
    """HOST:PORT for the page, the API and the metrics of the coordinator that is started, such as localhost:29511."""
    spares: int = 0
    """Further groups that stand by, and replace a group that is lost."""
    rungs: str = ""
    """Numbers of devices that a group may have, falling, such as 8,4,2: a group whose devices do not all come back
    starts again with fewer, and with more once they work. The first is a group's share of this machine's
    devices. For groups of one process. See --probe."""
    probe: str = ""
    """Command that prints the numbers of this machine's devices that work, separated by commas or spaces. It is run
    every 10 s at least, and before each start of a group. For --rungs."""
    max_restarts: int = 10
    """Restarts of a group in a row without a new step, before it is given up."""
    deadlines: str = ""
    """The longest times that a process may stay in a phase, as PHASE=SECONDS,...; 0 means any time."""
    drain_timeout_s: float = 60.0
    """On SIGTERM or Ctrl-C, how long groups may take to finish their step and leave."""
    check: str = ""
    """Command whose exit status decides whether a group should run here: 0 well, 1 warning, 2 critical, 3 unknown,
    such as "jaxft check gpu". It is run every 30 s for each group. A critical group finishes its step and leaves, one
    group at a time, and comes back when the status is 0."""
    warm: bool = True
    """Fork processes from a warm process that has imported JAX, so that a restart takes less time."""
    folder: Path | None = None
    """Folder for logs, events and compiled programs. None: a new one, named after the time, in the current one."""
