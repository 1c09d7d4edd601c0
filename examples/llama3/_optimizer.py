"""AdamW with clipping by global norm, warmed up and decayed by the number of committed steps."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import jaxft
from examples.llama3._config import SettingsError, check_not_negative, check_positive
from examples.llama3._sharding import parameter_name

Schedule = Literal["cosine", "linear"]
# all: also the scales of the norms. matrices: all but those. blocks: the matrices of the layers alone.
Decayed = Literal["all", "matrices", "blocks"]

_NOT_IN_BLOCKS = frozenset({"embedding", "head"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    learning_rate: float
    warmup_steps: int
    total_steps: int
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule: Schedule = "cosine"
    final_fraction: float = 0.1  # of the peak learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    decayed: Decayed = "matrices"
    any_mesh: bool = False  # the same bits on every mesh, for a slower norm

    def __post_init__(self) -> None:
        check_positive(
            learning_rate=self.learning_rate,
            steps=self.total_steps,
            clip_norm=self.clip_norm,
            epsilon=self.epsilon,
        )
        check_not_negative(
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            final_fraction=self.final_fraction,
        )
        for name, beta in (("--beta1", self.beta1), ("--beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise SettingsError(f"{name} must be from 0 to less than 1, not {beta}.")


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return clip, Adam and weight decay: everything but the learning rate, for which see `learning_rate`."""

    def decays(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: _decays(config.decayed, path), params)

    clip = clip_by_global_norm if config.any_mesh else optax.clip_by_global_norm
    return optax.chain(
        clip(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def learning_rate(config: OptimizerConfig, step: jax.typing.ArrayLike) -> jax.Array:
    """Return the learning rate of the step that follows `step` committed ones.

    It depends only on the state's own counter, so an aborted attempt or a relaunched group cannot shift it. The first
    step already has some of the warm-up, or it would change nothing; a run that is shorter than its warm-up ends
    within it.
    """
    peak, last = config.learning_rate, config.final_fraction * config.learning_rate
    warmup_steps, total_steps = config.warmup_steps, max(config.total_steps, config.warmup_steps + 1)
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=peak,
            warmup_steps=warmup_steps,
            decay_steps=total_steps,
            end_value=last,
        )
    else:
        rise = optax.linear_schedule(0.0, peak, warmup_steps)
        fall = optax.linear_schedule(peak, last, total_steps - warmup_steps)
        schedule = optax.join_schedules([rise, fall], [warmup_steps])
    return jax.numpy.asarray(schedule(step + 1))


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with the norm that is the same on every mesh."""

    def clipped(updates: Any, _params: Any) -> Any:
        scale = jnp.minimum(1.0, most / jaxft.global_norm(updates))
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates)

    return optax.stateless(clipped)


def _decays(decayed: Decayed, path: tuple[Any, ...]) -> bool:
    name = parameter_name(path)
    match decayed:
        case "all":
            return True
        case "matrices":
            return not name.endswith("norm")
        case "blocks":
            return not name.endswith("norm") and name not in _NOT_IN_BLOCKS
