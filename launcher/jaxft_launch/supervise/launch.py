"""The command `jaxft launch`: starts a job's groups on this machine, and keeps them alive until the job is done."""

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from jaxft_protocol.credentials import job_key, read_secret

from jaxft_launch.check._health import Health
from jaxft_launch.check._rules import read_rules
from jaxft_launch.processes._checks import LaunchError, check_command, check_installed
from jaxft_launch.processes._coordinator import COORDINATOR, Coordinator, StartStopped
from jaxft_launch.processes._processes import Processes
from jaxft_launch.processes._python_command import other_python
from jaxft_launch.processes._ranks import Member, cache_in, dealt
from jaxft_launch.processes._statuses import AGAIN, ERROR
from jaxft_launch.supervise._attached import attach
from jaxft_launch.supervise._claim import claimed
from jaxft_launch.supervise._deadlines import SILENCE, parse_deadlines, without_phases
from jaxft_launch.supervise._hosts import (
    check_reachable,
    check_shell,
    http_for,
    meeting_of,
    own_name,
    own_secret,
    parts_of,
    remote_member,
)
from jaxft_launch.supervise._journal import Journal, LaunchBegan, LaunchEnded
from jaxft_launch.supervise._ladder import Ladder
from jaxft_launch.supervise._launcher import Launcher
from jaxft_launch.supervise._options import (
    LaunchOptions,
    check_options,
    devices_of,
    hosts_of,
    rungs_of,
    words_of,
)
from jaxft_launch.supervise._output import make_output
from jaxft_launch.supervise._probe import Probe
from jaxft_launch.supervise._remote_shell import ALL_DRAINED
from jaxft_launch.supervise._supervisor import Rules
from jaxft_launch.supervise._unblocked import unblocked

EVENTS = "events.jsonl"
# Of the deadline for silence: groups wait as long for a coordinator, by default, and end together if it stays away.
COORDINATOR_SILENCE, LEAST_SILENCE_S = 1 / 3, 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_launch(
    options: LaunchOptions, words: Sequence[str], *, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the groups until all have ended; return the exit status. Tests pass another command for the coordinator.

    Raises:
        LaunchError: an option is not valid, the program does not exist, or the coordinator does not start.
    """
    if options.attached:
        # Unbuffered: a thread that waits in a buffered read ends the interpreter with an error.
        attach(open(0, "rb", buffering=0, closefd=False))
    check_command(words, command="jaxft launch")
    check_options(options)
    rules = Rules(
        deadlines=parse_deadlines(options.deadlines),
        max_restarts=options.max_restarts,
        warm=options.warm,
        preload=tuple(words_of(options.preload)),
        drain_timeout_s=options.drain_timeout_s,
    )
    silence_s = max(LEAST_SILENCE_S, COORDINATOR_SILENCE * rules.deadlines[SILENCE])
    address = options.coordinator or os.environ.get("JAXFT_COORDINATOR", "")
    if not address and options.group is not None:
        raise LaunchError(
            "--group starts one group of a job, so it needs the job's coordinator: --coordinator HOST:PORT. "
            "To start N groups on this machine, say --groups N."
        )
    if options.hosts and address:
        check_reachable(address, hosts_of(options))
    if address and options.http:
        raise LaunchError(
            f"--http is for a coordinator that the launcher starts, but the job's coordinator is {address}. Give "
            "--http to that one."
        )
    if not address:
        check_installed(("jaxft_coordinator",), remedy="pip install jaxft-coordinator")
    http_url = os.environ.get("JAXFT_HTTP", "")
    if options.http:
        http_url = f"http://{options.http}"
        if options.hosts:
            http_url = http_for(hosts_of(options), options.http, needed=options.health is not None)
    health = () if options.health is None else read_rules(options.health, http=http_url)
    if options.hosts:  # the launchers there see to all of this
        health, rules = (), replace(rules, warm=False, deadlines=without_phases(rules.deadlines))
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_signals())
        folder = _folder(options, stack)
        phases = _phases(stack)
        output = stack.enter_context(make_output(unblocked(sys.stdout)))
        journal = Journal(folder / EVENTS, output.say)
        stack.callback(journal.close)
        processes = stack.enter_context(Processes(folder, cwd=Path.cwd(), keeps_token=bool(address)))
        own, token = None, ""
        if not address:
            try:
                own, token = _own_coordinator(options, processes, coordinator, phases, lambda: bool(signals))
            except StartStopped:
                name = signal.Signals(signals[0]).name
                output.say(f"got {name} while the coordinator started: no group was started")
                return 128 + signal.SIGINT if signals[0] == signal.SIGINT else AGAIN
            address = own.address
            if options.http:
                output.say(f"the page is at http://{options.http}/")
        hosts = f" on {options.hosts}" if options.hosts else ""
        output.say(f"{len(options.names)} groups x {options.nproc}{hosts}; logs and {EVENTS} in {folder}")
        if not options.hosts and (other := other_python(words)):
            output.say(
                f"the groups run {other}, another Python than {sys.executable}, which runs jaxft launch. To use the "
                "packages of the latter, activate its environment"
            )
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
            remote_members(options, address, folder, words, token, http_url)
            if options.hosts
            else members_of(options, address, folder),
            words,
            processes,
            rules,
            coordinator=own,
            silence_s=silence_s,
            journal=journal,
            output=output,
            phases=phases,
            health=Health(rules=health, folder=folder, http=http_url),
            probe=_probe(options, output.say),
            ladder_of=lambda member: ladder_of(options, member),
        )
        status = launcher.run(signals)
        if options.attached:
            status = attached_status(status, all_drained=launcher.all_drained)
        journal.write(LaunchEnded(status=status))
        output.say(f"ends with exit status {status}")
        return status


def attached_status(status: int, *, all_drained: bool) -> int:
    """Return what a launcher on another host ends with. The status of a program must not say that it was drained."""
    if all_drained:
        return ALL_DRAINED
    return ERROR if status == ALL_DRAINED else status


def _own_coordinator(
    options: LaunchOptions,
    processes: Processes,
    command: Sequence[str],
    phases: Path,
    stopped: Callable[[], bool],
) -> tuple[Coordinator, str]:
    """Start a coordinator, unless `stopped`; return it and, if other hosts are to reach it, the job's token."""
    folder, alive = processes.folder, phases / "coordinator.alive"
    flags = ["--state", str(folder / "coordinator")]
    if options.http:
        flags += ["--http", options.http]
    if not options.hosts:
        return Coordinator(processes, (*command, *flags), stopped=stopped, alive=alive), ""
    secret = own_secret(folder)
    flags += ["--token-file", str(secret)]
    host = own_name(hosts_of(options))
    coordinator = Coordinator(processes, (*command, *flags), host=host, stopped=stopped, alive=alive)
    return coordinator, job_key(read_secret(secret), options.job).hex()


def ladder_of(options: LaunchOptions, member: Member) -> Ladder | None:
    """Return a group's ladder."""
    rungs = rungs_of(options)
    return Ladder(member.devices, rungs, options.rung_after_s) if rungs else None


def _probe(options: LaunchOptions, say: Callable[[str], None]) -> Probe | None:
    if not options.probe:
        return None
    return Probe(shlex.split(options.probe), say=say, patience_s=options.rung_after_s)


def members_of(options: LaunchOptions, coordinator: str, folder: Path) -> list[Member]:
    """Return the groups of the launch."""
    caches = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # the user's own choice
    shares = dealt(devices_of(options), len(options.names))
    return [
        Member(
            name=name,
            nproc=options.nproc,
            nodes=options.nodes,
            node=options.node,
            meet=options.meet,
            coordinator=coordinator,
            spare=name.startswith("spare-"),
            devices=devices,
            compilation_cache=None if caches else folder / "compiled" / name,
            extra={"JAXFT_OTHER_MESHES": "1"} if options.rungs else {},
        )
        for name, devices in zip(options.names, shares, strict=True)
    ]


def remote_members(
    options: LaunchOptions, coordinator: str, folder: Path, words: Sequence[str], token: str, http: str
) -> list[Member]:
    """Return the parts of the groups on other hosts. `http`: the URL of the coordinator's HTTP port there, or ""."""
    parts, shell = parts_of(options.names, hosts_of(options)), check_shell(options.remote_shell)
    caches = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # the user's own choice
    members: list[Member] = []
    for part in parts:
        number = options.names.index(part.group)
        own = {"PYTHONUNBUFFERED": "1", **({"JAXFT_HTTP": http} if http else {})}
        if not caches:  # of all hosts of a group: only its first process writes there
            own |= cache_in(folder / "compiled" / part.group)
        if number >= options.groups:
            own["JAXFT_SPARE"] = "1"
        said = {
            "--group": number,
            "--nproc": options.nproc,
            "--nodes": part.nodes,
            "--node": part.node,
            "--meet": meeting_of(part, parts) if part.nodes > 1 else "",
            "--coordinator": coordinator,
            "--devices": ",".join(map(str, dealt(devices_of(options), part.shares)[part.share])),
            "--max-restarts": options.max_restarts,
            "--deadlines": options.deadlines,
            "--drain-timeout-s": options.drain_timeout_s,
            "--preload": options.preload,
            "--health": "" if options.health is None else options.health.absolute(),
            "--folder": folder / part.name,
        }
        flags = [word for flag, value in said.items() if value != "" for word in (flag, str(value))]
        flags += [] if options.warm else ["--no-warm"]
        members.append(remote_member(part, shell, flags, words, own, token))
    return members


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield the list of the signals that have arrived."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    # `nohup jaxft launch` is to outlive its terminal.
    heeded = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    # While a parent's choice to ignore it is inherited, the kernel keeps no exit status: all of them would be 0.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _phases(stack: contextlib.ExitStack) -> Path:
    """Return a new folder on this machine, which is removed when the stack is left."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="jaxft-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"There is no folder for temporary files: {error}. Set TMPDIR to one on this machine."
        ) from error
    return Path(stack.enter_context(temporary))


def _folder(options: LaunchOptions, stack: contextlib.ExitStack) -> Path:
    """Return the folder, which is this launch's until the stack is left."""
    folder = options.folder or Path(time.strftime(f"jaxft-launch-%Y%m%d-%H%M%S-{os.getpid()}"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(claimed(folder, options.names, node=options.node if options.nodes > 1 else None))
        (folder / EVENTS).open("ab").close()
    except OSError as error:
        raise LaunchError(
            f"--folder {folder} cannot hold logs and events: {error}. Name another one."
        ) from error
    return folder.absolute()
