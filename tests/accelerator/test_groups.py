"""Two groups share the device; one is killed with kill -9 in an exchange, starts again and heals."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.accelerator import models
from tests.clusters import Cluster, Worker, cluster

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("worker.py")
STEPS, KILLED_AT = 14, 4
# The survivor computes this step once the victim heals.
GATE = 6
# Of the device's memory, for each of the processes that may be there at once, in addition to pytest.
MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}


@dataclass
class Story:
    alone: Worker
    survivor: Worker
    killed: Worker
    back: Worker


def started(here: Cluster, group: str, *flags: str, coordinated: bool = True) -> Worker:
    fresh = models.on_accelerator()  # where each group compiles by itself
    words = ("--steps", str(STEPS), *flags)
    return here.start(group, *words, coordinated=coordinated, script=WORKER, fresh=fresh)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("groups")
    again, present = folder / "started-again", folder / "all-present"
    gate = ("--gate", f"{GATE}:{again}")
    with cluster(folder) as here:
        if models.on_accelerator():
            here.environment = MEMORY
        alone = started(here, "alone", coordinated=False)
        here.until_finished(alone)
        here.start_coordinator()
        at_start = ("--gate", f"start:{present}")
        survivor = started(here, "group-0", *gate, *at_start)
        killed = started(here, "group-1", *gate, *at_start, "--die", f"exchange step {KILLED_AT}")
        for group in ("group-0", "group-1"):
            text = f"{group} is present"
            here.until(lambda text=text: text in here.coordinator_log.read_text(), f"{group}'s Hello")
        present.touch()
        here.until_dead(killed)
        back = started(here, "group-1", *gate)
        here.until(lambda: back.logged("heals to step"), "group-1 to heal")
        again.touch()
        here.until_finished(survivor, back)
        yield Story(alone, survivor, killed, back)


@pytest.mark.long
def test_one_is_killed_and_heals(story: Story) -> None:
    # A single test: with several, pytest-xdist would repeat the story in each worker.
    assert story.survivor.digest == story.back.digest == story.alone.digest
    assert story.alone.digest is not None

    assert [event["step"] for event in story.survivor.steps()] == list(range(1, STEPS + 1))
    assert [event["step"] for event in story.killed.steps()] == list(range(1, KILLED_AT + 1))

    together, alone = (story.survivor.steps()[step]["shards"] for step in (0, KILLED_AT))
    assert (len(together), sorted(alone)) == (2, [0, 1, 2, 3])

    assert story.back.steps()[0]["healed"]

    ends = [worker.events()[-1] for worker in (story.alone, story.survivor, story.back)]
    assert [end["kind"] for end in ends] == ["pinned_host"] * 3

    for worker in (story.survivor, story.back):
        assert not worker.logged("may give different bits"), worker.log()
