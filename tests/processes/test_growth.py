"""A group that outlives many others, and their coordinator, take no more of the machine for each of them."""

from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(600)]

WARM_UPS = 6  # memory for reuse is taken in these
JOINS = 24
WIDTH = 50_000  # gradients of 3.6 MB, and a state of three times as much
# Slow joins take more of the up to 16 blocks that are kept for reuse, 55 MiB; the means of a step for each are 82.
GROWN_MIB = 60
MORE_HANDLES = JOINS // 4  # XLA and gRPC start a thread late now and then


def mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def handles(pid: int) -> int:
    """How many descriptors and threads a process has."""
    return sum(len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("fd", "task"))


def joined(here: Cluster, watched: Worker, number: int) -> None:
    """Let a group join, take part, and die."""
    flags = ("--steps", str(1 << 30), "--width", str(WIDTH))
    joiner = here.start("group-1", *flags)
    here.until(lambda: any(step["shards"] for step in joiner.steps()), f"join {number} to contribute")
    joiner.process.kill()
    here.until_dead(joiner)
    here.until_lost("group-1")
    died_at = watched.step
    here.until(lambda: watched.step > died_at + 2, f"steps after death {number}")


def test_joins_and_deaths_leave_nothing_behind(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        assert here.coordinator is not None
        watched = here.start("group-0", "--steps", str(1 << 30), "--width", str(WIDTH))
        here.until(lambda: watched.step > 2, "the first steps")
        for number in range(WARM_UPS):
            joined(here, watched, number)
        pids = {"group-0": watched.process.pid, "coordinator": here.coordinator.pid}
        before = {name: (handles(pid), mib(pid)) for name, pid in pids.items()}
        for number in range(WARM_UPS, WARM_UPS + JOINS):
            joined(here, watched, number)
        for name, pid in pids.items():
            held, used_mib = before[name]
            assert handles(pid) < held + MORE_HANDLES, name
            assert mib(pid) < used_mib + GROWN_MIB, name
