"""A bit that flips in one group's memory, on real processes: caught before it reaches the run, and repaired."""

from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 40
FLIPPED_AFTER = 12
# The others compute this step once the victim heals: without that they may end before it has dialled again.
GATE = 30
GROUPS = ("group-0", "group-1", "group-2")


@pytest.fixture
def undisturbed() -> str:
    return digest_alone(STEPS)


def start(
    here: Cluster, groups: tuple[str, ...], *flags: str, victim: str = "group-1", leaf: str
) -> dict[str, Worker]:
    here.start_coordinator()
    flip = ("--flip", f"{leaf}:{FLIPPED_AFTER}")
    gate = ("--gate", f"{GATE}:{here.folder / 'victim-heals'}")
    return here.start_together(
        groups, lambda group: ("--steps", str(STEPS), *gate, *flags, *(flip if group == victim else ()))
    )


def until_finished(here: Cluster, victim: Worker) -> None:
    here.until(lambda: victim.logged("] heals to step"), "the victim to heal")
    (here.folder / "victim-heals").touch()
    here.until_finished(*here.workers)


@pytest.mark.parametrize(
    ("leaf", "victim"),
    [
        pytest.param("params.out", "group-1", marks=pytest.mark.storm),
        ("params.hidden", "group-0"),
        ("mu.hidden", "group-2"),
        pytest.param("nu.out", "group-1", marks=pytest.mark.storm),
    ],
)
def test_the_odd_one_out_heals_and_the_run_keeps_its_bits(
    leaf: str, victim: str, undisturbed: str, tmp_path: Path
) -> None:
    with cluster(tmp_path) as here:
        workers = start(here, GROUPS, "--digest-every", "1", leaf=leaf, victim=victim)
        until_finished(here, workers[victim])
        assert {worker.digest for worker in here.workers} == {undisturbed}
        log = here.coordinator_log.read_text()
        # Within the very step that would have used the flipped bit.
        assert f"evicts {victim}: its state is not the majority's" in log
        assert f"quorum 2 from step {FLIPPED_AFTER}:" in log


@pytest.mark.long
def test_within_one_period(tmp_path: Path) -> None:
    """Compared every 8 steps: steps in between may have used the bit, and all groups agree again."""
    with cluster(tmp_path) as here:
        workers = start(here, GROUPS, "--digest-every", "8", leaf="params.hidden")
        until_finished(here, workers["group-1"])
        assert len({worker.digest for worker in here.workers}) == 1
        assert "quorum 2 from step 16:" in here.coordinator_log.read_text()


def test_two_that_differ_stop_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        start(here, GROUPS[:2], "--digest-every", "1", leaf="nu.hidden")
        for worker in here.workers:
            here.until(lambda worker=worker: worker.process.poll() is not None, "both to stop")
            assert worker.process.returncode == 1
            assert worker.logged("jaxft.Diverged")
            assert worker.logged(
                f"hold different states {FLIPPED_AFTER}, and no majority shows which is right"
            )
            assert worker.steps()[-1]["step"] == FLIPPED_AFTER
