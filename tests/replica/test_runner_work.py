"""What the training thread has computed of a step, and of which state, when an attempt gives way to another."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxft_protocol.messages import GroupName, Incarnation, Member, NewQuorum, QuorumId, Step
from jaxft_protocol.replica.state import Event, Exchanged

from jaxft._errors import JaxftError
from jaxft._programs._build import Programs, cut_programs, joined
from jaxft._replica._attempt import Attempts
from jaxft._replica._config import GroupConfig
from jaxft._replica._engine import BatchFor, Call, OwnBatch
from jaxft._replica._finite import FiniteCheck
from jaxft._replica._held_state import HeldState
from jaxft._report import Record
from jaxft._transport._listener import Abort, Listener
from tests import patience

ME = GroupName("group-1")
STEP = Step(5)


class Heard:
    """Stands for the session with the coordinator: keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.computed = (QuorumId(0), Step(0))
        self.all_computed = (QuorumId(0), Step(0))
        self.progress = 0

    @contextlib.contextmanager
    def activity(self, directive: object, abort: Abort) -> Iterator[Abort]:
        yield abort

    def post(self, event: Event) -> None:
        self.events.append(event)

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
    """A group in a job, of one state: its attempts, and the record of its call."""

    def __init__(
        self,
        listener: Listener,
        *,
        shards: int | None,
        digest_every: int = 1000,
        batch_for: BatchFor = batch_for,
    ) -> None:
        self.heard, self.record, state = Heard(), Record(), {"w": jnp.zeros(3)}
        config = GroupConfig(coordinator="c:1", group=ME, job="job", failure_timeout_s=30.0)
        self.held = HeldState(cast(Any, self.heard), cast(Any, None), STEP, digest_every=digest_every)
        self.attempts = Attempts(config, cast(Any, self.heard), listener, self.held, FiniteCheck(ME))
        self.call = Call(built(state), batch_for, shards, "allow")
        self.held.leaves = self.call.programs.state_leaves(state)

    def attempt(self, quorum: NewQuorum) -> None:
        self.attempts.attempt(self.call, quorum, STEP, self.record)

    def compute(self, quorum: NewQuorum) -> bool:
        return self.attempts._compute(self.call, quorum, Abort(), self.record)

    @property
    def counted(self) -> tuple[int, ...]:
        return self.attempts._work.counted

    def summed(self, shard: int) -> list[float]:
        """What the group contributes for one shard."""
        partials = self.attempts._work.partials
        assert partials is not None
        (node,) = partials.nodes
        assert (node.start, node.stop) == (shard, shard + 1)
        return np.asarray(partials.part(node, 0, 0, 3)).tolist()


def test_a_vote_has_its_fingerprint_also_after_the_work_was_dropped(listener: Listener) -> None:
    """Back from a lost connection: others have been given shards that this group had computed."""
    group = Group(listener, shards=2)
    group.attempt(quorum(1, 2, group_1=(0, 1)))
    group.attempt(quorum(2, 1, group_1=(0,)))
    first, second = group.heard.events
    assert isinstance(first, Exchanged)
    assert isinstance(second, Exchanged)
    assert group.counted == (0,), "the work was begun afresh"
    assert first.digest is not None
    assert second.digest == first.digest


def test_a_fingerprint_is_of_the_state_that_the_step_is_computed_from(listener: Listener) -> None:
    group = Group(listener, shards=1, digest_every=1)
    digests: set[int | None] = set()
    for number, fill in ((1, 0.0), (2, 1.0)):
        group.held._digest = None  # as when a state is healed to, or applied
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


def test_a_batch_that_the_group_brings_is_kept_at_any_place(listener: Listener) -> None:
    group = Group(listener, shards=None, batch_for=OwnBatch(jnp.full(3, 7.0)))
    assert group.compute(quorum(1, 2, group_0=(0,), group_1=(1,)))
    assert group.summed(1) == [7.0, 7.0, 7.0]
    assert group.compute(quorum(2, 1, group_1=(0,)))
    assert group.summed(0) == [7.0, 7.0, 7.0]
    assert group.record.shards == [1], "it is computed once"


def test_a_listener_that_has_ended_is_noticed_in_the_next_step_under_the_same_quorum(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, alone = Group(listener, shards=1), quorum(1, 1, group_1=(0,))
    group.attempt(alone)
    monkeypatch.setattr(listener, "_accept_some", lambda: 1 // 0)
    socket.create_connection(("127.0.0.1", listener.port)).close()
    patience.until(lambda: not listener._thread.is_alive(), "the end of the listener")
    with pytest.raises(JaxftError, match="no other group can reach this one any more: ZeroDivisionError"):
        group.attempt(alone)
