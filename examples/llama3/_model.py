"""Llama 3: grouped-query attention, rotary positions with the 3.1 scaling, RMSNorm, SwiGLU.

The layers' parameters are stacked along a leading axis and scanned over, so the program is as long as one layer:
405B traces as fast as debug. Parameters are float32; matrices are cast to the compute dtype where they are used, and
norms, softmax and loss stay in float32.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.llama3._config import ModelConfig, RopeScaling
from examples.llama3._init import INIT_STDDEV, stddev_by_depth, truncated_normal
from examples.llama3._sharding import NO_MESH, ActivationSharding


class Llama(nnx.Module):
    """Token ids (batch, position) -> float32 logits (batch, position, vocabulary).

    With `segment_ids` and `positions`, both int32 (batch, position), tokens see only those of the same document, at
    their positions in it. Without, a sequence is one document.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shard: ActivationSharding = NO_MESH) -> None:
        self.config = config
        self.shard = shard
        head_stddev = config.dim**-0.5
        # A tied embedding is also the head, and is drawn as one.
        stddev = head_stddev if config.tied_embeddings else 1.0
        self.embedding = _matrix(rngs, config.vocab_size, config.dim, stddev=stddev)
        self.blocks = Block(config, rngs=rngs, shard=shard)
        self.final_norm = _ones(config.dim)
        if not config.tied_embeddings:
            self.head = _matrix(rngs, config.dim, config.vocab_size, stddev=head_stddev)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        config = self.config
        x = self.embedding[...][tokens].astype(config.compute_dtype)
        x = self.shard(x, "batch", None, None)
        rotation = rope_rotation(jnp.arange(tokens.shape[1]) if positions is None else positions, config)
        graph, stacked_layers = nnx.split(self.blocks)

        def layer(x: jax.Array, parameters: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, parameters)(x, rotation, segment_ids), None

        x, _ = jax.lax.scan(jax.checkpoint(layer) if config.remat else layer, x, stacked_layers)
        x = rms_norm(x, self.final_norm[...], config.norm_epsilon)
        head = self.embedding[...].T if config.tied_embeddings else self.head[...]
        logits = jnp.matmul(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
        return self.shard(logits, "batch", None, "vocab")


class Block(nnx.Module):
    """One transformer layer. Built with its parameters stacked over all layers; called on the slice of one."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shard: ActivationSharding) -> None:
        self.epsilon = config.norm_epsilon
        self.shard = shard
        self.attention_norm = _ones(config.layers, config.dim)
        self.attention = Attention(config, rngs=rngs, shard=shard)
        self.ffn_norm = _ones(config.layers, config.dim)
        self.feed_forward = FeedForward(config, rngs=rngs, shard=shard)

    def __call__(self, x: jax.Array, rotation: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        x = x + self.attention(rms_norm(x, self.attention_norm[...], self.epsilon), rotation, segment_ids)
        x = x + self.feed_forward(rms_norm(x, self.ffn_norm[...], self.epsilon))
        return self.shard(x, "batch", None, None)


class Attention(nnx.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shard: ActivationSharding) -> None:
        layers, dim, head_dim = config.layers, config.dim, config.head_dim
        self.shard = shard
        self.query = _matrix(rngs, layers, dim, config.heads, head_dim)
        self.key = _matrix(rngs, layers, dim, config.kv_heads, head_dim)
        self.value = _matrix(rngs, layers, dim, config.kv_heads, head_dim)
        self.output = _matrix(rngs, layers, config.heads, head_dim, dim, stddev=stddev_by_depth(layers))

    def __call__(self, x: jax.Array, rotation: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        query = jnp.einsum("btd,dhk->bthk", x, self.query[...].astype(x.dtype))
        key = jnp.einsum("btd,dhk->bthk", x, self.key[...].astype(x.dtype))
        value = jnp.einsum("btd,dhk->bthk", x, self.value[...].astype(x.dtype))
        query = self.shard(rotate(query, rotation), "batch", None, "heads", None)
        key = self.shard(rotate(key, rotation), "batch", None, "kv_heads", None)
        value = self.shard(value, "batch", None, "kv_heads", None)
        mixed = self.shard(causal_attention(query, key, value, segment_ids), "batch", None, "heads", None)
        return jnp.einsum("bthk,hkd->btd", mixed, self.output[...].astype(x.dtype))


class FeedForward(nnx.Module):
    """SwiGLU: a feed-forward layer with a gate."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shard: ActivationSharding) -> None:
        layers, dim, ffn_dim = config.layers, config.dim, config.ffn_dim
        self.shard = shard
        self.gate = _matrix(rngs, layers, dim, ffn_dim)
        self.up = _matrix(rngs, layers, dim, ffn_dim, stddev=stddev_by_depth(layers))
        self.down = _matrix(rngs, layers, ffn_dim, dim, stddev=stddev_by_depth(layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jnp.matmul(x, self.gate[...].astype(x.dtype))
        hidden = jax.nn.silu(gate) * jnp.matmul(x, self.up[...].astype(x.dtype))
        hidden = self.shard(hidden, "batch", None, "ffn")
        return jnp.matmul(hidden, self.down[...].astype(x.dtype))


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Mix the document's values up to each position, (batch, position, head, head_dim); softmax in float32.

    Consecutive query heads share a key and value head, so a head group stays on its `tp` device.
    """
    batch, positions, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, positions, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)
    at = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    seen = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 4)
    visible = seen <= at
    if segment_ids is not None:
        visible &= (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None, None]
    scores = jnp.where(visible, scores / math.sqrt(head_dim), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(batch, positions, heads, head_dim)


def next_token_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross-entropy, in nats per token.

    The target's logit is selected by comparison, not by a gather, so the vocabulary stays sharded over `tp`.
    """
    token_ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    is_target = token_ids == targets[..., None]
    target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Scale each vector to unit root mean square, in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    unit = wide * jax.lax.rsqrt(mean_square + epsilon)
    return (unit * jnp.broadcast_to(scale, unit.shape)).astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Return radians per position of each pair of a head's dimensions, with Llama 3.1's scaling applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is None:
        return frequencies
    return _scale_frequencies(frequencies, config.rope_scaling)


def rope_rotation(positions: jax.Array, config: ModelConfig) -> jax.Array:
    """Return cosines and sines, (2, 1 or batch, position, 1, head_dim / 2), in float32.

    Args:
        positions: (position,), or (batch, position).
    """
    rows = positions.reshape(-1, positions.shape[-1], 1).astype(jnp.float32)
    angles = rows * rope_frequencies(config).astype(np.float32)[None, None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])[:, :, :, None, :]


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotate each pair of dimensions by its position's angle.

    The pairs are (i, i + head_dim / 2), as in the weights on Hugging Face; Meta's own files interleave them.
    """
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


def _scale_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Keep high frequencies, lower those with few turns within the original context, blend in between."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _matrix(rngs: nnx.Rngs, *shape: int, stddev: jax.typing.ArrayLike = INIT_STDDEV) -> nnx.Param[jax.Array]:
    return nnx.Param(truncated_normal(rngs.params(), shape, stddev))


def _ones(*shape: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.ones(shape, jnp.float32))
