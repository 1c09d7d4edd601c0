"""The options of `jaxft launch`, and whether they fit together."""

import math
import operator
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Start the replica groups of a job on this machine, and restart each group that ends before its job does.

    Everything after two dashes is the program: jaxft launch --groups 3 -- python my_train.py. It takes its group and
    the coordinator from the environment: leave both out of jaxft.Manager(...), or pass it {coordinator}, {group},
    {rank} and {folder} in its command. docs/clusters.md documents the environment, the exit statuses and the events.

    Exit status 0 if the job is done; 75 if it should be started again; 78 if the job refused the program; otherwise
    that of the program.
    """

    groups: int = 1
    """Replica groups to start."""
    group: int | None = None
    """Start only this one group of the job, group-GROUP: for an element of a Slurm array or a Kubernetes Job."""
    nproc: int = 1
    """Processes of each group. If one of them ends, its group is restarted."""
    nodes: int = 1
    """With --group: the number of hosts of the group. On each of them, start a launcher with the same --meet."""
    node: int = 0
    """With --nodes: which of them this host is, from 0."""
    meet: str = ""
    """With --nodes above 1: HOST:PORT where all processes of the group meet, with a free port of node 0."""
    coordinator: str = ""
    """HOST:PORT of the job's coordinator; by default that of the environment variable JAXFT_COORDINATOR. If neither
    is given, one is started (jaxft-coordinator), and it is restarted if it ends."""
    http: str = ""
    """HOST:PORT for the page, the API and the metrics of the coordinator that is started, such as localhost:29511."""
    spares: int = 0
    """Further groups that stand by, and replace a group that is lost."""
    devices: str = ""
    """Numbers of this machine's accelerators, separated by commas, to be dealt out evenly to all processes. Empty:
    each process sees all devices."""
    rungs: str = ""
    """Numbers of devices that a group may have, falling, such as 8,4,2: a group whose devices do not all come back
    starts again with fewer, and with more once they work. The first is a group's share of --devices. For groups
    of one process. See --probe."""
    probe: str = ""
    """Command that prints the numbers of this machine's devices that work, separated by commas or spaces. It is run
    every 10 s at least, and before each start of a group. For --rungs."""
    rung_after_s: float = 60.0
    """How long a group waits for devices that do not work before it starts with fewer, and how long devices must have
    worked before a group makes use of them."""
    max_restarts: int = 10
    """Restarts of a group in a row without a new step, before it is given up."""
    deadlines: str = ""
    """The longest times that a process may stay in a phase, as PHASE=SECONDS,...; 0 means any time."""
    drain_timeout_s: float = 60.0
    """On SIGTERM or Ctrl-C, how long groups may take to finish their step and leave."""
    warm: bool = True
    """Fork processes from one that has imported JAX, so that a restart takes less time."""
    preload: str = ""
    """Further modules that the warm processes import, separated by commas, such as flax,optax."""
    folder: Path | None = None
    """Folder for logs, events and compiled programs. None: a new one, named after the time, in the current one."""

    @property
    def names(self) -> list[str]:
        """The names of the groups, spares last."""
        if self.group is not None:
            return [f"group-{self.group}"]
        spares = [f"spare-{number}" for number in range(self.spares)]
        return [*(f"group-{number}" for number in range(self.groups)), *spares]


def check_options(options: LaunchOptions) -> None:
    """Raise a LaunchError if the options do not fit together."""
    for name in ("groups", "nproc", "max_restarts", "spares"):
        least = 1 if name in ("groups", "nproc") else 0
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise LaunchError(f"--{flag} must be at least {least}, not {getattr(options, name)}.")
    for name in ("drain_timeout_s", "rung_after_s"):
        if not 0 <= getattr(options, name) < math.inf:
            flag = name.replace("_", "-")
            raise LaunchError(f"--{flag} must be at least 0 s and finite, not {getattr(options, name):g}.")
    if options.group is not None and (options.spares or options.groups != 1):
        raise LaunchError("--group starts one group, so --groups and --spares do not go with it.")
    if options.group is not None and options.group < 0:
        raise LaunchError(f"--group must be a number from 0, not {options.group}.")
    check_nodes(options)
    devices, processes = devices_of(options), len(options.names) * options.nproc
    if devices and len(devices) % processes:
        raise LaunchError(
            f"--devices names {len(devices)} devices, which {processes} processes ({len(options.names)} groups x "
            f"{options.nproc}) cannot share evenly."
        )

    check_rungs(options, devices)


def check_nodes(options: LaunchOptions) -> None:
    """Raise a LaunchError if the hosts of a group do not fit together."""
    if options.nodes < 1:
        raise LaunchError(f"--nodes must be at least 1, not {options.nodes}.")
    if not 0 <= options.node < options.nodes:
        raise LaunchError(
            f"--node must be a number from 0 to {options.nodes - 1} with --nodes {options.nodes}, not {options.node}."
        )
    if options.nodes == 1:
        return
    if options.group is None or not options.meet:
        raise LaunchError(
            "--nodes is for the hosts of one group: it needs --group, and --meet HOST:PORT, a free port of node 0."
        )
    if options.rungs:
        raise LaunchError("--rungs is for groups on one host: it does not go with --nodes.")
    _, colon, port = options.meet.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--meet must be HOST:PORT, not {options.meet!r}.")


def check_rungs(options: LaunchOptions, devices: Sequence[int]) -> None:
    """Raise a LaunchError if the mesh ladder cannot be right."""
    rungs = rungs_of(options)
    if not rungs and not options.probe:
        return
    if not rungs or not options.probe:
        given, lacking = ("--rungs", "--probe") if rungs else ("--probe", "--rungs")
        raise LaunchError(f"{given} needs {lacking}: docs/clusters.md has both.")
    if options.nproc > 1:
        raise LaunchError(
            f"--rungs does not go with --nproc {options.nproc}: groups of several processes exchange device by "
            "device, so the job would refuse one that comes back with fewer. Leave out --nproc: one process can use "
            "all devices of a group."
        )
    share = len(devices) // len(options.names)
    if rungs[0] != share:
        raise LaunchError(
            f"--rungs begins with {rungs[0]} devices, but each of {len(options.names)} groups has {share} of the "
            f"{len(devices)} in --devices. The first rung is a group with all of its devices."
        )
    try:
        words = shlex.split(options.probe)
    except ValueError as error:
        raise LaunchError(f"--probe {options.probe!r} is no command: {error}.") from error
    if not words or shutil.which(words[0]) is None:
        raise LaunchError(
            f"--probe {options.probe!r}: there is no program {words[0] if words else ''!r} to run."
        )


def rungs_of(options: LaunchOptions) -> tuple[int, ...]:
    """Return the rungs of each group's mesh ladder; empty without one.

    Raises:
        LaunchError: they are not falling numbers.
    """
    words = words_of(options.rungs)
    if not all(word.isdecimal() for word in words) or any(
        map(operator.le, map(int, words), map(int, words[1:]))
    ):
        raise LaunchError(f"--rungs must be falling numbers of devices such as 8,4,2, not {options.rungs!r}.")
    if 0 in map(int, words):
        raise LaunchError(f"--rungs must be at least 1 each, not {options.rungs!r}.")
    return tuple(map(int, words))


def devices_of(options: LaunchOptions) -> list[int]:
    """Return the numbers of the devices.

    Raises:
        LaunchError: they are not different numbers.
    """
    words = words_of(options.devices)
    if not all(word.isdecimal() for word in words) or len(set(map(int, words))) != len(words):
        raise LaunchError(f"--devices must be different numbers such as 0,1,2,3, not {options.devices!r}.")
    return [int(word) for word in words]


def words_of(comma_list: str) -> list[str]:
    """Return what stands between the commas."""
    return [word.strip() for word in comma_list.split(",") if word.strip()]
