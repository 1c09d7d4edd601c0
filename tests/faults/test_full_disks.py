"""A disk that is full, for a while: under the checkpoints, and under the coordinator's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import jaxft
from tests import patience
from tests.clusters import digest_alone
from tests.faults.trial import FAILURE_S, STEPS, figures, slack_s, trial
from tests.processes.worker import init

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

DISK_BYTES = 48 << 20
WIDTH = 25_000  # a state of 5 MB, which does not compress
BLOCK = bytes(1 << 16)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk, used by this test alone."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    if patience.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield folder
    finally:
        patience.run(("umount", "--lazy", str(folder)), check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a disk to the last byte, and make room again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(BLOCK) == len(BLOCK):
                pass
        except OSError:
            pass
        yield
    filler.unlink()


@pytest.mark.storm
def test_checkpoints_wait_for_room_and_training_does_not(tmp_path: Path, disk: Path) -> None:
    width = ("--width", str(WIDTH))
    saved = jaxft.Checkpoints(disk / "checkpoints")
    flags = (*width, "--checkpoints", str(disk / "checkpoints"), "--checkpoint-every", "8")
    with trial(tmp_path, *flags) as job:
        job.here.until(saved.steps, "the first checkpoint")
        with full(disk):
            kept = saved.steps()
            job.here.until(
                lambda: any("No space left on device" in worker.log() for worker in job.workers.values()),
                "a warning that the disk is full",
            )
            job.until_step("group-0", 3)
            assert saved.steps() == kept, "saved steps stay"
            fresh = init(WIDTH)
            found = saved.restore(fresh, job="toy")
            assert found is not None
            assert jaxft.digest(found.state) == digest_alone(found.step, *width)
        job.here.until(lambda: saved.steps() != kept, "the next checkpoint")
        job.finish(digest_alone(STEPS, *width))


@pytest.mark.storm
def test_the_coordinator_waits_for_room(tmp_path: Path, disk: Path, undisturbed: str) -> None:
    with trial(tmp_path, state=disk / "state") as job:
        with job.fault("coordinator") as heard, full(disk):
            job.here.until(lambda: "No space left" in job.here.coordinator_log.read_text(), "it to say so")
        figures.info("coordinator's disk full: stood still %.2f s", job.standstill_s(heard()))
        assert job.standstill_s(heard()) < heard().seconds + FAILURE_S + slack_s()
        job.finish(undisturbed)
