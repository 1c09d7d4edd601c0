"""Ring attention: each device of an axis holds one span of the sequence, and keys and values travel around the ring.

In every round a device lets its queries see the keys that it holds, then passes them to the next one. So no device
ever holds more than one span's keys besides its own, and a transfer can overlap with the products of a round.
Backward, the gradients of keys and values travel with them, and are complete when they are home.

The sequence is cut in stripes so that causal attention keeps all devices equally busy: of 2n stripes, device r holds
r and 2n - 1 - r, one early and one late. In every round but the first, exactly two of a device's four pairs of
stripes are visible: late queries see early keys in any case, and either the early queries see the early keys, or the
late ones the late keys. `striped` and `in_order` convert.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from examples.llama3._chunked import (
    Backward,
    Keys,
    Mix,
    Queries,
    backward_of,
    finished,
    gather,
    gather_gradients,
    nothing_yet,
)

T = TypeVar("T")


def striped(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """Reorder a whole sequence so that n equal spans of it hold the stripes of n devices."""
    return _take_stripes(x, _order(devices), axis) if devices > 1 else x


def in_order(x: jax.Array, devices: int, axis: int = 1) -> jax.Array:
    """Undo `striped`."""
    order = _order(devices)
    return _take_stripes(x, [order.index(s) for s in range(2 * devices)], axis) if devices > 1 else x


def ring_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, axis: str
) -> jax.Array:
    """As `chunked_attention`, with each device of a manual mesh axis holding its two stripes of the sequence.

    Args:
        query, key, value, segments: this device's part, the early stripe first; see `chunked_attention`.
        axis: the mesh axis, of at least two devices.
    """
    return _ring(query, key, value, segments, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, axis: str
) -> jax.Array:
    return _forward(query, key, value, segments, axis)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, axis: str
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    queries, keys = Queries(query, segments), Keys(key, value, segments)
    early, late = _halves(queries)
    early_keys, late_keys = _halves(keys)
    mixes = (
        gather(nothing_yet(early.query), early, early_keys, same_span=True),
        gather(
            gather(nothing_yet(late.query), late, late_keys, same_span=True),
            late,
            early_keys,
            same_span=False,
        ),
    )

    def a_round(number: jax.Array, carried: tuple[tuple[Mix, Mix], Keys]) -> tuple[tuple[Mix, Mix], Keys]:
        (early_mix, late_mix), keys = carried
        keys = _pass_on(keys, axis)
        theirs_early, theirs_late = _halves(keys)
        late_mix = gather(late_mix, late, theirs_early, same_span=False)
        after = _is_after(number, axis)  # whether our early stripe comes after theirs
        mix = gather(
            _choose(after, early_mix, late_mix),
            _choose(after, early, late),
            _choose(after, theirs_early, theirs_late),
            same_span=False,
        )
        return (_choose(after, mix, early_mix), _choose(after, late_mix, mix)), keys

    mixes, _ = jax.lax.fori_loop(1, jax.lax.axis_size(axis), a_round, (mixes, keys))
    (early_out, early_rows), (late_out, late_rows) = (finished(mix, query.dtype) for mix in mixes)
    out = checkpoint_name(jnp.concatenate([early_out, late_out], 1), "attention_out")
    rows = checkpoint_name(jnp.concatenate([early_rows, late_rows], 3), "attention_rows")
    return out, (query, key, value, segments, out, rows)


def _backward(
    axis: str, saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, segments, out, rows = saved
    early, late = _halves(Queries(query, segments))
    backward = backward_of(out, rows, cotangent)
    early_backward, late_backward = (
        Backward(*parts)
        for parts in zip(
            *(jnp.split(part, 2, at) for part, at in zip(backward, (1, 3, 3), strict=True)), strict=True
        )
    )
    keys = Keys(key, value, segments)
    early_keys, late_keys = _halves(keys)
    d_early, *d_early_keys = gather_gradients(
        jnp.zeros(early.query.shape, jnp.float32), early, early_backward, early_keys, same_span=True
    )
    d_late, *d_late_keys = gather_gradients(
        jnp.zeros(late.query.shape, jnp.float32), late, late_backward, late_keys, same_span=True
    )
    d_late, *more = gather_gradients(d_late, late, late_backward, early_keys, same_span=False)
    d_early_keys = _sum(d_early_keys, more)

    def a_round(number: jax.Array, carried: Any) -> Any:
        d_early, d_late, keys, d_early_keys, d_late_keys = carried
        keys, d_early_keys, d_late_keys = _pass_on((keys, d_early_keys, d_late_keys), axis)
        theirs_early, theirs_late = _halves(keys)
        d_late, *more = gather_gradients(d_late, late, late_backward, theirs_early, same_span=False)
        d_early_keys = _sum(d_early_keys, more)
        after = _is_after(number, axis)
        d_mine, *more = gather_gradients(
            _choose(after, d_early, d_late),
            _choose(after, early, late),
            _choose(after, early_backward, late_backward),
            _choose(after, theirs_early, theirs_late),
            same_span=False,
        )
        d_early, d_late = _choose(after, d_mine, d_early), _choose(after, d_late, d_mine)
        d_early_keys = _choose(after, _sum(d_early_keys, more), d_early_keys)
        d_late_keys = _choose(after, d_late_keys, _sum(d_late_keys, more))
        return d_early, d_late, keys, d_early_keys, d_late_keys

    carried = (d_early, d_late, keys, d_early_keys, d_late_keys)
    carried = jax.lax.fori_loop(1, jax.lax.axis_size(axis), a_round, carried)
    d_early, d_late, _, *d_keys = carried
    (d_early_key, d_early_value), (d_late_key, d_late_value) = _pass_on(d_keys, axis)  # home
    return (
        jnp.concatenate([d_early, d_late], 1).astype(query.dtype),
        jnp.concatenate([d_early_key, d_late_key], 1).astype(key.dtype),
        jnp.concatenate([d_early_value, d_late_value], 1).astype(value.dtype),
        None,
    )


_ring.defvjp(_forward, _backward)


def _halves(tree: T) -> tuple[T, T]:
    """Split all arrays, (batch, position, ...), into the early and the late stripe."""
    early = jax.tree.map(lambda x: jnp.split(x, 2, 1)[0], tree)
    return early, jax.tree.map(lambda x: jnp.split(x, 2, 1)[1], tree)


def _pass_on(tree: T, axis: str) -> T:
    size = jax.lax.axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), tree)


def _is_after(number: jax.Array, axis: str) -> jax.Array:
    """Return whether this device comes after the owner of the keys that it holds in this round."""
    return jax.lax.axis_index(axis) >= number


def _choose(first: jax.Array, a: T, b: T) -> T:
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), a, b)


def _sum(a: T, b: T) -> T:
    return jax.tree.map(jnp.add, a, b)


def _order(devices: int) -> list[int]:
    return [stripe for r in range(devices) for stripe in (r, 2 * devices - 1 - r)]


def _take_stripes(x: jax.Array, order: list[int], axis: int) -> jax.Array:
    stripes = jnp.split(x, len(order), axis)
    return jnp.concatenate([stripes[i] for i in order], axis)
