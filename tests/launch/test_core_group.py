"""One group in the supervisor's core: its lives, deadlines, and ends."""

import pytest

from jaxft_launch.supervise.core.entries import GroupEnded, GroupRestarts, RankEnded, RankOverdue
from jaxft_launch.supervise.core.group import Phase, Rules
from jaxft_launch.supervise.core.values import (
    DrainAsked,
    Ended,
    Kill,
    KillRest,
    RestSeen,
    ShowStacks,
    Signalled,
    StartFailed,
    StrikeAsked,
    Terminate,
)
from tests.launch.core import Play, no_deadlines, play

# ---- deadlines ----


def overdue_after(one: Play, seconds: float) -> list[RankOverdue]:
    one.after(seconds)
    one.after(3.0)
    return one.entries(RankOverdue)


def test_a_process_that_tells_no_phase_is_ended_after_boot() -> None:
    one = play(1, rules=Rules(deadlines={"boot": 100.0, "silence": 5.0}))
    assert overdue_after(one, 90.0) == []
    (late,) = overdue_after(one, 20.0)
    assert (late.phase, late.deadline_s) == ("boot", 100.0)


@pytest.mark.parametrize(("phase", "late"), [("compute", True), ("vote", False), ("end", True)])
def test_a_phase_has_its_own_deadline(phase: str, *, late: bool) -> None:
    """`end`: the main thread has ended, and another thread keeps the process alive."""
    one = play(1, rules=Rules(deadlines={"compute": 50.0, "end": 50.0, "silence": 1e9}))
    one.sign("group-0", phase, 7)
    assert overdue_after(one, 45.0) == []
    assert bool(overdue_after(one, 10.0)) is late


def test_a_new_sign_in_the_same_phase_ends_the_silence_but_not_the_phase() -> None:
    one = play(1, rules=Rules(deadlines={"compute": 100.0, "silence": 30.0}))
    sign = {"group": "group-0", "phase": "compute", "step": 7}
    for _ in range(4):
        one.sign(**sign)  # with its own time each
        one.after(25.0)
    assert one.entries(RankOverdue) == []
    assert overdue_after(one, 10.0)[0].phase == "silence"


def test_what_is_overdue_shows_its_stacks_and_is_killed_three_seconds_later() -> None:
    one = play(1, ranks=2, rules=Rules(deadlines={"compute": 10.0}))
    for rank in range(2):
        one.sign("group-0", "compute", 3, rank=rank)
    assert one.after(11.0) == [ShowStacks("group-0")]
    assert Kill("group-0") in one.after(3.0)
    assert "its group is killed. It may wait for another" in one.lines
    for rank in range(2):
        one.end("group-0", -9, rank=rank)
    (ended,) = one.entries(GroupEnded)
    assert ended.ending == "killed"


def test_a_rank_beside_one_that_is_done_has_a_deadline() -> None:
    one = play(1, ranks=2, rules=Rules(deadlines={"end": 60.0}))
    one.send(Ended("group-0", 0, 0))
    assert overdue_after(one, 50.0) == []
    (late,) = overdue_after(one, 20.0)
    assert (late.rank, late.phase) == (1, "end")


@pytest.mark.parametrize(("last", "ending"), [("drained", "drained"), ("late", "done"), ("end", "killed")])
def test_a_process_that_only_a_thread_keeps_alive_is_ended(last: str, ending: str) -> None:
    """Its main thread has ended: its last phase counts."""
    one = play(1, rules=Rules(deadlines={"end": 60.0}))
    one.commit("group-0", 4)
    one.sign("group-0", last, 4)
    assert len(overdue_after(one, 70.0)) == 1
    one.end("group-0", -9)
    assert [entry.ending for entry in one.entries(GroupEnded)] == [ending]


# ---- the fate that ranks share ----


def test_a_rank_that_is_killed_takes_its_group_with_it() -> None:
    one = play(1, ranks=2)
    one.send(Ended("group-0", 1, -9))
    assert Kill("group-0") in one.after(0.0)
    one.end("group-0", -9)
    (entry,) = one.entries(RankEnded)
    assert (entry.rank, entry.status, entry.ending) == (1, -9, "killed")
    assert one["group-0"].phase is Phase.WAITING


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (75, 1, (1, "error")),
        (1, 75, (1, "error")),
        (75, -9, (-9, "killed")),
        (1, -6, (1, "error")),
        (1, 78, (78, "refused")),
    ],
)
def test_the_reason_is_the_worst_end(first: int, second: int, reason: tuple[int, str]) -> None:
    """A process whose own error has ended the others may end after them; SIGABRT is JAX's end of a rank."""
    one = play(1, ranks=2)
    one.send(Ended("group-0", 0, first))
    assert Kill("group-0") not in one.after(0.5)
    one.end("group-0", second, rank=1)
    (ended,) = one.entries(GroupEnded)
    assert (ended.status, ended.ending) == reason


def test_an_end_after_the_kill_is_no_reason() -> None:
    one = play(1, ranks=2)
    one.send(Ended("group-0", 0, 75))
    assert Kill("group-0") in one.after(1.5)
    one.end("group-0", 1, rank=1)
    assert one.entries(GroupEnded)[0].ending == "again"


def test_in_a_drain_each_rank_ends_by_itself() -> None:
    one = play(1, ranks=2)
    one.send(DrainAsked("group-0"))
    one.send(Ended("group-0", 0, 1))
    assert Kill("group-0") not in one.after(30.0)


# ---- restarts ----


def test_a_group_that_made_progress_is_restarted_at_once() -> None:
    one = play(1)
    for step in (3, 5):
        one.commit("group-0", step)
        one.end("group-0", -9)
        one.after(0.0)
    assert [entry.wait_s for entry in one.entries(GroupRestarts)] == [0.0, 0.0]
    assert one["group-0"].lives == 3


def test_a_step_to_which_it_only_healed_is_no_progress() -> None:
    one = play(1, rules=no_deadlines(max_restarts=1))
    one.commit("group-0", 3)
    one.end("group-0", -9)
    one.after(0.0)
    one.sign("group-0", "heal", 8)
    one.end("group-0", -9)
    first_s, second_s = (entry.wait_s for entry in one.entries(GroupRestarts))
    assert first_s == 0.0 < second_s


def test_a_start_that_fails_is_tried_again() -> None:
    one = play(1, started=False)
    one.starts = False
    one.after(0.0)
    assert one["group-0"].phase is Phase.STARTING
    one.send(StartFailed("group-0", "[Errno 24] Too many open files"))
    assert one["group-0"].phase is Phase.WAITING
    assert "group-0 cannot be started: [Errno 24]" in one.lines
    one.starts = True
    one.after(3.0)
    assert one["group-0"].phase is Phase.RUNNING


def test_a_start_that_waits_for_imports_says_so_once() -> None:
    one = play(1, started=False)
    one.starts = False
    for _ in range(5):
        one.after(3.0)
    assert one.lines == "group-0 waits until its warm process has imported its modules"


def test_a_struck_group_is_restarted() -> None:
    one = play(1)
    one.commit("group-0", 4)
    assert Kill("group-0") in one.send(StrikeAsked("group-0"))
    one.end("group-0", -9)
    one.after(0.0)
    assert (one["group-0"].phase, one["group-0"].lives) == (Phase.RUNNING, 2)


# ---- what processes leave behind ----


def test_what_a_process_left_behind_has_two_seconds() -> None:
    """Python's tracker of shared memory needs a moment of them: if it is killed, the memory stays."""
    one = play(1)
    one.commit("group-0", 4)
    one.send(StrikeAsked("group-0"))
    one.send(Ended("group-0", 0, -9))
    assert one.send(RestSeen("group-0", (77,))) == []
    one.now_s += 2.5
    assert KillRest("group-0") in one.send(RestSeen("group-0", (77,)))
    assert one["group-0"].phase is Phase.SWEPT  # its devices are not free yet
    one.send(RestSeen("group-0", ()))
    assert one["group-0"].phase is Phase.WAITING


def test_a_program_in_a_shell_that_has_ended_may_finish_its_step() -> None:
    one = play(1, rules=no_deadlines(drain_timeout_s=60.0))
    assert Terminate("group-0") in one.send(DrainAsked("group-0"))
    one.send(Ended("group-0", 0, -15))
    one.now_s += 50.0
    assert one.send(RestSeen("group-0", (77,))) == []
    one.now_s += 11.0
    assert KillRest("group-0") in one.send(RestSeen("group-0", (77,)))


def test_a_second_signal_kills_what_is_left_behind_too() -> None:
    one = play(1)
    one.send(Signalled("SIGTERM"))
    one.send(Ended("group-0", 0, 0))
    one.send(Signalled("SIGTERM"))
    assert KillRest("group-0") in one.send(RestSeen("group-0", (77,)))


def test_a_launch_ends_without_a_process_that_the_kernel_cannot_end() -> None:
    """As in uninterruptible sleep, for a driver or a file server that hangs."""
    one = play(1)
    one.send(Signalled("SIGTERM"))
    one.send(Signalled("SIGTERM"))
    one.after(0.0)
    one.after(31.0)
    assert one.launch.over
    assert f"Its process {one.pid - 1} was killed, and has not ended. It is in the kernel" in one.lines


def test_a_group_waits_for_a_process_that_the_kernel_cannot_end() -> None:
    """It holds the devices."""
    one = play(1)
    one.send(StrikeAsked("group-0"))
    one.after(0.0)
    one.after(31.0)
    assert one["group-0"].phase is Phase.KILLED
    assert "was killed, and has not ended" in one.lines
