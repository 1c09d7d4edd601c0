"""Attention: every form gives the numbers of the plain one, and none but the plain one writes all scores."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama3 import _attention, _chunked
from examples.llama3._attention import attend, best_kernel, plain_attention, visible
from examples.llama3._config import Kernel
from examples.llama3._ring import in_order, ring_attention, striped
from examples.llama3._sharding import make_mesh

pytestmark = pytest.mark.unoptimized

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 4, 2, 8


@pytest.fixture(autouse=True)
def _strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunked, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(_chunked, "LEAST_CHUNK_TOKENS", 4)


def inputs(dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """Query, key, value and the cotangent of the output."""
    rng = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return tuple(rng.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype)) for shape in shapes)


def documents() -> np.ndarray:
    """Segments that end within a chunk, at its end, and after one token."""
    first = np.repeat([0, 1, 2, 3], [5, 11, 1, 47])
    second = np.repeat([0, 1, 2], [32, 31, 1])
    return np.stack([first, second]).astype(np.int32)


def value_and_gradients(function: Any, query: Any, key: Any, value: Any, cotangent: Any) -> list[np.ndarray]:
    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(function, *args[:3])
        return out, *pull(args[3])

    return [np.asarray(x, np.float32) for x in jax.jit(run)(query, key, value, cotangent)]


def assert_close(actual: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    for here, there in zip(actual, expected, strict=True):
        np.testing.assert_allclose(here, there, rtol=tolerance, atol=tolerance * np.abs(there).max())


@pytest.mark.parametrize("segments", [None, documents()], ids=["one document", "documents"])
def test_plain_attention_equals_a_loop_over_positions(segments: np.ndarray | None) -> None:
    query, key, value, _ = inputs()
    expected = np.empty_like(query)
    for b, head, at in np.ndindex(BATCH, HEADS, LENGTH):
        first = 0 if segments is None else int(np.argmax(segments[b] == segments[b, at]))
        seen = slice(first, at + 1)
        scores = key[b, seen, head // 2] @ query[b, at, head] / math.sqrt(HEAD_DIM)
        weights = np.exp(scores) / np.exp(scores).sum()
        expected[b, at, head] = weights @ value[b, seen, head // 2]
    actual = jax.jit(plain_attention)(query, key, value, segments)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize(
    ("segments", "dtype", "tolerance"),
    [(documents(), "float32", 3e-6), (None, "bfloat16", 2e-2)],
    ids=["documents", "bfloat16"],
)
def test_chunked_attention_equals_the_plain_form(
    segments: np.ndarray | None, dtype: str, tolerance: float
) -> None:
    arrays = inputs(dtype)
    plain, chunked = (
        value_and_gradients(lambda q, k, v: attend(q, k, v, segments, kernel=kernel), *arrays)  # noqa: B023
        for kernel in ("plain", "chunked")
    )
    assert_close(chunked, plain, tolerance)


@pytest.mark.parametrize("kernel", ["cudnn", "transformer-engine"])
@pytest.mark.parametrize("segments", [None, documents()], ids=["one document", "documents"])
def test_a_fused_kernel_equals_the_plain_form(kernel: Kernel, segments: np.ndarray | None) -> None:
    if best_kernel(LENGTH, "bfloat16") != kernel:
        pytest.skip(f"{kernel} does not run on {jax.devices()[0].device_kind}")
    arrays = [np.repeat(x, 8, axis=-1) for x in inputs("bfloat16")]
    fused, plain = (
        value_and_gradients(lambda q, k, v: attend(q, k, v, segments, kernel=each), *arrays)  # noqa: B023
        for each in (kernel, "plain")
    )
    assert_close(fused, plain, 3e-2)


@pytest.mark.long
@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("segments", [None, documents()], ids=["one document", "documents"])
def test_a_ring_of_devices_equals_the_plain_form(segments: np.ndarray | None) -> None:
    devices = 4
    mesh = make_mesh(1, 1, context=devices)
    spec = jax.sharding.PartitionSpec(None, "context")

    def ring(query: jax.Array, key: jax.Array, value: jax.Array, *segments: jax.Array) -> jax.Array:
        grouped = query.reshape(*query.shape[:2], KV_HEADS, -1, HEAD_DIM)
        mixed = ring_attention(grouped, key, value, segments[0] if segments else None, "context")
        return mixed.reshape(query.shape)

    def whole(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        arrays = [query, key, value] if segments is None else [query, key, value, segments]
        arrays = [striped(x, devices) for x in arrays]
        spread = jax.shard_map(
            ring, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"context"}, check_vma=False
        )
        return in_order(spread(*arrays), devices)

    actual = value_and_gradients(whole, *inputs())
    expected = value_and_gradients(lambda q, k, v: plain_attention(q, k, v, segments), *inputs())
    assert_close(actual, expected, 3e-6)


@pytest.mark.parametrize(
    ("kernel", "remains"), [("plain", True), ("chunked", False)], ids=["plain", "chunked"]
)
def test_only_the_plain_form_writes_all_scores(kernel: Kernel, *, remains: bool) -> None:
    """By buffer assignment of the gradient at 4,096 tokens: one head's float32 scores are 64 MiB."""
    length = 4096
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.bfloat16) for heads in (2, 1, 1, 2)]

    def gradient(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(lambda *qkv: attend(*qkv, None, kernel=kernel), query, key, value)[1](cotangent)

    needed = jax.jit(gradient).lower(*shapes).compile().memory_analysis()
    assert (needed.temp_size_in_bytes > 4 * length**2) == remains


def test_the_best_kernel_without_an_accelerator_depends_on_the_length() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("an accelerator has its own kernels")
    assert best_kernel(1024, "bfloat16") == "plain"
    assert best_kernel(2048, "bfloat16") == "chunked"
    assert _attention.PLAIN_TOKENS == _chunked.CHUNK_TOKENS


def test_a_position_sees_itself_and_earlier_ones_of_its_document() -> None:
    segments = np.array([[0, 0, 1, 1]], np.int32)
    assert visible(4, segments)[0, 0, 0].astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]
