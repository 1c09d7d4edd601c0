"""A supervisor in the process of the test, over real processes: what it tells."""

import errno
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.processes._fate import Fate
from jaxft_launch.processes._processes import Child, Processes
from jaxft_launch.processes._ranks import Member
from jaxft_launch.supervise import _life, _restarts, _supervisor
from jaxft_launch.supervise._journal import Entry, GroupEnded, GroupGivenUp, GroupRestarts, RankEnded
from jaxft_launch.supervise._supervisor import Rules, Supervisor
from tests import patience
from tests.launch.launches import FAKE, is_alive

pytestmark = pytest.mark.processes


@dataclass
class Told:
    """What a supervisor has written and said."""

    entries: list[Entry] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, cwd=tmp_path) as made:
        yield made


def supervisor(
    processes: Processes,
    told: Told,
    *command: str,
    warm: bool,
    nproc: int = 1,
    drain_timeout_s: float = 60.0,
) -> Supervisor:
    return Supervisor(
        Member(name="group-0", coordinator="localhost:1", nproc=nproc),
        command,
        processes,
        Rules(warm=warm, drain_timeout_s=drain_timeout_s),
        phases=processes.folder,
        write=told.entries.append,
        say=told.said.append,
    )


def test_how_a_process_ended_is_told_even_if_it_ends_between_two_looks(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    one = supervisor(processes, told, *FAKE, "gate:go exit:3", warm=False)
    look = Fate.watch

    def look_and_let_it_end(self: Fate, *, shared: bool = True) -> None:
        look(self, shared=shared)
        (processes.folder / "go").touch()
        assert one.life is not None
        assert one.life.ranks[0].child.wait(patience.FAR_S)

    monkeypatch.setattr(Fate, "watch", look_and_let_it_end)
    patience.until(lambda: one.poll() or (one.state is _supervisor.State.WAITING and one.lives), "its end")
    assert [entry.status for entry in told.entries if isinstance(entry, RankEnded)] == [3]
    assert [entry.status for entry in told.entries if isinstance(entry, GroupEnded)] == [3]
    assert any("ended with exit status 3 (error)" in text for text in told.said)


def test_a_start_that_waits_for_imports_says_so_once(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_supervisor, "FIRST_MENTION_S", 0.0)
    told = Told()
    script = processes.folder / "train.py"
    script.write_text("")
    one = supervisor(processes, told, sys.executable, str(script), warm=True)
    patience.until(lambda: one.poll() or told.said, "a line")
    one.poll()
    assert told.said == ["group-0 waits until its warm process has imported jax, jaxft"]


def test_a_group_that_cannot_be_started_is_tried_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a free descriptor, process or disk: at any of its ranks, of which none is left running."""
    told, start, started = Told(), Processes.start, list[Child]()
    fails = iter([False, True, False, False])

    def start_or_fail(self: Processes, name: str, *rest: Any, **named: Any) -> Child:
        if next(fails):
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(start(self, name, *rest, **named))
        return started[-1]

    monkeypatch.setattr(Processes, "start", start_or_fail)
    monkeypatch.setattr(_restarts, "FIRST_WAIT_S", 0.01)
    one = supervisor(processes, told, *FAKE, "exit:0", warm=False, nproc=2)
    one.poll()
    assert one.state is _supervisor.State.WAITING
    assert [child.exit_code() is None for child in started] == [False]
    assert "Too many open files" in told.said[0]
    patience.until(lambda: one.poll() or one.over, "the group to end")
    assert one.state is _supervisor.State.DONE
    assert [entry.life for entry in told.entries if isinstance(entry, GroupRestarts)] == [0]


def test_a_group_that_can_never_be_started_is_given_up(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()

    def fail(*rest: Any, **named: Any) -> Child:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Processes, "start", fail)
    monkeypatch.setattr(_restarts, "LONGEST_WAIT_S", 0.0)
    one = supervisor(processes, told, *FAKE, "exit:0", warm=False)
    patience.until(lambda: one.poll() or one.over, "it to be given up")
    assert one.state is _supervisor.State.GIVEN_UP
    assert "can't start new thread" in told.said[0]


STRANDED = "phase:stranded:0 exit:75"


def stranded(processes: Processes, told: Told) -> Supervisor:
    """A supervisor whose group found that nothing holds the job's state, and looks once more."""
    one = supervisor(processes, told, *FAKE, STRANDED, "made:up mute", warm=False)
    patience.until(lambda: one.poll() or (processes.folder / "up").exists(), "the second life")
    return one


@pytest.mark.parametrize(
    ("words", "expected"),
    [("say:nothing", True), ("phase:wait:0", True), ("phase:stranded:0", True), ("phase:heal:3", False)],
)
def test_what_a_life_tells_counts_for_more_than_the_last_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, words: str, expected: bool
) -> None:
    monkeypatch.setattr(_restarts, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(_supervisor, "SUPERVISE_EVERY_S", 0.0)
    one = supervisor(processes, Told(), *FAKE, STRANDED, f"{words} made:up alive", warm=False)
    patience.until(lambda: one.poll() or (processes.folder / "up").exists(), "the second life")
    one.poll()
    assert one.stranded is expected
    one.kill()


def test_a_group_is_stranded_while_it_waits_in_vain(processes: Processes) -> None:
    one = supervisor(processes, Told(), *FAKE, "phase:stranded:0 alive", warm=False)
    assert not one.stranded
    patience.until(lambda: one.poll() or one.stranded, "its word")
    one.kill()


def test_a_stranded_group_is_given_up_once(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may take a moment to end. The launcher says nothing more meanwhile."""
    monkeypatch.setattr(_restarts, "FIRST_WAIT_S", 0.01)
    told = Told()
    one = stranded(processes, told)
    assert one.stranded
    one.give_up("Nothing holds the state.")
    assert not one.over
    assert not one.stranded
    patience.until(lambda: one.poll() or one.over, "its end")
    assert (one.state, one.status) == (_supervisor.State.GIVEN_UP, 1)
    assert [entry.why for entry in told.entries if isinstance(entry, GroupGivenUp)] == [
        "Nothing holds the state."
    ]


@pytest.mark.parametrize("leaves", [Supervisor.retire, Supervisor.leave, Supervisor.drain])
def test_a_group_that_leaves_is_not_stranded(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, leaves: Callable[[Supervisor], None]
) -> None:
    monkeypatch.setattr(_restarts, "FIRST_WAIT_S", 0.01)
    one = stranded(processes, Told())
    leaves(one)
    assert not one.stranded
    one.kill()


@pytest.mark.long
def test_a_warm_process_that_tells_no_end_is_ended_with_its_forks(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, so the status of the fork that was killed never comes: the group would never be restarted."""
    monkeypatch.setattr(_life, "REAP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(_restarts, "FIRST_WAIT_S", 0.01)
    told = Told()
    script = processes.folder / "train.py"
    script.write_text("import signal\nsignal.pause()\n")
    one = supervisor(processes, told, sys.executable, str(script), warm=True)
    patience.until(lambda: one.poll() or one.lives == 1, "its first life")
    (warm,) = processes._warm.values()
    warm.stop()
    one.strike()
    patience.until(
        lambda: one.poll() or one.lives == 2, "its second life", context=lambda: "\n".join(told.said)
    )
    assert [entry.ending for entry in told.entries if isinstance(entry, GroupEnded)] == ["killed"]
    assert warm.exit_code() == -9
    said = "group-0 was killed, but its warm process does not tell of its end: that is killed as well"
    assert told.said.count(said) == 1
    one.kill()


# A shell that ends at once on SIGTERM, around a program that does not.
WRAPPED = ("sh", "-c", '"$@"; exit 3', "wrapper", *FAKE)


def wrapped(processes: Processes, life: str, *, drain_timeout_s: float = 600.0) -> tuple[Supervisor, int]:
    """Start a shell around a program; return its supervisor, and the number of the program's process."""
    one = supervisor(processes, Told(), *WRAPPED, life, warm=False, drain_timeout_s=drain_timeout_s)
    patience.until(lambda: one.poll() or (processes.folder / "up").exists(), "the program to run")
    return one, int((processes.folder / "group-0.0.starts").read_text())


def poll_after_its_shell(one: Supervisor) -> None:
    """Let the supervisor look several times after the shell has ended."""
    assert one.life is not None
    assert one.life.ranks[0].child.wait(patience.FAR_S)
    for _ in range(5):
        one.poll()


@pytest.mark.parametrize("drain", [Supervisor.drain, Supervisor.retire])
def test_a_program_in_a_shell_finishes_its_step_in_a_drain(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, drain: Callable[[Supervisor], None]
) -> None:
    monkeypatch.setattr(_life, "REST_TIMEOUT_S", 0.0)
    one, pid = wrapped(processes, "finishes:go steps:1 made:up mute")
    drain(one)
    poll_after_its_shell(one)
    assert is_alive(pid)
    assert not one.over
    (processes.folder / "go").touch()
    patience.until(lambda: one.poll() or one.over, "its end")
    assert (processes.folder / "finished").exists()


@pytest.mark.parametrize("drain", [Supervisor.drain, Supervisor.retire])
@pytest.mark.parametrize("late", [True, False])
def test_a_program_in_a_shell_that_does_not_leave_is_killed(
    processes: Processes, drain: Callable[[Supervisor], None], late: bool
) -> None:
    """At the end of the drain, or when its launcher wants to end at once."""
    one, pid = wrapped(processes, "deaf steps:1 made:up mute", drain_timeout_s=0.0 if late else 600.0)
    drain(one)
    poll_after_its_shell(one)
    if not late:
        assert is_alive(pid)
        one.kill()
    patience.until(lambda: one.poll() or one.over, "its end")
    patience.until(lambda: not is_alive(pid), "the program to end")


def test_a_change_of_the_time_of_day_is_no_long_life(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes of standing by count as progress of a spare, so that it is restarted at once."""
    told = Told()
    one = supervisor(processes, told, "sh", "-c", "exit 75", warm=False)
    one.poll()
    t_s = time.time()
    monkeypatch.setattr(time, "time", lambda: t_s + 3600.0)
    ends = lambda: [entry.lived_s for entry in told.entries if isinstance(entry, GroupEnded)]  # noqa: E731
    (lived_s,) = patience.until(lambda: one.poll() or ends(), "the end of the group")
    assert 0.0 <= lived_s < 3600.0
