"""`jaxft launch` over the Llama 3 example: groups of two processes, FSDP x TP."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import patience
from tests.launch.launches import Launch, launch

STEPS = 40
KILLED_AT = 3
TRAIN = (
    *(sys.executable, "-m", "examples.llama3.train", "--size", "debug", "--fsdp", "2", "--tp", "2"),
    *("--cpu-devices", "2", "--steps", str(STEPS), "--shards", "4", "--digest-at-end"),
    *("--events", "{folder}/{group}.{rank}.jsonl", "--compilation-cache", "{folder}/../compiled"),
)
JOB = ("--coordinator", "{coordinator}", "--group", "{group}")
pytestmark = [pytest.mark.storm, pytest.mark.processes, pytest.mark.timeout(600)]


def events(running: Launch, group: str, rank: int, name: str) -> list[dict[str, Any]]:
    file = running.folder / f"{group}.{rank}.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def undisturbed(folder: Path) -> str:
    """The digest of the same training by one group of as many processes, without a job."""
    with launch(folder, "--nproc", "2", program=TRAIN, JAX_PLATFORMS="cpu") as running:
        assert running.status() == 0, running.text()
        (digest,) = {events(running, "group-0", rank, "finished")[0]["digest"] for rank in range(2)}
    return digest


@pytest.mark.parametrize("overlap", [1, 2])
def test_a_killed_rank_changes_no_bit_of_a_model_that_is_sharded_over_two_processes(
    overlap: int, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "alone")  # without overlap
    words = ("--groups", "2", "--nproc", "2")
    with launch(
        tmp_path / "job", *words, program=(*TRAIN, *JOB, "--overlap", str(overlap)), JAX_PLATFORMS="cpu"
    ) as running:
        patience.until(
            lambda: all(
                any(event["step"] >= KILLED_AT and len(event["members"]) == 2 for event in steps)
                for steps in (events(running, f"group-{number}", 0, "step") for number in range(2))
            ),
            "both groups to take part",
            limit_s=300.0,
            context=running.text,
        )
        started = next(event for event in running.events("group_started") if event["group"] == "group-1")
        os.kill(started["pids"][1], signal.SIGKILL)
        assert running.status() == 0, running.text()
        ended = running.events("rank_ended")[0]
        assert (ended["group"], ended["rank"], ended["ending"]) == ("group-1", 1, "killed")
        for rank in range(2):
            steps = [event["step"] for event in events(running, "group-0", rank, "step")]
            assert steps == list(range(1, STEPS + 1))
            assert [event["digest"] for event in events(running, "group-0", rank, "finished")] == [expected]
            # Its second life may find that the job is over.
            assert {event["digest"] for event in events(running, "group-1", rank, "finished")} <= {expected}
        assert [
            event["life"] for event in running.events("group_started") if event["group"] == "group-1"
        ] == [0, 1]
