"""Which settings the job takes, if groups bring different ones."""

from typing import Any

import pytest
from jaxft_protocol.coordinator.bounds import MAX_SETTINGS_BYTES
from jaxft_protocol.coordinator.job import GroupPhase
from jaxft_protocol.coordinator.sessions import MAX_SHARDS
from jaxft_protocol.messages import Difference, Refused

from tests.protocol.coordinator.helpers import Desk, members

OLD, NEW = {"program": "old"}, {"program": "new"}
HISTORY, OTHER = 7, 8
COMMITTED: dict[str, Any] = {"step": 1000, "history": HISTORY}
FRESH: list[dict[str, Any]] = [{"step": 0}, {"step": 0, "history": OTHER}, {"step": 1000}, {"step": 2000}]
# Settings that give way to it.
LESSER: list[dict[str, Any]] = [*FRESH, {"step": 900, "history": HISTORY}]
# Of a group that trains, and has not just restored a checkpoint.
TRAINS: dict[str, Any] = {"members": 2}
FIRST_AND_SECOND = [
    *((COMMITTED, fresh) for fresh in FRESH),
    *((fresh, {"step": 0}) for fresh in FRESH),
    *((fresh, {"step": 0, "history": HISTORY}) for fresh in FRESH),
    (COMMITTED, {"step": 900, "history": HISTORY}),
    (COMMITTED, {"step": 1100, "history": OTHER}),
    # It has not heard yet of the commit after which another one has saved.
    (COMMITTED | TRAINS, {"step": 1001, "history": HISTORY}),
    ({"step": 900, "history": OTHER}, COMMITTED),
    (COMMITTED, COMMITTED),
]


@pytest.mark.parametrize("min_replicas", [1, 2])
@pytest.mark.parametrize("lesser", LESSER)
def test_a_group_with_a_committed_state_brings_the_settings(lesser: dict[str, Any], min_replicas: int):
    """A coordinator without a store has forgotten them. Running groups must not end because another was quicker."""
    desk = Desk.open(min_replicas=min_replicas)
    desk.hello("busy")
    desk.come("quick", settings=NEW, digest="", **lesser)
    done = desk.come("a", settings=OLD, **COMMITTED)
    (refused,) = done.to("quick")
    assert isinstance(refused, Refused)
    assert refused.differences == (Difference("program", "old", "new"),)
    assert done.closed == ["quick"]
    desk.come("b", settings=OLD, **COMMITTED)
    desk.close("busy")
    desk.wait(60.0)
    assert (members(desk), desk.step) == (["a", "b"], 1000)
    assert desk.job.settings == OLD
    (refused,) = desk.come("quick", settings=NEW, incarnation=2, **lesser).to("quick")
    assert isinstance(refused, Refused)


@pytest.mark.parametrize(("first", "second"), FIRST_AND_SECOND)
def test_otherwise_the_first_group_brings_them(first: dict[str, Any], second: dict[str, Any]):
    desk = Desk.open(min_replicas=2)
    desk.come("a", settings=OLD, **first)
    (refused,) = desk.come("late", settings=NEW, **second).to("late")
    assert isinstance(refused, Refused)
    assert refused.differences == (Difference("program", "old", "new"),)
    assert desk.group("a").phase is GroupPhase.STALE


@pytest.mark.parametrize("older", [{}, TRAINS])
def test_of_groups_that_train_one_with_a_newer_state_brings_the_settings(older: dict[str, Any]):
    desk = Desk.open(min_replicas=2)
    desk.come("a", settings=NEW, step=900, history=HISTORY, **older)
    done = desk.come("b", settings=OLD, **COMMITTED, **TRAINS)
    assert done.only(Refused).keys() == {"a"}
    assert desk.job.settings == OLD


def test_a_fresh_founding_gives_way_with_its_settings():
    desk = Desk.open()
    desk.come("quick", settings=NEW, shards=3, min_replicas=1)
    desk.come("another", settings=NEW, shards=3, min_replicas=1, digest="")
    assert members(desk) == ["quick"]
    done = desk.come("a", step=1000, history=HISTORY, settings=OLD)
    assert done.only(Refused).keys() == {"quick", "another"}
    heard = done.only(Refused)["quick"].differences
    assert heard == (Difference("program", "old", "new"), Difference("shards", "6", "3"))
    assert (members(desk), desk.step, desk.job.history) == (["a"], 1000, HISTORY)
    assert (desk.job.settings, desk.job.total_shards) == (OLD, 6)


def test_a_founding_on_which_a_step_is_committed_keeps_its_settings():
    desk = Desk.open()
    desk.come("quick", settings=NEW)
    desk.commit()
    assert desk.come("a", step=1000, history=HISTORY, settings=OLD).only(Refused).keys() == {"a"}
    assert members(desk) == ["quick"]


def test_settings_of_groups_that_are_gone_hold_for_no_other():
    desk = Desk.open(min_replicas=2)
    desk.come("quick", settings=NEW)
    desk.close("quick")
    assert not desk.come("a", settings=OLD).only(Refused)
    assert desk.job.settings == OLD


@pytest.mark.parametrize(
    "wrong", [{"settings": {"x": "y" * MAX_SETTINGS_BYTES}}, {"shards": 0}, {"shards": MAX_SHARDS + 1}]
)
def test_a_group_that_is_refused_itself_overrules_no_other(wrong: dict[str, Any]):
    desk = Desk.open(min_replicas=2)
    desk.come("quick", settings=NEW)
    assert desk.come("a", **COMMITTED, **wrong).only(Refused).keys() == {"a"}
    assert desk.group("quick").phase is GroupPhase.STALE
    assert desk.job.settings == NEW
