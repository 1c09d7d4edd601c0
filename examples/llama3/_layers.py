"""The layers, one after the other: scanned over, over the stages of a pipeline, over spans of the sequence.

One program for all of it. With a `pipeline` axis each stage holds its part of every layer-stacked parameter, and the
batch is cut into microbatches that follow each other through the stages (GPipe): in tick t stage s computes
microbatch t - s and passes it on. Autodiff turns the loop around for the backward pass. What a stage computes when it
has no microbatch is not used: gradients get exact zeros from it, and have the bits of the same microbatches without a
pipeline.

With a `context` axis each device holds a span of the sequence, and attention is a ring (`_ring`). Parameters are
sharded over it as over `fsdp`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from examples.llama3._sharding import PARAMETER_AXES, ActivationSharding, parameter_name, partition_spec


class Positions(NamedTuple):
    """What attention knows of the positions."""

    rotation: jax.Array
    """Cosines and sines, float32 (batch or 1, position, 2, 1, head_dim / 2)."""
    segments: jax.Array | None
    """The number of each position's document, int32 (batch, position); None: one document."""


Layer = Callable[[jax.Array, Any, Positions], jax.Array]


def run_layers(
    layer: Layer,
    parameters: Any,
    x: jax.Array,
    positions: Positions,
    *,
    shard: ActivationSharding,
    microbatches: int = 1,
) -> jax.Array:
    """Return the output of the last layer, (batch, position, dim).

    Args:
        layer: `layer(x, parameters, positions)` is the output of one layer.
        parameters: of all layers, stacked along axis 0 of every leaf, by their names in `PARAMETER_AXES`. With a
            `context` axis, `layer` gets one device's part of them: see `whole_parameters`.
        x: (batch, position, dim); with a `context` axis, in its stripes (`_ring.striped`).
        microbatches: into how many the batch is cut; divides it.
    """
    stages, spans = shard.size("pipeline"), shard.size("context")
    run = functools.partial(_pipeline, layer, shard=shard, stages=stages, microbatches=microbatches)
    if stages == spans == 1:
        return run(parameters, x, positions)
    of_parameters = jax.tree_util.tree_map_with_path(
        lambda path, _: partition_spec(*PARAMETER_AXES[parameter_name(path)], without=("fsdp", "tp")),
        parameters,
    )
    run = jax.shard_map(
        run,
        mesh=shard.mesh,
        in_specs=(of_parameters, _SPREAD, PartitionSpec(None, "context")),
        out_specs=_SPREAD,
        axis_names={"pipeline", "context"},
        check_vma=False,
    )
    return run(parameters, x, positions)


# Stages divide the sequence before and after the layers, so that no embedding and no logit is computed twice.
_SPREAD = PartitionSpec(None, ("context", "pipeline"))


def whole_parameters(one: Any, shard: ActivationSharding) -> Any:
    """Gather one layer's parameters over the `context` axis; their gradients are reduced over it, in float32.

    Within the rematerialised function, so that no more than one layer's are ever whole.
    """
    if shard.size("context") == 1:
        return one

    def whole(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        axis = PARAMETER_AXES[parameter_name(path)].index("dim") - 1  # without the axis of layers
        return jax.lax.all_gather(leaf, "context", axis=axis, tiled=True)

    return jax.tree_util.tree_map_with_path(whole, one)


def _pipeline(  # noqa: PLR0913 - arrays, and three sizes
    layer: Layer,
    parameters: Any,
    x: jax.Array,
    positions: Positions,
    *,
    shard: ActivationSharding,
    stages: int,
    microbatches: int,
) -> jax.Array:
    def stage(x: jax.Array, positions: Positions) -> jax.Array:
        return jax.lax.scan(lambda x, one: (layer(x, one, positions), None), x, parameters)[0]

    if stages == microbatches == 1:
        return stage(x, positions)
    parameters = shard.parameters(parameters)  # or the sum of their gradients would be whole on every device
    number = jax.lax.axis_index("pipeline") if stages > 1 else 0
    x = shard(_to_first_stage(x, stages), "batch", "sequence", None)
    waiting = shard(_microbatches(x, microbatches), None, "batch", "sequence", None)
    their_positions = jax.tree.map(lambda leaf: _microbatches(leaf, microbatches), positions)

    def tick(arrived: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        mine = jnp.clip(t - number, 0, microbatches - 1)
        its_positions = jax.tree.map(lambda leaf: leaf[mine % leaf.shape[0]], their_positions)
        out = stage(jnp.where(number == 0, waiting[mine], arrived), its_positions)
        return _to_next_stage(out, stages), out

    ticks = jnp.arange(microbatches + stages - 1, dtype=jnp.int32)
    _, out = jax.lax.scan(tick, jnp.zeros_like(waiting[0]), ticks)
    out = out[stages - 1 :]  # of the last stage: what was in its last ticks is all microbatches
    out = shard(_together(out), "batch", "sequence", None)
    return _from_last_stage(out, stages)


def _microbatches(x: jax.Array, count: int) -> jax.Array:
    """Cut (batch, ...) into (microbatch, sequence, ...); what is alike for all sequences stays one.

    Microbatch m takes every count-th sequence, from m on: so each device has a part of every microbatch.
    """
    if x.shape[0] == 1 and count > 1:
        return jnp.asarray(x)[None]
    return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)


def _together(x: jax.Array) -> jax.Array:
    moved = jnp.moveaxis(x, 0, 1)
    return moved.reshape(-1, *moved.shape[2:])


# These send parts of a sequence one by one. A sum over stages would do, but XLA on CPU cannot add bf16 there; and
# an all-to-all would first gather them over the other axes.


def _to_first_stage(x: jax.Array, stages: int) -> jax.Array:
    """Give the first stage the whole span of a sequence that stages divide; the others get what none reads."""
    sent = (jax.lax.ppermute(x, "pipeline", [(stage, 0)]) for stage in range(1, stages))
    return jnp.concatenate([x, *sent], axis=1)


def _from_last_stage(x: jax.Array, stages: int) -> jax.Array:
    """Divide the last stage's span of the sequence among all stages."""
    *parts, out = jnp.split(x, stages, axis=1)
    for stage, part in enumerate(parts):
        sent = jax.lax.ppermute(part, "pipeline", [(stages - 1, stage)])
        out = jnp.where(jax.lax.axis_index("pipeline") == stage, sent, out)
    return out


def _to_next_stage(x: jax.Array, stages: int) -> jax.Array:
    if stages == 1:
        return x
    return jax.lax.ppermute(x, "pipeline", [(i, i + 1) for i in range(stages - 1)])
