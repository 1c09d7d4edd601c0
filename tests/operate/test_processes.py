"""The HTTP port of a real coordinator, with real groups, while a group is killed."""

import json
import resource
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.clusters import Cluster, cluster
from tests.operate import port
from tests.operate.port import Port

pytestmark = pytest.mark.processes
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "events.schema.json").read_text())
# Made once: `jsonschema.validate` checks the schema itself each time.
VALID = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
GROUPS = ("group-0", "group-1", "group-2")


def events(path: Path) -> list[dict[str, Any]]:
    """The events whose lines are complete."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def group(web: Port, name: str) -> Any:
    return next((each for each in web.job()["group_list"] if each["group"] == name), None)


def train(here: Cluster, gate: Path, *more: str) -> dict[str, Any]:
    flags = ("--steps", "60", "--gate", f"20:{gate}", "--show", *more)
    return here.start_together(GROUPS, lambda _name: flags)


def lines(log: str) -> list[str]:
    """The lines of a log without repeated lines about a wait: a slow machine has more of them."""
    return [line for line in log.splitlines() if "waiting" not in line]


@pytest.mark.long
def test_a_kill_is_seen_in_metrics_api_events_and_few_lines(tmp_path: Path) -> None:
    gate, written = tmp_path / "gate", tmp_path / "events.jsonl"
    own = ("--group-events", str(tmp_path / "{group}.events"))
    with cluster(tmp_path) as here:
        web = port.start(here, "--events", str(written))
        assert web.get("/healthz") == (200, "ok\n")
        workers = train(here, gate, *own)
        here.until(lambda: web.metric("jaxft_step", job="toy") == 20, "step 20")
        assert web.metric("jaxft_quorum_members", job="toy") == 3
        here.until(lambda: web.job()["values"].get("loss", 0) > 0, "the loss of the training")
        survivors = [workers["group-0"], workers["group-2"]]
        quiet = [
            len(lines(text)) for text in (here.coordinator_log.read_text(), *(w.log() for w in survivors))
        ]
        workers["group-1"].process.kill()
        here.until(lambda: group(web, "group-1")["state"] == "gone", "the loss to be seen")
        assert "connection closed" in group(web, "group-1")["reason"]
        assert web.metric("jaxft_quorum_members", job="toy") == 2
        back = here.start("group-1", "--steps", "60", "--gate", f"20:{gate}", "--show", *own)
        here.until(lambda: group(web, "group-1")["state"] == "ready", "group-1 to heal")
        gate.touch()
        here.until(lambda: web.job()["state"] == "finished", "the end")
        here.until_finished(back, workers["group-0"], workers["group-2"])
        answer = web.job()
        families = {family.name: family for family in text_string_to_metric_families(web.get("/metrics")[1])}
        here.until(lambda: events(written)[-1]["event"] == "job_finished", "the last event to be written")
        logs = [lines(text) for text in (here.coordinator_log.read_text(), *(w.log() for w in survivors))]
    check_events_of_groups(tmp_path)
    coordinator, *groups = (log[count:] for log, count in zip(logs, quiet, strict=True))
    # For one death, heal and return: a storm costs no more lines for each fault. At the end each group leaves, and
    # slower groups continue without it: two lines of the coordinator, and a line of each group.
    assert len(coordinator) <= 5 + 2 * len(GROUPS), coordinator
    assert max(map(len, groups)) <= 2 + len(GROUPS), groups
    assert answer["step"] == 60
    assert answer["steps_committed"] == 60
    assert answer["steps_retried"] == {"lost a member": 1}
    assert answer["departures"]["lost"] == 1
    assert 0 < answer["goodput"] <= 1
    assert any(point.get("loss", 0) > 0 for point in answer["points"])
    assert answer["goodput_seconds"] > 0
    assert answer["badput_seconds"]["PROGRAM_STARTUP"] > 0
    kinds = [event["event"] for event in events(written)]
    for kind in ("leads", "group_present", "job_founded", "quorum_changed", "group_lost", "step_retried"):
        assert kind in kinds
    for kind in ("heal_began", "group_ready", "group_left", "job_finished"):
        assert kind in kinds[kinds.index("group_lost") :]
    assert [event["event"] for event in answer["events"]] == [
        event["event"] for event in events(written) if event.get("job") == "toy"
    ]
    for event in events(written):
        VALID.validate(event)
    heals = next(each for each in families["jaxft_heal_seconds"].samples if each.name.endswith("_count"))
    assert heals.value == 1
    exchanges = [each for each in families["jaxft_exchange_seconds"].samples if each.name.endswith("_count")]
    # Two groups took 60 steps, and group-1 most of them, in two lives. A group sends the steps after its last
    # heartbeat when it leaves.
    assert 120 <= exchanges[0].value <= 181
    assert families["jaxft_heal_bytes"].samples[0].value > 1000


def test_a_job_whose_decisions_cannot_be_written_is_shown_to_wait(tmp_path: Path) -> None:
    """No file of the coordinator may become larger, as on a full disk."""
    state = tmp_path / "state"
    with cluster(tmp_path) as here:
        web = port.start(here, "--state", str(state))
        here.start("group-0", "--steps", "1000000")
        here.until(lambda: (web.metric("jaxft_step", job="toy") or 0) > 20, "step 20")
        assert here.coordinator is not None
        pid = here.coordinator.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        full_bytes = max(path.stat().st_size for path in state.iterdir())
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (full_bytes, before[1]))
        here.until(lambda: web.job()["waiting"], "the job to be shown to wait")
        blocked = web.job()
        listed = web.json("/api/v1/jobs")["jobs"][0]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        here.until(lambda: web.job()["step"] > blocked["step"] + 20, "the job to go on")
        here.until(lambda: web.job()["state"] == "training", "the job to be shown to train")
    assert blocked["waiting"].startswith("the store has not taken its last decision for ")
    assert blocked["state"] == listed["state"] == "waiting"
    assert listed["waiting"]


def check_events_of_groups(folder: Path) -> None:
    """They follow the schema, and tell of the kill: two lives of group-1, and every step of the others."""
    files = {name: events(folder / f"{name}.events") for name in GROUPS}
    for event in (event for file in files.values() for event in file):
        VALID.validate(event)
    for name in ("group-0", "group-2"):
        done = [event["step"] for event in files[name] if event["event"] == "step_done"]
        assert done == list(range(1, 61))
        changed = [event for event in files[name] if event["event"] == "members_changed"]
        assert [each["group"] for event in changed for each in event.get("left", [])] == ["group-1"]
    kinds = [event["event"] for event in files["group-1"]]
    assert kinds.count("life_began") == 2
    assert kinds.count("heal_done") == 1
    assert kinds.count("life_ended") == 1  # the first life was killed
    assert kinds[-1] == "life_ended"
