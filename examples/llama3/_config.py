"""The sizes of Llama 3, and the checks that refuse a bad setting before anything is changed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kernel = Literal["auto", "plain", "chunked", "cudnn", "transformer-engine"]
Remat = Literal["none", "selective", "full"]
Size = Literal["debug", "50m", "1B", "3B", "8B", "70B", "405B"]


class SettingsError(ValueError):
    """A flag, the corpus or the mesh is invalid. Nothing was compiled, opened or changed."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How Llama 3.1 stretches the rotary frequencies from 8k to 128k tokens of context."""

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One size of the model. Static to jit; equal configs compile to the same program."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int = 128_256
    tied_embeddings: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = RopeScaling(factor=8.0)
    norm_epsilon: float = 1e-5
    compute_dtype: str = "bfloat16"
    attention: Kernel = "auto"
    remat: Remat = "full"
    microbatches: int = 1

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


# 256 bytes and three specials, rounded up to a multiple of 64 so that any common `tp` divides it.
BYTE_VOCAB_SIZE = 320

# debug and 50m read bytes and exist for tests and benchmarks; the others are the published shapes.
MODEL_SIZES: Mapping[Size, ModelConfig] = MappingProxyType(
    {
        "debug": ModelConfig(dim=160, layers=3, heads=8, kv_heads=4, ffn_dim=480, vocab_size=BYTE_VOCAB_SIZE),
        "50m": ModelConfig(dim=512, layers=16, heads=8, kv_heads=4, ffn_dim=1536, vocab_size=BYTE_VOCAB_SIZE),
        "1B": ModelConfig(
            dim=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            ffn_dim=8192,
            tied_embeddings=True,
            rope_scaling=RopeScaling(factor=32.0),
        ),
        "3B": ModelConfig(
            dim=3072,
            layers=28,
            heads=24,
            kv_heads=8,
            ffn_dim=8192,
            tied_embeddings=True,
            rope_scaling=RopeScaling(factor=32.0),
        ),
        "8B": ModelConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14_336),
        "70B": ModelConfig(dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28_672),
        "405B": ModelConfig(dim=16_384, layers=126, heads=128, kv_heads=8, ffn_dim=53_248),
    }
)


def check_positive(**values: float) -> None:
    """Check that all values are finite and above zero; an error names the flag."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise SettingsError(f"{flag(name)} must be above 0 and finite, not {value}.")


def check_not_negative(**values: float) -> None:
    """Check that all values are finite, and zero or above; an error names the flag."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise SettingsError(f"{flag(name)} must be 0 or above and finite, not {value}.")


def check_seed(seed: int) -> None:
    """Check that the random generators of JAX and of grain take this seed."""
    if not 0 <= seed < 2**32:
        raise SettingsError(f"--seed must be from 0 to {2**32 - 1}, not {seed}.")


def check_mesh(  # noqa: PLR0913 - one for each flag
    model: ModelConfig,
    *,
    fsdp: int,
    tp: int,
    batch_per_shard: int,
    device_count: int,
    pipeline: int = 1,
    context: int = 1,
    seq_len: int | None = None,
) -> None:
    """Check that there are devices for the mesh, and that its axes divide the model, the batch and its sequences."""
    axes = {"pipeline": pipeline, "fsdp": fsdp, "context": context, "tp": tp}
    check_positive(**axes, microbatches=model.microbatches, batch_per_shard=batch_per_shard)
    needed = math.prod(axes.values())
    if needed > device_count:
        used = [name for name, size in axes.items() if name in ("fsdp", "tp") or size > 1]
        mesh = " x ".join(f"{name}={axes[name]}" for name in used)
        raise SettingsError(
            f"A mesh of {mesh} needs {needed} devices, but there are {device_count} here. "
            f"Lower {' or '.join(map(flag, used))}, or simulate devices with --cpu-devices {needed}."
        )
    if context > 1 and model.attention not in ("auto", "chunked"):
        raise SettingsError(
            f"context={context} needs ring attention, which is chunked; --attention is {model.attention}. "
            "Leave it at auto."
        )
    sequences = "sequences of a shard (--batch-per-shard)"
    divisions = (
        ("pipeline", pipeline, "layers", model.layers),
        ("microbatches", model.microbatches, sequences, batch_per_shard),
        ("tp", tp, "attention heads", model.heads),
        ("tp", tp, "key and value heads", model.kv_heads),
        ("tp", tp, "feed-forward width", model.ffn_dim),
        ("tp", tp, "vocabulary", model.vocab_size),
        ("fsdp", fsdp, "model width", model.dim),
        ("context", context, "model width left by fsdp", max(1, model.dim // fsdp)),
        ("fsdp", fsdp, sequences, batch_per_shard),
    )
    for axis, size, what, extent in divisions:
        if extent % size != 0:
            raise SettingsError(
                f"{axis}={size} does not divide the {what}, {extent}. "
                f"Choose --{axis} from {_powers_of_two_in(extent)}."
            )
    if batch_per_shard % (model.microbatches * fsdp) != 0:
        raise SettingsError(
            f"microbatches={model.microbatches} x fsdp={fsdp} does not divide the {sequences}, {batch_per_shard}. "
            f"Make it a multiple of {model.microbatches * fsdp}."
        )
    spans = math.lcm(pipeline * context * tp, 2 * context if context > 1 else 1)
    if seq_len is not None and seq_len % spans != 0:
        raise SettingsError(
            f"pipeline={pipeline} x context={context} x tp={tp} divides sequences into {spans} equal parts, but "
            f"--seq-len is {seq_len}. Make it a multiple of {spans}."
        )


def flag(name: str) -> str:
    """Return the command-line spelling of a setting."""
    return "--" + name.replace("_", "-")


def _powers_of_two_in(extent: int) -> str:
    powers = [2**k for k in range(extent.bit_length()) if extent % 2**k == 0]
    return ", ".join(str(power) for power in powers[:8])
