"""The command `jaxft launch`: starts a job's groups on this machine, and keeps them alive until the job is done."""

import contextlib
import operator
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from jaxft._health._health import Health
from jaxft._health._rules import read_rules
from jaxft._launch._checks import LaunchError, check_command, check_installed
from jaxft._launch._coordinator import COORDINATOR, Coordinator
from jaxft._launch._deadlines import parse_deadlines
from jaxft._launch._journal import Journal, LaunchBegan, LaunchEnded
from jaxft._launch._ladder import Ladder
from jaxft._launch._launcher import Launcher
from jaxft._launch._output import make_output
from jaxft._launch._probe import Probe
from jaxft._launch._processes import Processes
from jaxft._launch._ranks import Member, dealt
from jaxft._launch._supervisor import Rules

EVENTS = "events.jsonl"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    starts again with fewer, and with more once they work. The first is a group's share of --devices. See --probe."""
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
    """On SIGTERM or Ctrl-C, or if a rule of --health drains a group, how long groups may take to finish their step
    and leave."""
    health: Path | None = None
    """TOML file with rules that are checked beside each group, and warn, drain or kill. docs/health.md has them."""
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


def run_launch(
    options: LaunchOptions, words: Sequence[str], *, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the groups until all have ended; return the exit status. Tests pass another command for the coordinator.

    Raises:
        LaunchError: an option is not valid, the program does not exist, or the coordinator does not start.
    """
    check_command(words, command="jaxft launch")
    check_options(options)
    rules = Rules(
        deadlines=parse_deadlines(options.deadlines),
        max_restarts=options.max_restarts,
        warm=options.warm,
        preload=tuple(_words(options.preload)),
        drain_timeout_s=options.drain_timeout_s,
    )
    address = options.coordinator or os.environ.get("JAXFT_COORDINATOR", "")
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
    if not address:
        check_installed(("jaxft_coordinator",), remedy="pip install jaxft-coordinator")
    http_url = f"http://{options.http}" if options.http else os.environ.get("JAXFT_HTTP", "")
    health = () if options.health is None else read_rules(options.health, http=http_url)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_signals())
        folder = _folder(options.folder)
        journal = Journal(folder / EVENTS)
        stack.callback(journal.close)
        phases = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxft-launch-")))
        output = stack.enter_context(make_output(sys.stdout))
        processes = stack.enter_context(Processes(folder, cwd=Path.cwd(), keeps_token=bool(address)))
        own = None
        if not address:
            http = ("--http", options.http) if options.http else ()
            own = Coordinator(processes, (*coordinator, "--state", str(folder / "coordinator"), *http))
            address = own.address
            if options.http:
                output.say(f"the page is at http://{options.http}/")
        output.say(f"{len(options.names)} groups x {options.nproc}; logs and {EVENTS} in {folder}")
        journal.write(
            LaunchBegan(
                groups=options.names,
                nproc=options.nproc,
                coordinator=address,
                command=list(words),
                folder=str(folder),
            )
        )
        launcher = Launcher(
            members_of(options, address, folder),
            words,
            processes,
            rules,
            coordinator=own,
            journal=journal,
            output=output,
            phases=phases,
            health=Health(rules=health, folder=folder, http=http_url),
            probe=_probe(options, output.say),
            ladder_of=lambda member: ladder_of(options, member),
        )
        status = launcher.run(signals)
        journal.write(LaunchEnded(status=status))
        output.say(f"ends with exit status {status}")
        return status


def check_options(options: LaunchOptions) -> None:
    """Raise a LaunchError if the options do not fit together."""
    for name in ("groups", "nproc", "max_restarts", "spares"):
        least = 1 if name in ("groups", "nproc") else 0
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise LaunchError(f"--{flag} must be at least {least}, not {getattr(options, name)}.")
    if options.drain_timeout_s < 0:
        raise LaunchError(f"--drain-timeout-s must be at least 0 s, not {options.drain_timeout_s:g}.")
    if options.group is not None and (options.spares or options.groups != 1):
        raise LaunchError("--group starts one group, so --groups and --spares do not go with it.")
    if options.group is not None and options.group < 0:
        raise LaunchError(f"--group must be a number from 0, not {options.group}.")
    devices, processes = devices_of(options), len(options.names) * options.nproc
    if devices and len(devices) % processes:
        raise LaunchError(
            f"--devices names {len(devices)} devices, which {processes} processes ({len(options.names)} groups x "
            f"{options.nproc}) cannot share evenly."
        )

    check_rungs(options, devices)


def check_rungs(options: LaunchOptions, devices: Sequence[int]) -> None:
    """Raise a LaunchError if the mesh ladder cannot be right."""
    rungs = rungs_of(options)
    if not rungs and not options.probe:
        return
    if not rungs or not options.probe:
        given, lacking = ("--rungs", "--probe") if rungs else ("--probe", "--rungs")
        raise LaunchError(f"{given} needs {lacking}: docs/clusters.md has both.")
    share = len(devices) // len(options.names)
    if rungs[0] != share:
        raise LaunchError(
            f"--rungs begins with {rungs[0]} devices, but each of {len(options.names)} groups has {share} of the "
            f"{len(devices)} in --devices. The first rung is a group with all of its devices."
        )
    per_process = share // options.nproc
    for rung in rungs:
        if rung > per_process and rung % per_process:
            raise LaunchError(
                f"--rungs has {rung} devices, which processes with {per_process} devices each cannot have. Take "
                f"multiples of {per_process}, or fewer than {per_process} for a single process."
            )
    if options.rung_after_s < 0:
        raise LaunchError(f"--rung-after-s must be at least 0 s, not {options.rung_after_s:g}.")
    try:
        words = shlex.split(options.probe)
    except ValueError as error:
        raise LaunchError(f"--probe {options.probe!r} is no command: {error}.") from error
    if shutil.which(words[0]) is None:
        raise LaunchError(f"--probe {options.probe!r}: there is no program {words[0]!r} to run.")


def rungs_of(options: LaunchOptions) -> tuple[int, ...]:
    """Return the rungs of each group's mesh ladder; empty without one.

    Raises:
        LaunchError: they are not falling numbers.
    """
    words = _words(options.rungs)
    if not all(word.isdigit() for word in words) or any(
        map(operator.le, map(int, words), map(int, words[1:]))
    ):
        raise LaunchError(f"--rungs must be falling numbers of devices such as 8,4,2, not {options.rungs!r}.")
    if "0" in words:
        raise LaunchError(f"--rungs must be at least 1 each, not {options.rungs!r}.")
    return tuple(map(int, words))


def ladder_of(options: LaunchOptions, member: Member) -> Ladder | None:
    """Return a group's ladder."""
    rungs = rungs_of(options)
    return Ladder(member.devices, rungs, options.rung_after_s) if rungs else None


def _probe(options: LaunchOptions, say: Callable[[str], None]) -> Probe | None:
    if not options.probe:
        return None
    return Probe(shlex.split(options.probe), say=say, patience_s=options.rung_after_s)


def devices_of(options: LaunchOptions) -> list[int]:
    """Return the numbers of the devices.

    Raises:
        LaunchError: they are not different numbers.
    """
    words = _words(options.devices)
    if not all(word.isdigit() for word in words) or len(set(words)) != len(words):
        raise LaunchError(f"--devices must be different numbers such as 0,1,2,3, not {options.devices!r}.")
    return [int(word) for word in words]


def members_of(options: LaunchOptions, coordinator: str, folder: Path) -> list[Member]:
    """Return the groups of the launch."""
    caches = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # the user's own choice
    shares = dealt(devices_of(options), len(options.names))
    return [
        Member(
            name=name,
            nproc=options.nproc,
            coordinator=coordinator,
            spare=name.startswith("spare-"),
            devices=devices,
            compilation_cache=None if caches else folder / "compiled" / name,
            extra={"JAXFT_OTHER_MESHES": "1"} if options.rungs else {},
        )
        for name, devices in zip(options.names, shares, strict=True)
    ]


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield the list of the signals that have arrived."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _folder(given: Path | None) -> Path:
    folder = given or Path(time.strftime(f"jaxft-launch-%Y%m%d-%H%M%S-{os.getpid()}"))
    if folder.exists() and not folder.is_dir():
        raise LaunchError(f"--folder {folder} exists and is not a folder. Name another one.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute()


def _words(comma_list: str) -> list[str]:
    return [word.strip() for word in comma_list.split(",") if word.strip()]
