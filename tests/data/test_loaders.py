"""The loaders of other libraries in a job of which a group is killed: the same bits as alone. Real processes."""

from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster
from tests.processes.test_edits import started

PROGRAM = Path(__file__).with_name("loader_program.py")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.long
@pytest.mark.parametrize("loader", ["grain", "prefetch"])
def test_a_killed_group_comes_back_to_the_same_batches(loader: str, tmp_path: Path) -> None:
    held = tmp_path / "held"
    flags = ("--loader", loader)
    gated = (*flags, "--gate", f"10:{held}")

    def start(here: Cluster, group: str, *own: str) -> Worker:
        return here.start(group, *own, coordinated=group != "alone", script=PROGRAM)

    with cluster(tmp_path) as here:
        here.start_coordinator()
        alone = start(here, "alone", *flags)
        workers = started(
            here, {"group-0": gated, "group-1": (*gated, "--die", "exchange step 6")}, script=PROGRAM
        )
        here.until_dead(workers["group-1"])
        survivor = workers["group-0"]
        here.until(lambda: len(survivor.steps()) == 10, "the survivor to come to the gate")
        back = start(here, "group-1", *gated)
        here.until(lambda: back.logged("heals to step 10"), "it to heal")
        held.touch()
        here.until_finished(alone, survivor, back)
        assert {survivor.digest, back.digest} == {alone.digest}
