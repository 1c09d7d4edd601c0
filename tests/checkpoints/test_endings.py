"""The newest checkpoint when a job ends: at the end of its loop, on purpose before it, or with a full disk."""

import errno
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._checkpoints import _orbax
from jaxft._replica import _saving
from tests.clusters import Cluster, cluster

pytestmark = pytest.mark.processes
EVERY, TOTAL = 4, 10


def train_step(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    return {"w": 0.5 * state["w"] + jaxft.pmean(batch), "count": state["count"] + 1}, {}


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.full(3, step + shard, np.float32)


def init() -> dict[str, Any]:
    return {"w": jnp.zeros(3), "count": jnp.int32(0)}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One coordinator for all: each test has its own job."""
    with cluster(tmp_path_factory.mktemp("coordinator")) as made:
        made.start_coordinator("--heartbeat-timeout-ms", "1000")
        yield made


class Job:
    def __init__(self, here: Cluster, folder: Path, name: str) -> None:
        self.here, self.folder, self.name = here, folder, name

    def manager(self, **options: Any) -> jaxft.Manager:
        settings: dict[str, Any] = {"failure_timeout_s": 60.0, **options}
        return jaxft.Manager(
            f"localhost:{self.here.port}",
            group="group-0",
            job=self.name,
            checkpoints=jaxft.Checkpoints(self.folder, every_steps=EVERY),
            **settings,
        )

    def train(self, at: Callable[[int], None] = lambda _: None, total: int = TOTAL, **options: Any) -> Any:
        with self.manager(**options) as manager:
            step = jaxft.fault_tolerant(train_step, manager, shards=2)
            state = step.join(manager.restore(init()), batch_for)
            for number in manager.steps(total):
                at(number)
                state, _ = step(state, batch_for)
        return jax.device_get(state)

    def saved(self) -> list[int]:
        return jaxft.Checkpoints(self.folder).steps()


@pytest.fixture
def job(here: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    return Job(here, tmp_path / "saved", request.node.name)


def test_a_job_whose_last_state_is_not_saved_is_not_finished_and_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended with status 0 and counted as finished: what came after the last checkpoint was gone for good."""
    monkeypatch.setattr(_saving, "_PAUSE_S", 0.01)
    real, full = _orbax.write, list[int]()

    def write(*arguments: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    monkeypatch.setattr(_orbax, "write", write)
    with pytest.raises(
        jaxft.NotSaved, match=f"of step {TOTAL}, is not on the disk .* No space left"
    ) as ended:
        job.train(lambda number: full.append(number) if number == 6 else None, failure_timeout_s=4.0)
    assert ended.value.exit_status == 74
    assert f"the last state, of step {TOTAL}, is not saved: OSError" in caplog.text
    assert f"{job.name}] finished" not in job.here.coordinator_log.read_text()
    assert job.saved() == [4]
    full.clear()
    job.train()
    assert job.saved()[-1] == TOTAL
    assert "finished at step 10" in job.here.coordinator_log.read_text()


def test_a_disk_that_has_room_again_takes_the_last_state(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_saving, "_PAUSE_S", 0.01)
    real, fails = _orbax.write, iter([True, True])

    def write(path: Path, *rest: Any) -> None:
        if path.name == str(TOTAL) and next(fails, False):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, *rest)

    monkeypatch.setattr(_orbax, "write", write)
    job.train()
    assert job.saved()[-1] == TOTAL
    assert next(fails, None) is None


def term(number: int) -> None:
    if number == 6:
        signal.raise_signal(signal.SIGTERM)


def ctrl_c(number: int) -> None:
    if number == 6:
        raise KeyboardInterrupt


def leave(number: int) -> None:
    if number == 6:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("stop", "error", "step"),
    [(term, SystemExit, 7), (ctrl_c, KeyboardInterrupt, 6), (leave, SystemExit, 6)],
    ids=["SIGTERM", "Ctrl-C", "sys.exit"],
)
def test_a_group_that_is_stopped_on_purpose_saves_first(
    stop: Callable[[int], None],
    error: type[BaseException],
    step: int,
    job: Job,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    caplog.set_level(logging.INFO, "jaxft")
    try:
        with pytest.raises(error):
            job.train(stop)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert job.saved() == [4, step]
    caplog.clear()
    job.train()
    assert f"restored step {step} from" in caplog.text


def test_an_exception_of_the_program_saves_nothing(job: Job) -> None:
    def fail(number: int) -> None:
        if number == 6:
            raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        job.train(fail)
    assert job.saved() == [4]


def test_a_folder_of_another_job_is_refused_before_the_first_step(job: Job) -> None:
    job.train(total=2)
    other = Job(job.here, job.folder, f"{job.name}-other")
    with other.manager() as manager, pytest.raises(jaxft.ConfigurationError, match="belongs to the job"):
        jaxft.fault_tolerant(train_step, manager, shards=2).join(init(), batch_for)
    assert job.saved() == [2]


def test_shapes_are_restored_and_arrays_are_given_up(job: Job) -> None:
    """The devices need not hold two states."""
    shapes = jax.eval_shape(init)
    with job.manager() as manager:
        assert manager.restore(shapes) is shapes, "there is none"
        with pytest.raises(jaxft.ConfigurationError, match="is ShapeDtypeStruct"):
            jaxft.fault_tolerant(train_step, manager, shards=2).join(shapes, batch_for)
    trained = job.train(total=2)
    found: list[Any] = []
    for like in (shapes, init()):
        with job.manager() as manager, jax.transfer_guard("disallow"):
            found.append(manager.restore(like))
    with jax.transfer_guard("allow"):
        for state in found:
            np.testing.assert_array_equal(state["w"], trained["w"])
            assert state["count"] == 2
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(like))


def test_leaves_that_are_no_arrays_are_not_saved_and_returned_as_they_are(job: Job) -> None:
    job.train(total=2)
    with job.manager() as manager:
        state = {**init(), "mode": "fast", "function": len}
        found = manager.restore(state, arrays=lambda leaf: isinstance(leaf, jax.Array))
    assert (found["count"], found["mode"], found["function"]) == (2, "fast", len)
