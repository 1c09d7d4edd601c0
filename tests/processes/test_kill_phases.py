"""SIGKILL at each phase of a step, on real processes: nothing is lost, and the run ends in the same bits."""

from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 60
KILLED_AT = 5
# The survivors compute this step once the victim has been started again, and the second once it is back.
GATE = 10
LAST_GATE = 45
END_GATE = 55  # of a test with two victims: the second comes back before this step
GROUPS = ("group-0", "group-1", "group-2")


@pytest.fixture
def undisturbed() -> str:
    return digest_alone(STEPS)


def start_all(here: Cluster, gates: tuple[str, ...], victim: str, die: str) -> dict[str, Worker]:
    here.start_coordinator()
    return here.start_together(
        GROUPS, lambda group: ("--steps", str(STEPS), *gates, *(("--die", die) if group == victim else ()))
    )


def gates_in(folder: Path) -> tuple[Path, Path, tuple[str, ...]]:
    first, last = folder / "victim-started", folder / "victim-back"
    return first, last, ("--gate", f"{GATE}:{first}", "--gate", f"{LAST_GATE}:{last}")


def open_last_gate(
    here: Cluster, gate: Path, back: Worker, survivors: list[Worker], step: int = LAST_GATE
) -> None:
    """Let the survivors past the last gate once the victim is in, or waits for the boundary that the gate holds."""

    def in_or_held() -> bool:
        contributes = any(event["shards"] for event in back.steps())
        return contributes or all(worker.step >= step for worker in survivors)

    here.until(in_or_held, "the victim to contribute, or the survivors to reach the last gate")
    gate.touch()


def is_alive(worker: Worker) -> bool:
    return worker.process.poll() is None


def assert_same_run(workers: list[Worker], undisturbed: str) -> None:
    assert {worker.digest for worker in workers} == {undisturbed}
    losses: dict[int, float] = {}
    for worker in workers:
        for event in worker.steps():
            assert losses.setdefault(event["step"], event["loss"]) == event["loss"]


def assert_no_step_lost(survivors: list[Worker]) -> None:
    for worker in survivors:
        steps = [event["step"] for event in worker.steps()]
        assert steps == list(range(1, STEPS + 1))
        for event in worker.steps():
            assert len(set(event["shards"])) == len(event["shards"]), f"computed twice: {event}"
    for events in zip(*(worker.steps() for worker in survivors), strict=True):
        shards = [shard for event in events for shard in event["shards"]]
        assert len(set(shards)) == len(shards), f"two survivors computed one shard: {events}"


@pytest.mark.parametrize("victim", [pytest.param("group-0", marks=pytest.mark.storm), "group-1"])
@pytest.mark.parametrize("phase", ["compute", "exchange", "vote", "apply"])
def test_a_kill_in_a_step_changes_nothing(phase: str, victim: str, undisturbed: str, tmp_path: Path) -> None:
    first, last, gates = gates_in(tmp_path)
    with cluster(tmp_path) as here:
        workers = start_all(here, gates, victim, f"{phase} step {KILLED_AT}")
        here.until_dead(workers[victim])
        back = here.start(victim, "--steps", str(STEPS), *gates)
        here.until(lambda: back.logged("heals to step"), f"{victim} to heal")
        first.touch()
        survivors = [worker for group, worker in workers.items() if group != victim]
        open_last_gate(here, last, back, survivors)
        here.until_finished(back, *survivors)
        assert_same_run([back, *survivors], undisturbed)
        assert_no_step_lost(survivors)
        assert all(event["step"] <= KILLED_AT for event in workers[victim].steps())


def test_a_joiner_killed_while_it_heals_changes_nothing(undisturbed: str, tmp_path: Path) -> None:
    first, last, gates = gates_in(tmp_path)
    with cluster(tmp_path) as here:
        workers = start_all(here, gates, "group-1", f"compute step {KILLED_AT}")
        here.until_dead(workers["group-1"])
        for phase in ("heals to step", "rehearse step"):
            joiner = here.start("group-1", "--steps", str(STEPS), *gates, "--die", phase)
            here.until_dead(joiner)
        joiner = here.start("group-1", "--steps", str(STEPS), *gates, "--die", "replay step")
        here.until(lambda: joiner.logged("heals to step"), "the joiner to heal")
        first.touch()
        here.until_dead(joiner)
        back = here.start("group-1", "--steps", str(STEPS), *gates)
        survivors = [workers["group-0"], workers["group-2"]]
        here.until(lambda: back.logged("heals to step"), "group-1 to heal")
        open_last_gate(here, last, back, survivors)
        here.until_finished(back, *survivors)
        assert_same_run([back, *survivors], undisturbed)
        assert_no_step_lost(survivors)


def test_a_kill_as_connections_stay_for_a_joiner_changes_nothing(undisturbed: str, tmp_path: Path) -> None:
    first, last, gates = gates_in(tmp_path)
    end = tmp_path / "end"
    gates = (*gates, "--gate", f"{END_GATE}:{end}")
    dies = {"group-1": "1 of 2 connections kept", "group-2": f"compute step {KILLED_AT}"}
    with cluster(tmp_path) as here:
        here.start_coordinator()
        workers = here.start_together(
            GROUPS,
            lambda group: ("--steps", str(STEPS), *gates, *(("--die", dies[group]) if group in dies else ())),
        )
        here.until_dead(workers["group-2"])
        joiner = here.start("group-2", "--steps", str(STEPS), *gates, "--die", "not at all")
        here.until(lambda: joiner.logged("heals to step"), "group-2 to heal")
        first.touch()
        # It enters before the step that the last gate holds, or after it.
        stands_by = f"wait step {LAST_GATE}"
        here.until(
            lambda: joiner.logged(stands_by) or not is_alive(workers["group-1"]), "group-2 to stand by"
        )
        last.touch()
        here.until_dead(workers["group-1"])
        back = here.start("group-1", "--steps", str(STEPS), *gates)
        here.until(lambda: back.logged("heals to step"), "group-1 to heal")
        open_last_gate(here, end, back, [workers["group-0"]], END_GATE)
        here.until_finished(back, joiner, workers["group-0"])
        assert_same_run([back, joiner, workers["group-0"]], undisturbed)
        assert_no_step_lost([workers["group-0"]])
