"""Llama 3: grouped-query attention, rotary positions with the 3.1 scaling, RMSNorm, SwiGLU.

The layers' parameters are stacked along a leading axis and scanned over, so the program is as long as one layer:
405B traces as fast as debug. Parameters are float32; matrices are cast to the compute dtype where they are used, and
norms, softmax and loss stay in float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from examples.llama3._attention import attend
from examples.llama3._config import Kernel, ModelConfig, Remat, RopeScaling
from examples.llama3._init import INIT_STDDEV, stddev_by_depth, truncated_normal
from examples.llama3._layers import Layer, Positions, run_layers, whole_parameters
from examples.llama3._loss import next_token_loss
from examples.llama3._products import project
from examples.llama3._ring import in_order, striped
from examples.llama3._sharding import NO_MESH, ActivationSharding


class Llama(nnx.Module):
    """Token ids (batch, position) -> float32 logits (batch, position, vocabulary), or the loss."""

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
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Return the logits.

        Args:
            tokens: int32 (batch, position).
            segment_ids: int32 (batch, position), the number of each position's document within its sequence.
                A position sees none of another document. None: one document.
            positions: int32 (batch, position), from 0 in each document. None: from 0 in each sequence.
        """
        spans = self.shard.size("context")
        x = self._last_layer(*_striped((tokens, segment_ids, positions), spans))
        logits = project("btd,dv->btv", x, self._head(), jnp.float32)
        logits = self.shard(logits, "batch", "spread_position", "vocab")
        return in_order(logits, spans)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Return the mean cross-entropy of the targets, int32 (batch, position), in nats per token."""
        tokens, targets, segment_ids, positions = _striped(
            (tokens, targets, segment_ids, positions), self.shard.size("context")
        )
        return next_token_loss(
            self._last_layer(tokens, segment_ids, positions), self._head(), targets, self.shard
        )

    def _last_layer(
        self, tokens: jax.Array, segment_ids: jax.Array | None, positions: jax.Array | None
    ) -> jax.Array:
        """Return the normalised output of the last layer, (batch, position, dim), in the compute dtype."""
        config = self.config
        x = self.embedding[...][tokens].astype(config.compute_dtype)
        x = self.shard(x, "batch", "spread", None)
        if positions is None:
            positions = striped(jnp.arange(tokens.shape[1])[None], self.shard.size("context"))
        graph, stacked_layers = nnx.split(self.blocks)

        def layer(x: jax.Array, parameters: Any, positions: Positions) -> jax.Array:
            return nnx.merge(graph, whole_parameters(parameters, self.shard))(x, positions)

        x = run_layers(
            rematerialised(layer, config.remat),
            nnx.to_pure_dict(stacked_layers),
            x,
            Positions(rope_rotation(positions, config), segment_ids),
            shard=self.shard,
            microbatches=config.microbatches,
        )
        x = rms_norm(x, self.final_norm[...], config.norm_epsilon)
        return self.shard(x, "batch", "spread", None)

    def _head(self) -> jax.Array:
        return self.embedding[...].T if self.config.tied_embeddings else self.head[...]


class Block(nnx.Module):
    """One transformer layer. Built with its parameters stacked over all layers; called on the slice of one."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shard: ActivationSharding) -> None:
        self.epsilon = config.norm_epsilon
        self.shard = shard
        self.attention_norm = _ones(config.layers, config.dim)
        self.attention = Attention(config, rngs=rngs, shard=shard)
        self.ffn_norm = _ones(config.layers, config.dim)
        self.feed_forward = FeedForward(config, rngs=rngs, shard=shard)

    def __call__(self, x: jax.Array, positions: Positions) -> jax.Array:
        x += self.attention(rms_norm(x, self.attention_norm[...], self.epsilon), positions)
        x = self.shard(x, "batch", "sequence", None)
        x += self.feed_forward(rms_norm(x, self.ffn_norm[...], self.epsilon))
        return self.shard(x, "batch", "sequence", None)


class Attention(nnx.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shard: ActivationSharding) -> None:
        layers, dim, head_dim = config.layers, config.dim, config.head_dim
        self.kernel: Kernel = config.attention
        self.shard = shard
        self.query = _matrix(rngs, layers, dim, config.heads, head_dim)
        self.key = _matrix(rngs, layers, dim, config.kv_heads, head_dim)
        self.value = _matrix(rngs, layers, dim, config.kv_heads, head_dim)
        self.output = _matrix(rngs, layers, config.heads, head_dim, dim, stddev=stddev_by_depth(layers))

    def __call__(self, x: jax.Array, positions: Positions) -> jax.Array:
        x = self.shard(x, "batch", "position", None)
        query = rotate(project("btd,dhk->bthk", x, self.query[...]), positions.rotation)
        key = rotate(project("btd,dhk->bthk", x, self.key[...]), positions.rotation)
        value = project("btd,dhk->bthk", x, self.value[...])
        query = checkpoint_name(self.shard(query, "batch", "position", "heads", None), "query")
        key = checkpoint_name(self.shard(key, "batch", "position", "kv_heads", None), "key")
        value = checkpoint_name(self.shard(value, "batch", "position", "kv_heads", None), "value")
        ring = "context" if self.shard.size("context") > 1 else None
        mixed = attend(query, key, value, positions.segments, kernel=self.kernel, ring=ring)
        mixed = self.shard(mixed, "batch", "position", "heads", None)
        return self.shard(project("bthk,hkd->btd", mixed, self.output[...]), "batch", "sequence", None)


class FeedForward(nnx.Module):
    """SwiGLU: a feed-forward layer with a gate."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, shard: ActivationSharding) -> None:
        layers, dim, ffn_dim = config.layers, config.dim, config.ffn_dim
        self.shard = shard
        self.gate = _matrix(rngs, layers, dim, ffn_dim)
        self.up = _matrix(rngs, layers, dim, ffn_dim, stddev=stddev_by_depth(layers))
        self.down = _matrix(rngs, layers, ffn_dim, dim, stddev=stddev_by_depth(layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.shard(x, "batch", "position", None)
        gate, up = project("btd,df->btf", x, self.gate[...]), project("btd,df->btf", x, self.up[...])
        hidden = self.shard(jax.nn.silu(gate) * up, "batch", "position", "ffn")
        return self.shard(project("btf,fd->btd", hidden, self.down[...]), "batch", "sequence", None)


def rematerialised(layer: Layer, remat: Remat) -> Layer:
    """Return the layer with what its backward pass computes again: nothing, all, or all but attention.

    Selective keeps the inputs and the output of attention: 20 KB per token and layer of 8B where everything is 180.
    The products of the feed-forward layer are computed again, the scores are not.
    """
    if remat == "none":
        return layer
    kept = _ATTENTION if remat == "selective" else ()
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return jax.checkpoint(
        layer, policy=policy, prevent_cse=False
    )  # within a scan there is nothing to merge with


_ATTENTION = ("query", "key", "value", "attention_out", "attention_rows")


def _striped(arrays: tuple[jax.Array | None, ...], spans: int) -> tuple[Any, ...]:
    """Order the positions of (batch, position) as the devices of a ring hold them."""
    return jax.tree.map(lambda array: striped(array, spans), arrays)


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
    """Return cosines and sines of (batch, position): float32 (batch, position, 2, 1, head_dim / 2)."""
    frequencies = rope_frequencies(config).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=2)[:, :, :, None, :]


def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotate each pair of dimensions by its position's angle.

    The pairs are (i, i + head_dim / 2), as in the weights on Hugging Face; Meta's own files interleave them.
    """
    cosine, sine = rotation[:, :, 0], rotation[:, :, 1]
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
