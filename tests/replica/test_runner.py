"""Directives that the training thread must refuse, in whatever order they arrive."""

import contextlib
import dataclasses
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax.numpy as jnp
import pytest
from jaxft_protocol.messages import GroupName, Heal, HealId, Incarnation, Member, NewQuorum, QuorumId, Step
from jaxft_protocol.replica.state import Attempt, Directive, Event, HealFrom, Identity, Over, Replay

from jaxft import Checkpoints
from jaxft._arrays._memory import result_regions
from jaxft._errors import JobFinished
from jaxft._exchange import _grid_links
from jaxft._exchange._exchange import exchange_into
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import Task
from jaxft._heal._store import StateStore
from jaxft._programs._build import cut_programs
from jaxft._programs._trace import joined
from jaxft._ranks._ranks import OneRank
from jaxft._replica._attempt import Attempts
from jaxft._replica._call import Call, FiniteCheck
from jaxft._replica._catch_up import CatchUp
from jaxft._replica._config import GroupConfig
from jaxft._replica._held_state import HeldState
from jaxft._replica._membership import Membership
from jaxft._replica._runner import Runner
from jaxft._replica._saving import Saving
from jaxft._report import Record
from jaxft._telemetry._call import Observers
from jaxft._transport._listener import Abort, Listener
from tests import patience

CONFIG = GroupConfig(coordinator="c:1", group="group-1", job="job", failure_timeout_s=1.0)
NOTHING = cast(Any, None)


class NoSession:
    """Any use of it, or of a donor, raises."""

    key = None


class Directed:
    """A session that gives these directives, and no more."""

    all_computed = computed = (QuorumId(0), Step(0))
    address = "127.0.0.1:1"

    def __init__(self, directives: Iterator[Directive]) -> None:
        self._directives = directives

    def wait(self, seen: int) -> tuple[int, Directive]:
        return seen + 1, next(self._directives)

    @contextlib.contextmanager
    def activity(self, _directive: Directive, abort: Abort) -> Iterator[Abort]:
        yield abort

    def wait_until_left(self, _deadline_s: float, _heard: Step | None) -> None:
        return None

    def post(self, event: Event) -> None: ...
    def got_on(self) -> None: ...


def member(session: Any, listener: Any = None) -> Membership:
    identity = Identity("job", GroupName("group-1"), Incarnation(1), "127.0.0.1:1", "c:1")
    return Membership(identity, listener or cast(Any, NoSession()), session, OneRank())


def held_at(step: int) -> HeldState:
    return HeldState(NOTHING, NOTHING, OneRank(), step, digest_every=1)


def test_a_group_announces_that_it_waits_before_it_does(caplog: pytest.LogCaptureFixture) -> None:
    """Its supervisor would otherwise take the wait for a part of the last phase, which has a deadline."""
    heard: list[str] = []

    class Session(NoSession):
        def wait(self, seen: int) -> tuple[int, Over]:
            heard.extend(record.message for record in caplog.records)
            return seen + 1, Over(Step(5))

    caplog.set_level("DEBUG", logger="jaxft")
    config = dataclasses.replace(CONFIG, step=5)
    runner = Runner(config, member(Session()), NOTHING, Observers())
    with pytest.raises(JobFinished):
        runner._follow_directives(NOTHING, Record(), joins=False)
    assert heard == ["wait step 5"]


def test_a_step_that_was_replayed_is_not_replayed_again() -> None:
    # A moved frontier renews the directive, possibly before the last Replayed has arrived.
    held = held_at(step=3)
    catch_up = CatchUp(CONFIG, member(None), Observers(), held, FiniteCheck("group-1"))
    record = Record()
    assert not catch_up.replay(Replay(cast(Any, HealId(1)), Step(2), Step(5)), NOTHING, record)
    assert held.step == 3
    assert record == Record()


@pytest.mark.parametrize("then", ["heals", "follows", "ends"])
def test_a_group_that_has_left_its_quorum_closes_its_connections(then: str) -> None:
    """A spare that gave its place back would keep them, closed by the others, for as long as it follows."""
    batch = jnp.ones(3)
    programs = cut_programs(
        joined(lambda w, batch: (batch * w, ()), lambda w, mean, _: (w - mean, ())), batch, batch
    )
    names = ("group-0", "group-1")
    with contextlib.ExitStack() as stack:
        listeners = [
            Listener(host="127.0.0.1", job="job", group=name, incarnation=1, on_heal=None) for name in names
        ]
        for listener in listeners:
            stack.callback(listener.close)
        addresses = [f"127.0.0.1:{listener.port}" for listener in listeners]
        shards = [(0,), (1,)]
        peers = [Peer(name, 1, *rest) for name, *rest in zip(names, addresses, shards, strict=True)]

        def other() -> Links:
            links = _grid_links.open_links(
                listeners[0],
                **{"job": "job", "quorum_id": 1, "me": "group-0", "members": peers},
                **{"abort": Abort(), "patience": Patience(patience.FAR_S)},
            )
            partials = Partials(programs.stages.layouts[0], 2)
            partials.add(0, [batch])
            waits = Patience(patience.FAR_S)
            exchange_into(
                links, Task(partials.layout, 5, partials, result_regions(partials.layout)), 2, waits
            )
            return links

        members = tuple(
            Member(GroupName(peer.group), Incarnation(1), peer.address, peer.shards) for peer in peers
        )
        quorum = NewQuorum(QuorumId(1), Step(5), 2, members)
        gone = Replay(Heal(HealId(1), Step(4), ()), Step(4), Step(5))  # it is replayed already
        after = {"heals": HealFrom(gone.heal), "follows": gone, "ends": None}[then]
        session = Directed(
            iter([Attempt(quorum, Step(5)), *([] if after is None else [after]), Over(Step(5))])
        )
        config = dataclasses.replace(CONFIG, step=5, failure_timeout_s=patience.FAR_S)
        runner = Runner(config, member(session, listeners[1]), StateStore(), Observers())
        runner._held.leaves, runner._held.programs = programs.state_leaves(batch), programs
        with ThreadPoolExecutor() as pool:
            opened = pool.submit(other)
            call = Call(programs, lambda _step, _shard: batch, 2, "allow")
            with pytest.raises(JobFinished):
                runner._follow_directives(call, Record(), joins=False)
            links = stack.enter_context(contextlib.closing(opened.result()))
        if then == "ends":
            runner.serve_until_left(0.0)
        poller = select.poll()
        poller.register(links.connections[1].sock, select.POLLIN)
        assert poller.poll(0), "its end of the connection is still open"
        assert links.connections[1].sock.recv(1) == b""


def test_an_attempt_at_another_step_than_the_one_in_hand_is_a_fault() -> None:
    attempts = Attempts(CONFIG, member(None), Observers(), held_at(step=3), FiniteCheck("group-1"))
    attempt = Attempt(NewQuorum(QuorumId(1), Step(2), 1, ()), Step(2))
    with pytest.raises(AssertionError, match="asked for step 2 while holding state 3"):
        attempts.attempt(NOTHING, attempt.quorum, attempt.step, Record())


def test_a_last_state_that_other_code_has_consumed_is_not_saved() -> None:
    # It must not raise: otherwise the group would not announce that it leaves.
    config = dataclasses.replace(CONFIG, checkpoints=Checkpoints("somewhere"))
    held = held_at(step=3)
    held.leaves, held.made = [jnp.ones(3)], True
    held.leaves[0].delete()
    assert "other code consumed the state" in Saving(config, NOTHING, OneRank(), held).save_last(NOTHING)
