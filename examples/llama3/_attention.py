"""Causal attention within documents: which kernel to use, and the plain form that the others must equal.

All take queries (batch, position, head, head_dim), keys and values (batch, position, kv head, head_dim), and the
number of each position's document, int32 (batch, position), or None for one document. Consecutive query heads share a
key and value head, so a head group stays on its `tp` device.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from examples.llama3._chunked import chunked_attention
from examples.llama3._config import Kernel
from examples.llama3._products import wide_product
from examples.llama3._ring import ring_attention

# Below this, all scores together are smaller than one chunk's.
PLAIN_TOKENS = 1024

# In one sequence, where a kernel needs to know. Documents of a corpus have hundreds of tokens or more.
MOST_DOCUMENTS = 256


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    kernel: Kernel = "auto",
    ring: str | None = None,
) -> jax.Array:
    """Mix the values of earlier positions of the same document; (batch, position, head, head_dim).

    Args:
        ring: the manual mesh axis that the sequence is striped over, where there is one (`_ring`).
    """
    if ring is not None:
        return ring_attention(grouped(query, key.shape[2]), key, value, segments, ring).reshape(query.shape)
    if kernel == "auto":
        kernel = best_kernel(query.shape[1], query.dtype)
    if kernel == "chunked":
        out = chunked_attention(grouped(query, key.shape[2]), key, value, segments).reshape(query.shape)
    else:
        out = _KERNELS[kernel](query, key, value, segments)
    return checkpoint_name(out, "attention_out")


def best_kernel(length: int, dtype: jax.typing.DTypeLike) -> Kernel:
    """Return the kernel that "auto" stands for on this platform, for sequences of this length and dtype."""
    platform = jax.devices()[0].client.platform_version.lower() if jax.default_backend() == "gpu" else ""
    fused = jnp.dtype(dtype).itemsize == 2  # the fused kernels take no float32
    if fused and "cuda" in platform:
        return "cudnn"
    if fused and "rocm" in platform and importlib.util.find_spec("transformer_engine") is not None:
        return "transformer-engine"
    return "plain" if length <= PLAIN_TOKENS else "chunked"


def plain_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """The definition: all scores at once, softmax in float32."""
    scores = wide_product("btkgd,bskd->bkgts", grouped(query, key.shape[2]), key)
    scores = jnp.where(visible(query.shape[1], segments), scores / math.sqrt(query.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """cuDNN's flash attention, on CUDA. With documents it reads a mask, which all heads of a sequence share."""
    if segments is None:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    mask = visible(query.shape[1], segments)[:, 0]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="cudnn")


def transformer_engine_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """Transformer Engine's fused attention: what AMD's JAX images use on ROCm (Composable Kernel or AOTriton).

    Its backward pass may add in any order unless NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 is set.

    A sequence of more than `MOST_DOCUMENTS` documents becomes NaN, which ends the job instead of training wrongly.
    """
    # Only where it is used: it is not a dependency of this example, and loads ROCm's or CUDA's libraries.
    from transformer_engine.jax.attention import (  # pyright: ignore[reportMissingImports]
        SequenceDescriptor,
    )
    from transformer_engine.jax.flax import DotProductAttention  # pyright: ignore[reportMissingImports]

    packed = segments is not None
    attention = DotProductAttention(
        head_dim=query.shape[-1],
        num_attention_heads=query.shape[2],
        num_gqa_groups=key.shape[2],
        attn_mask_type="padding_causal" if packed else "causal",
        attn_bias_type="no_bias",
        attention_dropout=0.0,
        qkv_layout="thd_thd_thd" if packed else "bshd_bshd_bshd",
        scale_factor=1.0 / math.sqrt(query.shape[-1]),
        transpose_batch_sequence=False,
        max_segments_per_seq=MOST_DOCUMENTS if packed else 1,
    )
    if segments is None:
        return attention.apply({}, query, key, value, deterministic=True)
    lengths, offsets = documents_in(segments, at_most=MOST_DOCUMENTS)
    described = SequenceDescriptor.from_seqlens_and_offsets((lengths, lengths), (offsets, offsets))
    out = attention.apply({}, query, key, value, sequence_descriptor=described, deterministic=True)
    fits = jnp.sum(jnp.maximum(lengths, 0), axis=1) == query.shape[1]
    return jnp.where(fits[:, None, None, None], out, jnp.nan)


def documents_in(segments: jax.Array, *, at_most: int) -> tuple[jax.Array, jax.Array]:
    """Return the length of each document, int32 (batch, at_most), and where it starts, with one more for the end.

    Unused places hold -1. Documents after the first `at_most` are left out.
    """

    def of_one(segments: jax.Array) -> tuple[jax.Array, jax.Array]:
        length = segments.shape[0]
        begins = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
        (offsets,) = jnp.nonzero(begins, size=at_most + 1, fill_value=length)
        offsets = offsets.astype(jnp.int32)
        used = offsets[:-1] < length
        ends = jnp.concatenate([jnp.ones(1, bool), used])
        return jnp.where(used, jnp.diff(offsets), -1), jnp.where(ends, offsets, -1)

    return jax.vmap(of_one)(segments)


def grouped(query: jax.Array, kv_heads: int) -> jax.Array:
    """Split the heads by the key and value head they share: (batch, position, kv head, group, head_dim)."""
    batch, positions, heads, head_dim = query.shape
    return query.reshape(batch, positions, kv_heads, heads // kv_heads, head_dim)


def visible(length: int, segments: jax.Array | None) -> jax.Array:
    """Return which keys each position sees: bool (batch or 1, 1, 1, query, key)."""
    at = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, length, length), 3)
    seen = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, length, length), 4)
    if segments is None:
        return seen <= at
    same = segments[:, None, None, :, None] == segments[:, None, None, None, :]
    return same & jnp.broadcast_to(seen <= at, same.shape)


_KERNELS: Mapping[str, Callable[..., jax.Array]] = {
    "plain": plain_attention,
    "cudnn": cudnn_attention,
    "transformer-engine": transformer_engine_attention,
}
