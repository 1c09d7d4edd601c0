"""A pinned state is not changed by the steps that consume it, and costs them nothing once it is released."""

import gc
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import jaxft
from jaxft._arrays._leaf_types import LeafType, type_of
from jaxft._heal import _snapshot
from jaxft._heal._blob import Spoiled
from jaxft._heal._snapshot import Snapshot
from jaxft._heal._store import Gone, StateStore
from jaxft._programs._build import cut_programs
from jaxft._programs._programs import Programs
from tests import patience

from .donors import content, in_thread, leaves_of, mesh, own, raw, read, same_bits, sharded, soon, values

DTYPES = ["float32", "bfloat16", "float16", "bool", "int8", "int32", "uint32", "complex64", "float8_e5m2"]
PACKED = ["int4", "uint4", "float4_e2m1fn"]  # XLA keeps two in a byte, so a host view is a copy

increase = jax.jit(lambda xs: [x + jnp.ones((), x.dtype) for x in xs], donate_argnums=0)


def pointers(leaf: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def assert_kept(leaves: list[jax.Array], step: Callable[[list[jax.Array]], list[jax.Array]]) -> None:
    """Run donating steps under a snapshot, and one after its release."""
    store = StateStore()
    before = [raw(leaf) for leaf in leaves]
    store.publish(7, leaves)
    store.pin(1, 7)
    for number in (7, 8):
        store.before_donation()
        leaves = jax.block_until_ready(step(leaves))
        store.publish(number + 1, leaves)
    blob = store.state(1, deadline_s=soon())[1]
    content(blob)  # joins spread leaves
    assert [raw(leaf) for leaf in leaves_of(blob)] == before
    store.release(1)
    del blob
    gc.collect()
    where = [pointers(leaf) for leaf in leaves if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    store.before_donation()
    after = jax.block_until_ready(step(leaves))
    again = [pointers(leaf) for leaf in after if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    assert again == where, "donation should be in place again"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_on_one_device(dtype: str) -> None:
    step = increase if dtype != "bool" else jax.jit(lambda xs: [~x for x in xs], donate_argnums=0)
    assert_kept([own(values((33, 5), dtype)), own(values((), dtype)), own(values((0, 3), dtype))], step)


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_dtypes_are_copied_and_given_up_by_nobody(dtype: str) -> None:
    store = StateStore()
    leaf = own(values((64, 3), "uint8").astype(dtype))
    before = raw(leaf)
    store.publish(0, [leaf])
    store.pin(1, 0)
    store.before_donation()
    store.publish(1, jax.block_until_ready(increase([leaf])))
    assert leaf.is_deleted(), "this test is of a donation that is not prevented"
    assert raw(leaves_of(store.state(1, deadline_s=soon())[1])[0]) == before


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()], ids=["rows", "columns", "replicated"])
def test_sharded_over_one_axis(devices: int, spec: tuple[str | None, ...]) -> None:
    over = mesh(devices)
    leaves = [sharded(values((16, 8), dtype), over, *spec) for dtype in ("float32", "bfloat16")]
    assert_kept(leaves, increase)


@pytest.mark.parametrize(
    "spec", [("x", "y"), ("y", "x"), ("y",), (None, "x"), (("x", "y"),)], ids=lambda spec: str(spec)
)
def test_sharded_over_two_axes(spec: tuple[str | None, ...]) -> None:
    assert_kept([sharded(values((8, 12)), mesh(2, 2), *spec)], increase)


def test_a_mesh_in_another_order_than_the_devices() -> None:
    devices = np.array(jax.devices()[:4])[[3, 1, 0, 2]].reshape(2, 2)
    over = jax.sharding.Mesh(devices, ("x", "y"))
    assert_kept([sharded(values((8, 4)), over, "x"), sharded(values((8, 4)), over, None, "y")], increase)


def test_keys() -> None:
    split = jax.jit(
        lambda keys: [jax.random.fold_in(keys[0], 1), *map(next_keys, keys[1:])], donate_argnums=0
    )
    spread = jax.device_put(
        jax.random.split(jax.random.key(1), 8), NamedSharding(mesh(4), PartitionSpec("x"))
    )
    assert_kept([jax.random.key(3), jax.random.split(jax.random.key(4), 5)], split)
    assert_kept([jax.device_put(jax.random.key(3), NamedSharding(mesh(4), PartitionSpec())), spread], split)


def next_keys(keys: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, 2))(keys)


@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 4, 6, 8, 12]), min_size=1, max_size=3).map(tuple),
    axes=st.permutations(["x", "y", None]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
)
def test_any_sharding_is_served_in_canonical_order(
    shape: tuple[int, ...], axes: list[str | None], dtype: str
) -> None:
    array = values(shape, dtype)
    spec = [axis if size % 2 == 0 else None for size, axis in zip(shape, axes, strict=False)]
    snapshot = Snapshot([sharded(array, mesh(2, 2), *spec)])
    assert snapshot.blob().layout.leaves == (LeafType(shape, dtype),)
    assert raw(leaves_of(snapshot.blob())[0]) == array.tobytes()


def test_another_memory_order_on_the_device() -> None:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.device_put(values((30, 20)), Format(Layout((1, 0)), where))
    snapshot = Snapshot([leaf])
    flat = snapshot.blob().sources[0].flat()
    assert bytes(flat) == values((30, 20)).tobytes()
    assert snapshot.blob().sources[0].flat() is flat, "it is put in order once, not for each chunk"


def test_a_spread_leaf_is_joined_once_and_then_its_views_are_dropped() -> None:
    leaf = sharded(values((64, 8)), mesh(4), None, "x")
    snapshot = Snapshot([leaf])
    snapshot.capture()
    flats = [in_thread(snapshot.blob().sources[0].flat) for _ in range(4)]
    first, *others = [flat() for flat in flats]
    assert all(other is first for other in others)
    where = pointers(leaf)
    (after,) = jax.block_until_ready(increase([leaf]))
    assert pointers(after) == where, "a joined leaf is a copy: nothing keeps its arrays from donation"
    assert bytes(first) == values((64, 8)).tobytes()
    assert snapshot.intact()


def test_leaves_of_a_first_state_that_are_no_jax_arrays() -> None:
    array = values((4, 3))
    state: list[Any] = [1.5, 3, True, array, np.float64(0.1), values((2,), "bfloat16"), np.arange(3)]
    snapshot = Snapshot(state)
    snapshot.capture()
    wanted = [jnp.asarray(leaf) for leaf in state]
    array_before = array.copy()
    assert [each.dtype for each in leaves_of(snapshot.blob())] == [each.dtype for each in wanted]
    assert same_bits(leaves_of(snapshot.blob()), wanted)
    array.setflags(write=False)
    assert raw(leaves_of(snapshot.blob())[3]) == array_before.tobytes()


def test_a_numpy_leaf_may_be_changed_after_the_capture() -> None:
    array = np.zeros(5, np.float32)
    snapshot = Snapshot([array])
    snapshot.capture()
    array[:] = 1
    assert not any(content(snapshot.blob()))


@pytest.mark.parametrize(
    ("leaf", "wanted"),
    [
        (1, LeafType((), "int32")),
        (2.0, LeafType((), "float32")),
        (np.zeros((2, 3)), LeafType((2, 3), "float32")),  # as JAX takes it, without x64
        (values((2,), "bfloat16"), LeafType((2,), "bfloat16")),
    ],
)
def test_types(leaf: Any, wanted: LeafType) -> None:
    assert type_of(leaf) == wanted


def test_types_of_keys() -> None:
    assert type_of(jax.random.key(0)) == LeafType((2,), "uint32")
    assert type_of(jax.random.split(jax.random.key(0), 3)) == LeafType((3, 2), "uint32")
    assert type_of(jax.random.key(0, impl="rbg")) == LeafType((4,), "uint32")


# ---- when the copy-on-write should fail ----


@pytest.fixture
def unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a JAX that donates an array although it has a view: it is overwritten under the snapshot."""

    def overwritten(leaf: Any, _: LeafType) -> Any:
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        return [(shard.index, np.array(shard.data)) for shard in shards], [shard.data for shard in shards]

    monkeypatch.setattr(_snapshot, "_host_pieces", overwritten)


@pytest.mark.usefixtures("unprotected")
@pytest.mark.parametrize("devices", [1, 4])
def test_a_state_that_was_overwritten_is_given_up(devices: int, caplog: pytest.LogCaptureFixture) -> None:
    store = StateStore()
    leaves = [sharded(values((8, 4)), mesh(devices), "x")]
    leaves = jax.block_until_ready(increase(leaves))  # memory of JAX's own
    store.publish(0, leaves)
    store.pin(1, 0)
    blob = store.state(1, deadline_s=soon())[1]
    store.before_donation()
    after = jax.block_until_ready(increase(leaves))
    assert leaves[0].is_deleted(), "this test is of a donation in place"
    with pytest.raises(Spoiled):
        read(blob, 0)  # before the store had a chance to look
    with caplog.at_level(logging.ERROR, "jaxft"):
        store.publish(1, after)
    assert "Abandoned heal 1: state 0 is lost, because it was overwritten" in caplog.text
    with pytest.raises(Gone):
        store.state(1, deadline_s=soon())


def test_a_leaf_that_was_overwritten_in_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first piece is protected by a view, and JAX judges the whole by its first buffer."""

    def only_the_first(leaf: Any, leaf_type: LeafType) -> Any:
        pieces, watched = _host_pieces(leaf, leaf_type)
        return [pieces[0], *((index, np.array(piece)) for index, piece in pieces[1:])], watched

    _host_pieces = _snapshot._host_pieces
    monkeypatch.setattr(_snapshot, "_host_pieces", only_the_first)
    leaves = jax.block_until_ready(increase([sharded(values((8, 4)), mesh(4), "x")]))
    snapshot = Snapshot(leaves)
    snapshot.capture()
    jax.block_until_ready(increase(leaves))
    assert not leaves[0].is_deleted(), "this test is of an array that looks alive"
    assert not snapshot.intact()
    with pytest.raises(Spoiled):
        read(snapshot.blob(), 0)


@pytest.mark.usefixtures("unprotected")
def test_a_leaf_that_was_joined_from_overwritten_pieces_stays_spoiled() -> None:
    leaves = jax.block_until_ready(increase([sharded(values((8, 4)), mesh(4), "x")]))
    snapshot = Snapshot(leaves)
    snapshot.capture()
    jax.block_until_ready(increase(leaves))
    with pytest.raises(Spoiled):
        read(snapshot.blob(), 0)
    assert not snapshot.intact()


def test_a_snapshot_that_is_read_after_its_release_and_donation_is_spoiled() -> None:
    leaves = [own(values((8, 4)))]
    snapshot = Snapshot(leaves)
    assert snapshot.blob().layout.total_bytes == 128
    jax.block_until_ready(increase(leaves))
    with pytest.raises(Spoiled, match="deleted"):
        read(snapshot.blob(), 0)


def test_capture_and_reading_at_once() -> None:
    """The training thread captures while servers read: whichever is first, all see the same bytes."""
    for number in range(20):
        leaves = [own(values((50, 7), seed=number)), sharded(values((8, 8), seed=number), mesh(2), "x")]
        before = [raw(leaf) for leaf in leaves]
        snapshot = Snapshot(leaves)
        barrier = threading.Barrier(3)

        def read(snapshot: Snapshot = snapshot, barrier: threading.Barrier = barrier) -> list[bytes]:
            barrier.wait(patience.FAR_S)
            return [raw(leaf) for leaf in leaves_of(snapshot.blob())]

        readers = [in_thread(read) for _ in range(2)]
        barrier.wait(patience.FAR_S)
        snapshot.capture()
        jax.block_until_ready(increase(leaves))
        assert [reader() for reader in readers] == [before, before]


# ---- the programs of real steps ----


def make_step(kind: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w.astype(jnp.float32)) ** 2)

    def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], Any]:
        grad = jaxft.pmean(jax.grad(loss_fn)(state["w"], batch))
        new = {**state, "w": state["w"] - (0.1 * grad).astype(state["w"].dtype)}
        if kind == "momentum":
            new["m"] = 0.9 * state["m"] + grad
            new["count"] = state["count"] + 1
        if kind == "key":
            new["key"] = jax.random.fold_in(state["key"], 1)
        if kind == "previous":
            new["m"] = state["w"]  # forwarded to another place
        return new, {}

    return train_step


def first_state(kind: str, over: jax.sharding.Mesh | None) -> dict[str, Any]:
    def put(array: np.ndarray) -> jax.Array:
        return own(array) if over is None else sharded(array, over, "x")

    random = np.random.default_rng(1)
    state: dict[str, Any] = {
        "w": put(random.standard_normal((16, 8), dtype=np.float32)),
        "m": put(np.zeros((16, 8), np.float32)),  # not touched by the plain step: forwarded
        "count": jnp.zeros((), jnp.int32),
    }
    if kind == "half":
        state["w"] = put(random.standard_normal((16, 8)).astype("bfloat16"))
    if kind == "key":
        state["key"] = jax.random.key(2)
    if kind == "number":
        state["count"] = 3
        state["m"] = np.zeros((16, 8), np.float32)
    return state


def programs_of(kind: str, state: Any) -> Programs:
    return cut_programs(make_step(kind), state, np.ones((4, 16), np.float32))


KINDS = ["plain", "momentum", "key", "previous", "half", "number"]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_apply_of_a_step_leaves_a_pinned_state_as_it_was(kind: str, devices: int) -> None:
    state = first_state(kind, None if devices == 1 else mesh(devices))
    programs = programs_of(kind, state)
    means = [np.full((16, 8), 0.5, programs.contribution[0].dtype)]
    reference = jax.tree.map(jnp.array, state)
    store = StateStore()
    snapshots: list[tuple[int, list[bytes]]] = []
    for step in range(4):
        leaves: Sequence[Any] = jax.tree.leaves(state)
        store.publish(step, leaves)
        if step != 1:
            store.pin(step, step)
            snapshots.append((step, [raw(jnp.asarray(leaf)) for leaf in leaves]))
        store.before_donation()
        state, _ = step_models.apply(programs, state, means, None)
        jax.block_until_ready(state)
        reference, _ = step_models.apply(programs, reference, means, None)
    store.publish(4, jax.tree.leaves(state))
    for step, wanted in snapshots:
        found, blob = store.state(step, deadline_s=soon())
        assert found == step
        assert [raw(leaf) for leaf in leaves_of(blob)] == wanted
        store.release(step)
    assert same_bits(jax.tree.leaves(state), jax.tree.leaves(reference))
    assert len({tuple(wanted) for _, wanted in snapshots}) == len(snapshots)

    del blob
    gc.collect()
    made = [leaf for index, leaf in enumerate(jax.tree.leaves(state)) if index in programs.cut.donated]
    where = {pointer for leaf in made if leaf.size and leaf.ndim for pointer in pointers(leaf)}
    state, _ = step_models.apply(programs, state, means, None)
    jax.block_until_ready(state)
    assert where <= set(itertools.chain(*map(pointers, filter(np.ndim, jax.tree.leaves(state)))))
