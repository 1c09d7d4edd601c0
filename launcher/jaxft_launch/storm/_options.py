"""The options of a storm over any program, and the plan that follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._devices import words_of
from jaxft_launch.storm._faults import PHASES, SHIPPED, FaultKind, Timeouts
from jaxft_launch.storm._schedule import Kinds, Strike, deal_ranks, parse_faults, plan_strikes


@dataclass(frozen=True, kw_only=True)
class StormOptions:
    """The options of every storm."""

    kills: int = 6
    """How many processes to kill; with --faults, how many faults of all kinds in total."""
    faults: str = FaultKind.KILL.value
    """Kinds of faults, separated by commas: kill, stop, hang, link, partition, coordinator, corrupt."""
    groups: int = 3
    """Replica groups of the job."""
    nproc: int = 1
    """Processes of each group. With several, a fault strikes a single process."""
    seed: int = 1
    """Seed of the plan: the same seed gives the same order of victims and phases."""
    keep: Path | None = None
    """Keep logs, event files and the verdict (verdict.json) in this new folder."""

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(f"group-{number}" for number in range(self.groups))

    @property
    def fault_kinds(self) -> tuple[FaultKind, ...]:
        return parse_faults(words_of(self.faults))

    @property
    def what(self) -> str:
        """The faults as text."""
        return "kills" if self.faults == FaultKind.KILL else f"faults ({self.faults})"

    def plan(
        self, *, last_step: int, phases: Sequence[str] = PHASES, timeouts: Timeouts = SHIPPED
    ) -> tuple[Strike, ...]:
        """Return the strikes of the plan, none later than `last_step`, with kills and hangs in these phases.

        Raises:
            LaunchError: the options allow no plan.
        """
        if self.nproc < 1:
            raise LaunchError(f"--nproc must be 1 or more, not {self.nproc}.")
        network = [kind.value for kind in self.fault_kinds if kind.on_the_network]
        if self.nproc > 1 and network:
            raise LaunchError(
                f"--faults {','.join(network)} needs groups of one process, not of {self.nproc}: the network of a "
                "storm reaches only the first process of a group."
            )
        strikes = plan_strikes(
            self.group_names,
            kills=self.kills,
            seed=self.seed,
            last_step=last_step,
            kinds=Kinds(faults=self.fault_kinds, phases=phases, timeouts=timeouts),
        )
        return deal_ranks(strikes, nproc=self.nproc, seed=self.seed)

    def coordinator_flags(self, memory: Path) -> tuple[str, ...]:
        """Return the coordinator's arguments: a store, if the storm kills it."""
        return ("--state", str(memory)) if FaultKind.COORDINATOR in self.fault_kinds else ()
