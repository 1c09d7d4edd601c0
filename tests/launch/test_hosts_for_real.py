"""Groups whose ranks are on several hosts, under `jaxft launch --hosts`, with a Manager: kill -9, and the same bits.

The hosts are loopback addresses of this machine, each with a launcher; the remote shell is one that stays here. The
coordinator is the launch's own, with a token.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from tests import patience
from tests.launch.test_hosts import HERE, children_of
from tests.launch.test_real import Training, ranks_of, training_ranks, undisturbed_ranks

GROUPS = ("group-0", "group-1")
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def pids_of(job: Training, part: str) -> list[int]:
    """The processes of the first life of a group on one host."""
    lines = (job.running.folder / part / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return next(event["pids"] for event in events if event["event"] == "group_started")


@pytest.mark.long
def test_a_rank_and_a_host_are_lost_and_the_bits_stay(tmp_path: Path) -> None:
    words = ("--hosts", ",".join(HOSTS), "--remote-shell", HERE, "--job", "toy")
    with training_ranks(tmp_path / "run", GROUPS, *words, nproc=1) as job:
        job.until_step(3, *ranks_of(GROUPS))
        # A rank on the second host of group-0: the launchers of both hosts start their ranks again.
        (pid,) = pids_of(job, "group-0@127.0.0.2")
        before = len(job.events("group-0.0"))
        os.kill(pid, signal.SIGKILL)
        for rank in range(2):
            until_back(job, f"group-0.{rank}", before)
        # All that runs on the first host of group-1, with the connection to it.
        before = len(job.events("group-1.1"))
        (shell,) = children_of(job.running.pids("group-1@127.0.0.3")[0])
        os.kill(shell, signal.SIGKILL)
        for rank in range(2):
            until_back(job, f"group-1.{rank}", before)
        job.hurry()
        assert job.running.status() == 0, job.running.text()
    assert job.digests(*ranks_of(GROUPS)) == {undisturbed_ranks(tmp_path)}
    assert {event["group"] for event in job.running.events("group_restarts")} == {"group-1@127.0.0.3"}


def until_back(job: Training, rank: str, before: int) -> None:
    """Wait until a rank that had told so many events has healed and taken part in a step."""
    patience.until(
        lambda: any(event.get("healed") is not None for event in job.events(rank)[before:]),
        f"{rank} to come back",
        context=job.running.text,
    )
