"""Exceptions of the user's code in a step, and Ctrl-C, on real processes."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from tests import patience
from tests.clusters import Cluster, Worker, cluster, digest_alone
from tests.operate import port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS, LONG = 12, 100
# In a long run no group computes this step before the group that raised is back.
GATE = 60
RUN = ("--steps", str(STEPS))
GROUPS = ("group-0", "group-1", "group-2")
TEXT = "cannot read sample 17"
# Of four shards in three groups, group-1 computes the third.
UNREADABLE = ("--unreadable", "5:2")
PHASES = ("compute step 5", "exchange step 5", "vote step 5", "apply step 5")


def raised(worker: Worker) -> list[dict[str, object]]:
    return [event for event in worker.events() if event["event"] == "raised"]


def until_failed(here: Cluster, worker: Worker) -> None:
    here.until(lambda: worker.process.poll() is not None, f"the end of {worker.log_path.stem}")
    assert worker.process.returncode == 1, worker.log()


def run_until_it_is_back(here: Cluster, *own: str) -> Worker:
    """Three groups, of which group-1 has these flags, and calls the step again; return it after the end."""
    hurry, gate = here.folder / "hurry", here.folder / "back"
    flags = ("--steps", str(LONG), "--pace", "0.1", "--hurry", str(hurry), "--gate", f"{GATE}:{gate}")
    web = port.start(here)
    workers = here.start_together(
        GROUPS, lambda group: (*flags, *((*own, "--again") if group == "group-1" else ()))
    )
    it = workers["group-1"]
    here.until(lambda: raised(it), "the exception")
    before = len(it.steps())

    def goes_on() -> bool:
        return len(it.steps()) > before + 1

    def is_held() -> bool:
        at_gate = all(workers[group].step == GATE for group in ("group-0", "group-2"))
        return at_gate and web.group("group-1")["state"] in ("ready", "member")

    here.until(
        lambda: goes_on() or is_held(), "it to take part, or to have caught up with the others at the gate"
    )
    gate.touch()
    here.until(goes_on, "its next steps")
    hurry.touch()
    here.until_finished(*workers.values())
    assert {worker.digest for worker in workers.values()} == {digest_alone(LONG)}
    assert len(raised(it)) == 1
    return it


def test_a_group_alone_tries_again_with_its_next_call(tmp_path: Path) -> None:
    """At once: it would not end in time if it waited for its failure timeout of ten minutes."""
    with cluster(tmp_path) as here:
        here.start_coordinator()
        worker = here.start("group-0", *RUN, *UNREADABLE, "--times", "2", "--again")
        here.until_finished(worker)
        assert worker.digest == digest_alone(STEPS)
        assert [event["step"] for event in raised(worker)] == [5, 5]
        assert "raised in shard 2 of step 5" in str(raised(worker)[0]["notes"])


def test_a_failure_that_one_group_has_is_its_own(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        workers = here.start_together(
            GROUPS, lambda group: (*RUN, *(UNREADABLE if group == "group-1" else ()))
        )
        ill = workers.pop("group-1")
        until_failed(here, ill)
        here.until_finished(*workers.values())
        for worker in workers.values():
            assert worker.digest == digest_alone(STEPS)
            assert worker.logged(f"lost group-1 (its code raised OSError: {TEXT} (step 5, shard 2))")
        assert ill.logged(f"OSError: {TEXT}")
        assert "The other groups could do this step" in str(raised(ill)[0]["notes"])
        assert "halts" not in here.coordinator_log.read_text()


def test_a_shard_that_no_group_can_read_stops_the_job_once_with_its_name(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        workers = here.start_together(GROUPS, lambda _group: (*RUN, *UNREADABLE))
        for worker in workers.values():
            until_failed(here, worker)
            assert worker.logged("JobHalted: ")
            assert worker.logged(
                "has stopped job 'toy': shard 2 of step 5 of job 'toy' fails in every group: "
            )
            assert worker.logged(f"OSError: {TEXT}")
            assert [event["step"] for event in worker.steps()] == list(range(1, 6))
        log = here.coordinator_log.read_text()
        assert log.count("halts: shard 2 of step 5") == 1


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_one_of_three_groups_holds_up_no_other(phase: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        run_until_it_is_back(here, "--interrupt", phase)


@pytest.mark.long
def test_a_cell_that_is_run_again_is_told_at_once_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a notebook: the state of the first run is gone with its `with` block, and no other one replaces it."""
    caplog.set_level(logging.WARNING, "jaxft")
    newest: dict[str, jax.Array] = {}

    def train_step(w: Any, batch: Any) -> Any:
        return w - jaxft.pmean(batch), {}

    def cell(w: Any, job: str = "run", *, fails_at: int = 9, timeout_s: float, step: int = 0) -> None:
        address = f"localhost:{here.port}"
        with jaxft.Manager(
            address, group="group-0", job=job, step=step, failure_timeout_s=timeout_s
        ) as manager:
            train = jaxft.fault_tolerant(train_step, manager, shards=2)
            w = train.join(w, batch_for)
            for number in manager.steps(5):
                if number == fails_at:
                    raise KeyboardInterrupt
                w, _ = train(w, batch_for)
                newest[job] = w

    def batch_for(step: int, shard: int) -> np.ndarray:
        return np.full(3, step + shard, np.float32)

    with cluster(tmp_path) as here:
        here.start_coordinator()
        with pytest.raises(KeyboardInterrupt):
            cell(jnp.zeros(3), fails_at=3, timeout_s=600.0)
        # A fresh state, and the notebook's own: the coordinator has no digest of it.
        for w, step in ((jnp.zeros(3), 0), (newest["run"], 3)):
            caplog.clear()
            with pytest.raises(jaxft.CannotHeal, match="or start a new run under another job name"):
                cell(w, step=step, timeout_s=patience.stretched(5.0))
            assert "such as a notebook cell that is run again, choose another job name" in caplog.text
        cell(newest["run"], "run-2", step=3, timeout_s=600.0)
        assert newest["run-2"].tolist() == [-12.5] * 3
