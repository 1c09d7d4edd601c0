"""The aligned line of a logged step, and the figures in it: tokens per second and model FLOPs utilisation."""

from dataclasses import dataclass
from typing import Any

from examples.llama3._config import ModelConfig
from examples.llama3._state import parameter_count

# Dense bf16 FLOP/s of one device, from the vendors' data sheets; matched in this order within `device_kind`, so a
# name that contains another comes first. JAX sees each of the two dies of an MI250 as a device.
PEAK_FLOPS_PER_S: tuple[tuple[str, float], ...] = (
    ("MI355X", 2516.6e12),
    ("MI350X", 2306.9e12),
    ("MI325X", 1307.4e12),
    ("MI300X", 1307.4e12),
    ("MI300A", 980.6e12),
    ("MI250X", 191.5e12),
    ("MI250", 181.05e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H20", 148e12),
    ("H100 PCIe", 756.0e12),
    ("H100 NVL", 835.0e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756.0e12),
    ("H800", 989.4e12),
    ("A100", 312.0e12),
    ("A800", 312.0e12),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The values in one log line."""

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    s_per_step: float
    tokens_per_s: float
    mfu: float | None
    replicas: int
    quorum_id: int | None


def log_line(progress: Progress) -> str:
    """Return the line of a logged step: with the same fields at the same columns for any values."""
    width = len(str(progress.total_steps))
    mfu = "-" if progress.mfu is None else f"{progress.mfu:.1%}"
    quorum = "-" if progress.quorum_id is None else str(progress.quorum_id)
    return (
        f"step {progress.step:>{width}}/{progress.total_steps}"
        f"  loss {progress.loss:7.4f}"
        f"  grad norm {progress.grad_norm:8.4f}"
        f"  s/step {progress.s_per_step:8.3f}"
        f"  tokens/s {progress.tokens_per_s:11,.0f}"
        f"  mfu {mfu:>6}"
        f"  replicas {progress.replicas:3}"
        f"  quorum {quorum:>4}"
    )


def flops_per_token(config: ModelConfig, params: Any, *, seq_len: int) -> int:
    """Return the model FLOPs of one trained token, forward and backward: 6 (N - N_embed) + attention.

    As in PaLM's appendix B: recomputation by remat does not count, and causal attention counts in full. N_embed are
    the parameters that are only looked up. A tied embedding is also multiplied as the output head, so it counts.
    """
    looked_up = 0 if config.tied_embeddings else config.vocab_size * config.dim
    attention = 12 * config.layers * config.heads * config.head_dim * seq_len
    return 6 * (parameter_count(params) - looked_up) + attention


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return a device's dense bf16 peak, or None if it is unknown."""
    for name, peak in PEAK_FLOPS_PER_S:
        if name.lower() in device_kind.lower():
            return peak
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work of one committed step, to turn seconds into rates."""

    tokens_per_step: int
    flops_per_token: int
    devices_per_replica: int
    peak_flops_per_s: float | None

    def tokens_per_s(self, s_per_step: float) -> float:
        return self.tokens_per_step / s_per_step

    def mfu(self, s_per_step: float, *, replicas: int) -> float | None:
        """Return model FLOPs utilisation, taking every replica group to be as large as this one."""
        if self.peak_flops_per_s is None:
            return None
        available = self.peak_flops_per_s * self.devices_per_replica * replicas
        return self.flops_per_token * self.tokens_per_s(s_per_step) / available
