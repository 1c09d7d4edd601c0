"""Copies in host memory where there is none that is pinned, and where there is too little of it."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft._arrays import _host_copies
from jaxft._arrays._host_copies import flat_on_host, host_copies, pinned_limit_bytes
from tests.accelerators import pretended


@pytest.fixture(autouse=True)
def _accelerator() -> Iterator[None]:
    with pretended():
        yield


def arrays() -> list[jax.Array]:
    mesh = jax.make_mesh((4,), ("x",))
    return [
        jax.device_put(np.arange(12.0, dtype=np.float32).reshape(4, 3), NamedSharding(mesh, P("x"))),
        jax.device_put(np.arange(5).astype(jnp.bfloat16), NamedSharding(mesh, P())),
        jax.device_put(np.arange(6).astype(jnp.int4), NamedSharding(mesh, P())),
    ]


def kinds(copies: list[_host_copies.HostCopy]) -> set[object]:
    pieces = [piece for copy in copies for _, piece in copy.pieces]
    return {"numpy" if isinstance(piece, np.ndarray) else piece.sharding.memory_kind for piece in pieces}


def donated(given: list[jax.Array]) -> None:
    """Overwrite arrays in place, except where numpy has a view of one: JAX copies it then, on CPU."""
    add = jax.jit(lambda xs: [x + jnp.ones((), x.dtype) for x in xs], donate_argnums=0)
    jax.block_until_ready(add(given))


@pytest.mark.parametrize("memory", ["pinned", "not wanted", "not there", "full"])
def test_copies_outlive_the_arrays(memory: str, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory\nmore")

    given = arrays()
    wanted = [np.asarray(array).reshape(-1) for array in arrays()]
    with pytest.MonkeyPatch.context() as patch:
        if memory == "not there":
            patch.setattr(_host_copies, "_has_pinned", lambda _: False)
        if memory == "full":
            patch.setattr(jax, "device_put", full)
        copies = host_copies(given, pinned=memory != "not wanted")
    assert kinds(copies) == ({"pinned_host"} if memory == "pinned" else {"numpy"})
    assert ("so they are slower: RESOURCE_EXHAUSTED: Out of host memory. Raise" in caplog.text) == (
        memory == "full"
    )
    donated(given)
    assert memory != "pinned" or all(array.is_deleted() for array in given)
    for copy, expected in zip(copies, wanted, strict=True):
        np.testing.assert_array_equal(copy.flat(), expected)


def test_what_is_on_the_host_is_read_where_it_is() -> None:
    pinned = [jax.device_put(array, array.sharding.with_memory_kind("pinned_host")) for array in arrays()]
    for copy, array in zip(host_copies(pinned), pinned, strict=True):
        np.testing.assert_array_equal(copy.flat(), flat_on_host(array))
    where = {piece.unsafe_buffer_pointer() for _, piece in host_copies(pinned)[0].pieces}  # pyright: ignore[reportAttributeAccessIssue]
    assert where == {shard.data.unsafe_buffer_pointer() for shard in pinned[0].addressable_shards}


def test_no_arrays() -> None:
    assert host_copies([]) == []


@pytest.mark.parametrize(("text", "gb"), [(None, 64), ("512", 512), ("much", 64)])
def test_the_limit_of_pinned_memory(text: str | None, gb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    if text is not None:
        monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", text)
    assert pinned_limit_bytes() == gb << 30
