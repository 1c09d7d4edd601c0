"""The log when groups of one process end one after the other, as they usually do."""

import logging
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from tests import patience
from tests.clusters import cluster

TOTAL = 12


def train_step(w: Any, batch: Any) -> Any:
    return w - jaxft.pmean(batch), {}


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.full(3, step + shard, np.float32)


@pytest.mark.processes
def test_a_group_that_has_finished_is_not_lost_and_no_step_is_done_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "jaxft")
    both_present = threading.Barrier(2)
    ended: dict[str, int] = {}

    def group(name: str) -> None:
        with jaxft.Manager(address, group=name, failure_timeout_s=600.0) as manager:
            step = jaxft.fault_tolerant(train_step, manager, shards=2)
            both_present.wait(patience.FAR_S)  # the job begins once all that are present have joined
            state = step.join(jnp.zeros(3), batch_for)
            for _ in manager.steps(TOTAL):
                state, _ = step(state, batch_for)
            ended[name] = manager.step
            if name == "group-0":
                patience.until(lambda: "group-0] quorum 1 -> 2" in caplog.text, "group-1 to leave")

    with cluster(tmp_path) as here:
        here.start_coordinator()
        address = f"localhost:{here.port}"
        threads = [threading.Thread(target=group, args=(f"group-{n}",), daemon=True) for n in range(2)]
        for thread in threads:
            thread.start()
        patience.until(lambda: not any(map(threading.Thread.is_alive, threads)), "both groups to end")
    assert ended == {"group-0": TOTAL, "group-1": TOTAL}
    line = next(line for line in caplog.text.splitlines() if "group-0] quorum 1 -> 2" in line)
    # "from" if the new quorum came while the last step was still being applied.
    then = line.partition("quorum 1 -> 2: group-1 has ended its loop; now group-0; ")[2]
    assert then in (f"goes on with step {TOTAL}", f"from step {TOTAL}")
    assert "continues: they will hold other states" not in caplog.text
    assert "Event loop is closed" not in caplog.text + capfd.readouterr().err
