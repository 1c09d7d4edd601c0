"""The coordinator is killed at each phase of a step, and started again with its records."""

import re
from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 40
KILLED_AT = 5
LAST_GATE = 30
GROUPS = ("group-0", "group-1", "group-2")


@pytest.fixture
def undisturbed() -> str:
    return digest_alone(STEPS)


def start_coordinator(here: Cluster) -> None:
    """Start a coordinator that waits for all groups to come back, however slowly they dial."""
    patient = ("--heartbeat-timeout-ms", "15000")
    here.start_coordinator("--state", str(here.folder / "state"), *patient, port=here.port)


def start_again(here: Cluster) -> None:
    assert here.coordinator is not None
    dead = here.coordinator
    here.until(lambda: dead.poll() is not None, "the coordinator to be killed")
    start_coordinator(here)


def assert_nothing_lost(workers: list[Worker], undisturbed: str) -> None:
    assert {worker.digest for worker in workers} == {undisturbed}
    for worker in workers:
        steps = [event["step"] for event in worker.steps()]
        assert steps == sorted(set(steps)), "a step was taken twice"
        ids = [event["quorum_id"] for event in worker.steps()]
        assert ids == sorted(ids), "quorum ids grow over the coordinator's death"


def let_in(here: Cluster, group: str, back: Worker, survivors: list[Worker], gate: Path) -> None:
    """Open the last gate once the coordinator knows of the joiner.

    It heals, or stands by if it had just caught up; and comes in at a boundary before the gate, or after it if it was
    slow to dial.
    """

    def in_or_held() -> bool:
        if any(event["shards"] for event in back.steps()):
            return True
        known = re.search(rf"{group} (heals to|stands by at) step", here.coordinator_log.read_text())
        return known is not None and all(worker.step >= LAST_GATE for worker in survivors)

    here.until(in_or_held, "the joiner to take part, or to heal while survivors are at the last gate")
    gate.touch()


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("compute", marks=pytest.mark.storm),
        pytest.param("exchange", marks=pytest.mark.storm),
        "vote",
        "apply",
    ],
)
def test_killed_in_a_step_it_goes_on_where_it_stood(phase: str, undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        start_coordinator(here)
        assert here.coordinator is not None
        murder = ("--murder", f"{here.coordinator.pid}:{phase} step {KILLED_AT}")
        workers = here.start_together(
            GROUPS, lambda group: ("--steps", str(STEPS), *(murder if group == "group-1" else ()))
        )
        start_again(here)
        here.until_finished(*workers.values())
        assert_nothing_lost(list(workers.values()), undisturbed)
        # All came back together: no group went on alone, and nothing was computed twice.
        for worker in workers.values():
            for event in worker.steps():
                assert event["members"] == list(GROUPS)
                assert len(set(event["shards"])) == len(event["shards"])
        assert "remembered: step" in here.coordinator_log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("phase", ["heals to step", pytest.param("replay step", marks=pytest.mark.storm)])
def test_killed_during_a_heal_it_lets_the_joiner_come_in(
    phase: str, undisturbed: str, tmp_path: Path
) -> None:
    first, last = tmp_path / "joiner-started", tmp_path / "joiner-back"
    gates = ("--steps", str(STEPS), "--gate", f"10:{first}", "--gate", f"{LAST_GATE}:{last}")
    with cluster(tmp_path) as here:
        start_coordinator(here)
        die = ("--die", f"compute step {KILLED_AT}")
        workers = here.start_together(GROUPS, lambda group: (*gates, *(die if group == "group-1" else ())))
        here.until_dead(workers["group-1"])
        assert here.coordinator is not None
        back = here.start("group-1", *gates, "--murder", f"{here.coordinator.pid}:{phase}")
        here.until(lambda: back.logged("heals to step"), "the joiner to heal")
        first.touch()
        start_again(here)
        survivors = [workers["group-0"], workers["group-2"]]

        let_in(here, "group-1", back, survivors, last)
        here.until_finished(back, *survivors)
        assert_nothing_lost([back, *survivors], undisturbed)
