"""Both cores together, as they are, under a virtual clock and a seeded scheduler. See `protocol_world.py`."""

import pytest
from protocol_world import SHARDS, World

SEEDS = range(200)
BATCH = 20


def test_an_undisturbed_run_keeps_its_first_quorum():
    world = World(seed=0, chaos_s=0.3)
    world.run()
    assert_good_end(world)
    assert len(world.quorums) < 5


@pytest.mark.parametrize("first", SEEDS[::BATCH])
def test_chaos_never_harms_the_run(first: int):
    for seed in range(first, first + BATCH):
        world = chaotic(seed)
        try:
            world.run()
            assert_good_end(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n" + "\n".join(world.trace[-60:])) from error


def test_the_same_seed_gives_the_same_run():
    first, second, other = chaotic(7), chaotic(7), chaotic(8)
    for world in (first, second, other):
        world.run()
    assert first.trace == second.trace
    assert first.trace != other.trace


def test_chaos_does_all_it_can():
    happened = sum((run(seed).happened for seed in range(40)), start=World(0).happened)
    assert happened.keys() == {
        "kill", "leave", "break", "hang", "stop", "stall", "cut", "flip", "wipe", "resume"
    }  # fmt: skip


def chaotic(seed: int) -> World:
    """The seeds go through small and large jobs, both kinds of shards, and a minimum that a kill may undercut."""
    return World(
        seed,
        groups=2 + seed % 4,
        min_replicas=1 + (seed % 3 == 2),
        shards="members" if seed % 5 == 4 else str(SHARDS),
        spares=1 if seed % 4 > 1 and seed % 7 < 3 else 0,
    )


def run(seed: int) -> World:
    world = chaotic(seed)
    world.run()
    return world


def assert_good_end(world: World) -> None:
    if world.coordinator.halted:
        assert any(process.is_flipped for process in world.processes.values())
        return
    assert world.target is not None
    assert len(world.decided) == world.target
    assert world.coordinator.job.finished == world.target
    for process in world.processes.values():
        assert process.history == world.decided, process.name
