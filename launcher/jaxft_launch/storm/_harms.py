"""Faults other than kills of groups: in a process that stays alive, in the network, in the coordinator.

Each starts when it is created, is driven by `pursue`, and has ended when `over` returns true; by then it is recorded
in the job.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxft._supervised._phase_file import read_word, words_beside
from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._faults import Cutoff, Damage, End, FaultKind, LinkFault, Victim, Way
from jaxft_launch.storm._job import Job
from jaxft_launch.storm._network import LEAST_DAMAGED_BYTES, Network, Pair
from jaxft_launch.storm._record import Fault

# A hang that was ordered starts in the next step, or never if the group was evicted meanwhile.
HANG_BEGINS_S = 30.0
# A group receives data in every step with others, so damage that has not come in this many of them will not come.
DAMAGE_WITHIN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The targets of a storm besides the groups' processes."""

    network: Network | None = None
    coordinator: Coordinator | None = None


class Harm(ABC):
    """A fault under way."""

    def __init__(self, victim: Victim, strike: int, job: Job, display: Display) -> None:
        self.group = victim.group
        self._job = job
        self._victim = victim
        self._strike = strike
        self._display = display
        self._rank_text = "" if job.nproc == 1 else f" rank {victim.rank}"
        self._began_step = job.committed_step
        self._began_s: float | None = None

    @abstractmethod
    def pursue(self) -> None:
        """Perform due actions."""

    @abstractmethod
    def over(self) -> bool:
        """Return whether the fault is over."""

    def _begins(self, t_s: float | None = None) -> None:
        self._began_s = time.time() if t_s is None else t_s
        seconds = f" for {self._victim.seconds:.1f} s" if self._victim.seconds else ""
        other = f" and {self._victim.other}" if self._victim.other else ""
        how = f" ({self._victim.how})" if self._victim.how is not None else ""
        self._display.say(f"{self._victim.kind}: {self.group}{self._rank_text}{other}{seconds}{how}")

    @property
    def _is_due(self) -> bool:
        """Whether the planned time has passed."""
        return self._began_s is not None and time.time() >= self._began_s + self._victim.seconds

    def _ends(self, seconds: float | None = None) -> None:
        """Record the fault, which lasted for `seconds`; None: until now."""
        assert self._began_s is not None
        if seconds is None:
            seconds = time.time() - self._began_s
        self._job.note_fault(
            Fault(
                kind=self._victim.kind,
                group=self.group,
                rank=self._victim.rank,
                other=self._victim.other,
                how="" if self._victim.how is None else str(self._victim.how),
                t_s=self._began_s,
                # A bit flip takes no time; the rest is its cost.
                seconds=0.0 if self._victim.kind is FaultKind.CORRUPT else seconds,
                step=self._began_step,
                strike=self._strike,
            )
        )


class Stop(Harm):
    """SIGSTOP, and SIGCONT later. The process continues, whatever the job has decided meanwhile.

    If a rank is silent for too long, its whole group ends.
    """

    def __init__(self, victim: Victim, strike: int, job: Job, display: Display) -> None:
        super().__init__(victim, strike, job, display)
        self._incarnation = job.current(victim.group)
        self._incarnation.frozen = True
        self._child = self._incarnation.ranks[victim.rank].child
        self._child.stop()
        self._begins()

    def pursue(self) -> None:
        pass

    def over(self) -> bool:
        if not self._is_due and not self._incarnation.over:
            return False
        self._ends()  # first: the group may be back before we look at the clock
        self._child.go_on()
        return True


class Hang(Harm):
    """The training thread hangs, while the process keeps sending heartbeats."""

    def __init__(self, victim: Victim, strike: int, job: Job, display: Display) -> None:
        super().__init__(victim, strike, job, display)
        self._incarnation = job.current(victim.group)
        self._incarnation.frozen = True
        self._rank = self._incarnation.ranks[victim.rank]
        self._ordered_s = time.time()
        self._rank.child.order(f"hang {victim.phase} {victim.seconds}")

    def pursue(self) -> None:
        word = read_word(words_beside(self._rank.files))
        began = self._began_s is not None
        if not began and word is not None and (word.hung_t_s or 0.0) >= self._ordered_s:
            self._begins(word.hung_t_s)

    def over(self) -> bool:
        if self._is_due:
            self._ends(self._victim.seconds)  # we may notice the end only after the group is back
            return True
        if self._began_s is not None and self._incarnation.over:
            self._ends()
            return True
        if self._began_s is not None or time.time() < self._ordered_s + HANG_BEGINS_S:
            return False
        self._rank.child.order(f"hang {self._victim.phase} 0")
        self._display.say(
            f"{self.group} did not reach the phase {self._victim.phase} in which it was to hang"
        )
        return True


class Cut(Harm):
    """Links carry no data for a while, or their connections are reset."""

    def __init__(self, victim: Victim, strike: int, job: Job, display: Display, network: Network) -> None:
        super().__init__(victim, strike, job, display)
        self._network = network
        self._pairs = _pairs(victim, network)
        if victim.seconds:
            network.cut(self._pairs)
        else:
            network.reset(victim.group, victim.other)
        self._begins()

    def pursue(self) -> None:
        pass

    def over(self) -> bool:
        if not self._is_due:
            return False
        if _ends_by_reset(self._victim):
            for a, b in {(min(pair), max(pair)) for pair in self._pairs}:
                self._network.reset(a, b)
        self._network.repair(self._pairs)
        self._ends()
        return True


class Corruption(Harm):
    """Bits flip in data that a group receives: in an exchange, or in its heal, from one donor or from each.

    Over when it has happened; in a heal, not before the group is back. `found_nothing`: all that the group received
    was too small to damage.
    """

    def __init__(self, victim: Victim, strike: int, job: Job, display: Display, network: Network) -> None:
        super().__init__(victim, strike, job, display)
        self._network = network
        self._number = job.current(victim.group).number
        self._damaged = network.damaged
        self._exchanges = self._count_exchanges()
        self.found_nothing = False
        self._in_heal = victim.how is not Damage.IN_AN_EXCHANGE
        pairs = network.around(victim.group, out=False)
        times = len(pairs) if victim.how is Damage.EACH_DONOR else 1
        network.damage(pairs, times=times, kind="heal" if self._in_heal else "exchange")

    def pursue(self) -> None:
        if self._began_s is None and self._network.damaged > self._damaged:
            self._begins()

    def over(self) -> bool:
        if not self._has_passed() and (self._in_heal or self._began_s is None):
            return False
        self._network.spare()
        self.pursue()  # it may have happened since
        if self._began_s is None:
            self.found_nothing = True
            where = "its heal" if self._in_heal else f"{DAMAGE_WITHIN_STEPS} exchanges"
            self._display.say(
                f"corrupt: nothing that {self.group} received in {where} could be damaged, since no piece of it had "
                f"{LEAST_DAMAGED_BYTES} bytes"
            )
        else:
            self._ends()
        return True

    def _has_passed(self) -> bool:
        """Whether the group has received all that might be damaged."""
        if not self._in_heal:
            return self._count_exchanges() >= self._exchanges + DAMAGE_WITHIN_STEPS
        current = self._job.current(self.group)
        return current.number > self._number and self.group in self._job.members_at_work()

    def _count_exchanges(self) -> int:
        return sum(event.live and len(event.members) > 1 for event in self._job.current(self.group).steps)


class CoordinatorDeath(Harm):
    """SIGKILL. The supervisor restarts it with the same command on the same port."""

    def __init__(
        self, victim: Victim, strike: int, job: Job, display: Display, coordinator: Coordinator
    ) -> None:
        super().__init__(victim, strike, job, display)
        self._coordinator = coordinator
        self._dead = coordinator.child
        self._dead.kill()
        self._begins()

    def pursue(self) -> None:
        pass

    def over(self) -> bool:
        if self._coordinator.child is self._dead or not self._coordinator.listens():
            return False
        self._ends()
        return True


def begin(victim: Victim, strike: int, job: Job, display: Display, reach: Reach) -> Harm:
    """Start a fault other than a kill of a group."""
    match victim.kind:
        case FaultKind.STOP:
            return Stop(victim, strike, job, display)
        case FaultKind.HANG:
            return Hang(victim, strike, job, display)
        case FaultKind.LINK | FaultKind.PARTITION:
            assert reach.network is not None
            return Cut(victim, strike, job, display, reach.network)
        case FaultKind.CORRUPT:
            assert reach.network is not None
            return Corruption(victim, strike, job, display, reach.network)
        case FaultKind.COORDINATOR:
            assert reach.coordinator is not None
            return CoordinatorDeath(victim, strike, job, display, reach.coordinator)
        case FaultKind.KILL:
            raise AssertionError("a kill is a Death")


def _pairs(victim: Victim, network: Network) -> tuple[Pair, ...]:
    if victim.other:
        return (victim.group, victim.other), (victim.other, victim.group)
    assert isinstance(victim.how, Cutoff)
    way = victim.how.way
    return network.around(victim.group, into=way is not Way.OUT, out=way is not Way.IN)


def _ends_by_reset(victim: Victim) -> bool:
    match victim.how:
        case Cutoff(end=end):
            return end is End.RESET
        case how:
            return how is LinkFault.STALLS_THEN_RESET
