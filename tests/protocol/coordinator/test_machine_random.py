"""Any message, at any time, from correct and faulty groups: the invariants of `machine.py` hold after each.

A failure prints the shortest sequence of rules that leads to it.
"""

import contextlib
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from jaxft_protocol import messages as msg
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator import job as j
from jaxft_protocol.coordinator.machine import IllegalEvent

from .helpers import Desk, Done

NAMES = ["a", "b", "c", "d"]
names = st.sampled_from(NAMES)
steps = st.integers(0, 3)


class AnyJob(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk.open(min_replicas=2, join_timeout_s=1.0, heartbeat_timeout_s=2.0)
        self.before = self.desk.job
        self.done = Done((), {})
        self.incarnation = dict.fromkeys(NAMES, 1)
        self.said_ok: set[tuple[str, msg.QuorumId, msg.Step]] = set()
        self.quorums: dict[msg.QuorumId, msg.NewQuorum] = {}
        self.heard: dict[j.SessionId, msg.Step] = {}  # for each session, the last commit that was sent on it
        self.closed: set[j.SessionId] = set()
        self.known: dict[str, j.Saved] = {}  # the coordinator's durable records
        self.term = 0

    @initialize(names=st.sets(names))
    def found(self, names: set[str]) -> None:
        for name in sorted(names):
            self._do(lambda name=name: self.desk.hello(name))
            self._do(lambda name=name: self.desk.join(name))

    # ---- what may happen ----

    @rule(name=names)
    def come(self, name: str) -> None:
        if name not in self.desk.job.groups:
            self.incarnation[name] += 1
            self._do(lambda: self.desk.hello(name, self.incarnation[name]))
            self._do(lambda: self.desk.join(name, 0))

    @rule()
    @precondition(lambda self: self.desk.job.frontier is not None)
    def everyone_heals(self) -> None:
        for name in list(self.desk.job.groups):
            if name in self.desk.job.groups and self.desk.group(name).phase is j.GroupPhase.HEALING:
                self._do(lambda name=name: self.desk.ready(name))

    @rule(name=names, restarted=st.booleans())
    def hello(self, name: str, *, restarted: bool) -> None:
        self.incarnation[name] += restarted
        if restarted and name in self.desk.job.groups:
            self._do(lambda: self.desk.close(name))
        self._do(lambda: self.desk.hello(name, self.incarnation[name]))

    @rule(name=names)
    def another_process(self, name: str) -> None:
        if name in self.desk.job.groups:
            before = self.desk.job
            self._do(lambda: self.desk.hello(name, 1000 + self.incarnation[name]))
            assert self.desk.job == before

    @rule(
        name=names,
        step=steps,
        digest=st.sampled_from(["d", "e", ""]),
        shards=st.sampled_from([6, 6, 6, 7, None]),
    )
    def join(self, name: str, step: int, digest: str, shards: int | None) -> None:
        self._do(lambda: self.desk.join(name, step, digest, shards))

    @rule(name=names)
    def join_at_the_frontier(self, name: str) -> None:
        step = 0 if self.desk.job.frontier is None else self.desk.step
        self._do(lambda: self.desk.join(name, step))

    @rule(name=names, ok=st.booleans(), back=st.integers(0, 1), accused=st.sets(names))
    @precondition(lambda self: self.desk.job.quorum is not None)
    def vote(self, name: str, *, ok: bool, back: int, accused: set[str]) -> None:
        vote = msg.Vote(
            msg.QuorumId(self.desk.quorum.quorum_id - back),
            self.desk.step,
            ok,
            tuple(msg.GroupName(peer) for peer in sorted(accused)),
            "because",
        )
        if ok:
            self.said_ok.add((name, vote.quorum_id, vote.step))
        self._do(lambda: self.desk.say(name, vote))

    @rule(name=names, back=st.integers(0, 1), shard=st.sampled_from([None, 3]))
    @precondition(lambda self: self.desk.job.quorum is not None)
    def raise_an_exception(self, name: str, back: int, shard: int | None) -> None:
        quorum_id = msg.QuorumId(self.desk.quorum.quorum_id - back)
        vote = msg.Vote(quorum_id, self.desk.step, ok=False, reason="no", raised=True, shard=shard)
        self._do(lambda: self.desk.say(name, vote))

    @rule(silent=st.sets(names, max_size=1))
    @precondition(lambda self: self.desk.job.quorum is not None)
    def everyone_votes_ok(self, silent: set[str]) -> None:
        quorum_id, step = self.desk.quorum.quorum_id, self.desk.step
        for member in self.desk.quorum.members:
            if member.group not in silent and self.desk.job.quorum is not None and self.desk.step == step:
                self.said_ok.add((member.group, quorum_id, step))
                self._do(lambda name=member.group: self.desk.vote(name, quorum_id=quorum_id, step=step))

    @rule(name=names, behind=st.integers(0, 2))
    @precondition(lambda self: self.desk.job.frontier is not None)
    def ready(self, name: str, behind: int) -> None:
        if name in self.desk.job.groups and self.desk.group(name).heal_id is not None:
            self._do(lambda: self.desk.ready(name, max(0, self.desk.step - behind)))

    @rule(answers=st.booleans())
    def donors_take_their_time(self, *, answers: bool) -> None:
        self.desk.tells_digests = answers

    @rule(donor=names, joiner=names, digest=st.sampled_from([7, 7, 7, 8, None]))
    def pinned(self, donor: str, joiner: str, digest: int | None) -> None:
        group = self.desk.job.groups.get(msg.GroupName(joiner))
        if group is not None and group.heal_id is not None:
            self._do(lambda: self.desk.pinned(donor, joiner, digest))

    @rule(name=names)
    def heal_failed(self, name: str) -> None:
        if name in self.desk.job.groups and self.desk.group(name).heal_id is not None:
            self._do(lambda: self.desk.heal_failed(name))

    @rule(name=names, finished=st.booleans())
    def leave(self, name: str, *, finished: bool) -> None:
        self._do(lambda: self.desk.leave(name, finished=finished))

    @rule(name=names)
    def close(self, name: str) -> None:
        if name in self.desk.sessions:
            self._do(lambda: self.desk.close(name))

    @rule(after_s=st.sampled_from([0.1, 0.5, 0.9, 5.0]), silent=st.sets(names))
    def tick(self, after_s: float, silent: set[str]) -> None:
        self._do(lambda: self.desk.tick(after_s, tuple(silent)))

    @rule(name=names)
    @precondition(lambda self: self.desk.job.quorum is not None)
    def computed(self, name: str) -> None:
        self._do(lambda: self.desk.say(name, msg.Heartbeat(self.desk.quorum.quorum_id, self.desk.step)))

    @rule()
    @precondition(lambda self: "job" in self.known)
    def the_coordinator_dies(self) -> None:
        """It restarts from its records: no session is left, and no decision is forgotten."""
        before = self.desk.job
        self.term += 1
        options = replace(before.options, term=self.term)
        self.closed |= before.sessions.keys()
        self.desk.sessions.clear()
        self.desk.job = durable.restored(self.known["job"], options, self.desk.now_s)
        assert self.desk.job.last_quorum_id == before.last_quorum_id
        assert self.desk.job.frontier == (None if before.empty else before.frontier)

    def _do(self, act) -> None:
        before = self.desk.job
        self.done = Done((), {})
        with contextlib.suppress(IllegalEvent, KeyError):  # KeyError: it never sent Hello
            self.done = act()
        heard = False
        for effect in self.done.effects:
            if isinstance(effect, j.Persist):
                assert not heard, "a decision was sent before it was persisted"
                self.known = durable.fold(self.known, effect.record)
            heard |= isinstance(effect, j.Send)
        self._check(before, self.desk.job)
        if self.desk.job.empty:
            self.desk.job = durable.emptied(self.desk.job)  # as the shell does

    # ---- what holds after each event ----

    def _check(self, before: j.Job, after: j.Job) -> None:
        self._quorum_ids_grow(before, after)
        self._the_frontier_moves_by_votes(before, after)
        self._quorums_are_whole(before, after)
        for effect in self.done.effects:
            if isinstance(effect, j.Close):
                self.closed.add(effect.session)
            if isinstance(effect, j.Send):
                assert effect.session not in self.closed
                self._one_stream_is_in_order(effect.session, effect.message, after)

    def _quorum_ids_grow(self, before: j.Job, after: j.Job) -> None:
        assert after.last_quorum_id >= before.last_quorum_id
        for quorum in _quorums(self.done.effects):
            assert self.quorums.setdefault(quorum.quorum_id, quorum) == quorum
            assert before.last_quorum_id < quorum.quorum_id <= after.last_quorum_id

    def _the_frontier_moves_by_votes(self, before: j.Job, after: j.Job) -> None:
        commits = self.done.only(msg.Commit)
        old, new = before.frontier, after.frontier
        if old is None or new is None or new.step == old.step:
            assert not commits
            assert old is None or new is not None
            return
        if new.founding:
            assert old.founding
            return
        assert new.step == old.step + 1
        assert before.quorum is not None
        assert new.quorum_id == before.quorum.quorum_id
        assert len(before.quorum.members) >= max(1, before.min_replicas)  # a trial commits nothing
        decisions = {(commit.quorum_id, commit.step) for commit in commits.values()}
        assert decisions == {(new.quorum_id, old.step)}
        assert commits.keys() <= {member.group for member in before.quorum.members}
        assert all((name, new.quorum_id, old.step) in self.said_ok for name in commits)
        assert new.holders <= {(member.group, member.incarnation) for member in before.quorum.members}
        assert {
            (member.group, member.incarnation) for member in before.quorum.members if member.group in commits
        } <= (new.holders)

    def _one_stream_is_in_order(
        self, session: j.SessionId, message: msg.CoordinatorMessage, after: j.Job
    ) -> None:
        if isinstance(message, msg.Commit):
            self.heard[session] = message.step
        if isinstance(message, msg.Pin):
            assert message.step == _frontier(after).step
            assert self.heard.get(session, -1) < message.step  # not after the commit that overwrites it
        if isinstance(message, msg.Heal):
            self._donors_hold_the_frontier(message, after)

    def _quorums_are_whole(self, before: j.Job, after: j.Job) -> None:
        for quorum in _quorums(self.done.effects):
            assert len(quorum.members) >= max(1, after.min_replicas) or after.raised  # then a trial
            owned = sorted(shard for member in quorum.members for shard in member.shards)
            assert owned == list(range(quorum.total_shards))
        old, new = before.quorum, after.quorum
        if old is None or new is None or new.step != old.step:
            return
        kept = {(m.group, m.incarnation): set(m.shards) for m in new.members}
        for member in old.members:
            assert set(member.shards) <= kept.get((member.group, member.incarnation), set(member.shards))

    def _donors_hold_the_frontier(self, heal: msg.Heal, after: j.Job) -> None:
        frontier = _frontier(after)
        assert heal.step <= frontier.step  # it may have moved while donors took digests
        donors = {(donor.group, donor.incarnation) for donor in heal.donors}
        assert donors <= frontier.holders

    @invariant()
    def what_must_survive_is_written_down(self) -> None:
        job = self.desk.job
        if "job" not in self.known or job.empty:
            assert job.empty or durable.saved(job) == durable.saved(j.Job(job.name, job.options))
        elif job.quorum is None:
            # After a restart, only the record knows the members of the last quorum.
            assert replace(self.known["job"], members=()) == replace(durable.saved(job), members=())
        else:
            assert self.known["job"] == durable.saved(job)

    @invariant()
    def sessions_and_groups_agree(self) -> None:
        job = self.desk.job
        assert {group.session: name for name, group in job.groups.items()} == job.sessions

    @invariant()
    def members_are_the_living_part_of_the_quorum(self) -> None:
        job = self.desk.job
        if job.quorum is None:
            return
        living = {
            (member.group, member.incarnation)
            for position, member in enumerate(job.quorum.members)
            if not job.ballot.lost >> position & 1
        }
        assert living == {group.holder for group in job.groups.values() if group.phase is j.GroupPhase.MEMBER}

    @invariant()
    def nobody_waits_without_need(self) -> None:
        job = self.desk.job
        able = [group for group in job.groups.values() if group.phase is j.GroupPhase.MEMBER]
        enough = len(able) >= max(1, job.min_replicas)
        # (After a restart the others have a moment to come back.)
        if job.frontier is not None and job.finished is None and enough and job.restored_s is None:
            assert job.quorum is not None

    @invariant()
    def donors_keep_nothing_for_those_who_are_gone(self) -> None:
        for group in self.desk.job.groups.values():
            assert (group.heal_id is None) == (not group.donors)
            if group.phase in (j.GroupPhase.PRESENT, j.GroupPhase.STALE, j.GroupPhase.LEAVING):
                assert group.heal_id is None


def _frontier(job: j.Job) -> j.Frontier:
    assert job.frontier is not None
    return job.frontier


def _quorums(effects: tuple[j.Effect, ...]) -> list[msg.NewQuorum]:
    messages = [effect.message for effect in effects if isinstance(effect, j.Send)]
    riding = [
        message.next for message in messages if isinstance(message, msg.Commit) and message.next is not None
    ]
    return riding + [message for message in messages if isinstance(message, msg.NewQuorum)]


AnyJob.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, print_blob=False
)
TestAnyJob = AnyJob.TestCase
