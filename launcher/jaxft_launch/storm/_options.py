"""The options of a storm over any program, and the plan that follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm._faults import PHASES, FaultKind, Timeouts
from jaxft_launch.storm._schedule import Strike, deal_ranks, parse_faults, plan_strikes


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
    """Processes of each group. With several, a fault strikes one of them."""
    seed: int = 1
    """Seed of the plan: the same seed gives the same order of victims and phases."""
    only: str = ""
    """Kill only these groups, separated by commas. Empty: all groups."""
    phases: str = ",".join(PHASES)
    """Kill only in these phases, separated by commas."""
    heartbeat_timeout_ms: int = 5000
    """Silence after which the coordinator considers a group dead. The lengths of faults depend on it."""
    failure_timeout_s: float = 60.0
    """How long any one failure may last before a group gives up; an exchange waits for half of it. The lengths of
    faults on links depend on it."""
    json: Path | None = None
    """Also write the verdict to this file."""
    keep: Path | None = None
    """Keep the event files and logs in this new folder."""

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(f"group-{number}" for number in range(self.groups))

    @property
    def fault_kinds(self) -> tuple[FaultKind, ...]:
        return parse_faults(_names(self.faults))

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(heartbeat_s=self.heartbeat_timeout_ms / 1000, failure_s=self.failure_timeout_s)

    @property
    def what(self) -> str:
        """The faults as text."""
        return "kills" if self.faults == FaultKind.KILL else f"faults ({self.faults})"

    def plan(self, *, last_step: int) -> tuple[Strike, ...]:
        """Return the strikes of the plan, none later than `last_step`.

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
            only=_names(self.only),
            phases=_names(self.phases),
            faults=self.fault_kinds,
            timeouts=self.timeouts,
        )
        return deal_ranks(strikes, nproc=self.nproc, seed=self.seed)

    def coordinator_flags(self, memory: Path) -> tuple[str, ...]:
        """Return the coordinator's arguments: its timeout, and a store if the storm kills it."""
        flags: Sequence[str] = ()
        if self.heartbeat_timeout_ms != StormOptions.heartbeat_timeout_ms:
            flags = ("--heartbeat-timeout-ms", str(self.heartbeat_timeout_ms))
        if FaultKind.COORDINATOR in self.fault_kinds:
            flags = (*flags, "--state", str(memory))
        return tuple(flags)


def _names(comma_list: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in comma_list.split(",") if name.strip())
