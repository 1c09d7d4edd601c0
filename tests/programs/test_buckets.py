"""On an accelerator, contributions are exchanged in buckets. CPU devices take its place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxft
from jaxft._programs import _programs, _stages
from jaxft._programs._build import Shared, cut_programs
from jaxft._programs._programs import Programs
from jaxft._programs._stages import Bucket, divided
from tests.accelerators import pretended
from tests.exchange.members import assert_same_bits

pytestmark = pytest.mark.unoptimized

SHAPES = {"a": (70, 3), "b": (9,), "c": (128,), "d": ()}


def state() -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {name: jnp.asarray(random.standard_normal(shape, np.float32)) for name, shape in SHAPES.items()}


def batch_for(step: int, shard: int) -> jax.Array:
    return jnp.float32(step + 0.1 * shard)


def train_step(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    grads = jaxft.pmean(jax.tree.map(lambda leaf: jnp.sin(leaf * batch), state))
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, state, grads), {"at": batch}


def twice(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    """Two stages, the second of which reads the means of the first."""
    first = jaxft.pmean(jax.tree.map(lambda leaf: jnp.sin(leaf * batch), state))
    second = jaxft.pmean(jax.tree.map(lambda leaf, mean: jnp.cos(leaf - mean * batch), state, first))
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, state, second), {"at": batch}


@functools.cache
def built(step: Any, bucket_bytes: int, overlap: int = 1) -> Programs:
    with pretended(bucket_bytes=bucket_bytes):
        programs = cut_programs(step, state(), batch_for(0, 0), Shared(overlap=overlap))
        assert programs.stages.buckets
    return programs


def trained(step: Any, shards: int, steps: int = 3) -> list[np.ndarray]:
    run, now = jaxft.fault_tolerant(step, None, shards=shards), state()
    for _ in range(steps):
        now, _ = run(now, batch_for)
    return list(map(np.asarray, jax.tree.leaves(now)))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_buckets_are_consecutive_and_none_is_small(sizes: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stages, "BUCKET_BYTES", 100)
        patch.setattr(_stages, "MOST_BUCKETS", most)
        buckets = divided(4, sizes, on_accelerator=True)
    assert [n for bucket in buckets for n in range(bucket.first, bucket.stop)] == list(range(len(sizes)))
    assert all(bucket.program == 4 and bucket.first < bucket.stop for bucket in buckets)
    assert len(buckets) <= most
    least = max(100, sum(sizes) / most)
    of_buckets = [sum(sizes[bucket.first : bucket.stop]) for bucket in buckets]
    assert len(buckets) == 1 or min(of_buckets) >= least
    assert all(size <= least + max(sizes) + 1 for size in of_buckets[:-1])
    assert most == 1 or of_buckets[-1] <= 2 * (least + 1) + max(sizes)


def test_a_large_leaf_leaves_no_small_buckets_behind_it() -> None:
    mb = 1 << 20
    sizes = [1024 * mb, *[mb // 64] * 3, *[300 * mb] * 4]
    assert [bucket.stop for bucket in divided(0, sizes, on_accelerator=True)] == [1, 5, 6, 7, 8]


def test_one_program_makes_several_buckets() -> None:
    programs = built(train_step, 1)
    assert programs.stages.buckets == tuple(Bucket(0, n, n + 1) for n in range(4))
    assert (programs.stages.count, programs.stages.runs) == (4, (range(4),))
    assert [programs.stages.begins(stage) for stage in range(4)] == [True, False, False, False]
    assert [programs.stages.made_with(stage) for stage in range(4)] == [range(n, 4) for n in range(4)]
    assert [layout.specs[0].shape for layout in programs.stages.layouts] == list(SHAPES.values())


def test_each_stage_is_divided_and_waits_for_the_means_that_it_reads() -> None:
    programs = built(twice, 1)
    assert [bucket.program for bucket in programs.stages.buckets] == [0] * 4 + [1] * 4
    assert programs.stages.runs == (range(4), range(4, 8))
    assert [programs.stages.begins(stage) for stage in range(8)] == [True, *[False] * 3] * 2


def test_overlapped_stages_are_divided_too() -> None:
    programs = built(train_step, 1, overlap=2)
    assert len({bucket.program for bucket in programs.stages.buckets}) == 2
    assert programs.stages.count == 4
    assert programs.stages.runs == (range(4),)


def test_on_cpu_nothing_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stages, "BUCKET_BYTES", 1)
    programs = cut_programs(train_step, state(), batch_for(0, 0))
    assert programs.stages.buckets == (Bucket(0, 0, 4),)


@pytest.mark.parametrize(("step", "shards"), [(train_step, 3), (twice, 1)])
def test_a_run_alone_has_the_same_bits(step: Any, shards: int) -> None:
    wanted = trained(step, shards)
    with pretended(bucket_bytes=1):
        assert_same_bits(trained(step, shards), wanted)


def test_means_that_have_no_room_stay_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    programs = built(train_step, 1)
    mean = [np.zeros(9, np.float32)]
    needed = programs.device._compute_bytes + 36

    def full(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with pretended(bucket_bytes=1), pytest.MonkeyPatch.context() as patch:
        for free, room in ((needed, True), (needed - 1, False)):
            patch.setattr(_programs, "free_bytes", lambda _device, free=free: free)
            assert (programs.device.to_devices(1, mean)[0] is not mean[0]) is room
        patch.setattr(_programs, "free_bytes", lambda _: needed)
        patch.setattr(jax, "device_put", full)
        assert programs.device.to_devices(1, mean) is mean
    assert "brought to the devices later, by apply: RESOURCE_EXHAUSTED" in caplog.text


def test_means_are_brought_to_the_devices_as_apply_takes_them() -> None:
    mesh = jax.make_mesh((4,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.device_put(state(), sharding)
    means = [np.full(shape, 2.0, np.float32) for shape in SHAPES.values()]
    with pretended(bucket_bytes=1):
        programs = cut_programs(train_step, placed, batch_for(0, 0))
        given = [
            mean for stage in range(4) for mean in programs.device.to_devices(stage, means[stage : stage + 1])
        ]
        assert {mean.sharding for mean in given} == {sharding}
        leaves, _ = programs.apply(programs.state_leaves(placed), given, None)
        plain, _ = programs.apply(programs.state_leaves(jax.device_put(state(), sharding)), means, None)
    assert_same_bits(list(map(np.asarray, leaves)), list(map(np.asarray, plain)))
