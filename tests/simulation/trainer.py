"""A model of a group's training thread: it obeys the real core's `directive`, and reports."""

import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxft_protocol.messages import GroupName, Heal, NewQuorum, QuorumId, Step, Stripe
from jaxft_protocol.replica import machine as core
from jaxft_protocol.replica import state as r

from .clock import Clock
from .ranks import Crew
from .saving import COMMON_ROOT, Saving
from .stripes import Keeper, feeders
from .truth import Violation

if TYPE_CHECKING:
    from .exchange import Attempt
    from .world import World

FETCH_TIMEOUT_S = 1.0
VERDICT_S = 30.0
APPLY_S = 0.008
DIGEST_S = 0.004
_COMPUTED_NOTHING = (QuorumId(0), Step(0))


class Trainer:
    """What `Process` (its session) builds on."""

    def __init__(self, world: "World", name: str, incarnation: int, replica: r.Replica, clock: Clock) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.replica = replica
        self.clock = clock
        self.spare = name in world.setting.spares
        self.dead = self.over = self.leaving = False
        # Its state: a first state, and for each step the quorum whose sum was applied.
        self.root = incarnation if world.setting.differ or world.is_odd(name) else COMMON_ROOT
        self.history: list[QuorumId] = []
        self.skipped: frozenset[int] = (
            frozenset()
        )  # steps that have changed nothing, for their means are not finite
        self.flipped = 0  # names a flipped bit in the state
        self.flipped_at = 0  # since which state
        self.flips_next = False
        self.computed: defaultdict[int, set[int]] = defaultdict(set)
        self.first: dict[int, int] = {}  # of each step, the shard that it computed first
        self.sums: set[tuple[QuorumId, Step]] = set()
        self.digests: set[tuple[Step, int]] = set()  # that it has sent, each with its state
        self.pins: dict[int, Step] = {}
        self.stripes: dict[int, Stripe] = {}  # of all heals that it was ever asked to serve
        self.log: dict[int, QuorumId] = {}
        self._logged_edit = 0  # of the step that it replays
        self.edits: dict[int, int] = {}  # of each step before which the job has edited its state
        regular = not any(other.name == name for other in world.incarnations.values())
        self.edits_otherwise = name == world.setting.edits_otherwise and regular  # until it is started again
        self._attempted: NewQuorum | None = None
        self._voted: NewQuorum | None = None  # the quorum of the last sum
        self.saving = Saving(self, world)
        self.crew = Crew(self, world.setting.size_of(name))
        # Its work.
        self.token = 0  # counts the works begun; whatever belongs to something older is void
        self.attempt: Attempt | None = None
        self.stuck_at: int | None = None  # the job's step when it was stuck forever
        self.sticks_next = False  # with its next sum, before its vote
        self.raises_next = self.ends_next = False  # in its next shard; and its user starts it again
        self._stands_until_s = 0.0
        self._key: object = None
        self._waits = False
        self._applying = False
        self._looks = False
        self._fetches: Heal | None = None  # the heal for which something is being fetched or replayed
        self._computed = _COMPUTED_NOTHING
        self.exit_status = 0
        self.own_step = 0  # behind the last step that it has committed itself
        self.has_healed = False
        self.progress = 0  # grows whenever it gets on with its step
        self.away = True  # between two calls of the step
        self.away_until_s = 0.0
        self.pauses_s = 0.0  # after the next step

    @property
    def is_flipped(self) -> bool:
        return not self.dead and (bool(self.flipped) or self.flips_next)

    @property
    def digest(self) -> int:
        """Of the state that it holds. The same shards summed in the same order are the same bits."""
        line = len(self.history) if self.world.truth.same_bits else self.history
        edits = sorted(self.edits.items())
        held = (self.root, line, sorted(self.skipped), self.flipped, *((edits,) if edits else ()))
        return zlib.crc32(repr(held).encode())

    @property
    def stands(self) -> bool:
        """Whether its training thread stands still."""
        return self.world.now_s < self._stands_until_s

    @property
    def joins(self) -> bool:
        """Whether its program has come to the job."""
        return self.replica.prepared is not None

    def has_done(self, quorum_id: QuorumId, step: Step) -> bool:
        return self._computed == (quorum_id, step)

    @property
    def is_computing(self) -> bool:
        """Whether it computes a shard, and has not begun to exchange."""
        directive = core.directive(self.replica)
        return isinstance(directive, r.Attempt) and not self.has_done(
            directive.quorum.quorum_id, directive.step
        )

    def still_holds(self, step: Step) -> bool:
        """Whether no step has overwritten that state, or is about to."""
        return len(self.history) == step and not self._applying

    def told_digest(self) -> int:
        """Return the digest of the state that it holds, and remember it."""
        self.digests.add((Step(len(self.history)), self.digest))
        return self.digest

    @property
    def heals_only(self) -> bool:
        """Whether it still holds the fresh state that it has because others have read the checkpoint."""
        return self.replica.prepared is not None and self.replica.prepared.heals_only

    def flipped_in(self, step: int) -> int:
        """The flipped bit that its state `step` has, or 0."""
        return self.flipped if step >= self.flipped_at else 0

    # ---- the session ----

    def post(self, event: r.Event) -> None:
        """Let `event` happen to the core."""
        raise NotImplementedError

    def without_quorum_s(self) -> float:
        """For how long its coordinator has had no quorum, as far as it is a member."""
        raise NotImplementedError

    def ends(self) -> None:
        """There is nothing more to do."""
        raise NotImplementedError

    def fails(self, failure: r.Failure) -> None:
        """The user sees an exception."""
        raise NotImplementedError

    # ---- standing still ----

    def hang(self, seconds: float) -> None:
        """The training thread stands still; the session's continues."""
        self._tell_where()
        self._stands_until_s = max(self._stands_until_s, self.world.now_s + seconds)

    def stick(self) -> None:
        self._tell_where()
        self.sticks_next = False
        self.stuck_at = len(self.world.truth.line)
        self._stands_until_s = float("inf")

    def _tell_where(self) -> None:
        if self.world.supervisor is not None:
            self.world.supervisor.stands(self)

    def pause(self, seconds: float) -> None:
        """Evaluate between two calls of the step, once the next one has ended."""
        self.pauses_s = max(self.pauses_s, seconds)

    def _go_away(self) -> None:
        self.away, self._waits = True, False
        self.away_until_s = self.world.now_s + self.pauses_s
        self.pauses_s = 0.0
        if self.world.tracing:
            self.world.note(f"{self.name}#{self.incarnation} is away")
        self._come_back_in_time()

    def _come_back_in_time(self) -> None:
        if self.world.now_s < self.away_until_s:
            self.world.after(
                min(0.2, self.away_until_s - self.world.now_s), self._run, self._come_back_in_time
            )
            return
        self.away, self._waits = False, True
        self._look_soon()

    # ---- orders ----

    def leave(self, *, finished: bool) -> None:
        if self.leaving or self.replica.failure is not None:  # which the user is about to see
            return
        self._begin(None)
        self.leaving = True
        self.post(r.LeaveNow(finished))
        if self.replica.phase is r.Phase.LEFT:  # it was drained meanwhile, and hears nothing more
            self._look_soon()

    def run(self, token: int, act: Callable[..., None], *args: Any) -> None:
        """`act` of the training thread, void once that has been given something else to do."""
        if self.token != token or self.dead:
            return
        if self.world.now_s < self._stands_until_s:
            self._later(self.run, token, act, *args)
        else:
            act(*args)

    def _run(self, act: Callable[..., None], *args: Any) -> None:
        """`act` of the training thread, which nothing but death can stop."""
        if self.dead:
            return
        if self.world.now_s < self._stands_until_s:
            self._later(self._run, act, *args)
        else:
            act(*args)

    def act(self, act: Callable[[], Any]) -> None:
        """As `_run`, for the crew."""
        self._run(act)

    def _later(self, act: Callable[..., None], *args: Any) -> None:
        if self.stuck_at is None:
            # A thread that stands still may be let go earlier than was meant.
            self.world.at(min(self._stands_until_s, self.world.now_s + 0.2), act, *args)

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            self.world.after(self.world.random() * 0.004, self._run, self._look)

    def _look(self) -> None:  # noqa: C901 (a case for each directive)
        """Read the order, and carry it out if it is a new one."""
        self._looks = False
        if self._applying or self.crew.inside or self.world.now_s < self.away_until_s:
            return
        directive = core.directive(self.replica)
        if self.crew.operates:
            if isinstance(directive, r.TakeDigest) or _key(directive) != self._key:
                self.crew.redirect()
            return
        if self.replica.phase is r.Phase.LEFT and (self.leaving or self.replica.failure is None):
            must_end = isinstance(directive, r.LeaveJob) or self._is_end(directive)
            if not self.leaving and not must_end:
                raise Violation("all end well", f"{self.name} ends without an order")
            self.ends()
            return
        if isinstance(directive, r.TakeDigest):
            self._take_digest(directive.step)
            return
        key = _key(directive)
        if key == self._key or self.leaving or self._has_done(directive):
            return
        self._begin(key)
        match directive:
            case r.Attempt() | r.Over() if self._is_done(directive):
                self.saving.ends_loop()
            case r.Attempt(quorum, step):
                self._waits = False
                if step < quorum.step:
                    raise Violation(
                        "a quorum begins at the frontier", f"{self.name} at {step}, not {quorum.step}"
                    )
                self.crew.direct(directive)
                self._compute(quorum, step)
            case r.Apply(quorum_id, step):
                self._check_may_apply(quorum_id, step)
                self.crew.direct(directive)
                self._advance(quorum_id, r.Applied(Step(step + 1)))
            case r.HealFrom(heal):
                self._waits = False
                self._fetches = heal
                if self.crew.meets(heal.donors):
                    self.crew.direct(directive)
                    self.crew.heal(heal)
                else:
                    self._fetch(heal, self.world.now_s + FETCH_TIMEOUT_S)
            case r.Replay(heal, step):
                self._waits = False
                self._fetches = heal
                if self.crew.meets(heal.donors):
                    self.crew.direct(directive)
                    self.crew.replay(heal, step)
                else:
                    self._replay(heal, step, self.world.now_s + FETCH_TIMEOUT_S)
            case r.ReadCheckpoint():
                self.world.sometimes.note("checkpoint read after all")
                self.saving.bring(read=True)
            case r.LeaveJob():
                self.world.sometimes.note("drained")
                self.leave(finished=False)
            case r.Fail(failure):
                self.fails(failure)
            case _:
                pass

    def _take_digest(self, step: Step) -> None:
        self._begin(None)
        self.crew.direct(r.TakeDigest(step))
        self._waits = False
        self.world.after(self.world.random() * DIGEST_S, self.run, self.token, self._digest_taken, step)

    def _digest_taken(self, step: Step) -> None:
        self._waits = True
        self._tell_digest(step)
        self._look_soon()

    def _tell_digest(self, step: Step) -> None:
        if step == len(self.history):
            self.post(r.Digested(step, self.told_digest()))

    def _has_done(self, directive: r.Directive) -> bool:
        """Whether the core does not know yet that this is done: then it asks for it again."""
        return isinstance(directive, r.Apply | r.Replay) and directive.step < len(self.history)

    def _begin(self, key: object) -> None:
        self.crew.break_off()
        self.token += 1
        self._key = key
        self._waits = True
        self.world.hub.leave(self)
        if self._fetches is not None:
            self._fetched(r.HealBroke(self._fetches.heal_id, "overtaken"))

    def _is_done(self, directive: r.Attempt | r.Over) -> bool:
        if isinstance(directive, r.Over):
            if not self._is_end(directive):
                raise Violation("all end well", f"{self.name} hears the end at {directive.step}")
            return True
        end = self.world.end_of(self.name)
        return end is not None and len(self.history) >= end

    def _is_end(self, directive: r.Directive) -> bool:
        ends = {self.world.end_of(name) for name in self.world.setting.names}
        return isinstance(directive, r.Over) and directive.step in ends

    def _prepare(self) -> None:
        self._waits = True
        self.away = False
        self.saving.prepare()

    def _compute(self, quorum: NewQuorum, step: Step) -> None:
        self.saving.note_beginning(quorum)
        self._attempted = quorum
        computed = self.computed[step]
        mine = next(member.shards for member in quorum.members if member.group == self.name)
        for shard in mine:
            if shard not in computed:
                delay_s = self.world.random() * self.world.shard_s(self.name)
                if self.crew.size > 1:
                    self.crew.compute(quorum, step, shard, delay_s)
                else:
                    self.world.after(delay_s, self.run, self.token, self._compute_one, quorum, step, shard)
                return
        self._computed = (quorum.quorum_id, step)
        if self.crew.meets(quorum.members):
            self.crew.exchange(quorum, step)
        else:
            self.world.hub.arrive(self, quorum, step)

    def _compute_one(self, quorum: NewQuorum, step: Step, shard: int) -> None:
        if self.raises_next or self.world.setting.is_unreadable(step, shard):
            self._raise(step, shard)
            return
        if shard in self.computed[step]:
            raise Violation("each shard counted once", f"{self.name} computes shard {shard} of {step} twice")
        self.computed[step].add(shard)
        self.first.setdefault(step, shard)
        self.progress += 1
        self._compute(quorum, step)

    # ---- news of the crew ----

    def has_computed(self, step: Step, shard: int) -> None:
        self.computed[step].add(shard)
        self.first.setdefault(step, shard)
        self.progress += 1

    def looks_elsewhere(self) -> bool:
        """Read the order; return whether it is a new one."""
        before = self.token
        self._look()
        return self.dead or self.token != before

    def computes(self, quorum: NewQuorum, step: Step) -> None:
        self._compute(quorum, step)

    def look_again(self) -> None:
        """An operation is over."""
        if self.stuck_at is None and not self._applying:
            self._waits = True
        self._look_soon()

    def exchange_failed(
        self, quorum_id: QuorumId, step: Step, accused: tuple[GroupName, ...], why: str
    ) -> None:
        self._waits = True
        self.post(r.ExchangeBroke(quorum_id, step, accused, why))

    def takes(self, heal: Heal, root: int, history: list[QuorumId], flipped: tuple[int, int]) -> None:
        """All ranks have fetched the state of a heal."""
        self.root, self.history = root, list(history)
        self.flipped, self.flipped_at = flipped
        bad = self.world.setting.bad_shard
        skips = self.world.setting.nonfinite == "skip"
        done = [step for step, quorum_id in enumerate(history) if quorum_id > 0]
        self.skipped = frozenset(step for step in done if skips and bad(step) is not None)
        self.world.truth.check_state(self, heal.step)
        self._fetched(r.Healed(heal.heal_id, heal.step))

    def could_not_heal(self, heal: Heal, why: str) -> None:
        self._fetched(r.HealBroke(heal.heal_id, why))

    def advances(self, quorum_id: QuorumId, then: r.Event) -> None:
        self._advance(quorum_id, then)

    def donors(self, heal: Heal) -> list["Trainer"]:
        return self._donors(heal)

    def kill(self) -> None:
        """The process ends."""
        raise NotImplementedError

    # ---- what one process does ----

    def _raise(self, step: Step, shard: int) -> None:
        """The user's code raises. The work on the step is dropped, and the exception waits for a verdict."""
        self.raises_next = False
        self.computed[step].clear()
        self.world.truth.raised.add((step, self.name))
        self._begin(None)
        self.away, self._waits = True, False
        self.away_until_s = self.world.now_s + VERDICT_S
        self.post(r.Raised(step, "OSError", shard))
        self._await_verdict(step)

    def _await_verdict(self, step: Step) -> None:
        replica = self.replica
        moved = (replica.frontier_step or 0) > step
        alone = replica.phase is r.Phase.PRESENT and bool(replica.waiting)
        if replica.failure is None and not moved and not alone and self.world.now_s < self.away_until_s:
            self.world.after(0.05, self._run, self._await_verdict, step)
            return
        if moved:
            self.world.sometimes.note("its own failure")
        self.away_until_s = self.world.now_s
        if self.ends_next and replica.failure is None:
            self.ends_next = False
            if self.leaving:  # ordered to leave meanwhile
                self._look_soon()
            self.leave(finished=False)
            self.exit_status = 1
            self.world.after(0.2, self.world.launch, self.name)
        else:
            self._come_back_in_time()

    def contributes(self, step: Step, shards: tuple[int, ...]) -> list[int]:
        """The batches that it has computed for these shards."""
        return [shard for shard in shards if shard in self.computed[step]]

    def exchanged(self, quorum_id: QuorumId, step: Step) -> None:
        self.sums.add((quorum_id, step))
        self._voted = self._attempted
        if self.sticks_next:
            self.stick()
            return
        self._waits = True
        stop = self.world.setting.nonfinite == "raise" and self._finds_nonfinite(step, replayed=False)
        nonfinite = "w is nan" if stop else ""
        self.post(r.Exchanged(quorum_id, step, self.fingerprint(step), nonfinite, self.edit_before(step)))

    def edit_before(self, step: int) -> int:
        """The digest of the edit that this group makes of the state before a step; 0: none."""
        if step not in self.world.setting.edits:
            return 0
        return zlib.crc32(repr((step, self.flipped_in(step), self.edits_otherwise)).encode()) or 1

    def fingerprint(self, _step: Step) -> int | None:
        """Its vote's fingerprint of the state that the step was computed from."""
        return self.told_digest() if self.world.setting.compares else None

    def _finds_nonfinite(self, step: int, *, replayed: bool) -> bool:  # noqa: ARG002 (for planted bugs)
        """Whether the means of a step are not finite: all who hold them see the same."""
        return self.world.setting.bad_shard(step) is not None

    def exchange_broke(self, quorum_id: QuorumId, step: Step, accused: str) -> None:
        self._waits = True
        self.post(r.ExchangeBroke(quorum_id, step, (GroupName(accused),), f"{accused} went away"))

    def _check_may_apply(self, quorum_id: QuorumId, step: Step) -> None:
        if step != len(self.history):
            raise Violation(
                "nothing is applied twice", f"{self.name} at {len(self.history)} is to apply {step}"
            )
        if (quorum_id, step) not in self.sums:
            raise Violation("no group commits outside its quorum", f"{self.name}: step {step} of {quorum_id}")

    def _advance(self, quorum_id: QuorumId, then: r.Event) -> None:
        """Apply the means of the next step; nothing but death interrupts that."""
        self._applying, self._waits = True, False
        self.world.after(self.world.random() * APPLY_S, self._run, self._advanced, quorum_id, then)

    def _advanced(self, quorum_id: QuorumId, then: r.Event) -> None:
        self._applying, self._waits = False, True
        if len(self.history) in self.replica.digests_due.values():
            self._tell_digest(Step(len(self.history)))  # the last moment at which it can be taken
            if self.dead:
                return
        self.world.truth.check_applied(self, quorum_id)
        if self.pins:
            self.log[len(self.history)] = quorum_id
        self._apply_edit(len(self.history), then)
        self._skip_or_apply(len(self.history), replayed=isinstance(then, r.Replayed))
        self.history.append(quorum_id)
        self._fetches = None
        voted = self._voted if type(then) is r.Applied else None
        self.saving.committed(voted if voted is not None and voted.quorum_id == quorum_id else None)
        if self.flips_next:
            self.world.flips += 1
            self.flipped, self.flips_next = self.world.flips, False
            self.flipped_at = len(self.history)
        if type(then) is r.Applied:
            self.own_step = len(self.history)
        self.post(then)
        if self.pauses_s and type(then) is r.Applied and not self.dead:
            self._go_away()
        else:
            self._look_soon()

    def _apply_edit(self, step: int, then: r.Event) -> None:
        """A group that replays a step takes the edit of its donor, and else its own."""
        edit = self.edit_before(step) if type(then) is r.Applied else self.replays_edit(step)
        if edit:
            self.edits[step] = edit

    def replays_edit(self, _step: int) -> int:
        return self._logged_edit

    def _skip_or_apply(self, step: int, *, replayed: bool) -> None:
        if self.world.setting.nonfinite == "skip" and self._finds_nonfinite(step, replayed=replayed):
            self.skipped |= {step}
            self.world.sometimes.note("skipped step replayed" if replayed else "skipped step")

    def _fetch(self, heal: Heal, until_s: float) -> None:
        donors = self._donors(heal)
        keepers = _keepers(donors, heal)
        if feeders(keepers, 0.0):
            delay_s = self.world.random() * self.world.setting.fetch_s
            self.world.after(delay_s, self.run, self.token, self._fetch_ends, heal, until_s)
        elif donors and len(keepers) == len(donors):
            self.world.sometimes.note("stripe lost")
            self._fetched(r.HealBroke(heal.heal_id, "no donor keeps some of the state"))
        else:
            self._try_again(self._fetch, donors, heal, until_s)

    def _fetch_ends(self, heal: Heal, until_s: float) -> None:
        donors = self._donors(heal)
        keepers = _keepers(donors, heal)
        fed_by = feeders(keepers, self.world.random() if keepers else 0.0)
        if not fed_by:
            self._fetch(heal, until_s)
            return
        if len(fed_by) > 1:
            self.world.sometimes.note("healed in stripes")
        for donor in fed_by:
            self.world.truth.check_fed(self, heal, donor)
        donor = max(fed_by, key=lambda donor: donor.flipped_in(heal.step))
        self.root, self.history = donor.root, donor.history[: heal.step]
        self.flipped, self.flipped_at = donor.flipped_in(heal.step), donor.flipped_at
        self.skipped = frozenset(step for step in donor.skipped if step < heal.step)
        self.edits = {step: edit for step, edit in donor.edits.items() if step < heal.step}
        self.saving.committed(None)
        self.has_healed = True
        self.world.truth.check_state(self, heal.step)
        self._fetched(r.Healed(heal.heal_id, heal.step))

    def _replay(self, heal: Heal, step: Step, until_s: float) -> None:
        donors = self._donors(heal)
        for donor in donors:
            if heal.heal_id in donor.pins and step in donor.log:
                self._logged_edit = donor.edits.get(step, 0)
                self._advance(donor.log[step], r.Replayed(heal.heal_id, Step(step + 1)))
                return
        self._try_again(self._replay, donors, heal, step, until_s)

    def _try_again(self, act: Callable[..., None], donors: list["Trainer"], heal: Heal, *args: Any) -> None:
        """Donors may need a moment; lost donors do not come back."""
        if not donors or self.world.now_s > args[-1]:
            self._fetched(r.HealBroke(heal.heal_id, "no donor answers"))
        else:
            self.world.after(0.02, self.run, self.token, act, heal, *args)

    def _fetched(self, event: r.Healed | r.HealBroke) -> None:
        self._fetches = None
        self._waits = True
        self.post(event)

    def _donors(self, heal: Heal) -> list["Trainer"]:
        """The donors that can be reached."""
        cables = self.world.cables
        found = [self.world.incarnations[donor.incarnation] for donor in heal.donors]
        return [donor for donor in found if not donor.dead and not cables.link_is_cut(donor.name, self.name)]


def _keepers(donors: list[Trainer], heal: Heal) -> list[Keeper[Trainer]]:
    return [
        Keeper(donor, donor.stripes[heal.heal_id], donor.still_holds(heal.step))
        for donor in donors
        if donor.pins.get(heal.heal_id) == heal.step and len(donor.history) >= heal.step
    ]


def _key(directive: r.Directive) -> object:
    match directive:
        case r.Attempt(quorum, step):
            return ("attempt", quorum.quorum_id, step)
        case r.HealFrom(heal):
            return ("heal", heal.heal_id)
        case r.Replay(heal, step):
            return ("replay", heal.heal_id, step)
        case r.Apply(quorum_id, step):
            return ("apply", quorum_id, step)
        case r.Over() | r.LeaveJob() | r.Fail():
            return ("end",)
        case r.ReadCheckpoint():
            return ("read",)
        case r.Wait() | r.TakeDigest():
            return ("wait",)
