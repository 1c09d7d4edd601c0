"""Groups are drained, and a job is paused, under training: no step is tried again, and the bits stay."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jaxft_protocol import credentials

from tests import patience
from tests.clusters import ROOT, Cluster, Worker, cluster, digest_alone
from tests.operate import port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 24
TERMINATED_AT, DRAINED_AT, PAUSED_AT = 6, 12, 18
GROUPS = ("group-0", "group-1", "group-2", "spare")


def first_step_with_shards(worker: Worker, after: int = 0) -> int:
    """The first step that a group has computed shards for; step s leads to state s + 1."""
    return next(event["step"] - 1 for event in worker.steps() if event["shards"] and event["step"] > after)


def until_at(here: Cluster, web: port.Port, step: int, *groups: str) -> None:
    """Wait until the coordinator knows that these groups hold state `step`, and so are in that step, at its gate."""
    for name in groups:
        here.until(lambda name=name: web.group(name).get("step") == step, f"{name} in step {step}")


def drain_by_command(web: port.Port, token: str, group: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "jaxft_launch", "drain", group, "--job", "toy", "--http", web.url]
    environment = {**os.environ, "JAXFT_TOKEN": token, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.long
def test_drains_and_a_pause_cost_no_step_and_no_bit(tmp_path: Path) -> None:
    """SIGTERM to one group, whose place a spare takes; `jaxft drain` of another; a pause of the rest."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef0123456789abcdef")
    token = credentials.job_key(credentials.read_secret(secret), "toy").hex()
    gates = {step: tmp_path / f"gate-{step}" for step in (TERMINATED_AT, DRAINED_AT, PAUSED_AT)}
    flags = ("--steps", str(STEPS), "--token", token, "--shards", "6")
    flags += tuple(word for step, file in gates.items() for word in ("--gate", f"{step}:{file}"))
    with cluster(tmp_path) as here:
        web = port.start(here, "--token-file", str(secret), "--http-actions")
        workers = here.start_together(GROUPS, lambda name: (*flags, *(("--spare",) * (name == "spare"))))

        until_at(here, web, TERMINATED_AT, *GROUPS)
        os.kill(workers["group-1"].process.pid, signal.SIGTERM)
        here.until(lambda: web.group("group-1")["draining"], "the coordinator to know of the drain")
        # Under Slurm the launcher passes on what Slurm has sent already.
        os.kill(workers["group-1"].process.pid, signal.SIGTERM)
        gates[TERMINATED_AT].touch()
        here.until_finished(workers["group-1"])  # status 0

        until_at(here, web, DRAINED_AT, "group-0", "group-2", "spare")
        with drain_by_command(web, token, "group-2") as command:
            here.until(lambda: web.group("group-2")["draining"], "the coordinator to know of the drain")
            gates[DRAINED_AT].touch()
            here.until_finished(workers["group-2"])
            assert "group 'group-2' takes part no more" in patience.communicate(command)[0]

        until_at(here, web, PAUSED_AT, "group-0", "spare")
        assert web.post("/api/v1/jobs/toy/pause", b"", token)[0] == 200
        gates[PAUSED_AT].touch()
        here.until(lambda: "an operator has paused the job" in web.job()["waiting"], "the job to stand")
        assert (web.job()["step"], web.job()["members"]) == (PAUSED_AT + 1, 0)
        assert web.post("/api/v1/jobs/toy/resume", b'{"reason": "done"}', token)[0] == 200

        here.until_finished(workers["group-0"], workers["spare"])
        job = web.job()
    events = [event["event"] for event in job["events"]]
    assert job["steps_retried"] == {}, json.dumps(job["events"])
    assert "group_evicted" not in events
    assert "group_lost" not in events
    at = events.index("job_unpaused")
    assert "job_waiting" in events[at - 2 : at]
    assert events[at + 1] == "quorum_changed"
    # The drained group contributed to the step in which it was asked, and the spare to the next one.
    assert workers["group-1"].steps()[-1]["step"] == TERMINATED_AT + 1
    assert first_step_with_shards(workers["spare"]) == TERMINATED_AT + 1
    assert workers["group-2"].steps()[-1]["step"] == DRAINED_AT + 1
    for worker in workers.values():
        assert all(event["attempts"] <= 1 for event in worker.steps()), worker.steps()
    assert {workers["group-0"].digest, workers["spare"].digest} == {digest_alone(STEPS, "--shards", "6")}


def test_a_spare_that_comes_too_late_for_a_drain_is_not_held_up_by_the_drained_group(tmp_path: Path) -> None:
    """It is stopped while the group goes, and is behind then: the group that is left has all that it lacks."""
    hurry = tmp_path / "hurry"
    # Means of several chunks, so that both donors are asked for some.
    flags = ("--steps", "200", "--pace", "0.05", "--hurry", str(hurry), "--width", str(1 << 15))
    with cluster(tmp_path) as here:
        here.start_coordinator("--heartbeat-timeout-ms", "60000")  # it is not taken for dead
        workers = here.start_together(
            ("group-0", "group-1", "spare"), lambda name: (*flags, *(("--spare",) * (name == "spare")))
        )
        left, drained, spare = workers.values()
        here.until(lambda: spare.step >= 3, "the spare to follow")
        os.kill(spare.process.pid, signal.SIGSTOP)
        behind = left.step + 3
        here.until(lambda: left.step >= behind, "the others to go on without it")
        os.kill(drained.process.pid, signal.SIGTERM)
        here.until(lambda: left.steps()[-1]["members"] == ["group-0"], "the group to be left alone")
        os.kill(spare.process.pid, signal.SIGCONT)
        here.until(lambda: any(event["shards"] for event in spare.steps()), "the spare to contribute")
        here.until_finished(drained)
        hurry.touch()
        here.until_finished(left, spare)
    # A second for each step that it lacked, and the others would have more than they keep for it.
    assert not spare.logged("heal failed"), spare.log()
    assert left.digest == spare.digest
