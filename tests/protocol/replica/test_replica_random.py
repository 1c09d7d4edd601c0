"""Any message, at any time: the invariants of `machine.py` hold after each.

The coordinator here is faulty: it sends any message, in any order, and an illegal one ends its stream. The training
thread is correct: it follows the directive, early or late, and reports its work, which is never illegal.
A failure prints the shortest sequence of rules that leads to it.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from jaxft_protocol import messages as m
from jaxft_protocol.replica import machine
from jaxft_protocol.replica import state as r
from jaxft_protocol.replica.legal import IllegalEvent

ME = r.Identity("job", m.GroupName("a"), m.Incarnation(7), "a:1", "one:1,two:2")
numbers = st.integers(0, 4)
members = tuple(m.Member(m.GroupName(n), m.Incarnation(7), f"{n}:1", (i,)) for i, n in enumerate(("a", "b")))
quorums = st.builds(
    lambda q, s: m.NewQuorum(m.QuorumId(q), m.Step(s), 2, members, history=m.HistoryId(9)), numbers, numbers
)
sent = st.one_of(
    st.builds(
        lambda s, q, held, term: m.Welcome(1000, s, q, held, term), numbers, numbers, st.booleans(), numbers
    ),
    st.just(m.Welcome(1000)),
    quorums,
    st.builds(
        lambda q, s, following: m.Commit(m.QuorumId(q), m.Step(s), following),
        numbers,
        numbers,
        quorums | st.none(),
    ),
    st.builds(lambda h, s, log: m.Pin(m.HealId(h), m.Step(s), log), numbers, numbers, st.booleans()),
    st.builds(lambda h: m.Release(m.HealId(h)), numbers),
    st.builds(
        lambda h, s, log: m.Heal(m.HealId(h), m.Step(s), members[1:], log), numbers, numbers, st.booleans()
    ),
    st.builds(lambda s: m.FrontierMoved(m.Step(s)), numbers),
    st.just(m.Waiting("for you")),
    st.just(m.Alive()),
    st.just(m.Evicted("you hang", may_return=True)),
)
last_words = st.sampled_from(
    [
        m.Goodbye(),
        m.Halted("you differ"),
        m.Refused("no"),
        m.Evicted("another you", may_return=False),
        m.Finished(m.Step(2)),
    ]
)
OFF_BY = st.sampled_from([0, 0, 0, -1, 1])
OVER = (r.Phase.LEFT, r.Phase.FAILED)


class AnyReplica(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replica = r.Replica(ME, 30.0, offline_since_s=0.0)
        self.now_s = 0.0
        self.prepared = False
        self.step = 0  # the state that the training thread holds
        self.sums: set[tuple[int, int]] = set()  # the quorums and steps whose sum it holds
        self.votes: set[tuple[int, int]] = set()
        self.committed: set[tuple[int, int]] = set()  # by a coordinator
        self.pins: set[int] = set()
        self.events = 0
        self.followed = 0  # the highest term of a Welcome that was taken

    # ---- what may happen ----

    @rule(message=sent)
    @precondition(lambda self: self.replica.phase is not r.Phase.OFFLINE)
    def hear(self, message: m.CoordinatorMessage) -> None:
        if isinstance(message, m.Commit):
            self.committed.add((message.quorum_id, message.step))
        if isinstance(message, m.Welcome) and message.frontier_step:
            self.committed.add((message.frontier_quorum_id, message.frontier_step - 1))
        self.on(r.Received(message))

    @rule(message=last_words)
    @precondition(lambda self: self.events > 25)
    def hear_the_last(self, message: m.CoordinatorMessage) -> None:
        self.hear(message)

    @initialize()
    def begin(self) -> None:
        self.on(r.Connected())
        self.on(r.Received(m.Welcome(1000)))
        self.prepare(0)

    @rule(newer=st.sampled_from([1, 1, 1, 0, -1]), off=OFF_BY)
    @precondition(lambda self: self.replica.phase is not r.Phase.OFFLINE)
    def hear_a_quorum(self, newer: int, off: int) -> None:
        quorum_id = max(0, self.replica.last_quorum_id + newer)
        self.on(r.Received(m.NewQuorum(m.QuorumId(quorum_id), m.Step(max(0, self.step + off)), 2, members)))

    @rule(off_id=OFF_BY, off=OFF_BY, rides=st.booleans())
    @precondition(lambda self: self.replica.vote is not None and self.replica.phase is not r.Phase.OFFLINE)
    def hear_a_decision(self, off_id: int, off: int, *, rides: bool) -> None:
        vote = self.replica.vote
        assert vote is not None
        following = (
            m.NewQuorum(m.QuorumId(vote.quorum_id + 1), m.Step(vote.step + 1), 2, members) if rides else None
        )
        self.hear(
            m.Commit(m.QuorumId(max(0, vote.quorum_id + off_id)), m.Step(max(0, vote.step + off)), following)
        )

    @rule(off_id=OFF_BY, off=OFF_BY, busy=st.booleans())
    @precondition(lambda self: self.replica.vote is not None)
    def come_back_and_hear_of_the_decision(self, off_id: int, off: int, *, busy: bool) -> None:
        vote = self.replica.vote
        assert vote is not None
        self.on(r.Disconnected("reset", busy))
        self.on(r.Connected())
        self.hear(
            m.Welcome(
                1000,
                m.Step(max(0, vote.step + 1 + off)),
                m.QuorumId(max(0, vote.quorum_id + off_id)),
                frontier_held=True,
                term=4,
            )
        )

    @rule()
    @precondition(lambda self: self.replica.phase in (r.Phase.OFFLINE, *OVER))
    def connect(self) -> None:
        self.on(r.Connected())

    @rule(busy=st.booleans())
    def disconnect(self, *, busy: bool) -> None:
        self.on(r.Disconnected("reset", busy))

    @rule()
    def wait(self) -> None:
        self.on(r.Idle())

    @rule(after_s=st.sampled_from([0.05, 1.0, 2.0, 40.0]))
    def tick(self, after_s: float) -> None:
        self.now_s += after_s
        self.on(r.Tick())

    @rule(finished=st.booleans())
    @precondition(lambda self: self.replica.phase is not r.Phase.LEAVING)
    def leave(self, *, finished: bool) -> None:
        self.on(r.LeaveNow(finished))

    @rule(step=numbers)
    @precondition(lambda self: not self.prepared)
    def prepare(self, step: int) -> None:
        self.prepared = True
        self.step = step
        self.on(r.Prepared(m.Step(step), 0xD1, total_shards=2))

    @rule(off=OFF_BY)
    @precondition(lambda self: self.prepared)
    def raise_an_exception(self, off: int) -> None:
        """Ctrl-C, at any time."""
        self.on(r.Raised(m.Step(max(0, self.step + off)), "KeyboardInterrupt"))

    @rule(works=st.booleans())
    @precondition(lambda self: self.prepared)
    def obey(self, *, works: bool) -> None:
        """The training thread reads its directive and follows it."""
        match machine.directive(self.replica):
            case r.Attempt(quorum, step):
                assert step == self.step, "asked for a step of a state that it does not hold"
                if works:
                    self.sums.add((quorum.quorum_id, step))
                    self.on(r.Exchanged(quorum.quorum_id, step))
                else:
                    self.on(r.ExchangeBroke(quorum.quorum_id, step, (m.GroupName("b"),), "reset"))
            case r.Apply(_, step) if step == self.step:
                self.step += 1
                self.on(r.Applied(m.Step(self.step)))
            case r.HealFrom(heal):
                if works:
                    self.step = heal.step
                self.on(r.Healed(heal.heal_id, heal.step) if works else r.HealBroke(heal.heal_id, "no donor"))
            case r.Replay(heal, step) if step == self.step:
                self.step += works
                self.on(
                    r.Replayed(heal.heal_id, m.Step(self.step))
                    if works
                    else r.HealBroke(heal.heal_id, "no donor")
                )
            case _:
                pass

    # ---- what holds after each event ----

    def on(self, event: r.Event) -> None:  # noqa: C901 (a case for each effect)
        self.events += 1
        before = self.replica
        try:
            self.replica, effects = machine.step(before, event, self.now_s)
        except IllegalEvent:
            assert isinstance(event, r.Received), "the training thread and the session do nothing illegal"
            self.on(r.Disconnected("it may not say this now"))
            return
        after = self.replica
        assert after.last_quorum_id >= before.last_quorum_id
        if after.quorum is not None and before.quorum is not None:
            assert after.quorum.quorum_id >= before.quorum.quorum_id
        if (
            isinstance(event, r.Received)
            and isinstance(event.message, m.Welcome)
            and after.phase is not before.phase
        ):
            assert event.message.term >= self.followed, "followed a coordinator that was replaced"
            self.followed = max(self.followed, event.message.term)
        if after.step != before.step:
            assert isinstance(event, r.Prepared | r.Applied | r.Replayed | r.Healed), (
                "only the training thread moves it"
            )
        assert after.step == self.step or not self.prepared
        if before.phase in OVER:
            assert after.phase in OVER
        for effect in effects:
            match effect:
                case r.Send(m.Vote(quorum_id, step, ok)):
                    assert (quorum_id, step) not in self.votes, "a vote is given once"
                    if ok:
                        assert (quorum_id, step) in self.sums
                        self.votes.add((quorum_id, step))
                case r.Send(message) if before.phase is r.Phase.OFFLINE:
                    assert isinstance(event, r.Connected), f"{message} is sent without a stream"
                case r.PinState(heal_id):
                    self.pins.add(heal_id)
                case r.ReleasePin(heal_id):
                    self.pins.discard(heal_id)
                case r.Dial():
                    assert isinstance(event, r.Disconnected)
                    assert after.phase is r.Phase.OFFLINE
                case r.Close():
                    assert isinstance(event, r.Received | r.Tick)
                case _:
                    pass
        if isinstance(event, r.Disconnected):
            assert not self.pins, "heals do not outlive a stream"
        directive = machine.directive(after)
        if isinstance(directive, r.Attempt):
            assert directive.step == after.step
            assert (directive.quorum.quorum_id, after.step) not in self.votes, "tries a step after its vote"
        if isinstance(directive, r.Apply) and directive.step == self.step:
            attempt = (directive.quorum_id, directive.step)
            assert attempt in self.sums, "must apply a sum that it does not hold"
            assert attempt in self.votes, "must apply a step without its vote"
            assert attempt in self.committed, "must apply an uncommitted step"
        if after.phase is r.Phase.OFFLINE:
            assert after.offline_since_s is not None


AnyReplica.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, print_blob=False
)
TestAnyReplica = AnyReplica.TestCase
