"""The plan of a launch, made of its options and the environment: `plan(options, ...) -> LaunchPlan`. Pure."""

import math
import operator
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._devices import shares, words_of
from jaxft_launch.processes._ranks import Member
from jaxft_launch.supervise._options import LaunchOptions
from jaxft_launch.supervise.core.group import Group, Rules
from jaxft_launch.supervise.core.ladder import Ladder
from jaxft_launch.supervise.core.life import DEADLINES_S, SILENCE

# Of the deadline for silence: groups wait as long for a coordinator, by default, and end together if it stays away.
COORDINATOR_SILENCE, LEAST_SILENCE_S = 1 / 3, 5.0
# How long a group waits for missing devices before it starts with fewer, and how long they must have worked again.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch.

    Attributes:
        groups: what each is started with. Their coordinator is None if the launch starts its own.
        command: the program; {coordinator}, {group}, {rank} and {folder} in its words are filled in.
        rules: when a group is ended and restarted.
        coordinator: the address of a coordinator elsewhere; "" if the launch starts its own.
        http: HOST:PORT for the page of the coordinator that it starts; "" for none.
        folder: for logs and events; None for a new one.
        caches: whether each group keeps its compiled programs in the folder.
        warm: whether processes are forked from a warm process, which has imported JAX and `preload`.
        rungs, patience_s: of the groups' mesh ladders; no rungs: none.
        probe: the command that names the devices that work; empty for none.
        check: the command that checks a group's host; empty for none.
        locks: the names that this launch holds in its folder.
        notes: what people should know about it.
    """

    groups: tuple[Member, ...]
    command: tuple[str, ...]
    rules: Rules = field(default_factory=Rules)
    coordinator: str = ""
    http: str = ""
    folder: Path | None = None
    caches: bool = True
    warm: bool = True
    preload: tuple[str, ...] = ()
    rungs: tuple[int, ...] = ()
    patience_s: float = PATIENCE_S
    probe: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def silence_s(self) -> float:
        """For how long its own coordinator may give no sign of life."""
        return max(LEAST_SILENCE_S, COORDINATOR_SILENCE * self.rules.deadlines.get(SILENCE, math.inf))

    def core_groups(self) -> tuple[Group, ...]:
        """Return the groups as the supervisor's core begins with them."""
        return tuple(
            Group(
                name=member.name,
                rules=self.rules,
                ranks=tuple(member.ranks_here),
                spare=member.spare,
                ladder=Ladder(member.devices, self.rungs, self.patience_s) if self.rungs else None,
            )
            for member in self.groups
        )


def plan(
    options: LaunchOptions,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    devices: Sequence[str] = (),
) -> LaunchPlan:
    """Return what these options ask for. `devices`: the accelerators of this machine.

    Raises:
        LaunchError: an option is not valid, or the options do not fit together.
    """
    _check_numbers(options)
    node, nodes = _node_of(options)
    address = _coordinator_of(options, environment)
    names = names_of(options)
    processes = len(names) * options.nproc
    rungs = _rungs_of(options)
    given, notes = _devices_of(rungs, devices, len(names), processes)
    groups = tuple(
        Member(
            name=name,
            nproc=options.nproc,
            nodes=nodes,
            node=node,
            meet=options.meet,
            coordinator=address or None,
            spare=name.startswith("spare-"),
            devices=share,
            extra={"JAXFT_OTHER_MESHES": "1"} if rungs else {},
        )
        for name, share in zip(names, shares(given, len(names)), strict=True)
    )
    host = f".node-{node}" if nodes > 1 else ""
    return LaunchPlan(
        groups=groups,
        command=tuple(words),
        rules=Rules(
            deadlines=parse_deadlines(options.deadlines),
            max_restarts=options.max_restarts,
            drain_timeout_s=options.drain_timeout_s,
        ),
        coordinator=address,
        http=options.http,
        folder=options.folder,
        caches=not environment.get("JAX_COMPILATION_CACHE_DIR"),  # otherwise the user's own choice
        warm=options.warm,
        rungs=rungs,
        patience_s=PATIENCE_S,
        probe=_command("--probe", options.probe),
        check=_command("--check", options.check),
        locks=tuple(f"{name}{host}" for name in names),
        notes=notes,
    )


def names_of(options: LaunchOptions) -> list[str]:
    """Return the names of the groups, spares last."""
    if options.group is not None:
        return [f"group-{options.group}"]
    spares = [f"spare-{number}" for number in range(options.spares)]
    return [*(f"group-{number}" for number in range(options.groups)), *spares]


def _check_numbers(options: LaunchOptions) -> None:
    for name, least in (("groups", 1), ("nproc", 1), ("max_restarts", 0), ("spares", 0)):
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise LaunchError(f"--{flag} must be at least {least}, not {getattr(options, name)}.")
    if not 0 <= options.drain_timeout_s < math.inf:
        raise LaunchError(
            f"--drain-timeout-s must be at least 0 s and finite, not {options.drain_timeout_s:g}."
        )
    if options.group is not None and (options.spares or options.groups != 1):
        raise LaunchError("--group starts one group, so --groups and --spares do not go with it.")
    if options.group is not None and options.group < 0:
        raise LaunchError(f"--group must be a number from 0, not {options.group}.")


def _node_of(options: LaunchOptions) -> tuple[int, int]:
    """Which of the group's hosts this is, and of how many."""
    first, slash, second = options.node.partition("/")
    if not slash or not first.isdecimal() or not second.isdecimal() or not int(first) < int(second):
        raise LaunchError(f"--node must be NUMBER/HOSTS, such as 0/2 and 1/2, not {options.node!r}.")
    node, nodes = int(first), int(second)
    if nodes == 1:
        return node, nodes
    if options.group is None or not options.meet:
        raise LaunchError(
            "--node is for the hosts of one group: it needs --group, and --meet HOST:PORT, a free port of the first."
        )
    if options.rungs:
        raise LaunchError("--rungs is for groups on one host: it does not go with --node.")
    _, colon, port = options.meet.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--meet must be HOST:PORT, not {options.meet!r}.")
    return node, nodes


def _coordinator_of(options: LaunchOptions, environment: Mapping[str, str]) -> str:
    address = options.coordinator or environment.get("JAXFT_COORDINATOR", "")
    if not address and options.group is not None:
        raise LaunchError(
            "--group starts one group of a job, so it needs the job's coordinator: --coordinator HOST:PORT. "
            "To start N groups on this machine, say --groups N."
        )
    if address and options.http:
        raise LaunchError(
            f"--http is for a coordinator that the launcher starts, but the job's coordinator is {address}. Give "
            "--http to that one."
        )
    return address


def _devices_of(
    rungs: Sequence[int], here: Sequence[str], groups: int, processes: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices to share out, and a note about them. Processes see all devices if there is nothing to share."""
    if rungs:
        given = tuple(here) or tuple(map(str, range(groups * rungs[0])))  # simulated devices
        if len(given) != groups * rungs[0]:
            raise LaunchError(
                f"--rungs begins with {rungs[0]} devices for each of {groups} groups, but this machine has "
                f"{len(given)} ({', '.join(given)}). The first rung is a group with all of its devices."
            )
        return given, ()
    if processes == 1 or not here:
        return (), ()
    if len(here) < processes:
        raise LaunchError(
            f"{processes} processes cannot share the {len(here)} devices of this machine ({', '.join(here)}): each "
            "needs a separate device. Start fewer, or set JAX_PLATFORMS=cpu to train without them."
        )
    share = len(here) // processes
    left = len(here) - share * processes
    unused = f"; {left} of {len(here)} are not used" if left else ""
    return tuple(here[: share * processes]), (f"each process has {share} of this machine's devices{unused}",)


def _rungs_of(options: LaunchOptions) -> tuple[int, ...]:
    """The rungs of each group's mesh ladder; empty without one."""
    rungs = _falling(options.rungs)
    if not rungs and not options.probe:
        return ()
    if not rungs or not options.probe:
        given, lacking = ("--rungs", "--probe") if rungs else ("--probe", "--rungs")
        raise LaunchError(f"{given} needs {lacking}: docs/clusters.md has both.")
    if options.nproc > 1:
        raise LaunchError(
            f"--rungs does not go with --nproc {options.nproc}: groups of several processes exchange device by "
            "device, so the job would refuse a group with fewer. Leave out --nproc: one process can use "
            "all devices of a group."
        )
    return rungs


def _falling(text: str) -> tuple[int, ...]:
    words = words_of(text)
    if not all(word.isdecimal() for word in words) or any(
        map(operator.le, map(int, words), map(int, words[1:]))
    ):
        raise LaunchError(f"--rungs must be falling numbers of devices such as 8,4,2, not {text!r}.")
    if 0 in map(int, words):
        raise LaunchError(f"--rungs must be at least 1 each, not {text!r}.")
    return tuple(map(int, words))


def _command(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"{flag} {text!r} is no command: {error}.") from error


def parse_deadlines(text: str) -> dict[str, float]:
    """Return the deadlines in seconds by phase: the defaults, changed by `PHASE=SECONDS,...`; 0 means none.

    Raises:
        LaunchError: there is no such phase, or a time is not a number of seconds.
    """
    found = dict(DEADLINES_S)
    for word in words_of(text):
        phase, _, value = word.partition("=")
        if phase not in DEADLINES_S:
            raise LaunchError(
                f"--deadlines {word}: there is no phase {phase!r}. Phases: {', '.join(DEADLINES_S)}."
            )
        found[phase] = _seconds(word, value) or math.inf
    return found


def _seconds(word: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise LaunchError(f"--deadlines {word}: write PHASE=SECONDS, with 0 for no deadline.")
    return seconds
