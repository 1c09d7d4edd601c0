"""The job that is planned, and what its groups need: bytes, processor time, memory, disk, time to heal.

The costs of jaxft are the measured ones of docs/performance.md: two CPU cores, no accelerator.
"""

import math
from dataclasses import dataclass, replace

from jaxft_launch.plan import forms

DEVICES_PER_NODE = 8
# Parameters and two moments, in float32.
STATE_BYTES = 12
# Processor time for each GB that a rank moves in each direction of an exchange, and GB/s of a heal on one core.
CPU_S_PER_GB = 0.6
# jaxft's default for a process with 16 cores or more. That they divide the time is assumed: not measured.
EXCHANGE_THREADS = 4
HEAL_GB_PER_S = 3.0
# A vote and its decision, for each group; and each peer of an exchange, regardless of size.
VOTE_S = 1e-4
PEER_S = 2e-4
# From this number of groups on, a rank is connected to its row and its column alone.
ROWS_FROM = 48
# A machine that dies without a word is noticed after a heartbeat timeout.
DETECT_S = 5.0
CHECKPOINTS_KEPT = 3
# Checkpoints for disasters, where no failure of groups needs more of them.
LONGEST_INTERVAL_S = forms.DAY_S
# The part of a step that an exchange may take.
FAIR_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def nodes_per_group(self) -> float:
        return self.devices_per_group / DEVICES_PER_NODE

    @property
    def group_failures(self) -> float:
        """Failures of a group, per second."""
        return self.nodes_per_group / (self.mtbf_node_days * forms.DAY_S)

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
        return self.link_gbits * 1e9 / 8 * self.nodes_per_group

    @property
    def link_s(self) -> float:
        """How long the links need for an exchange."""
        return self.moved_bytes / self.group_bytes_per_s

    @property
    def exchange_cpu_s(self) -> float:
        """Processor time of a group for an exchange."""
        return CPU_S_PER_GB * self.moved_bytes / 1e9

    @property
    def exchange_s(self) -> float:
        """An exchange of jaxft: its links or its threads, its peers, and the votes."""
        if self.groups == 1:
            return VOTE_S
        peers = self.groups - 1 if self.groups < ROWS_FROM else 2.0 * math.sqrt(self.groups)
        moved_s = max(self.link_s, self.exchange_cpu_s / self.devices_per_group / self.exchange_threads)
        return moved_s + peers * PEER_S + self.groups * VOTE_S

    @property
    def state_bytes(self) -> float:
        return STATE_BYTES * self.params

    @property
    def heal_s(self) -> float:
        """How long a joiner fetches the state, by its links and its cores."""
        by_cores_s = self.state_bytes / 1e9 / HEAL_GB_PER_S / self.devices_per_group
        return max(self.state_bytes / self.group_bytes_per_s, by_cores_s)

    @property
    def back_s(self) -> float:
        """From a group's failure until it takes part again."""
        return self.detect_s + self.return_s + self.heal_s

    def scaled(self, **factors: float) -> "Job":
        """Return the job with some of its numbers multiplied."""
        changes = {name: getattr(self, name) * factor for name, factor in factors.items()}
        whole = ("groups", "devices_per_group", "shards_per_group", "inner_steps", "bits")
        return replace(
            self,
            **{name: max(1, round(value)) if name in whole else value for name, value in changes.items()},
        )


@dataclass(frozen=True, slots=True)
class Need:
    """One need of a group."""

    name: str
    value: float
    unit: str
    why: str


def needs(job: Job) -> tuple[Need, ...]:
    """Return what each group of a job needs."""
    gb = 1e9
    steps_healed = math.ceil(job.heal_s / (job.round_s + job.exchange_s)) + 1
    fair_s = FAIR_SHARE * job.step_s
    return (
        Need(
            "moved each way a step", job.moved_bytes / job.inner_steps / gb, "GB", "2 x payload x (n - 1) / n"
        ),
        Need("exchange", job.exchange_s, "s", "links, or four threads a rank; peers; votes"),
        Need(
            "processor a step",
            job.exchange_cpu_s / job.inner_steps,
            "CPU s",
            "0.6 s for each GB moved each way",
        ),
        Need("link for 10 % of a step", _link_for(job, fair_s * job.inner_steps), "Gbit/s", "of each node"),
        Need(
            "inner steps for 10 %",
            max(1.0, math.ceil(job.exchange_s / fair_s)),
            "",
            "where DiLoCo begins to pay",
        ),
        Need("state", job.state_bytes / gb, "GB", "parameters and two moments, float32"),
        Need(
            "state of a device", job.state_bytes / job.devices_per_group / gb, "GB", "sharded over the group"
        ),
        Need("heal", job.heal_s, "s", "links, or 3 GB/s a core; the others train on"),
        Need(
            "host memory, donor",
            job.state_bytes / max(1, job.groups - 1) / gb,
            "GB",
            "its stripe; all if alone",
        ),
        Need(
            "host memory, log",
            steps_healed * job.payload_bytes / gb,
            "GB",
            f"means of {steps_healed} exchanges",
        ),
        Need("host memory, joiner", job.state_bytes / gb, "GB", "receives the whole state"),
        Need("disk", CHECKPOINTS_KEPT * job.state_bytes / gb, "GB", "three checkpoints, once a job"),
    )


def _link_for(job: Job, seconds: float) -> float:
    """Return the Gbit/s of a node's link with which an exchange takes this time."""
    return job.moved_bytes * 8 / 1e9 / job.nodes_per_group / seconds
