"""Print how much memory a step of each size needs on a device, without a device.

Compiles the program that jaxft makes of a step up to its mean, for simulated devices, and reads XLA's buffer
assignment: the state's part (parameters and two moments, float32), the gradients', and all temporaries. XLA's CPU
backend computes bf16 in float32 and keeps some of it, so on an accelerator temporaries are smaller.
"""

import dataclasses
import math
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from examples.llama3._config import MODEL_SIZES, Kernel, ModelConfig, Remat, Size, check_mesh
from examples.llama3._model import Llama
from examples.llama3._optimizer import OptimizerConfig, make_optimizer
from examples.llama3._sharding import batch_sharding, make_mesh, state_shardings
from examples.llama3._state import TrainState
from examples.llama3.train import make_train_step

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    size: Size
    """The model."""
    fsdp: int = 1
    """As in train.py, and so are the others."""
    tp: int = 1
    pipeline: int = 1
    context: int = 1
    batch_per_shard: int = 1
    microbatches: int = 1
    seq_len: int = 8192
    attention: Kernel = "chunked"
    remat: Remat = "full"


# The meshes of TorchTitan's published runs, with one sequence for each device of fsdp.
PUBLISHED = (
    Case(size="8B", fsdp=8, batch_per_shard=8),
    Case(size="8B", fsdp=8, batch_per_shard=8, remat="selective"),
    Case(size="8B", fsdp=8, batch_per_shard=8, remat="none"),
    Case(size="70B", fsdp=8, tp=8, batch_per_shard=8),
    Case(size="70B", fsdp=8, tp=8, batch_per_shard=8, remat="selective"),
    Case(size="405B", fsdp=64, tp=8, batch_per_shard=64),
    Case(size="405B", fsdp=64, tp=8, batch_per_shard=64, remat="selective"),
    Case(size="70B", pipeline=4, fsdp=4, tp=4, batch_per_shard=32, microbatches=8),
    Case(size="405B", pipeline=2, fsdp=32, tp=8, batch_per_shard=128, microbatches=4),
    Case(size="8B", fsdp=2, context=8, batch_per_shard=2, seq_len=131_072),
)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one device, and seconds of this machine."""

    state: int
    gradients: int
    temporaries: int
    compile_s: float


def need_of(case: Case) -> Need:
    """Compile the step up to its mean, and read what one device needs.

    Raises:
        SettingsError: the mesh does not divide the model, the batch or the sequences, or needs more devices.
    """
    model = dataclasses.replace(
        MODEL_SIZES[case.size], attention=case.attention, remat=case.remat, microbatches=case.microbatches
    )
    axes = {"fsdp": case.fsdp, "tp": case.tp, "pipeline": case.pipeline, "context": case.context}
    batch = {"batch_per_shard": case.batch_per_shard, "seq_len": case.seq_len}
    check_mesh(model, **axes, **batch, device_count=jax.device_count())
    mesh = make_mesh(**axes)
    state = _abstract_state(model)
    shardings = state_shardings(state, mesh)
    placed = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), state, shardings
    )
    columns = {"tokens": case.seq_len + 1, "segment_ids": case.seq_len, "positions": case.seq_len}
    shapes = {
        name: jax.ShapeDtypeStruct((case.batch_per_shard, count), jnp.int32, sharding=batch_sharding(mesh))
        for name, count in columns.items()
    }

    def contribution(state: TrainState, batch: dict[str, jax.Array]) -> Any:
        averaged: list[Any] = []
        make_train_step(model, OPTIMIZER, mesh, mean=lambda tree: averaged.append(tree) or tree)(state, batch)
        return averaged[0][0]

    started_s = time.monotonic()
    compiled = jax.jit(contribution, out_shardings=shardings.params).lower(placed, shapes).compile()
    needed = compiled.memory_analysis()
    assert needed is not None  # every backend of XLA has it
    return Need(
        state=sum(_part(leaf) for leaf in jax.tree.leaves(placed)),
        gradients=needed.output_size_in_bytes,
        temporaries=needed.temp_size_in_bytes,
        compile_s=time.monotonic() - started_s,
    )


OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3, warmup_steps=1, total_steps=2, weight_decay=0.1, clip_norm=1.0
)


def _abstract_state(model: ModelConfig) -> TrainState:
    def create() -> TrainState:
        params = nnx.to_pure_dict(nnx.state(Llama(model, rngs=nnx.Rngs(0))))
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=params, opt_state=make_optimizer(OPTIMIZER).init(params)
        )

    return jax.eval_shape(create)


def _part(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of one device's part of an array."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def row(case: Case, need: Need) -> str:
    """Return a row of the table, GiB with one decimal."""
    mesh = {"pipeline": case.pipeline, "fsdp": case.fsdp, "context": case.context, "tp": case.tp}
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 device"
    parts = (need.state, need.gradients, need.temporaries)
    gib = " | ".join(f"{part / GIB:.1f}" for part in (*parts, sum(parts)))
    batch = f"{case.batch_per_shard} x {case.seq_len:,}"
    return f"| {case.size} | {axes} | {batch} | {case.remat} | {gib} | {need.compile_s:.0f} |"


def main() -> None:
    cases = PUBLISHED if len(sys.argv) == 1 else (tyro.cli(Case, description=__doc__),)
    devices = max(math.prod((case.fsdp, case.tp, case.pipeline, case.context)) for case in cases)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    lines = [
        "| size | mesh | batch | remat | state | gradients | temporaries | GiB in all | compile s |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        sys.stdout.write(line + "\n")
    for case in cases:
        sys.stdout.write(row(case, need_of(case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
