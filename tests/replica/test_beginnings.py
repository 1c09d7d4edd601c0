"""With which state a job began is noted, and a group that comes with it reports it: in a real job of one group."""

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._checkpoints import _beginning
from jaxft._checkpoints._beginning import NAME, Beginning
from tests import patience
from tests.clusters import cluster


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("coordinator")) as here:
        here.start_coordinator("--heartbeat-timeout-ms", "600")
        yield f"localhost:{here.port}"


class Stop(Exception):
    pass


class Job:
    def __init__(self, coordinator: str, name: str, folder: Path) -> None:
        self.coordinator, self.name, self.folder = coordinator, name, folder

    def train(self, steps: int, first: float = 1.0, *, every: int = 100, timeout_s: float = 60.0) -> float:
        """Up to the step `steps`, then fail, as if the power went."""
        saved = jaxft.Checkpoints(self.folder, every_steps=every)
        manager = jaxft.Manager(
            self.coordinator, group="a", job=self.name, checkpoints=saved, failure_timeout_s=timeout_s
        )
        state = jnp.full(3, first)
        try:
            with manager:
                step = jaxft.fault_tolerant(train_step, manager, shards=2)
                state = step.join(manager.restore(state), batch_for)
                for _ in manager.steps(steps):
                    state, _ = step(state, batch_for)
                raise Stop
        except Stop:
            return float(state[0])


def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    return state * 1.5 + jaxft.pmean(batch), {}


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.full(3, step + shard, np.float32)


@pytest.fixture
def job(coordinator: str, request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return Job(coordinator, request.node.name, tmp_path / "saved")


def test_a_job_without_a_checkpoint_begins_again(job: Job) -> None:
    job.train(3)
    begun = _beginning.read(job.folder)
    assert begun is not None
    assert (begun.job, begun.step) == (job.name, 0)
    again = job.train(4)
    step, state = jaxft.fault_tolerant(train_step, None, shards=2), jnp.ones(3)
    for _ in range(4):
        state, _ = step(state, batch_for)
    assert again == float(state[0])
    assert _beginning.read(job.folder) == begun


def test_one_with_another_first_state_does_not(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.train(3)
    begun = _beginning.read(job.folder)
    with caplog.at_level(logging.INFO, "jaxft"), pytest.raises(jaxft.CannotHeal):
        job.train(4, first=2.0, timeout_s=2.0)
    assert "comes with another state than the one with which job" in caplog.text
    assert _beginning.read(job.folder) == begun


def test_the_note_of_another_job_says_nothing(job: Job) -> None:
    _beginning.write(job.folder, Beginning("another", 7, 0, 7))
    job.train(2)
    begun = _beginning.read(job.folder)
    assert begun is not None
    assert begun.job == job.name


def test_a_checkpoint_takes_the_note_away(job: Job) -> None:
    job.train(3, every=2)
    patience.until(lambda: not (job.folder / NAME).exists(), "the save to end")
    assert {path.name for path in job.folder.glob("[0-9]*")} == {"2"}


def test_a_full_disk_costs_no_step(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_full(folder: Path, _beginning: Beginning) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(_beginning, "write", is_full)
    job.train(2)
    assert "cannot write to the folder of the checkpoints" in caplog.text
    assert "No space left on device" in caplog.text
