"""A child that the program forks while it is in a job has a copy of the Manager, and none of its threads."""

from pathlib import Path

import pytest

from tests.clusters import cluster
from tests.forks import Script

pytestmark = pytest.mark.processes

# The parent trains again once the child has ended.
PROGRAM = """
import os, signal, sys
import jax.numpy as jnp
import numpy as np
import jaxft

def train_step(state, batch):
    return state - jaxft.pmean(batch), {}

def batch_for(step, shard):
    return np.full(3, step + shard, np.float32)

def child(what):
    match what:
        case "step":
            step(state, batch_for)
        case "join":
            step.join(state, batch_for)
        case "steps":
            next(manager.steps(4))
        case "edit":
            step.edit(state, lambda state: state)
        case "restore":
            manager.restore(state)
        case "raise":
            raise ValueError("of the child")

parent = os.getpid()
checkpoints = jaxft.Checkpoints(sys.argv[3], every_steps=2)
try:
    with jaxft.Manager(sys.argv[1], group="group-0", checkpoints=checkpoints) as manager:
        step = jaxft.fault_tolerant(train_step, manager, shards=2)
        state = step.join(manager.restore(jnp.zeros(3)), batch_for)
        for number in manager.steps(4):
            if number == 2 and os.fork() == 0:
                signal.alarm(60)
                child(sys.argv[2])
                break
            if number == 2:
                print("child", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
            state, metrics = step(state, batch_for)
except (jaxft.ConfigurationError, ValueError) as error:
    print(type(error).__name__, error, flush=True)
finally:
    if os.getpid() != parent:
        os._exit(3)
print("end", manager.step, state.tolist(), flush=True)
"""


LONG = [pytest.param(what, marks=pytest.mark.long) for what in ("join", "steps", "edit", "restore", "raise")]


@pytest.mark.long
@pytest.mark.parametrize("what", ["step", "leave", *LONG])
def test_a_forked_child_neither_waits_nor_leaves_for_its_parent(what: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    log = tmp_path / "program.log"
    with cluster(tmp_path) as here:
        here.start_coordinator()
        address, folder = f"localhost:{here.port}", str(tmp_path / "checkpoints")
        group = Script(program, [address, what, folder], log, jax_platforms="cpu")
        here.started.append(group)
        here.until(lambda: group.poll() is not None, "the program to end")
        assert "left" not in here.coordinator_log.read_text().partition("step 3")[0]
    assert group.returncode == 0, log.read_text()
    lines = log.read_text().splitlines()
    assert "child 3" in lines, log.read_text()
    assert "end 4 [-8.0, -8.0, -8.0]" in lines
    logged = [line for line in lines if line.startswith(("ConfigurationError", "ValueError"))]
    called = "restore" if what == "restore" else "step"
    match what:
        case "leave":
            assert logged == []
        case "raise":
            assert logged == ["ValueError of the child"]
        case _:
            assert len(logged) == 1
            assert f"has called the {called} of group 'group-0', but it was forked from process" in logged[0]
