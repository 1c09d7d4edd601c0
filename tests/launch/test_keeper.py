"""How long a launcher waits before it restarts its coordinator."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.supervise import _launcher
from jaxft_launch.supervise._journal import CoordinatorEnded, Entry
from jaxft_launch.supervise._launcher import CoordinatorKeeper
from jaxft_launch.supervise._restarts import LONGEST_WAIT_S
from tests import patience
from tests.shortages import no_descriptors

# Says that it listens, as a coordinator does, and stays.
COMMAND = ("sh", "-c", "echo '(port 1)'; exec sleep 3600")


class Told:
    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def write(self, entry: Entry) -> None:
        if isinstance(entry, CoordinatorEnded):
            self.waits_s.append(entry.wait_s)

    def say(self, text: str) -> None: ...


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, cwd=tmp_path) as made:
        yield made


def test_a_coordinator_that_never_stays_is_restarted_however_often_it_has_ended(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, told = Coordinator(processes, COMMAND), Told()
    keeper = CoordinatorKeeper(coordinator, told, told)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(keeper, "_ended", 5000)
    coordinator.child.kill()
    patience.until(lambda: keeper.poll() or told.waits_s, "its end to be seen")
    assert told.waits_s == [LONGEST_WAIT_S]


def test_the_log_of_an_earlier_coordinator_says_nothing_of_this_one(
    processes: Processes, tmp_path: Path
) -> None:
    for name in ("coordinator", "coordinator.1"):
        (tmp_path / f"{name}.log").write_text("listens (port 7)\nan old line\n")
    coordinator = Coordinator(processes, COMMAND)
    assert coordinator.port == 1
    assert "an old line" not in coordinator.child.log_tail()
    gate = tmp_path / "gate"
    coordinator._command = ("sh", "-c", f"until test -e {gate}; do sleep 0.01; done; {COMMAND[-1]}")
    coordinator.start_again()
    assert not coordinator.listens()
    gate.touch()
    patience.until(coordinator.listens, "it to listen")


def test_a_log_that_cannot_be_read_for_a_moment_is_read_later(processes: Processes, tmp_path: Path) -> None:
    gate, looks = tmp_path / "gate", list[int]()
    command = ("sh", "-c", f"until test -e {gate}; do sleep 0.01; done; {COMMAND[-1]}")
    with ExitStack() as stack:

        def looked() -> bool:
            looks.append(1)
            if len(looks) == 1:
                gate.touch()
                stack.enter_context(no_descriptors())
            if len(looks) == 3:
                stack.close()
            return False

        assert Coordinator(processes, command, stopped=looked).port == 1
    assert len(looks) >= 3


@pytest.mark.parametrize(("steady_s", "waits_s"), [(3600.0, [0.01, 0.02, 0.04]), (0.0, [0.01, 0.01, 0.01])])
def test_a_coordinator_that_has_lived_for_long_is_restarted_soon(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, steady_s: float, waits_s: list[float]
) -> None:
    """Three crashes in a day are no reason to let the job stand for minutes."""
    monkeypatch.setattr(_launcher, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(_launcher, "STEADY_S", steady_s)
    coordinator, told = Coordinator(processes, COMMAND), Told()
    keeper = CoordinatorKeeper(coordinator, told, told)  # pyright: ignore[reportArgumentType]
    for _ in waits_s:
        killed, seen = coordinator.child, len(told.waits_s)
        killed.kill()
        patience.until(lambda seen=seen: keeper.poll() or len(told.waits_s) > seen, "its end to be seen")
        patience.until(lambda killed=killed: keeper.poll() or coordinator.child is not killed, "its restart")
    assert told.waits_s == waits_s


def test_a_coordinator_that_cannot_be_started_is_tried_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a free descriptor or process: the groups do not end for that."""
    monkeypatch.setattr(_launcher, "FIRST_WAIT_S", 0.01)
    coordinator, told = Coordinator(processes, COMMAND), Told()
    keeper = CoordinatorKeeper(coordinator, told, told)  # pyright: ignore[reportArgumentType]
    start, fails = (
        coordinator.start_again,
        iter([OSError(24, "Too many open files"), RuntimeError("no thread"), None]),
    )

    def start_or_fail() -> None:
        if (error := next(fails)) is not None:
            raise error
        start()

    monkeypatch.setattr(coordinator, "start_again", start_or_fail)
    killed = coordinator.child
    killed.kill()
    patience.until(lambda: keeper.poll() or coordinator.child is not killed, "it to be started")
    assert list(fails) == []


def test_a_coordinator_that_gives_no_sign_any_more_is_killed(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each life has its own first sign: one whose start takes long is not silent."""
    monkeypatch.setattr(_launcher, "FIRST_WAIT_S", 0.01)
    alive = tmp_path / "alive"
    signs = "until test -e {0}.gate; do sleep 0.01; done; while sleep 0.01; do touch {0}; done"
    command = ("sh", "-c", f"echo '(port 1)'; {signs.format(alive)}")
    coordinator, told = Coordinator(processes, command, alive=alive), Told()
    keeper = CoordinatorKeeper(coordinator, told, told, silence_s=1.0)  # pyright: ignore[reportArgumentType]
    poll_for(keeper, 1.2)
    assert told.waits_s == []  # it never said that it can tell
    (tmp_path / "alive.gate").touch()
    patience.until(lambda: keeper.poll() or alive.exists(), "its first sign")
    first = coordinator.child
    (tmp_path / "alive.gate").unlink()
    first.stop()
    patience.until(lambda: keeper.poll() or coordinator.child is not first, "the next one")
    assert first.exit_code() == -9
    second = coordinator.child
    poll_for(keeper, 1.2)
    assert coordinator.child is second


def test_a_coordinator_that_hangs_in_its_next_start_is_killed(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launcher, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(_launcher, "START_TIMEOUT_S", 1.0)
    coordinator, told = Coordinator(processes, COMMAND), Told()
    keeper = CoordinatorKeeper(coordinator, told, told)  # pyright: ignore[reportArgumentType]
    coordinator._command = ("sh", "-c", "exec sleep 3600")
    first = coordinator.child
    first.kill()
    patience.until(lambda: keeper.poll() or coordinator.child is not first, "the next one")
    second = coordinator.child
    coordinator._command = COMMAND
    patience.until(lambda: keeper.poll() or coordinator.child is not second, "the one after that")
    assert second.exit_code() == -9


def poll_for(keeper: CoordinatorKeeper, seconds: float) -> None:
    """Let a launcher look for so long."""
    until_s = time.monotonic() + seconds
    patience.until(lambda: keeper.poll() or time.monotonic() >= until_s, "time to pass")
