"""Exact causal attention in chunks, in plain JAX: no array of sequence length squared, forward or backward.

As in FlashAttention: a running maximum and sum of each row's weights, corrected with every chunk of keys; backward
recomputes a chunk's weights from the saved logarithm of that sum. Chunks above the diagonal are left out, so it takes
half the products of the plain form.

Query heads are grouped by the key and value head that they share: queries are (batch, query, kv head, group,
head_dim), keys and values (batch, key, kv head, head_dim), rows' statistics (batch, kv head, group, query).
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

T = TypeVar("T")

CHUNK_TOKENS = 1024
LEAST_CHUNK_TOKENS = 128

# Stands for minus infinity: differences of two stay finite. The weights of a row that has seen only masked keys are
# wrong, and are multiplied by zero as soon as it sees one that is not.
MASKED = -1e30


class Keys(NamedTuple):
    """Keys and values of a span of the sequence; `segments` is (batch, key), or None for one document."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


class Queries(NamedTuple):
    query: jax.Array
    segments: jax.Array | None


class Mix(NamedTuple):
    """What queries have gathered from the keys they have seen: float32, not yet divided by the sum of weights."""

    values: jax.Array
    maximum: jax.Array
    total: jax.Array


class Backward(NamedTuple):
    """Inputs of the backward pass from the queries: the gradient of the output, and the rows' statistics."""

    cotangent: jax.Array
    log_total: jax.Array
    delta: jax.Array


def chunk_tokens(length: int) -> int:
    """Return the largest divisor of a sequence's length that is at most `CHUNK_TOKENS`.

    Raises:
        ValueError: it would be so small that attention takes thousands of tiny steps.
    """
    if length <= CHUNK_TOKENS:
        return length
    chunk = next(size for size in range(CHUNK_TOKENS, 0, -1) if length % size == 0)
    if chunk < LEAST_CHUNK_TOKENS:
        raise ValueError(
            f"A sequence of {length} tokens cannot be cut into equal chunks of {LEAST_CHUNK_TOKENS} to "
            f"{CHUNK_TOKENS} tokens. Choose a multiple of {LEAST_CHUNK_TOKENS}."
        )
    return chunk


@jax.custom_vjp
def chunked_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """Mix the values of earlier positions of the same document.

    Args:
        query: (batch, position, kv head, group, head_dim).
        key, value: (batch, position, kv head, head_dim), of the query's dtype.
        segments: int32 (batch, position), the number of each position's document; None is one document.

    Returns:
        The mixed values, shaped like the query and of its dtype. Products take its dtype and accumulate in float32.
    """
    return _forward(query, key, value, segments)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    mix = gather(nothing_yet(query), Queries(query, segments), Keys(key, value, segments), same_span=True)
    out, log_total = finished(mix, query.dtype)
    # With these two, rematerialisation need not run the forward pass again.
    out, log_total = checkpoint_name(out, "attention_out"), checkpoint_name(log_total, "attention_rows")
    return out, (query, key, value, segments, out, log_total)


def _backward(
    saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, segments, out, log_total = saved
    d_query, d_key, d_value = gather_gradients(
        jnp.zeros(query.shape, jnp.float32),
        Queries(query, segments),
        backward_of(out, log_total, cotangent),
        Keys(key, value, segments),
        same_span=True,
    )
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), None


chunked_attention.defvjp(_forward, _backward)


def nothing_yet(query: jax.Array) -> Mix:
    """Return the state of queries that have seen no key."""
    batch, length, kv_heads, group, _ = query.shape
    rows = (batch, kv_heads, group, length)
    return Mix(
        jnp.zeros(query.shape, jnp.float32), jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    )


def finished(mix: Mix, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return the mixed values, and the logarithm of each row's sum of weights."""
    values = mix.values / jnp.moveaxis(mix.total, -1, 1)[..., None]
    return values.astype(dtype), mix.maximum + jnp.log(mix.total)


def backward_of(out: jax.Array, log_total: jax.Array, cotangent: jax.Array) -> Backward:
    delta = jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)
    return Backward(cotangent, log_total, jnp.moveaxis(delta, 1, -1))


def gather(mix: Mix, queries: Queries, keys: Keys, *, same_span: bool) -> Mix:
    """Let queries see further keys.

    Args:
        mix: the queries' weighted values so far.
        queries, keys: of equal lengths.
        same_span: the keys are of the queries' own positions, and a query sees none after it; otherwise all keys are
            of earlier positions.
    """
    size, count = _chunks(queries.query.shape[1])

    def one_chunk(i: jax.Array) -> Mix:
        its_queries = _cut(queries, i, size)
        mine = Mix(*(_cut(part, i, size, axis) for part, axis in zip(mix, _MIX_AXES, strict=True)))

        def see(step: jax.Array, mine: Mix) -> Mix:
            j = i - step if same_span else step  # own chunk first: then every row has seen a key
            its_keys = _cut(keys, j, size)
            scores = _scores(its_queries, its_keys, (i - j) * size if same_span else None)
            maximum = jnp.maximum(mine.maximum, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - maximum[..., None])
            keep = jnp.exp(mine.maximum - maximum)
            more = jnp.einsum(
                "bkgts,bskd->btkgd",
                weights.astype(its_keys.value.dtype),
                its_keys.value,
                preferred_element_type=jnp.float32,
            )
            values = mine.values * jnp.moveaxis(keep, -1, 1)[..., None] + more
            return Mix(values, maximum, mine.total * keep + jnp.sum(weights, axis=-1))

        return _repeat(jnp.int32(0), i + 1 if same_span else count, see, mine, at_most=count)

    if count == 1:
        return one_chunk(jnp.int32(0))
    done = jax.lax.map(one_chunk, jnp.arange(count, dtype=jnp.int32))
    return Mix(*(_joined(part, axis) for part, axis in zip(done, _MIX_AXES, strict=True)))


def gather_gradients(
    d_query: jax.Array, queries: Queries, backward: Backward, keys: Keys, *, same_span: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients that come from queries seeing these keys, as in `gather`.

    Args:
        d_query: float32, the queries' gradient from other keys, to add to.

    Returns:
        The queries' gradient, and those of keys and values from these queries alone; all float32.
    """
    size, count = _chunks(queries.query.shape[1])
    scale = 1.0 / math.sqrt(queries.query.shape[-1])

    def one_chunk(d_query: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        its_keys = _cut(keys, j, size)
        key, value, dtype = its_keys.key, its_keys.value, its_keys.key.dtype

        def seen_by(
            i: jax.Array, so_far: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            d_query, d_key, d_value = so_far
            its_queries = _cut(queries, i, size)
            cotangent = _cut(backward.cotangent, i, size)
            log_total, delta = _cut(backward.log_total, i, size, 3), _cut(backward.delta, i, size, 3)
            scores = _scores(its_queries, its_keys, (i - j) * size if same_span else None)
            weights = jnp.exp(scores - log_total[..., None])
            d_value += _wide("bkgts,btkgd->bskd", weights.astype(dtype), cotangent)
            d_weights = _wide("btkgd,bskd->bkgts", cotangent, value)
            d_scores = (weights * (d_weights - delta[..., None]) * scale).astype(dtype)
            d_key += _wide("bkgts,btkgd->bskd", d_scores, its_queries.query)
            more = _cut(d_query, i, size) + _wide("bkgts,bskd->btkgd", d_scores, key)
            d_query = jax.lax.dynamic_update_slice_in_dim(d_query, more, i * size, 1)
            return d_query, d_key, d_value

        zeros = jnp.zeros(key.shape, jnp.float32)
        first = j if same_span else jnp.int32(0)
        d_query, d_key, d_value = _repeat(first, count, seen_by, (d_query, zeros, zeros), at_most=count)
        return d_query, (d_key, d_value)

    if count == 1:
        d_query, (d_key, d_value) = one_chunk(d_query, jnp.int32(0))
        return d_query, d_key, d_value
    d_query, (d_key, d_value) = jax.lax.scan(one_chunk, d_query, jnp.arange(count, dtype=jnp.int32))
    return d_query, _joined(d_key, 1), _joined(d_value, 1)


_MIX_AXES = (1, 3, 3)  # of the queries, in each part of a Mix


def _chunks(length: int) -> tuple[int, int]:
    size = chunk_tokens(length)
    return size, length // size


def _repeat(
    first: jax.Array, end: jax.Array | int, body: Callable[[jax.Array, T], T], init: T, *, at_most: int
) -> T:
    return body(first, init) if at_most == 1 else jax.lax.fori_loop(first, jnp.int32(end), body, init)


def _cut(tree: T, i: jax.Array, size: int, axis: int = 1) -> T:
    """Return chunk i along `axis` of all arrays in the tree."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size, axis), tree)


def _joined(chunks: jax.Array, axis: int) -> jax.Array:
    """Join chunks, stacked along axis 0, along `axis` of each."""
    moved = jnp.moveaxis(chunks, 0, axis)
    shape = (*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
    return moved.reshape(shape)


def _wide(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _scores(queries: Queries, keys: Keys, lead: jax.Array | None) -> jax.Array:
    """Return scaled scores, (batch, kv head, group, query, key), `MASKED` where a query does not see the key.

    `lead` is by how many positions the first query comes after the first key; None: it comes after all of them.
    """
    scores = _wide("btkgd,bskd->bkgts", queries.query, keys.key) / math.sqrt(queries.query.shape[-1])
    if lead is not None:
        at = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3) + lead
        scores = jnp.where(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 4) <= at, scores, MASKED)
    if queries.segments is not None and keys.segments is not None:
        same = queries.segments[:, None, None, :, None] == keys.segments[:, None, None, None, :]
        scores = jnp.where(same, scores, MASKED)
    return scores
