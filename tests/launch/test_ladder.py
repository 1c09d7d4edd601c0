"""The mesh ladder's decisions, and the probe that they rest on."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from jaxft_launch.processes._ranks import Member
from jaxft_launch.supervise import _probe
from jaxft_launch.supervise._ladder import Ladder
from jaxft_launch.supervise._probe import Probe
from tests import patience
from tests.launch.launches import is_alive

ALL = frozenset(range(8))


def ladder() -> Ladder:
    """A group of the devices 4 to 7, which waits for 60 s."""
    return Ladder((4, 5, 6, 7), (4, 2, 1), 60.0)


def test_with_all_devices_it_starts_at_once():
    one = ladder()
    one.look(ALL, 0.0)
    assert one.start(ALL, 0.0) == (4, 5, 6, 7)
    one.look(ALL, 1.0, used=(4, 5, 6, 7))
    assert not one.may_climb(1000.0)


def test_it_waits_for_missing_devices_and_then_starts_on_a_lower_rung():
    one, working = ladder(), ALL - {5}
    one.look(working, 10.0)
    assert one.start(working, 69.9) == ()
    assert one.missing(working) == (5,)
    assert one.start(working, 70.0) == (4, 6)


def test_devices_that_come_back_in_time_are_all_used():
    one = ladder()
    one.look(ALL - {5}, 10.0)
    one.look(ALL, 20.0)
    assert one.start(ALL, 20.0) == (4, 5, 6, 7)
    one.look(ALL - {5}, 30.0)
    assert one.start(ALL - {5}, 80.0) == (), "it waits the whole time again"


def test_the_next_start_without_the_same_devices_is_at_once():
    one, working = ladder(), ALL - {5}
    one.look(working, 10.0)
    assert one.start(working, 70.0) == (4, 6)
    one.look(working, 100.0)
    assert one.start(working, 100.0) == (4, 6)
    one.look(ALL - {4, 5, 6}, 101.0)
    assert one.start(ALL - {4, 5, 6}, 101.0) == (7,)


def test_without_enough_for_the_lowest_rung_it_waits_on():
    one = Ladder((0, 1, 2, 3), (4, 2), 5.0)
    one.look({3}, 0.0)
    assert one.start({3}, 1000.0) == ()


def test_it_climbs_once_the_devices_have_worked_for_long_enough():
    one, used = ladder(), (4, 6)
    one.look(ALL - {5}, 0.0, used=used)
    assert not one.may_climb(1000.0), "three devices make no higher rung"
    one.look(ALL, 10.0, used=used)
    assert not one.may_climb(69.9)
    assert one.may_climb(70.0)
    one.look(ALL - {5}, 69.0, used=used)
    one.look(ALL, 80.0, used=used)
    assert not one.may_climb(100.0), "they failed again meanwhile"


def test_a_group_on_a_rung_sees_the_devices_of_the_rung():
    member = Member(name="group-0", coordinator=None, devices=(0, 1, 2, 3), extra={"A": "1"})
    two = member.on((0, 3))
    assert (two.devices, two.ranks()[0]["JAX_LOCAL_DEVICE_IDS"]) == ((0, 3), "0,3")
    assert (two.environment()["JAX_NUM_CPU_DEVICES"], two.environment()["A"]) == ("2", "1")


class Asked:
    """A probe, and what it said."""

    def __init__(self, *words: str, timeout_s: float = 60.0) -> None:
        self.said: list[str] = []
        self.probe = Probe(words, say=self.said.append, patience_s=0.0, timeout_s=timeout_s)

    def until_answer(self) -> frozenset[int]:
        asked_s = time.monotonic()
        self.until(lambda: self.probe.asked_s >= asked_s)
        return self.probe.working

    def until_said(self, count: int) -> str:
        self.until(lambda: len(self.said) >= count)
        return self.said[-1]

    def until(self, done) -> None:
        def polled() -> bool:
            self.probe.poll()
            return done()

        try:
            patience.until(polled, "the probe")
        finally:
            self.probe.end()


@pytest.mark.parametrize("text", ["0,1,3", "0\n1\n3\n", " 3, 1 0,\n", "1 1 0 3"])
def test_a_probe_prints_numbers(text: str):
    assert Asked("printf", text).until_answer() == {0, 1, 3}


def test_no_numbers_are_no_devices():
    assert Asked("true").until_answer() == frozenset()


def test_each_answer_counts_from_when_it_was_asked(tmp_path: Path):
    file = tmp_path / "devices"
    file.write_text("0 1")
    asked = Asked("cat", str(file))
    assert asked.until_answer() == {0, 1}
    file.write_text("0")
    assert asked.until_answer() == {0}


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("printf GPU-0", "printed 'GPU-0', which are not numbers of devices"),
        (f"printf {'1' * 5000}", f"printed '{'1' * 80}', which are not numbers of devices"),
        ("sh -c 'echo 0,1; exit 3'", "ended with status 3"),
        ("no-such-program", "is no program that can be run"),
    ],
)
def test_an_answer_that_cannot_be_read_is_reported_once(command: str, why: str):
    asked = Asked(*shlex.split(command))
    asked.probe.working = frozenset({7})
    first = asked.until_said(1)
    assert why in first
    assert "wait for its next answer" in first
    asked.probe._command = ("printf", "5")  # pyright: ignore[reportPrivateUsage]
    assert asked.until_answer() == {5}
    assert asked.said == [first]


def test_a_probe_that_hangs_is_killed_with_its_children(tmp_path: Path):
    file = tmp_path / "pid"
    asked = Asked("sh", "-c", 'sleep 1000 & echo $! > "$1"; wait', "sh", str(file), timeout_s=0.5)
    asked.until(lambda: bool(asked.said) and file.exists() and bool(file.read_text()))
    assert "did not end within 0.5 s, and was killed" in asked.said[0]
    pid = int(file.read_text())
    patience.until(lambda: not is_alive(pid), "the child to end")


def test_a_probe_does_not_get_the_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXFT_TOKEN", "0" * 64)
    code = "import os; print(1 if 'JAXFT_TOKEN' in os.environ else 0)"
    assert Asked(sys.executable, "-c", code).until_answer() == {0}


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread is free")])
def test_a_probe_that_cannot_be_started_is_reported_and_asked_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    probe = Probe(["echo", "0"], say=said.append, patience_s=0.0)

    def fail(*words: object, **options: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(_probe, "start_beside", fail)
        probe.poll()
    assert str(error) in said[0]
    patience.until(lambda: probe.poll() or probe.working, "an answer")
    assert probe.working == {0}
    probe.end()
