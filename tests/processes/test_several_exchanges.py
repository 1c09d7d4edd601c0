"""SIGKILL between the exchanges of one step, on real processes: one commit, and the same bits."""

from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone
from tests.processes.test_kill_phases import GROUPS, KILLED_AT, assert_same_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 20
# The survivors compute this step once the victim heals to it, and the second when they all are there.
GATE = 8
LAST_GATE = 12


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "phase", "overlap"),
    [
        ("sam", f"exchange step {KILLED_AT} stage 1", 1),
        pytest.param("sam", f"exchange step {KILLED_AT}", 1, marks=pytest.mark.storm),
        pytest.param("gan", f"vote step {KILLED_AT}", 1, marks=pytest.mark.storm),
        pytest.param("gan", f"exchange step {KILLED_AT} stage 1", 1, marks=pytest.mark.storm),
        pytest.param("clipped", f"exchange step {KILLED_AT} stage 1", 1, marks=pytest.mark.storm),
        ("quantised", f"exchange step {KILLED_AT} stage 1", 1),
        pytest.param("quantised", f"exchange step {KILLED_AT}", 1, marks=pytest.mark.storm),
        ("thrice", f"exchange step {KILLED_AT} stage 2", 1),
        ("rounds", f"exchange step {KILLED_AT} stage 2", 1),
        ("contrastive", f"exchange step {KILLED_AT} stage 1", 1),
        pytest.param("contrastive", f"exchange step {KILLED_AT} stage 2", 1, marks=pytest.mark.storm),
        ("", f"exchange step {KILLED_AT} stage 1", 3),
        pytest.param("", f"exchange step {KILLED_AT}", 3, marks=pytest.mark.storm),
        pytest.param("sam", f"exchange step {KILLED_AT} stage 1", 2, marks=pytest.mark.storm),
        pytest.param("sam", f"exchange step {KILLED_AT} stage 3", 2, marks=pytest.mark.storm),
    ],
)
def test_a_kill_between_two_exchanges_changes_nothing(
    model: str, phase: str, overlap: int, tmp_path: Path
) -> None:
    undisturbed = digest_alone(STEPS, "--model", model)  # without overlap
    first, last = tmp_path / "victim-started", tmp_path / "victim-back"
    flags = (
        *("--steps", str(STEPS), "--model", model, "--overlap", str(overlap)),
        *("--gate", f"{GATE}:{first}", "--gate", f"{LAST_GATE}:{last}"),
    )
    victim, *others = reversed(GROUPS)
    exchanges, begun = f"exchange step {KILLED_AT}", tmp_path / "others-have-begun"
    own = {victim: ("--gate", f"{KILLED_AT}:{begun}", "--die", phase)}
    tells_all = ("--die", f"compute step {STEPS}")  # it never comes so far
    with cluster(tmp_path) as here:
        here.start_coordinator()
        workers = here.start_together(GROUPS, lambda group: (*flags, *own.get(group, tells_all)))
        for name in others:
            here.until(
                lambda name=name: workers[name].logged(exchanges), f"{name} to be in the first exchange"
            )
        begun.touch()
        here.until_dead(workers[victim])
        back = here.start(victim, *flags)
        here.until(lambda: back.logged("heals to step"), f"{victim} to heal")
        first.touch()
        survivors = [workers[name] for name in others]
        here.until(
            lambda: all(worker.step >= LAST_GATE for worker in survivors),
            "the survivors to reach the last gate",
        )
        last.touch()
        here.until_finished(back, *survivors)
        assert_same_run([back, *survivors], undisturbed)
        for worker in survivors:
            assert [event["step"] for event in worker.steps()] == list(range(1, STEPS + 1))
            # A kill before its vote may leave the others with all means, and the step counts at once.
            again = any(event["attempts"] > 1 for event in worker.steps())
            assert again or "vote" in phase, "the step was tried again"
        assert any(event["healed"] for event in back.steps()), "it has replayed steps"
