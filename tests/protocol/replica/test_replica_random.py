"""Any message, at any time: the invariants of `machine.py` hold after each.

The coordinator here is faulty: it sends any message, in any order, and an illegal one ends its stream. The training
thread is correct: it follows the directive, early or late, and reports its work, which is never illegal.
A failure prints the shortest sequence of rules that leads to it.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from jaxft_protocol.messages import (
    Alive,
    Commit,
    CoordinatorMessage,
    Evicted,
    Finished,
    FrontierMoved,
    Goodbye,
    GroupName,
    Halted,
    Heal,
    HealId,
    HistoryId,
    Incarnation,
    Member,
    NewQuorum,
    Pin,
    QuorumId,
    Refused,
    Release,
    Step,
    Vote,
    Waiting,
    Welcome,
)
from jaxft_protocol.replica import machine
from jaxft_protocol.replica.legal import IllegalEvent
from jaxft_protocol.replica.state import (
    Applied,
    Apply,
    Attempt,
    Close,
    Connected,
    Dial,
    Disconnected,
    Event,
    ExchangeBroke,
    Exchanged,
    HealBroke,
    Healed,
    HealFrom,
    Identity,
    Idle,
    LeaveNow,
    Phase,
    PinState,
    Prepared,
    Raised,
    Received,
    ReleasePin,
    Replay,
    Replayed,
    Replica,
    Send,
    Tick,
)

ME = Identity("job", GroupName("a"), Incarnation(7), "a:1", "one:1,two:2")
numbers = st.integers(0, 4)
members = tuple(Member(GroupName(n), Incarnation(7), f"{n}:1", (i,)) for i, n in enumerate(("a", "b")))
quorums = st.builds(
    lambda q, s: NewQuorum(QuorumId(q), Step(s), 2, members, history=HistoryId(9)), numbers, numbers
)
sent = st.one_of(
    st.builds(
        lambda s, q, held, term: Welcome(1000, s, q, held, term), numbers, numbers, st.booleans(), numbers
    ),
    st.just(Welcome(1000)),
    quorums,
    st.builds(
        lambda q, s, following: Commit(QuorumId(q), Step(s), following), numbers, numbers, quorums | st.none()
    ),
    st.builds(lambda h, s, log: Pin(HealId(h), Step(s), log), numbers, numbers, st.booleans()),
    st.builds(lambda h: Release(HealId(h)), numbers),
    st.builds(lambda h, s, log: Heal(HealId(h), Step(s), members[1:], log), numbers, numbers, st.booleans()),
    st.builds(lambda s: FrontierMoved(Step(s)), numbers),
    st.just(Waiting("for you")),
    st.just(Alive()),
    st.just(Evicted("you hang", may_return=True)),
)
last_words = st.sampled_from(
    [
        Goodbye(),
        Halted("you differ"),
        Refused("no"),
        Evicted("another you", may_return=False),
        Finished(Step(2)),
    ]
)
OFF_BY = st.sampled_from([0, 0, 0, -1, 1])
OVER = (Phase.LEFT, Phase.FAILED)


class AnyReplica(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica(ME, 30.0, offline_since_s=0.0)
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
    @precondition(lambda self: self.replica.phase is not Phase.OFFLINE)
    def hear(self, message: CoordinatorMessage) -> None:
        if isinstance(message, Commit):
            self.committed.add((message.quorum_id, message.step))
        if isinstance(message, Welcome) and message.frontier_step:
            self.committed.add((message.frontier_quorum_id, message.frontier_step - 1))
        self.on(Received(message))

    @rule(message=last_words)
    @precondition(lambda self: self.events > 25)
    def hear_the_last(self, message: CoordinatorMessage) -> None:
        self.hear(message)

    @initialize()
    def begin(self) -> None:
        self.on(Connected())
        self.on(Received(Welcome(1000)))
        self.prepare(0)

    @rule(newer=st.sampled_from([1, 1, 1, 0, -1]), off=OFF_BY)
    @precondition(lambda self: self.replica.phase is not Phase.OFFLINE)
    def hear_a_quorum(self, newer: int, off: int) -> None:
        quorum_id = max(0, self.replica.last_quorum_id + newer)
        self.on(Received(NewQuorum(QuorumId(quorum_id), Step(max(0, self.step + off)), 2, members)))

    @rule(off_id=OFF_BY, off=OFF_BY, rides=st.booleans())
    @precondition(lambda self: self.replica.vote is not None and self.replica.phase is not Phase.OFFLINE)
    def hear_a_decision(self, off_id: int, off: int, *, rides: bool) -> None:
        vote = self.replica.vote
        assert vote is not None
        following = (
            NewQuorum(QuorumId(vote.quorum_id + 1), Step(vote.step + 1), 2, members) if rides else None
        )
        self.hear(Commit(QuorumId(max(0, vote.quorum_id + off_id)), Step(max(0, vote.step + off)), following))

    @rule(off_id=OFF_BY, off=OFF_BY, busy=st.booleans())
    @precondition(lambda self: self.replica.vote is not None)
    def come_back_and_hear_of_the_decision(self, off_id: int, off: int, *, busy: bool) -> None:
        vote = self.replica.vote
        assert vote is not None
        self.on(Disconnected("reset", busy))
        self.on(Connected())
        self.hear(
            Welcome(
                1000,
                Step(max(0, vote.step + 1 + off)),
                QuorumId(max(0, vote.quorum_id + off_id)),
                frontier_held=True,
                term=4,
            )
        )

    @rule()
    @precondition(lambda self: self.replica.phase in (Phase.OFFLINE, *OVER))
    def connect(self) -> None:
        self.on(Connected())

    @rule(busy=st.booleans())
    def disconnect(self, *, busy: bool) -> None:
        self.on(Disconnected("reset", busy))

    @rule()
    def wait(self) -> None:
        self.on(Idle())

    @rule(after_s=st.sampled_from([0.05, 1.0, 2.0, 40.0]))
    def tick(self, after_s: float) -> None:
        self.now_s += after_s
        self.on(Tick())

    @rule(finished=st.booleans())
    @precondition(lambda self: self.replica.phase is not Phase.LEAVING)
    def leave(self, *, finished: bool) -> None:
        self.on(LeaveNow(finished))

    @rule(step=numbers)
    @precondition(lambda self: not self.prepared)
    def prepare(self, step: int) -> None:
        self.prepared = True
        self.step = step
        self.on(Prepared(Step(step), 0xD1, total_shards=2))

    @rule(off=OFF_BY)
    @precondition(lambda self: self.prepared)
    def raise_an_exception(self, off: int) -> None:
        """Ctrl-C, at any time."""
        self.on(Raised(Step(max(0, self.step + off)), "KeyboardInterrupt"))

    @rule(works=st.booleans())
    @precondition(lambda self: self.prepared)
    def obey(self, *, works: bool) -> None:
        """The training thread reads its directive and follows it."""
        match machine.directive(self.replica):
            case Attempt(quorum, step):
                assert step == self.step, "asked for a step of a state that it does not hold"
                if works:
                    self.sums.add((quorum.quorum_id, step))
                    self.on(Exchanged(quorum.quorum_id, step))
                else:
                    self.on(ExchangeBroke(quorum.quorum_id, step, (GroupName("b"),), "reset"))
            case Apply(_, step) if step == self.step:
                self.step += 1
                self.on(Applied(Step(self.step)))
            case HealFrom(heal):
                if works:
                    self.step = heal.step
                self.on(Healed(heal.heal_id, heal.step) if works else HealBroke(heal.heal_id, "no donor"))
            case Replay(heal, step) if step == self.step:
                self.step += works
                self.on(
                    Replayed(heal.heal_id, Step(self.step)) if works else HealBroke(heal.heal_id, "no donor")
                )
            case _:
                pass

    # ---- what holds after each event ----

    def on(self, event: Event) -> None:  # noqa: C901 (a case for each effect)
        self.events += 1
        before = self.replica
        try:
            self.replica, effects = machine.step(before, event, self.now_s)
        except IllegalEvent:
            assert isinstance(event, Received), "the training thread and the session do nothing illegal"
            self.on(Disconnected("it may not say this now"))
            return
        after = self.replica
        assert after.last_quorum_id >= before.last_quorum_id
        if after.quorum is not None and before.quorum is not None:
            assert after.quorum.quorum_id >= before.quorum.quorum_id
        if (
            isinstance(event, Received)
            and isinstance(event.message, Welcome)
            and after.phase is not before.phase
        ):
            assert event.message.term >= self.followed, "followed a coordinator that was replaced"
            self.followed = max(self.followed, event.message.term)
        if after.step != before.step:
            assert isinstance(event, Prepared | Applied | Replayed | Healed), (
                "only the training thread moves it"
            )
        assert after.step == self.step or not self.prepared
        if before.phase in OVER:
            assert after.phase in OVER
        for effect in effects:
            match effect:
                case Send(Vote(quorum_id, step, ok)):
                    assert (quorum_id, step) not in self.votes, "a vote is given once"
                    if ok:
                        assert (quorum_id, step) in self.sums
                        self.votes.add((quorum_id, step))
                case Send(message) if before.phase is Phase.OFFLINE:
                    assert isinstance(event, Connected), f"{message} is sent without a stream"
                case PinState(heal_id):
                    self.pins.add(heal_id)
                case ReleasePin(heal_id):
                    self.pins.discard(heal_id)
                case Dial():
                    assert isinstance(event, Disconnected)
                    assert after.phase is Phase.OFFLINE
                case Close():
                    assert isinstance(event, Received | Tick)
                case _:
                    pass
        if isinstance(event, Disconnected):
            assert not self.pins, "heals do not outlive a stream"
        directive = machine.directive(after)
        if isinstance(directive, Attempt):
            assert directive.step == after.step
            assert (directive.quorum.quorum_id, after.step) not in self.votes, "tries a step after its vote"
        if isinstance(directive, Apply) and directive.step == self.step:
            attempt = (directive.quorum_id, directive.step)
            assert attempt in self.sums, "must apply a sum that it does not hold"
            assert attempt in self.votes, "must apply a step without its vote"
            assert attempt in self.committed, "must apply an uncommitted step"
        if after.phase is Phase.OFFLINE:
            assert after.offline_since_s is not None


AnyReplica.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, print_blob=False
)
TestAnyReplica = AnyReplica.TestCase
