"""The replica's half of the protocol: every phase, every event."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.names import ENDED, LEFT
from jaxft_protocol.replica import machine, sessions
from jaxft_protocol.replica import state as r

ME = r.Identity("job", m.GroupName("a"), m.Incarnation(7), "a:1", "coordinator:29510")
SETTINGS = {"program": "x"}
DIGEST = 0xD1
DONORS = (m.Member(m.GroupName("b"), m.Incarnation(1), "b:1"),)


@dataclass
class Group:
    """One replica and its effects, driven event by event."""

    replica: r.Replica = field(default_factory=lambda: r.Replica(ME, 60.0, offline_since_s=0.0))
    now_s: float = 0.0
    effects: tuple[r.Effect, ...] = ()
    # The training thread takes the digest of its state as soon as it is asked for it.
    takes_digests: bool = True

    def on(self, event: r.Event) -> "Group":
        self.replica, self.effects = machine.step(self.replica, event, self.now_s)
        wanted = machine.directive(self.replica)
        if self.takes_digests and isinstance(wanted, r.TakeDigest):
            before = self.effects
            self.on(r.Digested(wanted.step, 0xD1))
            self.effects = (*before, *self.effects)
        return self

    def hear(self, *messages: m.CoordinatorMessage) -> "Group":
        for message in messages:
            self.on(r.Received(message))
        return self

    @property
    def phase(self) -> r.Phase:
        return self.replica.phase

    @property
    def directive(self) -> r.Directive:
        return machine.directive(self.replica)

    @property
    def sent(self) -> list[m.GroupMessage]:
        return [effect.message for effect in self.effects if isinstance(effect, r.Send)]

    @property
    def notes(self) -> list[str]:
        return [effect.text for effect in self.effects if isinstance(effect, r.Log)]


def quorum(quorum_id: int, step: int, *names: str, **changes: list[m.Change]) -> m.NewQuorum:
    members = tuple(
        m.Member(m.GroupName(name), m.Incarnation(1), f"{name}:1", (i,))
        for i, name in enumerate(names or ("a", "b"))
    )
    lists = {name: tuple(value) for name, value in changes.items()}
    return m.NewQuorum(m.QuorumId(quorum_id), m.Step(step), len(members), members, **lists)


def commit(quorum_id: int, step: int, following: m.NewQuorum | None = None) -> m.Commit:
    return m.Commit(m.QuorumId(quorum_id), m.Step(step), following)


def heal(heal_id: int, step: int) -> m.Heal:
    return m.Heal(m.HealId(heal_id), m.Step(step), DONORS)


def welcome(frontier_step: int | None = None, quorum_id: int = 0, term: int = 0) -> m.Welcome:
    step = None if frontier_step is None else m.Step(frontier_step)
    return m.Welcome(1000, step, m.QuorumId(quorum_id), term=term)


def connected() -> Group:
    return Group().on(r.Connected())


def joining(step: int = 0) -> Group:
    return connected().hear(welcome()).on(r.Prepared(m.Step(step), 0xD1, SETTINGS, 2))


def working(quorum_id: int = 1, step: int = 0) -> Group:
    return joining(step).hear(quorum(quorum_id, step))


def voted() -> Group:
    return working().on(r.Exchanged(m.QuorumId(1), m.Step(0)))


def applying() -> Group:
    return voted().hear(commit(1, 0))


def healing() -> Group:
    return joining().hear(heal(5, 3))


def following() -> Group:
    return healing().on(r.Healed(m.HealId(5), m.Step(3)))


def finished() -> Group:
    return following().hear(m.Finished(m.Step(3)))


def failed() -> Group:
    return joining().hear(m.Refused("no"))


# ---- connecting and joining ----


def test_it_says_hello_as_soon_as_the_stream_is_there():
    group = connected()
    assert group.phase is r.Phase.GREETING
    assert group.sent == [m.Hello("job", m.GroupName("a"), m.Incarnation(7), "a:1", stream=1)]
    assert group.directive == r.Wait("the coordinator coordinator:29510 (connecting)")


def test_its_streams_are_counted_so_that_a_late_hello_is_known_as_one():
    again = connected().hear(welcome()).on(r.Disconnected("")).on(r.Connected())
    assert [hello.stream for hello in again.sent if isinstance(hello, m.Hello)] == [2]


def test_it_is_present_while_the_programs_compile():
    group = connected().hear(welcome())
    assert group.phase is r.Phase.PRESENT
    assert group.sent == []
    assert isinstance(group.directive, r.Wait)


def test_it_joins_when_both_programs_are_compiled():
    group = joining(step=4)
    assert group.phase is r.Phase.JOINING
    assert group.sent == [m.Join(m.Step(4), DIGEST, SETTINGS, m.QuorumId(0), 2)]


@pytest.mark.parametrize("early", [Group, connected])
def test_programs_that_were_compiled_before_the_welcome_join_with_it(early):
    group = early().on(r.Prepared(m.Step(0), 0xD1, SETTINGS))
    assert group.sent == []
    if group.phase is r.Phase.OFFLINE:
        group.on(r.Connected())
    assert group.hear(welcome()).sent == [m.Join(m.Step(0), DIGEST, SETTINGS)]


def test_a_refusal_is_an_error_that_lists_what_differs():
    differences = (m.Difference("shards", "8", "4"), m.Difference("program", "x", "-"))
    group = joining().hear(m.Refused("group 'a' differs from job 'job' in: program, shards", differences))
    assert group.phase is r.Phase.FAILED
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.JOIN_REFUSED
    assert group.directive.failure.text.splitlines() == [
        "the coordinator coordinator:29510 refused group 'a': group 'a' differs from job 'job' in: program, shards.",
        "  shards: the job has '8', this group '4'",
        "  program: the job has 'x', this group '-'",
        "Start every group of a job with the same program and settings, or use another job name.",
        "The same code may make another program in each process: by the order of a set of texts (start all with the "
        "same PYTHONHASHSEED), by hash() or id(), or by a constant that depends on the host.",
    ]


def test_other_static_arguments_are_the_reason_for_another_program():
    differences = (
        m.Difference("program", "x", "y"),
        m.Difference("static arguments", "rollout=8", "rollout=2"),
    )
    group = joining().hear(m.Refused("group 'a' differs from job 'job'", differences))
    assert isinstance(group.directive, r.Fail)
    text = group.directive.failure.text
    assert "static arguments: the job has 'rollout=8', this group 'rollout=2'" in text
    assert "give `step.join` the same ones in all groups" in text
    assert "PYTHONHASHSEED" not in text


REFUSES = "it refused this group"


def test_a_waiting_job_says_why_until_it_moves():
    group = joining().hear(m.Waiting("1 of at least 2 groups have joined (a)"))
    assert group.directive == r.Wait("1 of at least 2 groups have joined (a)")
    assert group.notes == ["waiting: 1 of at least 2 groups have joined (a)"]
    assert group.hear(quorum(1, 0)).directive == r.Attempt(quorum(1, 0), m.Step(0))
    assert group.replica.waiting == ""


# ---- one step ----


def test_a_quorum_at_its_step_is_an_attempt():
    group = working()
    assert group.phase is r.Phase.WORKING
    assert group.directive == r.Attempt(quorum(1, 0), m.Step(0))
    assert group.notes == ["quorum 0 -> 1: shards reassigned; now a, b; from step 0"]


def test_a_quorum_of_many_is_a_line_that_people_can_read():
    names = [m.GroupName(f"g-{number}") for number in range(2000)]
    lost = tuple(m.Change(name, "its connection closed") for name in names[:500])
    made = replace(quorum(1, 0, "a", *names[500:]), joined=tuple(map(m.Change, names[500:])), left=lost)
    (line,) = joining().hear(made).notes
    assert "lost g-0 (its connection closed); lost g-1 (" in line
    assert "; 490 more; joined g-500, g-501, " in line
    assert "g-509, 1490 more; now a, g-500, " in line
    assert line.endswith("g-508, 1491 more; from step 0")


def test_a_finished_exchange_is_a_vote_and_no_commit():
    group = voted()
    assert group.sent == [m.Vote(m.QuorumId(1), m.Step(0), ok=True)]
    assert group.phase is r.Phase.VOTED
    assert group.directive == r.Wait("the decision on step 0: the votes of b, or the coordinator's store")


def test_a_broken_exchange_is_a_vote_that_names_whom_and_why():
    group = working().on(
        r.ExchangeBroke(m.QuorumId(1), m.Step(0), (m.GroupName("b"),), "b closed its connection")
    )
    vote = m.Vote(
        m.QuorumId(1), m.Step(0), ok=False, accused=(m.GroupName("b"),), reason="b closed its connection"
    )
    assert group.sent == [vote]
    assert group.phase is r.Phase.VOTED


@pytest.mark.parametrize(
    "group", [working(2), voted().hear(quorum(2, 0)).on(r.Exchanged(m.QuorumId(2), m.Step(0)))]
)
def test_the_end_of_an_older_attempt_is_no_vote(group: Group):
    before = group.phase
    assert group.on(r.Exchanged(m.QuorumId(1), m.Step(0))).sent == []
    assert group.on(r.ExchangeBroke(m.QuorumId(1), m.Step(0), (), "")).sent == []
    assert group.phase is before


@pytest.mark.parametrize("group", [joining(), healing(), following(), failed()])
def test_nobody_votes_outside_an_attempt(group: Group):
    assert group.on(r.Exchanged(m.QuorumId(1), m.Step(0))).sent == []


def test_of_an_attempt_that_is_over_the_digest_is_kept():
    group = working().hear(heal(5, 0)).on(r.Exchanged(m.QuorumId(1), m.Step(0), 0xE))
    assert (group.replica.digest, group.phase) == (0xE, r.Phase.HEALING)


def test_a_commit_of_its_vote_lets_it_apply():
    group = applying()
    assert group.phase is r.Phase.APPLYING
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))


def test_without_a_new_quorum_the_next_step_is_tried_in_the_same_one():
    group = applying().on(r.Applied(m.Step(1)))
    assert group.phase is r.Phase.WORKING
    assert group.directive == r.Attempt(quorum(1, 0), m.Step(1))
    assert group.on(r.Exchanged(m.QuorumId(1), m.Step(1))).sent == [m.Vote(m.QuorumId(1), m.Step(1), ok=True)]


def test_the_next_quorum_rides_on_the_commit():
    following = quorum(2, 1, "a", "b", "c")
    group = voted().hear(commit(1, 0, following))
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))
    assert group.on(r.Applied(m.Step(1))).directive == r.Attempt(following, m.Step(1))


def test_a_new_quorum_for_the_step_is_another_attempt():
    lost = m.Change(m.GroupName("b"), "its connection closed")
    for group in (working(), voted()):
        group.hear(quorum(2, 0, "a", left=[lost]))
        assert group.directive == r.Attempt(quorum(2, 0, "a", left=[lost]), m.Step(0))
        assert group.replica.vote is None
        assert group.notes == ["quorum 1 -> 2: lost b (its connection closed); now a; retries step 0"]


def test_at_the_end_of_a_run_no_group_is_lost_and_nothing_is_retried():
    for reason, text in ((LEFT, "left"), (ENDED, "has ended its loop")):
        left = m.Change(m.GroupName("b"), reason)
        group = working().hear(quorum(2, 0, "a", left=[left]))
        assert group.notes == [f"quorum 1 -> 2: b {text}; now a; goes on with step 0"]
    left = m.Change(m.GroupName("b"), LEFT)
    both = [left, m.Change(m.GroupName("c"), "its connection closed")]
    group = working().hear(quorum(2, 0, "a", left=both))
    assert group.notes == ["quorum 1 -> 2: b left; lost c (its connection closed); now a; retries step 0"]


# ---- healing ----


def test_a_healed_group_at_the_frontier_is_ready():
    group = following()
    assert group.phase is r.Phase.FOLLOWING
    assert group.sent == [m.Ready(m.HealId(5), m.Step(3))]
    assert group.directive == r.Wait("the boundary after step 3, to enter the quorum")


def test_it_replays_step_by_step_what_the_job_has_committed_meanwhile():
    group = healing().hear(m.FrontierMoved(m.Step(4)), m.FrontierMoved(m.Step(5)))
    assert group.on(r.Healed(m.HealId(5), m.Step(3))).sent == []
    assert group.directive == r.Replay(heal(5, 3), m.Step(3), m.Step(5))
    assert group.on(r.Replayed(m.HealId(5), m.Step(4))).sent == []
    assert group.directive == r.Replay(heal(5, 3), m.Step(4), m.Step(5))
    assert group.on(r.Replayed(m.HealId(5), m.Step(5))).sent == [m.Ready(m.HealId(5), m.Step(5))]


def test_it_follows_while_it_waits_for_the_boundary():
    group = following().hear(m.FrontierMoved(m.Step(4)))
    assert group.directive == r.Replay(heal(5, 3), m.Step(3), m.Step(4))
    assert group.on(r.Replayed(m.HealId(5), m.Step(4))).sent == [m.Ready(m.HealId(5), m.Step(4))]


def test_it_takes_part_at_once_in_a_quorum_for_the_step_it_stands_at():
    assert following().hear(quorum(2, 3)).directive == r.Attempt(quorum(2, 3), m.Step(3))


def test_let_in_with_a_commit_it_gets_the_last_sum_first_and_says_so():
    group = following().hear(m.FrontierMoved(m.Step(4)), quorum(2, 4))
    assert group.directive == r.Replay(heal(5, 3), m.Step(3), m.Step(4))
    group.on(r.Replayed(m.HealId(5), m.Step(4)))
    assert group.sent == [m.Ready(m.HealId(5), m.Step(4))]
    assert group.directive == r.Attempt(quorum(2, 4), m.Step(4))


@pytest.mark.parametrize("group", [healing(), following()])
def test_a_heal_that_fails_is_reported_and_another_one_awaited(group: Group):
    group.on(r.HealBroke(m.HealId(5), "no donor answers"))
    assert group.sent == [m.HealFailed(m.HealId(5), "no donor answers", group.replica.step)]
    assert group.phase is r.Phase.JOINING
    assert group.hear(heal(6, 4)).directive == r.HealFrom(heal(6, 4))


def test_the_end_of_a_heal_that_was_given_up_moves_the_step_and_nothing_else():
    group = healing().on(r.HealBroke(m.HealId(5), "")).hear(heal(6, 4)).on(r.Healed(m.HealId(5), m.Step(3)))
    assert group.sent == []
    assert (group.phase, group.replica.step) == (r.Phase.HEALING, 3)
    assert group.on(r.HealBroke(m.HealId(5), "")).sent == []


def test_what_it_joined_with_is_not_what_it_holds_after_a_heal():
    # Healed to the step that it came with: the number is the same, the state is the founders'.
    group = joining().hear(heal(5, 0)).on(r.Healed(m.HealId(5), m.Step(0)))
    group.on(r.Disconnected("")).on(r.Connected()).hear(welcome(0))
    assert group.sent == [m.Join(m.Step(0), DIGEST, SETTINGS, m.QuorumId(0), 2, members=0)]


def test_donors_pin_and_release():
    pinned = working().hear(m.Pin(m.HealId(2), m.Step(0))).effects
    assert pinned == (r.PinState(m.HealId(2), m.Step(0)), r.Send(m.Pinned(m.HealId(2), 0xD1)))
    group = working().hear(m.Pin(m.HealId(2), m.Step(0)), m.Release(m.HealId(2)))
    assert group.effects == (r.ReleasePin(m.HealId(2)),)
    assert group.replica.pins == frozenset()


@pytest.mark.parametrize("group", [applying(), following(), working().on(r.LeaveNow(finished=True))])
def test_a_pin_is_taken_in_any_phase(group: Group):
    before = group.phase
    assert group.hear(m.Pin(m.HealId(2), m.Step(3))).effects[:1] == (r.PinState(m.HealId(2), m.Step(3)),)
    assert group.phase is before


# ---- a lost stream ----


def test_a_lost_stream_is_dialled_again_with_patience():
    group = working()
    delays: list[float] = []
    for _ in range(8):
        group.on(r.Disconnected("reset"))
        delays += [effect.delay_s for effect in group.effects if isinstance(effect, r.Dial)]
        group.on(r.Connected())
    longest_s = [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert all(most / 2 < delay_s <= most for delay_s, most in zip(delays, longest_s, strict=True))


def test_a_thousand_groups_that_lose_the_coordinator_at_once_do_not_dial_at_once():
    """Their moments are spread evenly over half of the delay, from one dial to the next as well."""
    for dials, longest_s in ((0, 0.05), (7, 1.0)):
        delays = sorted(sessions._redial_delay_s(incarnation, dials, 1) for incarnation in range(1000))
        gaps = [late - early for early, late in itertools.pairwise(delays)]
        assert longest_s / 2 < delays[0] < 0.51 * longest_s
        assert 0.99 * longest_s < delays[-1] <= longest_s
        assert max(gaps) < longest_s / 50
    assert sessions._redial_delay_s(1, 7, 1) != sessions._redial_delay_s(1, 8, 1)


def test_a_welcome_ends_the_patience():
    group = working().on(r.Disconnected("")).on(r.Disconnected("")).on(r.Connected()).hear(welcome(0))
    again = group.on(r.Disconnected("")).effects[-1]
    assert isinstance(again, r.Dial)
    assert again.delay_s <= 0.05


def test_a_lost_stream_is_mentioned_once():
    group = working().on(r.Disconnected("connection reset"))
    assert group.notes == ["lost the coordinator coordinator:29510 (connection reset); dials again"]
    assert group.directive == r.Wait("the coordinator coordinator:29510 (connection reset)")
    assert group.on(r.Connected()).on(r.Disconnected("refused")).notes == []


def test_it_comes_back_with_the_step_it_holds_and_the_highest_quorum_it_has_seen():
    group = applying().on(r.Applied(m.Step(1))).on(r.Disconnected("")).on(r.Connected()).hear(welcome(1, 1))
    assert group.sent == [m.Join(m.Step(1), DIGEST, SETTINGS, m.QuorumId(1), 2, members=2)]
    assert group.phase is r.Phase.JOINING


def test_the_digest_is_said_again_while_its_first_state_has_not_moved():
    group = working().on(r.Disconnected("")).on(r.Connected()).hear(welcome(0))
    assert group.sent == [m.Join(m.Step(0), DIGEST, SETTINGS, m.QuorumId(1), 2, members=2)]


def test_a_commit_that_it_missed_is_told_by_welcome():
    group = voted().on(r.Disconnected("")).on(r.Connected()).hear(welcome(1, 1))
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))
    assert group.sent == []
    assert group.on(r.Applied(m.Step(1))).sent == [
        m.Join(m.Step(1), DIGEST, SETTINGS, m.QuorumId(1), 2, members=2)
    ]


@pytest.mark.parametrize("frontier", [welcome(0), welcome(1, 2), welcome(2, 1), welcome()])
def test_a_welcome_to_another_frontier_commits_nothing(frontier: m.Welcome):
    group = voted().on(r.Disconnected("")).on(r.Connected()).hear(frontier)
    assert group.phase is r.Phase.JOINING
    assert group.replica.vote is None


def test_a_failed_vote_is_not_committed_by_welcome():
    group = working().on(r.ExchangeBroke(m.QuorumId(1), m.Step(0), (), ""))
    assert group.on(r.Disconnected("")).on(r.Connected()).hear(welcome(1, 1)).phase is r.Phase.JOINING


@pytest.mark.parametrize("frontier", [welcome(1, 1), welcome(2, 2), welcome()])
def test_a_commit_that_it_heard_is_applied_before_it_joins_again(frontier: m.Welcome):
    # Otherwise Join would name a step that the training thread is just leaving, and a coordinator that has lost its
    # store would found the job on it.
    group = applying().on(r.Disconnected("")).on(r.Connected()).hear(frontier)
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))
    assert group.sent == []
    assert [
        message.step for message in group.on(r.Applied(m.Step(1))).sent if isinstance(message, m.Join)
    ] == [1]


def test_an_application_that_ends_while_it_is_offline_counts():
    group = applying().on(r.Disconnected("")).on(r.Applied(m.Step(1))).on(r.Connected()).hear(welcome(1, 1))
    assert group.sent == [m.Join(m.Step(1), DIGEST, SETTINGS, m.QuorumId(1), 2, members=2)]


def test_heals_do_not_outlive_the_stream_at_the_joiner():
    group = following().on(r.Disconnected("")).on(r.Connected()).hear(welcome(4, 2))
    assert group.phase is r.Phase.JOINING
    assert group.on(r.Replayed(m.HealId(5), m.Step(4))).sent == []
    assert group.replica.step == 4


def test_heals_do_not_outlive_the_stream_at_the_donor():
    group = (
        working().hear(m.Pin(m.HealId(3), m.Step(0)), m.Pin(m.HealId(2), m.Step(0))).on(r.Disconnected(""))
    )
    released = [effect for effect in group.effects if isinstance(effect, r.ReleasePin)]
    assert released == [r.ReleasePin(m.HealId(2)), r.ReleasePin(m.HealId(3))]


def test_an_eviction_ends_in_another_try():
    group = working().hear(m.Evicted("b: timed out", may_return=True))
    assert group.notes == ["evicted: b: timed out; comes back as a joiner"]
    assert group.on(r.Disconnected("ended")).phase is r.Phase.OFFLINE
    assert group.on(r.Connected()).hear(welcome(4, 3), heal(5, 4)).directive == r.HealFrom(heal(5, 4))


def test_an_eviction_for_good_is_an_error():
    group = working().hear(m.Evicted("another process has joined as 'a'", may_return=False))
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.EVICTED
    assert (
        "group 'a' of job 'job' was evicted by the coordinator coordinator:29510"
        in group.directive.failure.text
    )
    assert "another process has joined as 'a'" in group.directive.failure.text


# ---- deadlines and heartbeats ----


@pytest.mark.parametrize("group", [joining(), working(), healing(), working().on(r.LeaveNow(finished=True))])
def test_heartbeats_go_out_at_the_interval_that_welcome_named(group: Group):
    group.now_s = 0.9
    assert group.on(r.Tick()).sent == []
    group.now_s = 1.0
    assert group.on(r.Tick()).sent == [m.Heartbeat()]
    assert group.on(r.Tick()).sent == []


def test_heartbeats_say_what_the_training_thread_does():
    group = working()
    sent: list[m.GroupMessage] = []
    for second, (away, progress) in enumerate([(True, 0), (False, 3), (False, 3), (False, 4)], start=1):
        group.now_s = float(second)
        group.hear(m.Alive())
        sent += group.on(r.Tick((m.QuorumId(1), m.Step(0)), away, progress)).sent
    assert sent == [
        m.Heartbeat(m.QuorumId(1), m.Step(0), away=True),
        m.Heartbeat(m.QuorumId(1), m.Step(0), moves=True),
        m.Heartbeat(m.QuorumId(1), m.Step(0)),
        m.Heartbeat(m.QuorumId(1), m.Step(0), moves=True),
    ]


def test_a_group_is_told_when_all_members_have_computed():
    group = working().hear(m.AllComputed(m.QuorumId(1), m.Step(0)))
    assert group.replica.all_computed == (m.QuorumId(1), m.Step(0))
    assert isinstance(group.directive, r.Attempt)


def test_one_that_is_stood_aside_is_not_frightened():
    group = working().hear(m.Evicted("it is away from training", may_return=True, aside=True))
    (note,) = [effect for effect in group.effects if isinstance(effect, r.Log)]
    assert (note.text, note.warning) == (
        "the job goes on without this group: it is away from training",
        False,
    )
    group.on(r.Disconnected("the coordinator ended the session", busy=True))
    assert group.notes == []
    assert [effect for effect in group.effects if isinstance(effect, r.Dial)]
    group.on(r.Connected()).hear(m.Welcome(1000, m.Step(5), m.QuorumId(2)))
    assert group.phase is r.Phase.PRESENT, "it takes part again when its training thread calls the next step"
    assert group.on(r.Idle()).phase is r.Phase.JOINING


def test_a_coordinator_that_never_answers_is_an_error():
    group = Group().on(r.Disconnected("connection refused"))
    group.now_s = 60.0
    assert isinstance(group.on(r.Tick()).directive, r.Wait)
    group.now_s = 60.1
    group.on(r.Connected()).on(r.Tick())
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.COORDINATOR_UNREACHABLE
    assert "no answer from the coordinator coordinator:29510 for 60 s (last: connection refused)" in (
        group.directive.failure.text
    )


def test_the_time_without_a_coordinator_counts_from_the_loss():
    group = working()
    group.now_s = 1000.0
    group.on(r.Disconnected("")).on(r.Tick())
    group.now_s = 1059.0
    assert group.on(r.Disconnected("")).on(r.Tick()).phase is r.Phase.OFFLINE
    group.now_s = 1061.0
    assert group.on(r.Tick()).phase is r.Phase.FAILED


def test_a_state_that_nobody_holds_is_an_error_in_the_end():
    group = connected().hear(welcome(9, 4)).on(r.Prepared(m.Step(2), 0xD1, SETTINGS))
    group.hear(m.Waiting("step 9 needs 1 groups that hold it, and 0 do (none)"))
    group.now_s = 60.1
    group.on(r.Tick())
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.CANNOT_HEAL
    assert "holds step 2 of job 'job', which has committed step 9 at least" in group.directive.failure.text
    assert "step 9 needs 1 groups that hold it" in group.directive.failure.text


def test_a_state_of_the_frontiers_step_that_is_not_the_frontier_is_an_error_in_the_end():
    """As of a notebook that passes `step=` and the state that it still has: the coordinator has no digest of it."""
    group = connected().hear(welcome(9, 4)).on(r.Prepared(m.Step(9), 0xD1, SETTINGS))
    group.hear(m.Waiting("step 9 needs 1 groups that hold it, and 0 do (none)"))
    group.now_s = 60.1
    group.on(r.Tick())
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.CANNOT_HEAL
    assert "not known to be of this run" in group.directive.failure.text


def test_one_whose_heal_has_failed_waits_for_the_next_as_long_as_a_group_holds_the_state():
    """The coordinator has it wait, for up to twice its heartbeat timeout, which may be longer than this timeout."""
    group = connected().hear(welcome(9, 4)).on(r.Prepared(m.Step(2), 0xD1, SETTINGS))
    group.hear(m.Waiting("step 9 needs 1 groups that hold it, and 0 do (none)"))
    group.hear(heal(5, 9)).on(r.HealBroke(m.HealId(5), "no donor answers"))
    group.now_s = 1000.0
    assert group.on(r.Tick()).phase is r.Phase.JOINING
    group.hear(m.Waiting("step 9 needs 1 groups that hold it, and 0 do (none)"))
    group.now_s = 1059.0
    assert group.on(r.Tick()).phase is r.Phase.JOINING
    group.now_s = 1061.0
    assert group.on(r.Tick()).phase is r.Phase.FAILED


def test_a_group_that_holds_the_frontier_waits_for_others_without_end():
    group = connected().hear(welcome(9, 4)).on(r.Prepared(m.Step(9), 0xD1, SETTINGS))
    group.hear(m.Waiting("step 9 needs 2 groups that hold it, and 1 do (a)", held=True))
    group.now_s = 10_000.0
    assert group.on(r.Tick()).phase is r.Phase.JOINING


# ---- leaving, and the end ----


@pytest.mark.parametrize("group", [joining(), working(), voted(), healing(), following()])
@pytest.mark.parametrize("at_its_end", [True, False])
def test_it_says_that_it_leaves_and_stays_until_goodbye(group: Group, *, at_its_end: bool):
    group = replace(group)
    assert group.on(r.LeaveNow(at_its_end)).sent == [m.Leave(at_its_end)]
    assert group.phase is r.Phase.LEAVING
    assert group.directive == r.Wait(f"the coordinator {ME.coordinator} to let this group go")
    assert group.hear(m.Goodbye()).phase is r.Phase.LEFT
    assert group.directive == r.Over(group.replica.step)


def test_a_group_that_leaves_says_for_whom_it_waits():
    """A coordinator that cannot write does not answer: then no joiner is to blame."""
    group = working().hear(m.Pin(m.HealId(2), m.Step(0))).on(r.LeaveNow(finished=True))
    assert group.directive == r.Wait("joiners that still fetch this group's state")
    group = group.hear(m.Release(m.HealId(2)))
    assert group.directive == r.Wait(f"the coordinator {ME.coordinator} to let this group go")


FOR_WHOM = r.Received(m.Waiting("b to fetch this group's state", held=True))


@pytest.mark.parametrize(
    ("group", "events"),
    [
        (working(), (r.LeaveNow(finished=True), FOR_WHOM)),
        (finished(), (r.LeaveNow(finished=True), FOR_WHOM)),
        (finished(), (FOR_WHOM, r.LeaveNow(finished=True))),
    ],
)
def test_a_group_that_leaves_waits_for_the_joiners_that_it_is_told(group: Group, events: tuple[r.Event, ...]):
    """Also a group that hears it after the job has finished, and before its loop comes to its end."""
    group = replace(group)
    for event in events:
        group.on(event)
    assert group.phase is r.Phase.LEAVING
    assert group.directive == r.Wait("b to fetch this group's state")
    assert group.hear(m.Goodbye()).phase is r.Phase.LEFT


def test_what_a_group_waited_for_before_it_leaves_is_not_why_it_stays():
    group = joining().hear(m.Waiting("1 of 2 groups have joined")).on(r.LeaveNow(finished=False))
    assert group.directive == r.Wait(f"the coordinator {ME.coordinator} to let this group go")


@pytest.mark.parametrize("group", [Group(), connected()])
def test_without_a_session_it_leaves_at_once(group: Group):
    assert group.on(r.LeaveNow(finished=False)).phase is r.Phase.LEFT
    assert group.sent == []


def test_a_leaver_goes_when_its_stream_is_lost():
    group = working().on(r.LeaveNow(finished=True)).on(r.Disconnected(""))
    assert group.phase is r.Phase.LEFT
    assert not any(isinstance(effect, r.Dial) for effect in group.effects)


def test_a_leaver_does_not_wait_for_ever():
    group = working().on(r.LeaveNow(finished=True))
    group.now_s = 60.1
    group.on(r.Tick())
    assert group.phase is r.Phase.LEFT
    assert group.notes == ["leaves after 60 s although a joiner may still need it"]


@pytest.mark.parametrize(
    "message",
    [
        commit(1, 0),
        quorum(2, 0),
        heal(6, 3),
        m.FrontierMoved(m.Step(4)),
        m.Waiting("x"),
        m.Finished(m.Step(4)),
        m.Refused("x"),
    ],
)
@pytest.mark.parametrize("start", [voted, following])
def test_a_leaver_is_not_called_back_by_what_crossed_its_leave(message: m.CoordinatorMessage, start):
    group = start().on(r.LeaveNow(finished=False)).hear(message)
    assert group.phase is r.Phase.LEAVING
    assert group.sent == []


@pytest.mark.parametrize("event", [r.Healed(m.HealId(5), m.Step(3)), r.HealBroke(m.HealId(5), "")])
def test_a_leaver_is_not_called_back_by_its_own_heal(event: r.Event):
    group = healing().on(r.LeaveNow(finished=False)).on(event)
    assert group.phase is r.Phase.LEAVING
    assert group.sent == []


def test_the_last_step_is_still_told_after_goodbye_and_after_the_stream():
    assert joining().hear(m.Finished(m.Step(9)), m.Goodbye()).directive == r.Over(m.Step(9))
    assert joining().hear(m.Finished(m.Step(9))).on(r.Disconnected("")).directive == r.Over(m.Step(9))


@pytest.mark.parametrize("message", [m.Goodbye(), m.Evicted("x", may_return=True), quorum(2, 0), heal(6, 3)])
def test_a_failure_stays_what_it_is(message: m.CoordinatorMessage):
    group = failed()
    before = group.directive
    assert group.hear(message).on(r.Disconnected("")).on(r.Tick()).directive == before


def test_words_for_whom_it_waits():
    assert joining().directive == r.Wait(
        "the coordinator coordinator:29510 to name donors to heal from, or a quorum"
    )
    alone = joining().hear(quorum(1, 0, "a")).on(r.Exchanged(m.QuorumId(1), m.Step(0)))
    assert alone.directive == r.Wait("the decision on step 0: the coordinator's store")
