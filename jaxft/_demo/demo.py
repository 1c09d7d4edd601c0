"""The command `jaxft demo`: two trainings of the same job, one with kills and one without, and a verdict."""

import contextlib
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from jaxft._demo._checks import DemoError, check_installed, check_json_file, check_new_folder, find_clone
from jaxft._demo._coordinator import COORDINATOR, start_coordinator
from jaxft._demo._display import Display, make_display
from jaxft._demo._job import TRAINER, Job, Training
from jaxft._demo._killer import plan_strikes
from jaxft._demo._processes import Processes
from jaxft._demo._run import run_job
from jaxft._demo._verdict import Verdict, judge
from jaxft._demo._verdict_text import verdict_json, verdict_text

GROUPS = ("group-0", "group-1", "group-2")
SHARDS = 6  # two for each group, three for each of two: nobody waits for one that has more
# A relaunched group costs as much processor time as some 9 steps of this size, 15 on a busy machine: three returns
# fit twice.
SEQUENCES_PER_SHARD = 8
STEPS = 70


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Train a small Llama 3 in three replica groups, kill -9 each of them, and compare with an undisturbed run.

    Exit status 0 if no step was lost and all final states are equal, bit for bit; 1 if not.
    """

    steps: int = STEPS
    """Steps that the job commits, with kills and without."""
    kills: int = len(GROUPS)
    """How many times to kill a group. Everyone is killed once before anyone is killed twice."""
    seed: int | None = None
    """Names the victims' order and the moments. None draws one, and prints it."""
    json: Path | None = None
    """Write the verdict to this file as well."""
    keep: Path | None = None
    """Keep the event files and logs in this new folder."""


@dataclass(frozen=True, slots=True)
class Commands:
    """What is started, so that tests can start something quicker."""

    coordinator: tuple[str, ...] = COORDINATOR
    trainer: tuple[str, ...] = TRAINER


def run_demo(options: DemoOptions, commands: Commands | None = None) -> int:
    """Run the demo and print its verdict; return the exit status.

    Raises:
        DemoError: it cannot run here, or its coordinator does not start.
    """
    if options.steps < 1 or options.kills < 0:
        raise DemoError(
            f"--steps must be 1 or more and --kills 0 or more, not {options.steps} and {options.kills}"
        )
    if options.json is not None:
        check_json_file(options.json)
        options.json.unlink(missing_ok=True)  # a failure must not leave an older verdict
    clone = find_clone()
    check_installed()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    display = make_display(sys.stdout)
    with _signals_as_exit(), _run_folder(options.keep) as folder:
        with display, Processes(folder, cwd=clone) as processes:
            verdict = _train_twice(
                options, commands or Commands(), seed=seed, processes=processes, display=display
            )
    sys.stdout.write("\n" + verdict_text(verdict, seed=seed) + "\n")
    if not verdict.ok and options.keep is None:
        sys.stdout.write(
            f"To look into it: jaxft demo --seed {seed} --keep FOLDER keeps every log and event file.\n"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(verdict_json(verdict, seed=seed), indent=2) + "\n")
    return 0 if verdict.ok else 1


def _train_twice(
    options: DemoOptions, commands: Commands, *, seed: int, processes: Processes, display: Display
) -> Verdict:
    """Kills first: whoever watches sees a recovery soon, and the second run repeats what the first has shown."""
    coordinator, address = start_coordinator(processes, commands.coordinator)
    display.say(f"coordinator at {address} (pid {coordinator.pid}); logs in {processes.folder}")
    training = Training(steps=options.steps, flags=trainer_flags(processes.folder), trainer=commands.trainer)
    strikes = plan_strikes(GROUPS, kills=options.kills, seed=seed)
    order = ", ".join(strike.group for strike in strikes)
    display.say(f"first run: {options.steps} steps with {options.kills} kills ({order}); --seed {seed}")
    job = Job("disturbed", GROUPS, training, coordinator=address, processes=processes)
    disturbed = run_job(job, display, title="run with kills", strikes=strikes)
    if disturbed.problems:
        return judge(disturbed, None)
    display.say(f"second run: the same {options.steps} steps, undisturbed")
    job = Job("undisturbed", GROUPS, training, coordinator=address, processes=processes)
    return judge(disturbed, run_job(job, display, title="undisturbed run"))


def trainer_flags(folder: Path) -> dict[str, str]:
    return {
        "--size": "debug",
        "--shards": str(SHARDS),
        "--batch-per-shard": str(SEQUENCES_PER_SHARD),
        "--fsdp": "2",
        "--cpu-devices": "2",
        "--compilation-cache": str(folder / "compilation"),
    }


@contextlib.contextmanager
def _run_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        check_new_folder(keep)
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="jaxft-demo-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _signals_as_exit() -> Iterator[None]:
    """End by SIGTERM and SIGHUP as by Ctrl-C: through every `with`, so that our processes end and files go."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
