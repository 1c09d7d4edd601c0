"""AdamW with clipping by global norm, warmed up and decayed by the number of committed steps."""

from dataclasses import dataclass
from typing import Any

import jax
import optax

from examples.llama3._config import SettingsError, check_positive
from examples.llama3._sharding import parameter_name


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float
    warmup_steps: int
    total_steps: int
    weight_decay: float
    clip_norm: float
    beta1: float = 0.9
    beta2: float = 0.95
    final_fraction: float = 0.1  # of the peak learning rate, as in the Llama papers

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate, steps=self.total_steps, clip_norm=self.clip_norm)
        if self.warmup_steps < 0:
            raise SettingsError(f"--warmup-steps must be 0 or above, not {self.warmup_steps}.")
        if self.weight_decay < 0:
            raise SettingsError(f"--weight-decay must be 0 or above, not {self.weight_decay}.")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return clip, Adam and weight decay: everything but the learning rate, for which see `learning_rate`."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2),
        optax.add_decayed_weights(config.weight_decay, mask=_is_matrix),
    )


def learning_rate(config: OptimizerConfig, step: jax.typing.ArrayLike) -> jax.Array:
    """Return the learning rate of the step that follows `step` committed ones.

    It depends only on the state's own counter, so an aborted attempt or a relaunched group cannot shift it. The first
    step already has some of the warm-up, or it would change nothing; a run that is shorter than its warm-up ends
    within it.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.total_steps, config.warmup_steps + 1),
        end_value=config.final_fraction * config.learning_rate,
    )
    return jax.numpy.asarray(schedule(step + 1))


def _is_matrix(params: Any) -> Any:
    """Mark the parameters that decay: all but norm scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not parameter_name(path).endswith("norm"), params)
