"""The rules of a launch as a whole: who may leave, who is given up, when it is over."""

from dataclasses import replace

import pytest

from jaxft._errors import ConfigurationError, JaxftError, JobFinished, JoinRefused, NotSaved
from jaxft_launch.supervise.core import launch as core
from jaxft_launch.supervise.core import values
from jaxft_launch.supervise.core.entries import (
    CheckChanged,
    CheckDrains,
    DevicesMissing,
    DrainBegan,
    GroupClimbs,
    GroupEnded,
    GroupGivenUp,
    GroupRestarts,
)
from jaxft_launch.supervise.core.group import Aim, Phase, Rules
from jaxft_launch.supervise.core.values import AskDevices, Checked, DrainAsked, Kill, Signalled, Terminate
from tests.launch.core import Play, no_deadlines, play, works

ALL = tuple(range(8))


def test_the_statuses_are_those_of_the_library() -> None:
    errors = (JobFinished, ConfigurationError, NotSaved, JaxftError, JoinRefused)
    assert [error.exit_status for error in errors] == [
        values.DONE,
        values.ERROR,
        values.UNSAVED,
        values.AGAIN,
        values.REFUSED,
    ]
    assert values.ending_of(values.UNSAVED) == values.Ending.AGAIN


# ---- one at a time, while another group holds the job's state ----


def on_a_lower_rung(count: int = 2, *, own_coordinator: bool = True) -> Play:
    """Groups of which each runs on two of its four devices, since the others do not work."""
    one = play(count, rungs=(4, 2), own_coordinator=own_coordinator, started=False)
    half = [device for device in range(4 * count) if device % 4 < 2]
    works(one, *half)
    one.after(61.0)
    works(one, *half)
    assert [len(group.life.devices) for group in one.launch.groups if group.life] == [2] * count
    return one


def leaving(one: Play) -> list[str]:
    return [group.name for group in one.launch.groups if group.aim is not Aim.RUN]


def test_groups_climb_one_at_a_time() -> None:
    """All of them in one pass would leave at the same boundary, and take the job's state with them."""
    one = on_a_lower_rung()
    for name in ("group-0", "group-1"):
        one.commit(name, 3)
    works(one, *ALL)
    assert one.after(61.0).count(Terminate("group-0")) == 1
    assert leaving(one) == ["group-0"]
    one.sign("group-0", "drained", 4)
    one.end("group-0", 0)
    works(one, *ALL)
    assert one["group-0"].life is not None
    assert len(one["group-0"].life.devices) == 4
    # The first one is back, but has not healed: the second one still holds the state alone.
    one.sign("group-0", "heal", 9)
    one.after(61.0)
    assert leaving(one) == []
    one.commit("group-0", 10)
    one.after(1.0)
    assert leaving(one) == ["group-1"]
    assert [entry.group for entry in one.entries(GroupClimbs)] == ["group-0", "group-1"]


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ((("heal", 9),), []),
        ((("heal", 9), ("replay", 9)), []),
        ((("heal", 9), ("replay", 9), ("wait", 9)), ["group-0"]),
        ((("heal", 9), ("wait", 0)), []),
        ((("wait", 0),), []),
    ],
    ids=["heals", "replays", "has healed", "could not heal", "waits"],
)
def test_a_heal_that_has_only_begun_holds_no_state(
    phases: tuple[tuple[str, int], ...], expected: list[str]
) -> None:
    one = play(2)
    one.commit("group-0", 8)
    for phase, step in phases:
        one.sign("group-1", phase, step)
    one.send(Checked("group-0", 2, "GPU 3 is gone"))
    one.after(1.0)
    assert leaving(one) == expected


def test_a_check_that_is_critical_for_all_moves_one_group_at_a_time() -> None:
    one = play(3)
    for number in range(3):
        one.commit(f"group-{number}", 5)
    for number in range(3):
        one.send(Checked(f"group-{number}", 2, "the fabric is down"))
    one.after(1.0)
    assert leaving(one) == ["group-0"]
    one.sign("group-0", "drained", 6)
    one.end("group-0", 0)
    one.after(1.0)
    assert one["group-0"].phase is Phase.WAITING
    assert leaving(one) == ["group-1"]
    one.sign("group-1", "drained", 7)
    one.end("group-1", 0)
    one.after(1.0)
    assert leaving(one) == []  # the last holder of the state stays
    assert "group-2 is kept although its check is critical" in one.lines
    assert "group-0 is not started here until its check is OK: the fabric is down" in one.lines
    one.send(Checked("group-0", 1, "it may be back"))
    one.after(1.0)
    assert one["group-0"].phase is Phase.WAITING
    one.send(Checked("group-0", 0, "it is back"))
    one.after(1.0)
    assert one["group-0"].phase is Phase.RUNNING
    assert [entry.group for entry in one.entries(CheckDrains)] == ["group-0", "group-1"]
    levels = [(entry.before, entry.level) for entry in one.entries(CheckChanged) if entry.group == "group-0"]
    assert levels == [("unknown", "critical"), ("critical", "warning"), ("warning", "ok")]


@pytest.mark.parametrize(("members", "expected"), [(2, ["group-0"]), (1, [])])
def test_a_launch_of_one_group_counts_the_members_elsewhere(members: int, expected: list[str]) -> None:
    one = play(1, own_coordinator=False)
    one.sign("group-0", "outside", 4, committed=4, members=members)
    one.send(Checked("group-0", 2, "no"))
    one.after(1.0)
    assert leaving(one) == expected


def test_members_of_the_same_launch_are_not_counted_as_others() -> None:
    one = play(2)
    one.commit("group-0", 4)  # with group-1, which has not committed it yet
    one.send(Checked("group-0", 2, "no"))
    one.after(1.0)
    assert leaving(one) == []


def test_a_group_that_does_not_leave_for_its_check_is_killed_and_waits() -> None:
    one = play(2, rules=no_deadlines(drain_timeout_s=30.0))
    for name in ("group-0", "group-1"):
        one.commit(name, 4)
    one.send(Checked("group-0", 2, "no"))
    one.after(1.0)
    assert Kill("group-0") in one.after(31.0)
    one.end("group-0", -9)
    one.after(1000.0)
    assert one["group-0"].phase is Phase.WAITING


# ---- devices ----


def test_a_group_waits_for_its_devices_and_starts_with_fewer() -> None:
    one = play(1, rungs=(4, 2), started=False)
    assert AskDevices() in one.after(0.0)
    works(one, 0, 1, 2)
    assert one["group-0"].phase is Phase.WAITING
    (missing,) = one.entries(DevicesMissing)
    assert (missing.devices, missing.wait_s) == (["3"], 60.0)
    one.after(61.0)
    assert one["group-0"].life is not None
    assert one["group-0"].life.devices == ("0", "1")


def test_an_answer_that_is_older_than_the_last_end_starts_nothing() -> None:
    one = play(1, rungs=(2, 1), started=False)
    works(one, 0, 1)
    one.commit("group-0", 1)
    one.now_s += 1.0
    one.end("group-0", -9)
    one.after(10.0)
    assert one["group-0"].phase is Phase.WAITING
    works(one, 0, 1)
    assert one["group-0"].phase is Phase.RUNNING


# ---- given up, or not ----


def test_a_group_is_never_given_up_while_the_job_lives_without_it() -> None:
    """A start that fails twice, as before the memory of a GPU is free, or ten kills of a spot machine."""
    one = play(2, rules=no_deadlines(max_restarts=3))
    one.commit("group-0", 5)
    for _ in range(12):
        one.end("group-1", 1)
        one.until(Phase.RUNNING, "group-1")
    assert one.entries(GroupGivenUp) == []
    waits_s = [entry.wait_s for entry in one.entries(GroupRestarts)]
    assert 200.0 < max(waits_s) <= 300.0
    assert "it ended 12 times in a row without a new step, while the job continues without it" in one.lines


def test_a_job_that_fails_as_a_whole_is_given_up() -> None:
    one = play(2)
    for _ in range(2):
        for name in ("group-0", "group-1"):
            one.until(Phase.RUNNING, name) if not one[name].over else None
            one.end(name, 3)
    assert one.launch.over
    assert core.verdict(one.launch) == (3, ())


def test_what_the_job_refuses_is_given_up_although_the_job_lives() -> None:
    one = play(2)
    one.commit("group-0", 5)
    one.end("group-1", 78)
    assert one["group-1"].phase is Phase.GIVEN_UP


def test_a_group_of_a_launch_alone_is_not_given_up_while_others_are_members() -> None:
    one = play(1, own_coordinator=False, rules=no_deadlines(max_restarts=1))
    for _ in range(5):
        one.until(Phase.RUNNING, "group-0")
        one.sign("group-0", "compute", 7, members=3)
        one.end("group-0", -9)
    assert not one.launch.over


def test_a_job_whose_state_nothing_holds_is_given_up() -> None:
    one = play(2)
    one.commit("group-0", 4)
    for name in ("group-0", "group-1"):
        one.end(name, 1)
        one.until(Phase.RUNNING, name)
    one.sign("group-0", "stranded", 0)
    assert one.entries(GroupGivenUp) == []
    one.sign("group-1", "stranded", 0)
    for name in ("group-0", "group-1"):
        one.end(name, -9)
    assert {entry.why[:37] for entry in one.entries(GroupGivenUp)} == {
        "No group holds the job's state any mo"
    }
    log = next(effect.log for effect in one.effects if isinstance(effect, values.Say) and effect.log)
    assert (log.group, log.life) == ("group-0", 0)  # of the last life that found the state
    assert core.verdict(one.launch)[0] == 1


@pytest.mark.parametrize("event", [Signalled("SIGTERM"), DrainAsked("group-0")])
def test_a_group_that_leaves_is_not_stranded(event: values.Event) -> None:
    one = play(1)
    one.sign("group-0", "wait", 0)
    one.send(event)
    one.sign("group-0", "stranded", 0)
    assert one.entries(GroupGivenUp) == []


# ---- the end ----


def test_once_a_group_is_done_the_others_have_a_deadline() -> None:
    one = play(3, rules=Rules(deadlines={"end": 600.0}))
    for number in range(3):
        one.commit(f"group-{number}", 9)
    one.end("group-2", -9)
    one.after(0.0)
    one.end("group-0", 0)
    one.end("group-2", -9)
    assert one["group-2"].phase is Phase.LEFT  # it is not restarted
    assert Kill("group-1") not in one.after(599.0)
    assert Kill("group-1") in one.after(2.0)
    assert "group-1 did not end in time: it is killed" in one.lines
    one.end("group-1", -9)
    assert core.verdict(one.launch) == (0, ())


def test_a_group_that_came_too_late_does_not_end_the_others() -> None:
    one = play(2)
    one.sign("group-0", "late", 0)
    one.end("group-0", 0)
    one.commit("group-1", 3)
    one.end("group-1", -9)
    assert one["group-1"].phase is not Phase.LEFT


def test_the_last_line_names_who_took_no_part_and_why() -> None:
    """Otherwise chance decides which half of a job is refused, and no one sees it."""
    one = play(3)
    one.commit("group-0", 3)
    one.end("group-1", 78)
    one.end("group-2", 1)
    one.end("group-0", 0)
    assert one.launch.over
    status, lines = core.verdict(one.launch)
    assert status == 78
    assert lines[0].startswith("the job was done, but group-1 took no part: The job refused it")
    assert lines[1] == "the job was done, but group-2 took no part: its last life ended with status 1"


@pytest.mark.parametrize("spare", [True, False])
def test_a_spare_may_take_no_part(*, spare: bool) -> None:
    one = play(2)
    members = tuple(replace(group, spare=spare) for group in one.launch.groups)
    one.launch = replace(one.launch, groups=members)
    one.commit("group-0", 3)
    one.end("group-1", -9)
    one.end("group-0", 0)
    assert core.verdict(one.launch)[0] == (0 if spare else 1)


def test_programs_that_all_came_back_too_late_have_not_ended_well() -> None:
    one = play(2)
    for name in ("group-0", "group-1"):
        one.commit(name, 4)
        one.end(name, -9)
        one.after(0.0)
        one.sign(name, "late", 0)
        one.end(name, 0)
    status, (lines,) = core.verdict(one.launch)
    assert status == 1
    assert "no program has ended well" in lines


@pytest.mark.parametrize(
    ("name", "status"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGHUP", 75), ("SIGINT", 130)]
)
def test_a_signal_drains_all_groups(name: str, status: int) -> None:
    one = play(2, rules=no_deadlines(drain_timeout_s=60.0))
    for group in ("group-0", "group-1"):
        one.commit(group, 4)
    effects = one.send(Signalled(name))
    assert [effect for effect in effects if isinstance(effect, Terminate)] == [
        Terminate("group-0"),
        Terminate("group-1"),
    ]
    one.sign("group-0", "drained", 5)
    one.end("group-0", 0)
    assert Kill("group-1") in one.after(61.0)
    one.end("group-1", -9)
    assert core.verdict(one.launch) == (status, ())
    assert [entry.ending for entry in one.entries(GroupEnded)] == ["drained", "killed"]
    assert [entry.signal for entry in one.entries(DrainBegan)] == [name]


def test_a_second_signal_kills_but_not_a_closed_terminal() -> None:
    one = play(1)
    one.send(Signalled("SIGINT"))
    assert one.send(Signalled("SIGHUP")) == []
    assert Kill("group-0") in one.send(Signalled("SIGTERM"))


def test_a_group_that_waits_for_its_start_leaves_at_once() -> None:
    one = play(1)
    one.end("group-0", 75)
    one.send(Signalled("SIGTERM"))
    assert one.launch.over


def test_groups_that_were_drained_one_by_one_end_a_launch_well() -> None:
    one = play(2)
    for name in ("group-0", "group-1"):
        one.commit(name, 4)
        one.send(DrainAsked(name))
        one.sign(name, "drained", 4)
        one.end(name, 0)
    assert core.verdict(one.launch) == (0, ())
