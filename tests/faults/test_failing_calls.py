"""A group whose system calls fail now and then, as the kernel may have them fail, trains on."""

import os
import sys
from pathlib import Path

import pytest

from tests import injection
from tests.clusters import WORKER, Worker, cluster, digest_alone, started_fresh

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not() or "it can"),
]

STEPS = 40
# In each thread: the first call of a kind that fails, and how many succeed before the next one does.
ERRORS = (
    "pipe2:error=EMFILE:when=2+3",
    "accept4:error=ECONNABORTED:when=1+2",
    "ppoll:error=EINTR:when=2+5",
    "recvmsg:error=EINTR:when=2+5",
    "sendmsg:error=EINTR:when=2+5",
    "sched_setaffinity:error=EPERM",
)


@pytest.mark.long
@pytest.mark.parametrize("group", ["group-0", "group-1"], ids=["who dials", "who is dialled"])
def test_a_group_whose_calls_fail_now_and_then_changes_nothing(tmp_path: Path, group: str) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        gate = tmp_path / "gate"
        flags = ("--steps", str(STEPS), "--gate", f"start:{gate}")
        stem = tmp_path / f"{group}-life-0"
        words = ("--group", group, "--coordinator", f"localhost:{here.port}", "--events", f"{stem}.jsonl")
        command = (*injection.failing(*ERRORS), sys.executable, str(WORKER), *words, *flags)
        disturbed = Worker(
            started_fresh(
                command, stem.with_suffix(".log"), JAX_PLATFORMS="cpu", PYTHONPATH=os.pathsep.join(sys.path)
            ),
            stem.with_suffix(".jsonl"),
            stem.with_suffix(".log"),
        )
        here.started.append(disturbed.process)
        other = here.start({"group-0": "group-1", "group-1": "group-0"}[group], *flags)
        for name in ("group-0", "group-1"):
            here.until(
                lambda name=name: f"{name} is present" in here.coordinator_log.read_text(), f"{name}'s Hello"
            )
        gate.touch()
        here.until_finished(disturbed, other)
        assert {disturbed.digest, other.digest} == {digest_alone(STEPS)}
        assert len(disturbed.steps()) == STEPS, "it was not evicted"
        assert "Traceback" not in disturbed.log()
