"""Digests, sums and memories: what must not depend on where an array is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxft
from jaxft._arrays._device_digest import StateDigest
from jaxft._arrays._device_sums import adds_as_numpy, device_sums
from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._exchange._partials import Partials
from tests.arrays.test_device_digest import reference
from tests.exchange.members import assert_same_bits

SPECIAL = np.array(
    [0x00000001, 0x80000001, 0x007FFFFF, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000],
    np.uint32,
).view(np.float32)  # denormals, NaNs of several payloads, an infinity, a negative zero


def leaves(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        np.concatenate([random.standard_normal(50, np.float32), SPECIAL]),
        random.standard_normal((3, 7), np.float32).astype(jnp.bfloat16),
        random.integers(-100, 100, 11, np.int8),
        np.float32(seed),
    ]


def test_the_digest_on_the_device_is_that_of_numpy() -> None:
    assert StateDigest().start([jnp.asarray(leaf) for leaf in leaves(1)]).result() == reference(leaves(1))


def test_the_digest_does_not_depend_on_the_sharding() -> None:
    devices = np.array(jax.devices())
    leaf = np.arange(devices.size * 12, dtype=np.float32).reshape(devices.size * 4, 3)
    mesh = Mesh(devices, ("x",))
    placed = [
        jax.device_put(leaf, NamedSharding(mesh, spec)) for spec in (PartitionSpec("x"), PartitionSpec())
    ]
    assert {StateDigest().start([each]).result() for each in placed} == {reference([leaf])}


@pytest.mark.parametrize("pair", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")])
def test_the_device_adds_as_numpy_does(pair: tuple[str, str]) -> None:
    """Denormals and NaN included. So an accelerator adds the contributions that it has made; on CPU the host does."""
    device = jax.devices()[0]
    layout = Layout.of([LeafSpec("x", (3,), pair[0])])
    found = device_sums(layout, (SingleDeviceSharding(device),))
    if device.platform == "cpu":
        assert found is None
        return
    assert adds_as_numpy(device, *pair)
    assert found is not None
    assert found.have_room()


def test_contributions_are_summed_where_they_are_made_and_read_from_pinned_memory() -> None:
    specs = [LeafSpec("a", (58,), "float32"), LeafSpec("b", (3, 7), "bfloat16")]
    layout, device = Layout.of(specs), jax.devices()[0]
    sums = device_sums(layout, (SingleDeviceSharding(device),) * 2)
    contributions = [leaves(shard)[:2] for shard in range(5)]
    on_host = Partials(layout, 5)
    partials = Partials(layout, 5, sums)
    for shard, each in enumerate(contributions):
        on_host.add(shard, each)
        partials.add(shard, jax.device_put(each, device))
    if device.platform != "cpu":
        (held,) = partials._on_device.values()
        assert held.summed
        partials.start_copies()
        assert held.copies is not None
        assert {copy.sharding.memory_kind for copy in held.copies} == {"pinned_host"}
        view = np.asarray(held.copies[0])
        assert view.ctypes.data == held.copies[0].unsafe_buffer_pointer(), "numpy made one more copy"
    assert_same_bits(partials.mean_alone(), on_host.mean_alone())


def test_what_is_in_pinned_host_memory_stays_there() -> None:
    far = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    space = jax.memory.Space

    def train_step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], dict]:
        mean = jaxft.pmean(batch)
        moment = jax.device_put(state["moment"], space.Device) * 0.5 + mean
        return {"moment": jax.device_put(moment, space.Host), "weight": state["weight"] - moment}, {}

    def ended(moment: jax.Array) -> dict[str, jax.Array]:
        step = jaxft.fault_tolerant(train_step, None, shards=2)
        state = {"moment": moment, "weight": jnp.ones(9)}
        for _ in range(3):
            state, _ = step(state, lambda step, shard: np.full(9, step + shard, np.float32))
        return state

    end = ended(jax.device_put(np.zeros(9, np.float32), far))
    assert end["moment"].sharding.memory_kind == "pinned_host"
    # 0.5, then 0.25 + 1.5, then 0.875 + 2.5; the weight loses all three.
    assert np.asarray(end["moment"]).tolist() == [3.375] * 9
    assert np.asarray(end["weight"]).tolist() == [1 - 0.5 - 1.75 - 3.375] * 9
