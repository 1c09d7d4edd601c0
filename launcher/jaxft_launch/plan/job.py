"""The job that is planned, and its groups' needs: bytes, processor time, memory, disk, time to heal.

The costs of jaxft are the measured ones of docs/performance.md: two CPU cores, no accelerator.
"""

import math
from dataclasses import dataclass, replace

from jaxft_launch.plan.forms import DAY_S

DEVICES_PER_NODE = 8
STATE_BYTES = 12  # parameters and two moments, in float32
# Processor time for each GB that a rank moves in each direction of an exchange, and GB/s of a heal on one core.
CPU_S_PER_GB = 0.6
HEAL_GB_PER_S = 3.0
EXCHANGE_THREADS = 4  # the default from 16 cores on; that they divide the time is assumed, not measured
VOTE_S, PEER_S = 1e-4, 2e-4  # a vote and its decision, for each group; and each peer of an exchange
ROWS_FROM = 48  # groups: from there on, a rank is connected to its row and its column alone
DETECT_S = 5.0  # a machine that dies without a word is noticed after a heartbeat timeout
CHECKPOINTS_KEPT, LONGEST_INTERVAL_S = 3, DAY_S  # against the loss of all groups
FAIR_SHARE = 0.1  # of a step, for its exchange
WHOLE = ("groups", "devices_per_group", "shards_per_group", "inner_steps", "bits")


@dataclass(frozen=True, kw_only=True)  # without slots: options of the command read its defaults
class Job:
    """A job. `step_s`: a step's computation; `inner_steps`: 1, or the optimizer steps of a round of DiLoCo."""

    params: float
    groups: int
    devices_per_group: int
    step_s: float
    shards_per_group: int = 8
    inner_steps: int = 1
    bits: int = 16
    mtbf_node_days: float = 154.0
    return_s: float = 300.0
    save_s: float = 30.0
    link_gbits: float = 400.0
    detect_s: float = DETECT_S
    exchange_threads: float = EXCHANGE_THREADS
    measured: bool = False  # step_s and return_s include the exchanges and heals of a run

    @property
    def group_failures(self) -> float:
        """Failures of a group, per second."""
        return self.devices_per_group / DEVICES_PER_NODE / (self.mtbf_node_days * DAY_S)

    @property
    def failures(self) -> float:
        """Failures of the job without spares, per second."""
        return self.groups * self.group_failures

    @property
    def round_s(self) -> float:
        """The computation between two exchanges."""
        return self.inner_steps * self.step_s

    @property
    def payload_bytes(self) -> float:
        """A group's contribution to an exchange."""
        return self.params * self.bits / 8

    @property
    def moved_bytes(self) -> float:
        """The bytes that a group sends, and receives, in an exchange."""
        return 2.0 * self.payload_bytes * (self.groups - 1) / self.groups

    @property
    def group_bytes_per_s(self) -> float:
        """The links of a group's nodes; a group smaller than a node has its part of the link."""
        return self.link_gbits * 1e9 / 8 * self.devices_per_group / DEVICES_PER_NODE

    @property
    def link_s(self) -> float:
        """How long the links need for an exchange."""
        return 0.0 if self.measured else self.moved_bytes / self.group_bytes_per_s

    @property
    def exchange_s(self) -> float:
        """An exchange of jaxft: its links or its threads, its peers, and the votes."""
        if self.groups == 1 or self.measured:
            return 0.0
        peers = self.groups - 1 if self.groups < ROWS_FROM else 2.0 * math.sqrt(self.groups)
        threads_s = CPU_S_PER_GB * self.moved_bytes / 1e9 / self.devices_per_group / self.exchange_threads
        return max(self.link_s, threads_s) + peers * PEER_S + self.groups * VOTE_S

    @property
    def heal_s(self) -> float:
        """How long a joiner fetches the state, by its links and its cores."""
        state = 0.0 if self.measured else STATE_BYTES * self.params
        return max(state / self.group_bytes_per_s, state / 1e9 / HEAL_GB_PER_S / self.devices_per_group)

    @property
    def back_s(self) -> float:
        """From a group's failure until it takes part again."""
        return self.detect_s + self.return_s + self.heal_s

    def scaled(self, **factors: float) -> "Job":
        """Return the job with some of its numbers multiplied."""
        found = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return replace(self, **{name: max(1, round(v)) if name in WHOLE else v for name, v in found.items()})


@dataclass(frozen=True, slots=True)
class Need:
    """One need of a group."""

    name: str
    value: float
    unit: str
    why: str


def needs(job: Job) -> tuple[Need, ...]:
    """Return the needs of each group of a job."""
    steps = math.ceil(job.heal_s / (job.round_s + job.exchange_s)) + 1
    moved, state, payload = (
        each / 1e9 for each in (job.moved_bytes, STATE_BYTES * job.params, job.payload_bytes)
    )
    fair_gbits = job.link_s / (FAIR_SHARE * job.round_s) * job.link_gbits
    fair_steps = max(1, math.ceil(job.exchange_s / (FAIR_SHARE * job.step_s)))
    return (
        Need("moved each way a step", moved / job.inner_steps, "GB", "2 x payload x (n - 1) / n"),
        Need("exchange", job.exchange_s, "s", "links, or four threads a rank; peers; votes"),
        Need(
            "processor a step", CPU_S_PER_GB * moved / job.inner_steps, "CPU s", "0.6 s for each GB each way"
        ),
        Need("link for 10 % of a step", fair_gbits, "Gbit/s", "of each node"),
        Need("inner steps for 10 %", fair_steps, "", "where DiLoCo begins to pay"),
        Need("state", state, "GB", "parameters and two moments, float32"),
        Need("state of a device", state / job.devices_per_group, "GB", "sharded over the group"),
        Need("heal", job.heal_s, "s", "links, or 3 GB/s a core; the others train on"),
        Need("host memory, donor", state / max(1, job.groups - 1), "GB", "its stripe; all if alone"),
        Need("host memory, log", steps * payload, "GB", f"means of {steps} exchanges"),
        Need("host memory, joiner", state, "GB", "receives the whole state"),
        Need("disk", CHECKPOINTS_KEPT * state, "GB", "three checkpoints, once a job"),
    )
