"""The work on a step that the training thread keeps when one attempt replaces another."""

import contextlib
import dataclasses
import socket
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxft_protocol.messages import Change, GroupName, Incarnation, Member, NewQuorum, QuorumId, Step
from jaxft_protocol.replica.state import Applied, Event, Exchanged, Prepared

import jaxft
from jaxft._errors import ConfigurationError, JaxftError
from jaxft._exchange import _spans
from jaxft._exchange._grid_links import MakePatience
from jaxft._exchange._partials import Partials
from jaxft._exchange._plan import Task
from jaxft._heal._store import StateStore
from jaxft._programs._build import Shared, cut_programs
from jaxft._programs._programs import Programs
from jaxft._programs._trace import joined
from jaxft._ranks._ranks import OneRank
from jaxft._replica import _compute
from jaxft._replica._attempt import Attempts
from jaxft._replica._call import Call, FiniteCheck, Policy
from jaxft._replica._compute import Stage, Try, Work
from jaxft._replica._config import GroupConfig
from jaxft._replica._held_state import HeldState
from jaxft._replica._joining import Joining
from jaxft._replica._membership import Membership
from jaxft._replica._saving import Saving
from jaxft._report import Record, StepReport
from jaxft._telemetry._call import Observers
from jaxft._transport._listener import Abort, Listener
from jaxft.data._batch_functions import BatchFor, OwnBatch
from tests import patience
from tests.accelerators import pretended

ME = GroupName("group-1")
STEP = Step(5)


class Received:
    """A fake session with the coordinator: records the events that are posted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.computed = (QuorumId(0), Step(0))
        self.all_computed = (QuorumId(0), Step(0))
        self.progress = 0
        self.frontier = (None, False)  # the coordinator knows of none

    @contextlib.contextmanager
    def activity(self, _directive: object, abort: Abort) -> Iterator[Abort]:
        yield abort

    def post(self, event: Event) -> None:
        self.events.append(event)

    def wants_digest(self, _step: Step) -> bool:
        return False

    def got_on(self) -> None:
        self.progress += 1


def quorum(quorum_id: int, total: int, **shards: tuple[int, ...]) -> NewQuorum:
    members = tuple(
        Member(GroupName(name.replace("_", "-")), Incarnation(1), "127.0.0.1:1", held)
        for name, held in shards.items()
    )
    return NewQuorum(QuorumId(quorum_id), STEP, total, members)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(host="127.0.0.1", job="job", group=ME, incarnation=1, on_heal=None)
    yield made
    made.close()


def batch_for(step: int, shard: int) -> jax.Array:
    return jnp.full(3, 10.0 * shard + step)


def grad_fn(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    return batch + 0.0 * state["w"], batch[0]


def update_fn(state: Any, mean: Any, local: Any) -> tuple[Any, Any]:
    return {"w": state["w"] - mean}, local


def built(state: Any) -> Programs:
    return cut_programs(joined(grad_fn, update_fn), state, batch_for(0, 0))


class Group:
    """A group of a job with one state: its attempts, and the record of its call."""

    def __init__(
        self,
        listener: Listener,
        *,
        shards: int | None,
        digest_every: int = 1000,
        batch_for: BatchFor = batch_for,
        nonfinite: Policy = "allow",
    ) -> None:
        self.heard, self.record, state = Received(), Record(), {"w": jnp.zeros(3)}
        config = GroupConfig(coordinator="c:1", group=ME, job="job", failure_timeout_s=30.0)
        session = cast(Any, self.heard)
        member = Membership(cast(Any, None), listener, session, OneRank())
        self.held = HeldState(session, StateStore(), OneRank(), STEP, digest_every=digest_every)
        self.attempts = Attempts(config, member, Observers(), self.held, FiniteCheck(ME))
        self.joining = Joining(
            config, session, OneRank(), self.held, Saving(config, session, OneRank(), self.held)
        )
        self.call = Call(built(state), batch_for, shards, nonfinite)
        self.held.leaves = self.call.programs.state_leaves(state)

    def attempt(self, quorum: NewQuorum) -> None:
        self.attempts.attempt(self.call, quorum, STEP, self.record)

    def compute(self, quorum: NewQuorum) -> bool:
        return self.start(quorum, Abort())

    def start(self, quorum: NewQuorum, abort: Abort) -> bool:
        mine = next(member.shards for member in quorum.members if member.group == ME)
        return self.attempts.computing.compute(Try(self.call, quorum, mine, abort, self.record), 0)

    @property
    def counted(self) -> tuple[int, ...]:
        return self.attempts.computing.work.counted

    def summed(self, shard: int) -> list[float]:
        """The group's contribution for one shard."""
        partials = self.attempts.computing.work.stages[0].partials
        assert partials is not None
        (node,) = partials.nodes
        assert (node.start, node.stop) == (shard, shard + 1)
        return np.asarray(partials.part(node, 0, 0, 3)).tolist()


def test_a_vote_has_its_fingerprint_also_after_the_work_was_dropped(listener: Listener) -> None:
    """Back from a lost connection: other groups got shards that this group had computed."""
    group = Group(listener, shards=2)
    group.attempt(quorum(1, 2, group_1=(0, 1)))
    group.attempt(quorum(2, 1, group_1=(0,)))
    first, second = group.heard.events
    assert isinstance(first, Exchanged)
    assert isinstance(second, Exchanged)
    assert group.counted == (0,), "the work was started again"
    assert first.digest is not None
    assert second.digest == first.digest


def test_a_fingerprint_is_of_the_state_that_the_step_is_computed_from(listener: Listener) -> None:
    group = Group(listener, shards=1, digest_every=1)
    digests: set[int | None] = set()
    for number, fill in ((1, 0.0), (2, 1.0)):
        group.held._digest = None  # as after a heal or an apply
        group.held.leaves = [jnp.full(3, fill)]
        group.attempt(quorum(number, 1, group_1=(0,)))
        digests.add(cast(Exchanged, group.heard.events[-1]).digest)
    assert len(digests) == 2
    assert None not in digests


def test_a_batch_made_for_a_place_is_not_counted_at_another(listener: Listener) -> None:
    """Without `shards=`, each group computes batch number i at place i; a survivor's place may change."""
    group = Group(listener, shards=None)
    assert group.compute(quorum(1, 3, group_0=(0,), group_1=(1,), group_2=(2,)))
    assert group.summed(1) == [15.0, 15.0, 15.0]
    assert group.compute(quorum(2, 2, group_1=(0,), group_2=(1,)))
    assert group.summed(0) == [5.0, 5.0, 5.0], "batch 0, not batch 1 under the number 0"
    assert group.compute(quorum(3, 3, group_0=(0,), group_1=(1,), group_2=(2,)))
    assert group.summed(1) == [15.0, 15.0, 15.0]
    assert group.record.shards == [1, 0], "and nothing was computed twice"
    assert group.counted == (1,)
    assert group.heard.progress == 3


def test_a_step_that_asks_for_its_place_counts_only_there(listener: Listener) -> None:
    """Without `shards`, `shard_index` is the place: a group that brings its batch computes it again at another."""

    def placed(state: Any, batch: jax.Array) -> tuple[Any, Any]:
        return {"w": state["w"] - jaxft.pmean(batch + jaxft.shard_index().astype(jnp.float32))}, {}

    group = Group(listener, shards=None, batch_for=OwnBatch(jnp.full(3, 7.0)))
    group.call = group.call._replace(programs=cut_programs(placed, {"w": jnp.zeros(3)}, jnp.full(3, 7.0)))
    assert group.compute(quorum(1, 2, group_0=(0,), group_1=(1,)))
    assert group.summed(1) == [8.0, 8.0, 8.0]
    assert group.compute(quorum(2, 1, group_1=(0,)))
    assert group.summed(0) == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("accelerator", [True, False])
def test_an_accelerator_starts_the_next_shard_before_it_waits_for_the_last(
    *, accelerator: bool, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    add = Partials.add

    def noted(self: Partials, shard: int, leaves: Any) -> None:
        done.append(f"add {shard}")
        add(self, shard, leaves)

    def noted_batch(step: int, shard: int) -> jax.Array:
        done.append(f"batch {shard}")
        return batch_for(step, shard)

    monkeypatch.setattr(Partials, "add", noted)
    with pretended() if accelerator else contextlib.nullcontext():
        group = Group(listener, shards=3, batch_for=noted_batch)
        group.attempt(quorum(1, 3, group_1=(0, 1, 2)))
    if accelerator:
        assert done == ["batch 0", "batch 1", "add 0", "batch 2", "add 1", "add 2"]
    else:
        assert done == ["batch 0", "add 0", "batch 1", "add 1", "batch 2", "add 2"]
    assert group.counted == (0, 1, 2)
    assert group.heard.progress == 4, "after each shard, and after the exchange"
    group.attempts.apply(group.call, STEP, group.record)
    np.testing.assert_array_equal(group.held.leaves[0], np.full(3, -15.0))


def test_means_of_an_attempt_that_failed_leave_the_devices(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the shards that this group takes over are computed, which need the memory."""
    held: list[bool] = []

    def noted_batch(step: int, shard: int) -> jax.Array:
        held.append(any(len(stage.given) for stage in group.attempts.computing.work.stages))
        return batch_for(step, shard)

    def alone(_links: object, task: Task, _shards: int, _patience: MakePatience) -> None:
        for each in task.result:
            each.fill(0)

    monkeypatch.setattr(_spans, "exchange_over", alone)
    monkeypatch.setattr(Attempts, "_span_links", _without_links)
    with pretended():
        group = Group(listener, shards=2, batch_for=noted_batch)
        group.attempt(quorum(1, 2, group_1=(0,), group_2=(1,)))
        assert len(group.attempts.computing.work.stages[0].given) == 1
        group.attempt(quorum(2, 2, group_1=(0, 1)))
    assert held == [False, False]


def _without_links(_self: Attempts, now: Try, _number: int) -> _spans.SpanLinks:
    return _spans.SpanLinks(now.quorum.quorum_id, [None], now.abort, lambda *_: cast(Any, None))


def test_an_overlapped_stage_is_copied_before_the_next_one_is_started(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy waits for all programs that were started before it, so there are no sums on the device either."""
    done: list[str] = []
    compute, compute_next, copies = Programs.compute, Programs.compute_next, _compute.host_copies

    def noted(name: str, function: Any) -> Any:
        def call(*given: Any) -> Any:
            done.append(name)
            return function(*given)

        return call

    monkeypatch.setattr(Programs, "compute", noted("compute", compute))
    monkeypatch.setattr(Programs, "compute_next", noted("compute", compute_next))
    monkeypatch.setattr(_compute, "host_copies", noted("copy", copies))

    def two(state: Any, batch: jax.Array) -> tuple[Any, Any]:
        one, other = jaxft.pmean((batch + 0.0 * state["w"], jnp.sin(2.0 * batch + state["w"])))
        return {"w": state["w"] - one + other}, {}

    with pretended():
        group = Group(listener, shards=2)
        programs = cut_programs(two, {"w": jnp.zeros(3)}, batch_for(0, 0), Shared(overlap=2))
        group.call = group.call._replace(programs=programs)
        group.attempt(quorum(1, 2, group_1=(0, 1)))
    assert programs.stages.count == 2
    assert [group.call.sums(stage) for stage in (0, 1)] == [None, None]
    assert done == ["compute", "copy", "compute", "copy"] * 2


def test_an_accelerator_computes_nothing_again_after_an_attempt_that_ended_between_two_shards(
    listener: Listener,
) -> None:
    abort = Abort()

    def batch_for_and_end(step: int, shard: int) -> jax.Array:
        asked.append(shard)
        if asked == [0, 1]:
            abort.set("a new quorum")
        return batch_for(step, shard)

    asked: list[int] = []
    with pretended():
        group = Group(listener, shards=3, batch_for=batch_for_and_end)
        assert not group.start(quorum(1, 3, group_1=(0, 1, 2)), abort)
        group.attempt(quorum(2, 3, group_1=(0, 1, 2)))
    assert asked == [0, 1, 2]
    group.attempts.apply(group.call, STEP, group.record)
    np.testing.assert_array_equal(group.held.leaves[0], np.full(3, -15.0))


def test_later_buckets_are_copied_while_the_first_is_exchanged(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the means of each are brought to the devices before the next is exchanged."""
    seen: list[tuple[list[bool], list[str]]] = []
    waits_s: list[float] = []

    def alone(_links: object, task: Task, _shards: int, patience: MakePatience) -> None:
        waits_s.append(patience(0.0).timeout_s)
        stages = group.attempts.computing.work.stages
        held = [dict(stage.partials._on_device) for stage in stages if stage.partials is not None]
        copied = [all(shard.copies is not None for shard in each.values()) for each in held]
        given = [type(each).__name__ for stage in stages for each in stage.given]
        seen.append((copied, given))
        task.partials.mean_into(task.result)

    def two(state: Any, batch: jax.Array) -> tuple[Any, Any]:
        one, other = jaxft.pmean((batch, 2.0 * batch))
        return {"w": state["w"] - one + other}, {}

    monkeypatch.setattr(_spans, "exchange_over", alone)
    with pretended(bucket_bytes=1):
        group = Group(listener, shards=2)
        group.call = group.call._replace(programs=cut_programs(two, {"w": jnp.zeros(3)}, batch_for(0, 0)))
        group.attempt(quorum(1, 2, group_1=(0, 1)))
        assert seen == [([True, True], []), ([True, True], ["ArrayImpl"])]
        assert len(group.heard.events) == 1, "one vote"
        assert waits_s == [15.0, 15.0], "no peer computes between two buckets"
        group.attempts.apply(group.call, STEP, group.record)
    np.testing.assert_array_equal(group.held.leaves[0], np.full(3, 10.0))


# Several exchanges


def around_the_mean(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """The mean, and then the mean square distance from it."""
    mean = jaxft.pmean(batch)
    apart = jaxft.pmean((batch - mean) ** 2)
    return {"w": state["w"] + apart}, batch - apart


def staged(listener: Listener, **options: Any) -> Group:
    group = Group(listener, **options)
    programs = cut_programs(around_the_mean, {"w": jnp.zeros(3)}, batch_for(0, 0))
    group.call = group.call._replace(programs=programs)
    return group


def locals_of(group: Group, stage: int) -> dict[int, int]:
    return {key: id(local) for key, local in group.attempts.computing.work.stages[stage].locals.items()}


def test_another_attempt_computes_nothing_again_in_any_stage(listener: Listener) -> None:
    group = staged(listener, shards=2)
    group.attempt(quorum(1, 2, group_1=(0, 1)))
    made = [locals_of(group, stage) for stage in (0, 1)]
    group.attempt(quorum(2, 2, group_1=(0, 1)))
    assert [locals_of(group, stage) for stage in (0, 1)] == made
    assert group.record.shards == [0, 1]
    assert len(group.heard.events) == 2, "one vote for each attempt"
    group.attempts.apply(group.call, STEP, group.record)
    (after,) = group.held.leaves
    np.testing.assert_array_equal(after, np.full(3, 25.0))
    np.testing.assert_array_equal(group.record.metrics, np.full(3, 5.0 - 25.0))


def test_only_the_newest_stage_keeps_what_the_next_one_reads(listener: Listener) -> None:
    """A round of an optimizer passes on weights and moments: one copy of them, not one for each round."""

    def thrice(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        w = state["w"]
        for _ in range(3):
            w = 2 * w + jaxft.pmean(w * batch)
        return {"w": w}, batch

    group = Group(listener, shards=2)
    programs = cut_programs(thrice, {"w": jnp.zeros(3)}, batch_for(0, 0))
    group.call = group.call._replace(programs=programs)
    group.attempt(quorum(1, 2, group_1=(0, 1)))
    stages = group.attempts.computing.work.stages
    assert [{local.spent for local in stage.locals.values()} for stage in stages] == [{True}, {True}, {False}]
    assert not any(local.rest or local.batch for stage in stages[:-1] for local in stage.locals.values())
    group.attempt(quorum(2, 2, group_1=(0, 1)))
    assert group.record.shards == [0, 1]


def test_shards_that_are_taken_over_go_through_all_stages(listener: Listener) -> None:
    """The new shard is computed in both stages, and the old one only in the stage that had not come yet."""
    group = staged(listener, shards=2)
    assert group.compute(quorum(1, 2, group_0=(0,), group_1=(1,)))
    group.attempt(quorum(2, 2, group_1=(0, 1)))
    assert group.record.shards == [1, 0], "each of them once"
    assert set(locals_of(group, 1)) == {0, 1}
    group.attempts.apply(group.call, STEP, group.record)
    np.testing.assert_array_equal(group.held.leaves[0], np.full(3, 25.0))


def test_a_changed_mean_is_noticed_bit_by_bit() -> None:
    work = Work(5)
    nan, other = np.array([np.nan], np.float32), np.array([0.0], np.float32)
    for means, kept in (([nan, other], True), ([nan.copy(), other], True), ([nan, -other], False)):
        work.stages = [*work.stages[:1], Stage()] if work.stages else [Stage(), Stage()]
        work.took(0, means, 1)
        assert (len(work.stages) == 2) == kept


def test_a_listener_that_has_ended_is_noticed_in_the_next_step_under_the_same_quorum(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, alone = Group(listener, shards=1), quorum(1, 1, group_1=(0,))
    group.attempt(alone)
    monkeypatch.setattr(listener._door, "_accept_some", lambda: 1 // 0)
    socket.create_connection(("127.0.0.1", listener.port)).close()
    patience.until(lambda: not listener._thread.is_alive(), "the end of the listener")
    with pytest.raises(JaxftError, match=r"failed with ZeroDivisionError.*no other group can reach this one"):
        group.attempt(alone)


@pytest.mark.parametrize("policy", ["skip", "allow"])
def test_a_step_that_is_skipped_keeps_the_state_and_counts(listener: Listener, policy: Policy) -> None:
    """Work, digest and means belong to one state, and are dropped with it."""
    group = Group(listener, shards=1, batch_for=lambda _step, _shard: jnp.full(3, np.inf), nonfinite=policy)
    before = group.held.leaves
    group.attempt(quorum(1, 1, group_1=(0,)))
    group.attempts.apply(group.call, STEP, group.record)
    assert group.heard.events[-1] == Applied(Step(STEP + 1))
    assert group.held.step == STEP + 1
    assert (group.held.leaves is before) == (policy == "skip")
    assert group.held.made
    assert group.held.started_digest() is None
    assert group.counted == ()
    assert np.isnan(group.record.metrics) == (policy == "skip")
    assert ("inf" in group.record.nonfinite) == (policy == "skip")


def test_a_call_of_another_step_does_not_replace_the_state(listener: Listener) -> None:
    group = Group(listener, shards=2)
    given = group.held.leaves
    group.joining.prepare(group.call, given)
    (prepared,) = group.heard.events
    assert isinstance(prepared, Prepared)
    assert (prepared.total_shards, prepared.settings.get("shards")) == (2, None)
    assert prepared.weight == 1, "its device"
    assert prepared.digest == group.held.digest()
    with pytest.raises(ConfigurationError, match=r"differs from the step .* in shards: '2' then, '3' now"):
        group.joining.prepare(group.call._replace(shards=3), [jnp.ones(3)])
    assert group.held.leaves is given
    assert not group.held.made, "and there is nothing to save"
    assert len(group.heard.events) == 1


def test_a_report_is_of_one_call() -> None:
    record = Record()
    record.entered(quorum(1, 2, a=(0,), b=(1,)))
    assert (record.joined, record.left) == ([], []), "the first group has not joined"
    record.attempts, record.shards = 2, [0, 1]
    assert record.report(6) == StepReport(6, attempts=2, quorum_id=1, members=("a", "b"), shards=(0, 1))
    record = record.next_call()
    lost = (Change(GroupName("b"), "its connection was lost"),)
    record.entered(dataclasses.replace(quorum(2, 2, a=(0,), c=(1,)), left=lost))
    assert record.report(7) == StepReport(
        7, quorum_id=2, members=("a", "c"), joined=("c",), left=(("b", "its connection was lost"),)
    )
