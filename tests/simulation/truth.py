"""What may never happen, checked where it would happen.

The truth is on the disk: a decision counts from the moment its record is written, as no group may learn it
earlier and none may forget it later. `line` is, for each step, the quorum whose commit made it.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from jaxft_protocol.coordinator import job as j
from jaxft_protocol.coordinator.quorums import is_trial
from jaxft_protocol.messages import Commit, CoordinatorMessage, Heal, NewQuorum, QuorumId, Step, Vote
from jaxft_protocol.names import DRAINED

if TYPE_CHECKING:
    from .lane import Lane
    from .trainer import Trainer
    from .world import World


class Violation(AssertionError):
    """An invariant does not hold. `invariant` is its name; the text has the evidence."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text

    def __reduce__(self) -> tuple[type["Violation"], tuple[str, str]]:
        return (Violation, (self.invariant, self.text))


class Truth:
    def __init__(self, world: "World") -> None:
        self.root = 0  # the state in which the job began
        self.line: list[QuorumId] = []
        self._before_last: tuple[int, list[QuorumId]] = (0, [])  # root and line before the last record
        # All decisions ever, also forgotten ones, when all their holders were gone.
        self.ever: set[tuple[int, QuorumId]] = set()
        self.roots: set[int] = set()
        self.went_back = 0
        self.commits = 0  # how many decisions there were, also repeated ones
        self._writers: dict[tuple[int, QuorumId], str] = {}  # of each state, who writes for the job
        self.raised: set[tuple[int, str]] = (
            set()
        )  # steps in which the user's code has raised, and in which group
        self._asked_s: dict[int, float] = {}  # when the digests of a heal's donors were asked for
        self._sent_digests: set[int] = set()  # heals of which a donor has sent its digest in time
        self._lost_since_s: dict[int, float] = {}  # of each coordinator
        self.quorums: dict[QuorumId, NewQuorum] = {}
        self._heals: dict[int, object] = {}
        self._world = world
        self.known: j.Saved | None = None  # durable before the event
        self.same_bits = world.setting.shards is not None

    # ---- records ----

    def durable(self, before: j.Saved | None, after: j.Saved | None) -> None:  # noqa: C901 (a check for each invariant)
        """A record was written."""
        self._before_last = (self.root, list(self.line))
        if after is None:
            if before is not None and before.finished is not None:
                return
            held = before is not None and before.frontier is not None and not before.frontier.fresh
            if before is not None and (held or before.last_quorum_id):
                raise Violation("quorum ids grow", f"{before} is forgotten")
            return
        if before is not None and after.last_quorum_id < before.last_quorum_id:
            raise Violation(
                "quorum ids grow", f"{after.last_quorum_id} is written after {before.last_quorum_id}"
            )
        old = None if before is None else before.frontier
        new = after.frontier
        if new is old:
            return
        if new is None:
            if self._world.setting.memoryless and after.settings is None:
                self.forgets_all()  # it begins again under a higher term, as after any restart
                return
            if old is not None and not old.fresh:
                raise Violation("the frontier never goes back", f"from step {old.step} to nothing")
            self._world.sometimes.note("founding gives way" if after.settings else "job forgotten")
            self.went_back += 1
            return
        if old is None or (
            new.founding and (not old.founding or new.step != old.step or new.digest != old.digest)
        ):
            if new.holders:  # else the job has halted
                self._founded(old, new)
        elif new.step == old.step + 1 and new.quorum_id:
            if len(self.line) != old.step:
                raise Violation("one outcome per step", f"step {old.step} is decided at {len(self.line)}")
            setting = self._world.setting
            if setting.nonfinite == "raise" and setting.bad_shard(old.step) is not None:
                raise Violation("a step that is not finite ends the job", f"step {old.step} counts")
            if old.step == setting.unreadable:
                raise Violation("a step that no group can do never counts", f"step {old.step} counts")
            self.line.append(new.quorum_id)
            self.commits += 1
            self.ever.add((old.step, new.quorum_id))
            if self._world.tracing:
                self._world.note(f"step {old.step} counts, by quorum {new.quorum_id}")
        elif (new.step, new.quorum_id) != (old.step, old.quorum_id):
            raise Violation(
                "one outcome per step",
                f"step {old.step} (quorum {old.quorum_id}), then {new.step} (quorum {new.quorum_id})",
            )

    def _founded(self, old: j.Frontier | None, new: j.Frontier) -> None:
        """The job begins, or resumes, with the state of `new.holders`."""
        founders = [self._world.incarnations[incarnation] for _, incarnation in sorted(new.holders)]
        line = list(founders[0].history)
        if len(line) != new.step:
            raise Violation("equal frontier means equal state", f"founded at {new.step} on {line}")
        self.check_alike(founders)
        if healers := [each.name for each in founders if each.heals_only]:
            raise Violation("a fresh state never becomes the truth", f"{healers} have read no checkpoint")
        if old is not None and old.founding:
            # Groups that do not know it yet still try the first step of the old founding.
            self._world.sometimes.note("founded again")
            self.went_back += 1
            if old.fresh and not new.fresh:
                self._world.sometimes.note("founding gives way")
        elif old is not None:
            if new.fresh:
                raise Violation("a fresh state never becomes the truth", f"step {old.step} was committed")
            self._world.sometimes.note("resume")
            if new.step < len(self.line):
                self._world.sometimes.note("frontier went back")
            # Decisions on the way that is left may still be on their way to a group.
            self.went_back += 1
            self._check_known(line)
        self.line, self.root = line, founders[0].root
        self.roots.add(self.root)
        self.ever.update(enumerate(line))

    def _check_known(self, history: list[QuorumId]) -> None:
        for step, quorum_id in enumerate(history):
            if (step, quorum_id) not in self.ever:
                raise Violation(
                    "one outcome per step", f"step {step} by quorum {quorum_id} was never decided"
                )

    def forgets(self, saved: j.Saved | None) -> None:
        """The disk has lost the last record: its decision may be made once more."""
        self.root, self.line = self._before_last
        self.went_back += 1
        last = 0 if saved is None else saved.last_quorum_id
        self.quorums = {number: quorum for number, quorum in self.quorums.items() if number <= last}

    def forgets_all(self) -> None:
        """A coordinator without a store has died: its groups hold all that is left."""
        self.went_back += 1
        self.quorums = {}

    # ---- conclusions of a coordinator ----

    def check_turn(self, before: j.Job, after: j.Job, event: j.Event) -> None:  # noqa: C901 (a check for each invariant)
        quorum = after.quorum
        if not before.ballot.lost:
            self._lost_since_s[before.options.term] = self._world.now_s
        if quorum is not None and quorum is not before.quorum:
            self._check_quorum(before, after, quorum)
            self._check_asked(before, after, quorum)
            self._check_drained(before, after, quorum)
            voted = isinstance(event, j.Received) and isinstance(event.message, Vote)
            if not voted:  # a vote may be the last that was waited for
                self._check_gathered(before, after, quorum)
        if after.groups is not before.groups:
            self._check_digests(before, after)
        old, new = before.frontier, after.frontier
        if new is old or new is None:
            return
        if old is None:
            self._check_founding(after)
            self._check_majority(before, after, new)
            return
        if new.step == old.step + 1 and new.quorum_id:
            self._check_commit(before, after, old.step)
            if after.paused and after.quorum is not None:
                raise Violation("a paused job stands still", f"step {new.step} follows at once")
            if after.paused:
                self._world.sometimes.note("paused")
            staying = () if after.quorum is None else after.quorum.members
            if drained := [m.group for m in staying if (g := before.groups.get(m.group)) and g.draining]:
                raise Violation("a drain ends with its step", f"{drained} take part in step {new.step}")
        elif new.founding and (new.step, new.holders) != (old.step, old.holders) and new.holders:
            self._check_majority(before, after, new)
            if new.step > old.step and old.quorum_id:
                self._world.sometimes.note("continues from newer")
        if new.founding and not old.founding:
            held = {
                group.holder for group in after.groups.values() if group.phase is not j.GroupPhase.PRESENT
            } & old.holders
            if held and new.step < old.step:
                raise Violation(
                    "the frontier never goes back", f"{held} hold step {old.step}, not {new.step}"
                )

    def _check_digests(self, before: j.Job, after: j.Job) -> None:
        """The known step and digest of a group belong together."""
        for name, group in after.groups.items():
            if group is before.groups.get(name) or group.digest is None:
                continue
            heard = self._world.incarnations[group.incarnation].digests
            if (group.step, group.digest) not in heard:
                raise Violation("a digest is of its step", f"{name} at step {group.step}: {heard}")

    def _check_majority(self, before: j.Job, _after: j.Job, new: j.Frontier) -> None:
        """The state from which a job begins is not the odd one of the brought states."""
        brought = [g for g in before.groups.values() if g.phase is j.GroupPhase.STALE and g.step == new.step]
        of_it = [self._world.incarnations[group.incarnation] for group in brought if group.history]
        sound = sum(not process.flipped_in(new.step) for process in of_it)
        founders = [self._world.incarnations[incarnation] for _, incarnation in new.holders]
        if 2 * sound > len(of_it) and any(founder.flipped_in(new.step) for founder in founders):
            raise Violation(
                "the majority of states is the truth", f"step {new.step} of {sorted(new.holders)}"
            )

    def _check_founding(self, after: j.Job) -> None:
        """A coordinator founds a job only if nothing was ever committed, as far as can be known."""
        known = None if self.known is None else self.known.frontier
        if known is not None and not known.fresh and self._world.leads(after.options.term):
            raise Violation("the frontier never goes back", f"founded though step {known.step} was committed")

    def _check_quorum(self, before: j.Job, after: j.Job, quorum: NewQuorum) -> None:
        if quorum.quorum_id <= before.last_quorum_id:
            raise Violation("quorum ids grow", f"{quorum.quorum_id} after {before.last_quorum_id}")
        least = max(1, after.min_replicas, self._world.setting.min_replicas)
        if len(quorum.members) < least:
            if not after.raised:
                raise Violation("no quorum below min_replicas", f"{len(quorum.members)} of {least}")
            self._world.sometimes.note("trial")
        spares = sum(member.group in self._world.setting.spares for member in quorum.members)
        if spares and len(quorum.members) > max(after.places, least):
            raise Violation("a spare takes a free place", f"{spares} spares of {len(quorum.members)} members")
        numbers = [int(member.group.rpartition("-")[2]) for member in quorum.members]
        if numbers != sorted(numbers):
            raise Violation("members in the order in which people count", str(numbers))
        given = sorted(shard for member in quorum.members for shard in member.shards)
        if given != list(range(quorum.total_shards)):
            raise Violation("each shard counted once", f"{given} of {quorum.total_shards}")
        if after.frontier is None or quorum.step != after.frontier.step:
            raise Violation("a quorum begins at the frontier", f"quorum from {quorum.step}")

    def _check_asked(self, before: j.Job, after: j.Job, quorum: NewQuorum) -> None:
        """A drain has no step tried again, and a paused job begins none."""
        drained = [change.group for change in quorum.left if change.reason == DRAINED]
        old, new = before.frontier, after.frontier
        again = before.quorum is not None and old is not None and new is not None and old.step == new.step
        # A trial commits nothing: its step is tried again whether a member is drained or not. And where one begins,
        # another group's exception has ended the quorum, so a drained group is in no step and goes at once.
        if again and drained and not is_trial(before) and not is_trial(after):
            raise Violation("a drain costs no step", f"step {quorum.step} is tried again without {drained}")
        if after.paused and not again:
            raise Violation("a paused job stands still", f"quorum {quorum.quorum_id} from step {quorum.step}")
        if drained and any(change.group in self._world.setting.spares for change in quorum.joined):
            self._world.sometimes.note("place handed over")

    def _check_drained(self, before: j.Job, after: j.Job, quorum: NewQuorum) -> None:
        """Once an operator hears that a group is drained, it takes part in no step after the current one."""
        if not self._world.leads(after.options.term):
            return
        stay = () if before.quorum is None else before.quorum.members
        for member in quorum.members:
            since = self._world.incarnations[member.incarnation].drains_since
            if since is not None and (self.commits > since or member.group not in {m.group for m in stay}):
                raise Violation(
                    "a drain is obeyed", f"{member.group} takes part in quorum {quorum.quorum_id}"
                )

    def _check_gathered(self, before: j.Job, after: j.Job, quorum: NewQuorum) -> None:
        """Losses that belong together cost one quorum, where they are gathered."""
        old, ballot, setting = before.quorum, before.ballot, self._world.setting
        if old is None or quorum.step != old.step or ballot.ok or ballot.failed:
            return
        least_s = before.options.gather_s(len(old.members)) * (1 - 2 * setting.drift)
        living = any(_still_takes_part(before.groups.get(member.group), after) for member in old.members)
        lost_since_s = self._lost_since_s[before.options.term]
        if living and self._world.now_s - lost_since_s < least_s:
            raise Violation("losses are gathered", f"quorum {quorum.quorum_id} at the first of them")

    def _check_commit(self, before: j.Job, after: j.Job, step: Step) -> None:
        """Every member that lives holds the complete sum, computed from one state."""
        quorum = before.quorum
        if quorum is None:
            raise Violation("no group commits outside its quorum", f"step {step} counts without a quorum")
        least = max(1, after.min_replicas, self._world.setting.min_replicas)
        if len(quorum.members) < least:
            raise Violation("no quorum below min_replicas", f"{len(quorum.members)} of {least} commit")
        living = [
            member for member in quorum.members if _still_takes_part(before.groups.get(member.group), after)
        ]
        for member in living:
            process = self._world.incarnations[member.incarnation]
            sum_of = (quorum.quorum_id, step)
            if sum_of not in process.sums or not process.crew.holds(*sum_of):
                raise Violation(
                    "commit only what all who live hold",
                    f"{member.group} does not hold the sum of step {step}",
                )
        if len(living) < len(quorum.members):
            self._world.sometimes.note("commit after a loss")
        tainted = self._world.hub.tainted(quorum.quorum_id, step)
        # From which state the lost groups had computed is unknown.
        flipped = [member.group for member in living if member.group in tainted]
        if flipped and len(flipped) < len(living):
            raise Violation("equal frontier means equal state", f"{flipped} are flipped, step {step} counts")

    # ---- messages of a coordinator ----

    def check_told(self, message: CoordinatorMessage) -> None:
        """Nothing is announced before it is durable."""
        match message:
            case Commit(quorum_id, step, following):
                if (step, quorum_id) not in self.ever:
                    raise Violation("durable before told", f"step {step} by quorum {quorum_id}")
                if following is not None:
                    self._check_told_quorum(following)
            case NewQuorum():
                self._check_told_quorum(message)
            case Heal() if not message.log_only:
                for donor in message.donors:
                    self._check_donor(self._world.incarnations[donor.incarnation], message.step)
            case _:
                pass

    def check_heal(self, heal: Heal, joiner: object) -> None:
        """An id names one heal of one group, over all lives of the coordinator."""
        if self._heals.setdefault(heal.heal_id, joiner) is not joiner:
            raise Violation("heal ids are given out once", f"heal {heal.heal_id} is given to another group")

    def _check_told_quorum(self, quorum: NewQuorum) -> None:
        saved = self._world.disk.saved
        if saved is None or saved.last_quorum_id < quorum.quorum_id:
            raise Violation("durable before told", f"quorum {quorum.quorum_id} from step {quorum.step}")
        if self.quorums.setdefault(quorum.quorum_id, quorum) != quorum:
            raise Violation("quorum ids grow", f"two quorums have the id {quorum.quorum_id}")

    def _check_donor(self, process: "Trainer", step: Step) -> None:
        """It holds state `step`, or all it takes to get there once it hears the decision."""
        held = len(process.history)
        able = all(
            any((at, by) in self.ever for by, of in process.sums if of == at) for at in range(held, step)
        )
        if not able and not process.dead:
            raise Violation("only holders of the frontier donate", f"{process.name} at {held}, not {step}")

    # ---- acts of a group ----

    def check_applied(self, process: "Trainer", quorum_id: QuorumId) -> None:
        self.check_line(process.name, process.history, quorum_id)

    def check_line(self, name: str, history: list[QuorumId], quorum_id: QuorumId) -> None:
        """Only decided steps are applied to a state."""
        step = len(history)
        decided = self.line[step] if step < len(self.line) else None
        if decided == quorum_id or (self.went_back and (step, quorum_id) in self.ever):
            return
        raise Violation(
            "one outcome per step",
            f"{name} applies step {step} of quorum {quorum_id}, decided: {decided}",
        )

    def asks_digest(self, heal_id: int) -> None:
        """A coordinator asks a donor to keep its state for a heal, and for its digest."""
        self._asked_s.setdefault(heal_id, self._world.now_s)

    def tells_digest(self, heal_id: int) -> None:
        """A donor sends it. No heal waits for longer than the heartbeat timeout, by a clock that may be fast."""
        patience_s = 0.85 * self._world.setting.heartbeat_timeout_s
        if self._world.now_s - self._asked_s[heal_id] < patience_s:
            self._sent_digests.add(heal_id)

    def check_fed(self, process: "Trainer", heal: Heal, donor: "Trainer") -> None:
        """A joiner gets a sound state, if it has more than one donor to tell; and never one older than its own."""
        donors = [self._world.incarnations[member.incarnation] for member in heal.donors]
        compared = heal.heal_id in self._sent_digests
        if (
            compared
            and donor.flipped_in(heal.step)
            and any(not each.flipped_in(heal.step) for each in donors)
        ):
            raise Violation("a corrupt donor feeds no joiner", f"{donor.name} feeds {process.name}")
        of_it = process.replica.history == heal.history != 0
        sound = not process.flipped and not process.is_distrusted()
        if of_it and sound and len(process.history) > heal.step:
            raise Violation(
                "nothing that was applied is lost",
                f"{process.name} holds step {len(process.history)} of this run, and heals back to {heal.step}",
            )

    def check_fetched(self, joiner: str, donor: "Trainer", found: list[QuorumId], step: int) -> None:
        """What one rank of a donor serves is its part of the group's state, also if another rank stands still."""
        own = donor.history[:step]
        right = own + self.line[len(own) : step]
        if len(found) != step or found[: len(own)] != own or (found != right and not self.went_back):
            raise Violation(
                "the ranks of a group hold one state",
                f"a rank of {donor.name} feeds {joiner} {found}, as state {step} of {donor.history}",
            )

    def check_state(self, process: "Trainer | Lane", step: int) -> None:
        """What `process` holds, as state `step`, is the job's, or was before the job went back."""
        history = process.history
        self._check_skipped(process)
        line = self.line[:step]
        if len(history) == step and history == line and process.root == self.root:
            return
        known = self.ever.issuperset(enumerate(history)) and process.root in self.roots
        if len(history) == step and self.went_back and known:
            return
        raise Violation(
            "equal frontier means equal state",
            f"{process.name} holds {process.root} {history} as state {step}, not {self.root} {line}",
        )

    def _check_skipped(self, process: "Trainer | Lane") -> None:
        """A step changes nothing in any group or in all of them."""
        setting = self._world.setting
        if setting.nonfinite != "skip":
            return
        # (Steps before the coordinator's first life have the numbers of no quorum.)
        done = [step for step, quorum_id in enumerate(process.history) if quorum_id > 0]
        bad = {step for step in done if setting.bad_shard(step) is not None}
        if process.skipped != bad:
            raise Violation(
                "equal frontier means equal state",
                f"{process.name} has skipped {sorted(process.skipped)}, and not {sorted(bad)}",
            )

    def check_writer(self, writer: str, state: tuple[int, QuorumId]) -> None:
        """All groups name one writer for a state, which is of the quorum that has committed it."""
        by = self.quorums.get(state[1])
        foreign = by is not None and all(member.group != writer for member in by.members)
        if (foreign or self._writers.setdefault(state, writer) != writer) and not self.went_back:
            raise Violation(
                "one group writes for the job", f"{writer}, and {self._writers.get(state)}: {state}"
            )

    def check_alike(self, processes: "Collection[Trainer | Lane]") -> None:
        """Those who exchange, or end together, hold one state."""
        first, *others = processes
        for other in others:
            alike = (other.root, other.edits) == (first.root, first.edits)
            if not alike or not self._alike(other.history, first.history):
                text = (
                    f"{first.name}: {first.root} {first.history} {first.edits}, "
                    f"{other.name}: {other.root} {other.history} {other.edits}"
                )
                raise Violation("equal frontier means equal state", text)

    def _alike(self, one: list[QuorumId], other: list[QuorumId]) -> bool:
        """The same shards summed in the same order are the same bits, whichever quorum did so."""
        return len(one) == len(other) if self.same_bits else one == other


def _still_takes_part(group: j.Group | None, after: j.Job) -> bool:
    now = None if group is None else after.groups.get(group.name)
    return (
        group is not None
        and group.phase is j.GroupPhase.MEMBER
        and now is not None
        and now.session == group.session
        and (now.phase in (j.GroupPhase.MEMBER, j.GroupPhase.READY) or now.draining)
    )
