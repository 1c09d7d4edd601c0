"""Groups of several processes: the real cores of rank 0 and of the others, on links that delay.

`Crew` stands between a group's training thread, in rank 0, and the other ranks (`mate.py`), each with its own
training thread and its own part of the state (`lane.py`).

Not modelled: exceptions of the user's code, which end a group of several processes in any case.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxft_protocol.messages import WHOLE, GroupName, Heal, Member, NewQuorum, QuorumId, Step, Stripe
from jaxft_protocol.ranks import lanes, leader
from jaxft_protocol.ranks.lanes import Span
from jaxft_protocol.ranks.messages import Decided, Directed, Order, StopWork, Verdict
from jaxft_protocol.replica import state as r

from .lane import LANES, OWN_LANES, Lane, Part, held, reached
from .mate import Mate
from .stripes import Keeper, feeders
from .truth import Violation

if TYPE_CHECKING:
    from .trainer import Trainer
    from .world import World

STUCK_S = 20.0
LINK_S = 0.002
# Until the kernel, or the end of a link, shows a rank that another is gone.
LOSS_S = 0.03
_ONE_PROGRAM = "the ranks of a group run one program"


class Crew:
    """The other ranks, for the training thread and the session of rank 0."""

    def __init__(self, process: "Trainer", size: int) -> None:
        self.process = process
        self.world: World = process.world
        self.size = size
        self.inside = False  # rank 0's thread is in a collective, which it cannot leave
        self.sums: set[tuple[QuorumId, Step]] = set()  # of rank 0
        self.mates = [Mate(self, rank) for rank in range(1, size)]
        self.core = leader.Leader.of(size, stuck_s=STUCK_S)
        self.part: Part | None = None  # rank 0's
        self._ends: Callable[[Verdict], None] | None = None  # of the current operation
        self._attempt: tuple[NewQuorum, Step] | None = None  # in which the others await a decision
        self._met: dict[int, tuple[object, Callable[[], None]]] = {}
        self._down_s = [0.0] * size  # when the last message arrives
        self._up_s = [0.0] * size
        self._fetched: tuple[int, list[QuorumId]] = (0, [])  # the root, and the steps applied to it
        self._flipped = (0, 0)  # the flipped bit that the state has that was fetched, and since when
        self._found = QuorumId(0)

    # ---- for the hub and the truth ----

    @property
    def operates(self) -> bool:
        return self._ends is not None

    def is_dead(self, rank: int) -> bool:
        return self.process.dead or (rank > 0 and self.mates[rank - 1].dead)

    def history_of(self, rank: int) -> list[QuorumId]:
        return self.mates[rank - 1].history if rank else self.process.history

    def progress_of(self, rank: int) -> int:
        return self.mates[rank - 1].progress if rank else self.process.progress

    def moved(self, rank: int) -> None:
        if rank:
            self.mates[rank - 1].progress += 1
        else:
            self.process.progress += 1

    def holds(self, quorum_id: QuorumId, step: Step) -> bool:
        """Whether every rank has its part of a sum."""
        return all((quorum_id, step) in mate.sums for mate in self.mates)

    # ---- life and death ----

    def start(self) -> None:
        for mate in self.mates:
            mate.start()

    def bring(self) -> None:
        for mate in self.mates:
            mate.root, mate.history = self.process.root, list(self.process.history)

    def die(self, *, later: bool = False) -> None:
        """All ranks die; with `later`, the others only when they notice that rank 0 is gone."""
        self._abandon()
        for mate in self.mates:
            if later:
                self.world.after(self.world.random() * LOSS_S, mate.die)
            else:
                mate.die()

    def lose(self, rank: int) -> None:
        """A rank other than 0 is gone, and the others notice soon."""
        self.mates[rank - 1].die()
        self.world.after(self.world.random() * LOSS_S, self.process.kill)

    def hang(self, rank: int, seconds: float) -> None:
        mate = self.mates[rank - 1]
        mate.stands_until_s = max(mate.stands_until_s, self.world.now_s + seconds)

    def recover(self) -> None:
        for mate in self.mates:
            mate.stands_until_s = min(mate.stands_until_s, self.world.now_s)

    def thread(self, rank: int, act: Callable[[], Any]) -> None:
        """`act` of a rank's training thread, once that does not stand still."""
        if not rank:
            self.process.act(act)
            return
        mate = self.mates[rank - 1]
        if mate.dead:
            return
        if self.world.now_s < mate.stands_until_s:
            at_s = min(mate.stands_until_s, self.world.now_s + 0.2)
            self.world.at(at_s, self.thread, rank, act)
        else:
            act()

    # ---- the session ----

    def pin(self, heal_id: int, number: Step) -> None:
        for mate in self.mates:
            self._to(mate, mate.pin, heal_id, number)

    def release(self, heal_id: int) -> None:
        for mate in self.mates:
            self._to(mate, mate.release, heal_id)

    # ---- orders ----

    def meets(self, members: Sequence[Member]) -> bool:
        """Whether this group, or a group that it meets, has several processes."""
        others = (self.world.incarnations[member.incarnation].crew for member in members)
        return self.size > 1 or any(crew.size > 1 for crew in others)

    def direct(self, directive: r.Directive | None) -> None:
        self._order(Directed(directive))
        if isinstance(directive, r.Attempt):
            self._attempt = (directive.quorum, directive.step)

    def break_off(self) -> None:
        """Rank 0 is directed to do something else before the exchange."""
        if self.size == 1 or self._attempt is None:
            self._abandon()  # of one process: its exchange in several spans
            return
        (quorum, step), self._attempt = self._attempt, None
        missing = set(self.shards_in(quorum)) - self.process.computed[step]
        self._order(Decided("go on" if missing else "exchange", value=False))

    def compute(self, quorum: NewQuorum, step: Step, shard: int, delay_s: float) -> None:
        self._order(Decided("go on", value=True))
        self.inside = True
        self.world.after(
            delay_s,
            self.thread,
            0,
            lambda: self.meet(0, ("compute", step, shard), lambda: self._computed(quorum, step, shard)),
        )

    def _computed(self, quorum: NewQuorum, step: Step, shard: int) -> None:
        self.inside = False
        self.process.has_computed(step, shard)
        if not self.process.looks_elsewhere():
            self.process.computes(quorum, step)

    def meet(self, rank: int, what: object, then: Callable[[], None]) -> None:
        for other, (theirs, _) in self._met.items():
            if theirs != what:
                raise Violation(
                    _ONE_PROGRAM, f"{self.process.name}: rank {rank} at {what}, {other} at {theirs}"
                )
        self._met[rank] = what, then
        if len(self._met) == self.size:
            met, self._met = self._met, {}
            for number in sorted(met):
                self.thread(number, met[number][1])

    # ---- operations ----

    def exchange(self, quorum: NewQuorum, step: Step) -> None:
        self._attempt = None
        if self.size > 1:
            self._order(Decided("exchange", value=True))
        process = self.process

        def ends(verdict: Verdict) -> None:
            if verdict.ok:
                process.exchanged(quorum.quorum_id, step)
            elif not verdict.stopped:
                accused = tuple(map(GroupName, verdict.accused))
                process.exchange_failed(quorum.quorum_id, step, accused, verdict.failure)

        self._operate("exchange", lambda part: self.exchange_lanes(0, quorum, step, part), ends)

    def heal(self, heal: Heal) -> None:
        self._flipped = (0, 0)

        def ends(verdict: Verdict) -> None:
            if verdict.ok:
                self.process.takes(heal, *self._fetched, self._flipped)
            else:
                self.process.could_not_heal(heal, verdict.failure)

        self._operate("heal", lambda part: self.seek_state(0, heal, part), ends)

    def replay(self, heal: Heal, step: Step) -> None:
        def ends(verdict: Verdict) -> None:
            if verdict.ok:
                self.process.advances(self._found, r.Replayed(heal.heal_id, Step(step + 1)))
            else:
                self.process.could_not_heal(heal, verdict.failure)

        self._operate("replay", lambda part: self.seek_means(0, heal, step, part), ends)

    def redirect(self) -> None:
        """The group is directed elsewhere while an operation is under way."""
        self._lead(leader.Redirected())
        if self.part is not None:
            self.part.end(Verdict("aborted"))
        else:
            self._lead(leader.Looks())

    def _operate(self, what: str, start: Callable[[Part], None], ends: Callable[[Verdict], None]) -> None:
        self._ends = ends
        self.part = part = Part(self._part_ended)
        self._lead(leader.Begins(what))
        if not part.over:
            start(part)

    def _part_ended(self, verdict: Verdict) -> None:
        self.part = None
        self.world.after(0.0, self.thread, 0, lambda: self._lead(leader.Done(verdict)))

    def _lead(self, event: leader.Event) -> None:
        if self.process.dead:
            return
        if self.core.interrupted or self.core.redirected:
            # The flag that stops rank 0's part is set, without the reason.
            self.core, _ = leader.step(self.core, leader.Redirected(), self.process.clock.now_s)
        self.core, effects = leader.step(self.core, event, self.process.clock.now_s)
        for effect in effects:
            match effect:
                case leader.Interrupt(reason) if self.part is not None:
                    self.world.sometimes.note("another rank failed")
                    self.part.end(Verdict(reason))
                case leader.Tell(message):
                    self._order(message)
                case leader.Conclude(verdict):
                    self._concluded(verdict)
                case leader.GiveUp() | leader.Lose():
                    self.process.kill()
                case leader.GetsOn():
                    self.process.progress += 1
                case leader.Interrupt() | leader.Mention():
                    pass

    def _concluded(self, verdict: Verdict) -> None:
        self._lead(leader.Leaves())
        ends, self._ends = self._ends, None
        if ends is not None:
            ends(verdict)
        self.process.look_again()

    def _abandon(self) -> None:
        part, self.part, self._ends = self.part, None, None
        if part is not None:
            part.over = True
            for lane in part.lanes:
                lane.leave()
            if self.size == 1:
                self.core, _ = leader.step(self.core, leader.Leaves(), 0.0)

    # ---- parts of operations ----

    def exchange_lanes(self, rank: int, quorum: NewQuorum, step: Step, part: Part) -> None:
        sizes = {self.world.incarnations[member.incarnation].crew.size for member in quorum.members}
        part.lanes = [Lane(self, rank, span, part) for span in self._spans(rank, sizes)]
        sums = self.mates[rank - 1].sums if rank else self.sums
        part.holds_all = lambda: sums.add((quorum.quorum_id, step))
        for lane in part.lanes:
            if not part.over:
                self.world.hub.arrive(lane, quorum, step, lane.span)

    def seek_state(self, rank: int, heal: Heal, part: Part) -> None:
        until_s = self.world.now_s + 1.0

        def seek() -> None:
            if part.over or self.is_dead(rank):
                return
            donors = self._donors_of(rank, heal)
            if donors is None:
                self._again(seek, heal, part, until_s)
            else:
                delay_s = self.world.random() * self.world.setting.fetch_s
                self.world.after(delay_s, self.thread, rank, fetched)

        def fetched() -> None:
            donors = None if part.over or self.is_dead(rank) else self._donors_of(rank, heal)
            if donors is None:
                if not part.over:
                    self._again(seek, heal, part, until_s)
                return
            for donor, donor_rank in donors:
                found = donor.crew.history_of(donor_rank)[: heal.step]
                truth = self.world.truth
                truth.check_fetched(self.process.name, donor, found, heal.step)
                truth.check_fed(self.process, heal, donor)
                self._flipped = max(self._flipped, (donor.flipped_in(heal.step), donor.flipped_at))
                if rank:
                    self.mates[rank - 1].fetched = donor.root, found
                else:
                    self._fetched = donor.root, found
            self.moved(rank)
            part.end(Verdict())

        seek()

    def seek_means(self, rank: int, heal: Heal, step: Step, part: Part) -> None:
        until_s = self.world.now_s + 1.0

        def seek() -> None:
            if part.over or self.is_dead(rank):
                return
            donors = self._donors_of(rank, heal, step)
            if donors is None:
                self._again(seek, heal, part, until_s)
                return
            found = {donor.crew.log_of(donor_rank)[step] for donor, donor_rank in donors}
            if len(found) > 1:
                raise Violation("one outcome per step", f"step {step} was {found} at {heal.donors}")
            if rank:
                (self.mates[rank - 1].found,) = found
            else:
                (self._found,) = found
            part.end(Verdict())

        seek()

    def log_of(self, rank: int) -> dict[int, QuorumId]:
        return self.mates[rank - 1].log if rank else self.process.log

    def pins_of(self, rank: int) -> dict[int, Step]:
        return self.mates[rank - 1].pins if rank else self.process.pins

    def _donors_of(
        self, rank: int, heal: Heal, step: Step | None = None
    ) -> "list[tuple[Trainer, int]] | None":
        """For each span of a rank, the donors' ranks that serve it: the snapshot, or the means of a step."""
        donors = self.process.donors(heal)
        spans = self._spans(rank, {self.size, *(donor.crew.size for donor in donors)})
        found: list[tuple[Trainer, int]] = []
        for span in spans:
            ranks = [(donor, reached(span, donor.name, donor.crew.size)) for donor in donors]
            able = [(donor, at) for donor, at in ranks if donor.crew.serves(at, heal, step)]
            keepers = [
                Keeper((donor, at), donor.crew.keeps(heal, step), donor.crew.still_holds(at, heal))
                for donor, at in able
            ]
            serving = feeders(keepers, self.world.random() if keepers else 0.0)
            if not serving:
                return None
            found += serving
        if len(spans) > 1:
            self.world.sometimes.note("healed in spans")
        return found

    def keeps(self, heal: Heal, step: Step | None) -> Stripe:
        """What of a state, or of the means of a step, this group keeps: means are whole at each donor."""
        return self.process.stripes[heal.heal_id] if step is None else WHOLE

    def still_holds(self, rank: int, heal: Heal) -> bool:
        return len(self.history_of(rank)) == heal.step and (rank > 0 or self.process.still_holds(heal.step))

    def serves(self, rank: int, heal: Heal, step: Step | None) -> bool:
        if self.is_dead(rank):
            return False
        pins = self.pins_of(rank)
        if step is not None:
            return heal.heal_id in pins and step in self.log_of(rank)
        return pins.get(heal.heal_id) == heal.step and len(self.history_of(rank)) >= heal.step

    def _again(self, seek: Callable[[], None], heal: Heal, part: Part, until_s: float) -> None:
        if not self.process.donors(heal) or self.world.now_s > until_s:
            part.end(Verdict("no donor answers"))
        else:
            self.world.after(0.02, seek)

    # ---- the ranks' states, and their links ----

    def _spans(self, rank: int, sizes: set[int]) -> tuple[Span, ...]:
        """How one rank divides its lanes, to meet groups of these sizes."""
        found = lanes.spans(lanes.span_of(rank, self.size, LANES), sizes, LANES)
        if [lane for span in found for lane in range(span.start, span.stop)] != list(held(rank, self.size)):
            raise Violation(OWN_LANES, f"rank {rank} of {self.process.name}, of {self.size}, takes {found}")
        return found

    def shards_in(self, quorum: NewQuorum) -> Sequence[int]:
        return next(member.shards for member in quorum.members if member.group == self.process.name)

    def apply_s(self) -> float:
        return self.world.random() * 0.008

    def compute_s(self) -> float:
        return self.world.random() * self.world.shard_s(self.process.name)

    def to_leader(self, event: leader.Reported | leader.Moved) -> None:
        """A message of another rank."""
        at_s = max(self._up_s[event.rank], self.world.now_s + self.world.random() * LINK_S)
        self._up_s[event.rank] = at_s
        self.world.at(at_s, self._hears, event)

    def _hears(self, event: leader.Event) -> None:
        self._lead(event)
        if self.core.own is not None:
            self.thread(0, lambda: self._lead(leader.Looks()))

    def _order(self, order: Order | StopWork) -> None:
        for mate in self.mates:
            self._to(mate, mate.hears, order)

    def _to(self, mate: Mate, act: Callable[..., None], *args: Any) -> None:
        self._down_s[mate.rank] = max(
            self._down_s[mate.rank], self.world.now_s + self.world.random() * LINK_S
        )
        self.world.at(self._down_s[mate.rank], act, *args)
