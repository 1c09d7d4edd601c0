"""Which bits differ between groups whose devices form different meshes.

    python -m lab.meshes

Each mesh is a separate process with that many simulated CPU devices. All start from the same state, and compute the
contributions of some batches (`compute`). Then all take the contribution of the group with one device as means, and
compute the new state (`apply`). The results are compared with those of the group with one device: equal in every bit,
or the largest difference, relative to the largest element of the leaf, and for how many batches.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxft
from examples.llama3._flags import Flags
from examples.llama3._optimizer import clip_by_global_norm
from examples.llama3._runtime import start_jax
from examples.llama3._settings import check_settings
from examples.llama3._sharding import batch_sharding, make_mesh
from examples.llama3._state import init_state
from examples.llama3.train import make_train_step
from jaxft._programs._build import cut_programs

WIDTH = 256
# The sharding of the MLP's parameters and batch on a mesh ("fsdp", "tp").
MLP_LAYOUTS: dict[str, tuple[dict[str, P], P]] = {
    "columns": ({"w1": P(None, "tp"), "b1": P("tp"), "w2": P(None, "tp")}, P()),
    "fsdp": ({"w1": P("fsdp"), "b1": P("fsdp"), "w2": P("fsdp")}, P("fsdp")),
}
MESHES = {
    "columns": [(1, 1), (1, 2), (1, 4)],
    "fsdp": [(1, 1), (2, 1), (4, 1)],
    "llama": [(1, 1), (2, 1), (1, 2), (2, 2)],
}

OPTAX, JAXFT = "optax.global_norm", "jaxft.global_norm"

Leaves = list[np.ndarray]


@dataclass(frozen=True)
class Arguments:
    """Compare the bits of groups with different meshes."""

    batches: int = 8
    """How many batches each mesh computes from the same first state."""


@dataclass(frozen=True)
class Case:
    """A model with an optimizer, on a mesh of fsdp x tp devices."""

    model: str
    clip: str  # which norm limits the gradients
    fsdp: int
    tp: int
    batches: int


@dataclass(frozen=True)
class Made:
    """The results of one group: its first state, and the contribution and new state of each batch."""

    state: Leaves
    contributions: list[Leaves]
    new_states: list[Leaves]


def main() -> None:
    arguments = tyro.cli(Arguments, prog="python -m lab.meshes", description=__doc__)
    os.environ["JAX_PLATFORMS"] = "cpu"
    context = multiprocessing.get_context("spawn")
    print("| model | fsdp x tp | first state | contribution | new state of equal means |")
    print("| --- | --- | --- | --- | --- |")
    # The number of JAX devices is fixed per process, so each case gets a separate process.
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for model, meshes in MESHES.items():
            for clip in CLIPS if model != "llama" else ("", OPTAX):
                reference: Made | None = None
                for fsdp, tp in meshes:
                    case = Case(model, clip, fsdp, tp, arguments.batches)
                    made = processes.submit(run, case, reference).result()
                    if reference is None:
                        reference = made
                    else:
                        print(row(case, made, reference), flush=True)


def row(case: Case, made: Made, reference: Made) -> str:
    name = f"{case.model}, Adam{f', clipped by {case.clip}' if case.clip else ''}"
    columns = [
        difference([made.state], [reference.state]),
        difference(made.contributions, reference.contributions),
        difference(made.new_states, reference.new_states),
    ]
    return f"| {name} | {case.fsdp} x {case.tp} | {' | '.join(columns)} |"


def difference(ours: list[Leaves], theirs: list[Leaves]) -> str:
    """Whether all bits are equal, or how large the difference is, and for how many batches."""
    worst = [max(map(leaf_difference, one, other)) for one, other in zip(ours, theirs, strict=True)]
    differ = sum(one > 0 for one in worst)
    return f"{max(worst):.0e} ({differ} of {len(worst)})" if differ else "equal"


def leaf_difference(one: np.ndarray, other: np.ndarray) -> float:
    if one.tobytes() == other.tobytes():
        return 0.0
    # A different sign of zero also counts.
    return max(float(np.abs(one - other).max() / np.abs(other).max()), 1e-45)


def run(case: Case, reference: Made | None) -> Made:
    """Compute contributions and new states on this case's mesh."""
    start_jax(cpu_devices=case.fsdp * case.tp, compilation_cache=None)
    mesh = make_mesh(case.fsdp, case.tp)
    state, batches, train_step = (llama if case.model == "llama" else mlp)(case, mesh)
    programs = cut_programs(train_step, state, batches[0])
    made = Made(to_numpy(jax.tree.leaves(state)), [], [])
    for number, batch in enumerate(batches):
        contribution, local = programs.compute(programs.state_leaves(state), batch)
        made.contributions.append(to_numpy(contribution))
        means = (reference or made).contributions[number]
        # Apply consumes its state.
        new_state, _ = programs.apply(programs.state_leaves(jax.tree.map(jnp.copy, state)), means, local)
        made.new_states.append(to_numpy(new_state))
    return made


def to_numpy(leaves: Sequence[jax.Array]) -> Leaves:
    return [np.array(leaf) for leaf in leaves]


CLIPS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "": lambda most: optax.identity(),
    OPTAX: optax.clip_by_global_norm,
    JAXFT: clip_by_global_norm,
}


def mlp(case: Case, mesh: Mesh) -> tuple[Any, list[jax.Array], Callable[..., Any]]:
    layout, batch_spec = MLP_LAYOUTS[case.model]
    shapes = {"w1": (WIDTH, WIDTH), "b1": (WIDTH,), "w2": (WIDTH, WIDTH)}
    random = np.random.default_rng(0)
    host = {name: random.standard_normal(shape, np.float32) / 16 for name, shape in shapes.items()}
    params = {name: jax.device_put(host[name], NamedSharding(mesh, layout[name])) for name in host}
    placement = NamedSharding(mesh, batch_spec)
    batches = [
        jax.device_put(random.standard_normal((64, WIDTH), np.float32), placement)
        for _ in range(case.batches)
    ]
    optimizer = optax.chain(CLIPS[case.clip](1e-2), optax.adam(1e-2))

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        hidden = jnp.tanh(batch @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - batch) ** 2)

    def train_step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        grads = jaxft.pmean(jax.grad(loss_fn)(params, batch))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    return (params, optimizer.init(params)), batches, train_step


def llama(case: Case, mesh: Mesh) -> tuple[Any, list[jax.Array], Callable[..., Any]]:
    """The debug size of the example; without clipping, the norm's limit is never reached."""
    flags = Flags(clip_norm=1e-2 if case.clip else 1e9)
    settings = check_settings(flags)
    state = init_state(settings.model, settings.optimizer, mesh, seed=0)
    placement = batch_sharding(mesh)
    batches = [jax.device_put(settings.batches(number, 0), placement) for number in range(case.batches)]
    return state, batches, make_train_step(settings.model, settings.optimizer, mesh, mean=jaxft.pmean)


if __name__ == "__main__":
    main()
