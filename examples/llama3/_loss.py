"""Cross-entropy of the next token, without ever holding the logits of the whole vocabulary.

A scan over chunks of the vocabulary keeps the running maximum and sum of each position, and the target's logit.
Backward, each chunk's logits are computed again, and give that chunk's columns of the head's gradient at once: so the
head is read, and its gradient reduced between devices, as often as without chunks. (Chunks of tokens would reduce it
once for each.) With `tp`, each device does this for its own part of the vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from examples.llama3._sharding import NO_MESH, ActivationSharding

T = TypeVar("T")

CHUNK_TOKENS = 16_384  # of the vocabulary, on one device


def next_token_loss(
    x: jax.Array, head: jax.Array, targets: jax.Array, shard: ActivationSharding = NO_MESH
) -> jax.Array:
    """Return the mean cross-entropy, in nats per token.

    Args:
        x: the normalised output of the last layer, (batch, position, dim), in the compute dtype.
        head: float32 (dim, vocabulary).
        targets: int32 (batch, position), the tokens to predict.
        shard: of the mesh, whose `tp` axis the vocabulary is sharded over.
    """
    return jnp.mean(_token_losses(shard, x, head, targets))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(shard: ActivationSharding, x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    return _forward(shard, x, head, targets)[0]


def _forward(
    shard: ActivationSharding, x: jax.Array, head: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    per_device = _over_vocabulary(shard, _scan_forward, out_axes=(None, None))
    log_total, target_logit = per_device(x, head, targets)
    return log_total - target_logit, (x, head, targets, log_total)


def _backward(
    shard: ActivationSharding, saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, head, targets, log_total = saved
    per_device = _over_vocabulary(shard, _scan_backward, out_axes=(None, 1))
    d_x, d_head = per_device(x, head, targets, log_total, cotangent)
    return d_x.astype(x.dtype), d_head, None


_token_losses.defvjp(_forward, _backward)


def _scan_forward(
    x: jax.Array, head: jax.Array, targets: jax.Array, *, shard: ActivationSharding, axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Return the logarithm of the sum of all tokens' exponentials, and the target's logit; float32."""
    chunks = _Chunks(head, axis)

    def one_chunk(c: jax.Array, so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        maximum, total, target_logit = so_far
        logits = chunks.logits(c, x, shard)
        target_logit += jnp.sum(jnp.where(chunks.is_target(c, targets, logits), logits, 0.0), axis=-1)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        more = jnp.sum(jnp.exp(logits - new_maximum[..., None]), axis=-1)
        return new_maximum, total * jnp.exp(maximum - new_maximum) + more, target_logit

    zeros = jnp.zeros(targets.shape, jnp.float32)
    so_far = (jnp.full(targets.shape, -jnp.inf, jnp.float32), zeros, zeros)
    maximum, total, target_logit = chunks.each(one_chunk, so_far)
    if axis is not None:
        own_maximum, maximum = maximum, jax.lax.pmax(maximum, axis)
        total = jax.lax.psum(total * jnp.exp(own_maximum - maximum), axis)
        target_logit = jax.lax.psum(target_logit, axis)
    return maximum + jnp.log(total), target_logit


def _scan_backward(  # noqa: PLR0913 - the arrays of the forward pass
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    log_total: jax.Array,
    cotangent: jax.Array,
    *,
    shard: ActivationSharding,
    axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of x and of the head; float32."""
    chunks = _Chunks(head, axis)

    def one_chunk(c: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_x, d_head = so_far
        logits = chunks.logits(c, x, shard)
        is_target = chunks.is_target(c, targets, logits).astype(jnp.float32)
        d_logits = jnp.exp(logits - log_total[..., None]) - is_target
        d_logits = (d_logits * cotangent[..., None]).astype(x.dtype)
        d_x += jnp.einsum(
            "btv,dv->btd", d_logits, chunks.columns(c, x.dtype), preferred_element_type=jnp.float32
        )
        d_columns = jnp.einsum("btd,btv->dv", x, d_logits, preferred_element_type=jnp.float32)
        return d_x, jax.lax.dynamic_update_slice_in_dim(d_head, d_columns, c * chunks.size, 1)

    so_far = (jnp.zeros(x.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32))
    d_x, d_head = chunks.each(one_chunk, so_far)
    return d_x if axis is None else jax.lax.psum(d_x, axis), d_head


class _Chunks:
    """The chunks of one device's part of the vocabulary."""

    def __init__(self, head: jax.Array, axis: str | None) -> None:
        self.head = head
        vocabulary = head.shape[1]
        self.count = next(
            n for n in range(1, vocabulary + 1) if vocabulary % n == 0 and vocabulary // n <= CHUNK_TOKENS
        )
        self.size = vocabulary // self.count
        self.first = 0 if axis is None else jax.lax.axis_index(axis) * vocabulary

    def each(self, body: Callable[[jax.Array, T], T], so_far: T) -> T:
        if self.count == 1:
            return body(jnp.int32(0), so_far)
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.count), body, so_far)

    def columns(self, c: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(self.head, c * self.size, self.size, 1).astype(dtype)

    def logits(self, c: jax.Array, x: jax.Array, shard: ActivationSharding) -> jax.Array:
        columns = self.columns(c, x.dtype)
        logits = jnp.einsum("btd,dv->btv", x, columns, preferred_element_type=jnp.float32)
        return shard(logits, "batch", "spread_position", "vocab")

    def is_target(self, c: jax.Array, targets: jax.Array, logits: jax.Array) -> jax.Array:
        """Return which logits are the targets', by comparison: a gather would need the whole vocabulary."""
        token_ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) + (self.first + c * self.size)
        return token_ids == targets[..., None]


def _over_vocabulary(
    shard: ActivationSharding, function: Callable[..., Any], *, out_axes: tuple[int | None, ...]
) -> Callable[..., Any]:
    """Run a function on each device's part of the vocabulary; the head is its second argument."""
    if shard.size("tp") == 1:
        return functools.partial(function, shard=shard, axis=None)

    def call(*args: jax.Array) -> Any:
        split = {None: PartitionSpec(), 1: PartitionSpec(None, "tp")}
        in_specs = tuple(split[1 if i == 1 else None] for i in range(len(args)))
        return jax.shard_map(
            functools.partial(function, shard=shard, axis="tp"),
            mesh=shard.mesh,
            in_specs=in_specs,
            out_specs=tuple(split[axis] for axis in out_axes),
            axis_names={"tp"},
            check_vma=False,
        )(*args)

    return call
