"""A group of several processes."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxft_launch.processes._ranks import free_ports
from tests.clusters import WORKER, Cluster, Worker, cluster

AGAIN = 75


@dataclass
class Group:
    """The processes of one life of a group."""

    name: str
    ranks: list[Worker]

    @property
    def leader(self) -> Worker:
        return self.ranks[0]


def assert_ends_with_its_group(worker: Worker, rank: int) -> None:
    """Check the status of a rank whose group has lost another rank.

    Where rank 0 and the service of `jax.distributed` in it are gone, JAX aborts the process if it is quicker than we.
    """
    allowed = (AGAIN, -signal.SIGABRT) if rank else (AGAIN,)
    assert worker.process.returncode in allowed, worker.log()


def start_ranks(
    here: Cluster,
    name: str,
    ranks: int,
    flags: Sequence[str],
    *,
    own: Mapping[int, Sequence[str]] | None = None,
    devices: int = 1,
    **start: Any,
) -> Group:
    """Start a group with this many ranks and devices a rank. `own`: more flags, by rank; `start`: see Cluster."""
    port = free_ports(1)[0]
    return Group(
        name,
        [
            here.start(
                name,
                *("--world", f"{rank}:{ranks}:{port}:{devices}", *flags),
                *(own or {}).get(rank, ()),
                **start,
            )
            for rank in range(ranks)
        ],
    )


def digest_of(folder: Path, devices: int, *flags: str, script: Path = WORKER) -> str:
    """The digest of the same training by one process with as many devices as a group's ranks, without a job.

    Two processes would give the same bits, and wait for each other in busy loops of gloo.
    """
    with cluster(folder) as here:
        alone = start_ranks(here, "alone", 1, flags, devices=devices, coordinated=False, script=script)
        here.until_finished(*alone.ranks)
        return alone.leader.events()[-1]["digest"]
