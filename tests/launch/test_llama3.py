"""`jaxft launch` over the Llama 3 example: groups of two processes, FSDP x TP, and groups that lose a device."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import patience
from tests.launch.launches import IMPATIENT, Launch, launch

STEPS = 40
LADDER_STEPS = 400
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


def test_a_group_that_has_lost_a_device_trains_on_the_others(tmp_path: Path) -> None:
    """And again on all of them, once they work. The program takes what devices there are, and does nothing for it."""
    working = tmp_path / "working"
    working.write_text("0 1 2 3")
    words = ("--groups", "2", "--rungs", "2,1", "--probe", f"cat {working}")
    program = (
        *(sys.executable, "-m", "examples.llama3.train", "--steps", str(LADDER_STEPS), "--shards", "6"),
        *("--digest-at-end", "--events", "{folder}/{group}.0.jsonl"),
        *("--compilation-cache", "{folder}/../compiled", *JOB),
    )

    def until_both_train(life: int) -> None:
        def both() -> bool:
            started = [one["t"] for one in running.events("group_started") if one["group"] == "group-1"]
            steps = events(running, "group-0", 0, "step")[-1:]
            own = events(running, "group-1", 0, "step")[-1:]
            assert running.process.poll() is None, running.text()
            return len(started) == life + 1 and bool(
                steps and own and len(steps[0]["members"]) == 2 and own[0]["t"] > started[life]
            )

        patience.until(both, f"life {life} of group-1 to train", limit_s=200.0, context=running.text)

    with launch(tmp_path / "job", *words, program=program, module=IMPATIENT, JAX_PLATFORMS="cpu") as running:
        until_both_train(0)
        working.write_text("0 1 2")
        [started] = [one for one in running.events("group_started") if one["group"] == "group-1"]
        os.kill(started["pids"][0], signal.SIGKILL)
        until_both_train(1)
        working.write_text("0 1 2 3")
        until_both_train(2)
        assert running.status() == 0, running.text()
        lives = [one["devices"] for one in running.events("group_started") if one["group"] == "group-1"]
        assert lives == [[2, 3], [2], [2, 3]]
        digests = [events(running, f"group-{number}", 0, "finished")[0]["digest"] for number in range(2)]
        assert digests[0] == digests[1]
        steps = [event["step"] for event in events(running, "group-0", 0, "step")]
        assert steps == list(range(1, LADDER_STEPS + 1))
