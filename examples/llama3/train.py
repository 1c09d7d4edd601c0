"""Train Llama 3 in groups of devices that may die and come back at any time.

Without flags it trains the debug size on one device, alone. With --coordinator HOST:PORT --group NAME it is one
of a job's replica groups: start one per NAME, each on its own devices.
"""

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import jaxft
from examples.llama3._config import ModelConfig, SettingsError
from examples.llama3._flags import Flags
from examples.llama3._model import Llama
from examples.llama3._optimizer import OptimizerConfig, learning_rate, make_optimizer
from examples.llama3._profile import Profile
from examples.llama3._report import Report, describe
from examples.llama3._run import folder_of, keep_config, parse_flags
from examples.llama3._runtime import is_first_process, join_group, start_jax
from examples.llama3._settings import Settings, check_export, check_settings, choose_mesh, job_settings
from examples.llama3._sharding import ActivationSharding, batch_sharding, placed
from examples.llama3._state import TrainState, init_state
from examples.llama3._tracker import make_tracker
from examples.llama3._weights import save_weights

logger = logging.getLogger("llama3")

# As `examples/llama3/_data.py` makes it: tokens, segment_ids and positions.
Batch = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def make_loss(model: ModelConfig, mesh: Mesh | None = None) -> Callable[[Any, Batch], jax.Array]:
    """Return the loss as a pure function of parameters and a batch, in nats per token."""
    shard = ActivationSharding(None if mesh is None else mesh.abstract_mesh)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(model, rngs=nnx.Rngs(0), shard=shard)))

    def loss_of(params: Any, batch: Batch) -> jax.Array:
        tokens, segment_ids, positions = batch["tokens"], batch["segment_ids"], batch["positions"]
        return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:], segment_ids, positions)

    return loss_of


def make_train_step(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    mesh: Mesh | None = None,
    *,
    mean: Callable[[Any], Any],
    accumulate: int = 1,
    grad_dtype: str = "float32",
) -> TrainStep:
    """Return the pure train step. `mean` is `jaxft.pmean`, or the identity for a plain step on one batch."""
    loss_and_grads = accumulated(jax.value_and_grad(make_loss(model, mesh)), parts=accumulate)
    transform = make_optimizer(optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = loss_and_grads(state.params, batch)
        grads, loss = mean((jax.tree.map(lambda grad: grad.astype(grad_dtype), grads), loss))
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        rate = learning_rate(optimizer, state.step)
        params = jax.tree.map(lambda param, update: param - rate * update, state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": rate}
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return train_step


def accumulated(function: Callable[[Any, Batch], Any], *, parts: int) -> Callable[[Any, Batch], Any]:
    """Return a function of parameters and a batch as the mean over parts of the batch, one at a time."""
    if parts == 1:
        return function

    def split(leaf: jax.Array) -> jax.Array:
        # Every part takes some sequences of each device, so none moves.
        return leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]).swapaxes(0, 1)

    def mean_over_parts(params: Any, batch: Batch) -> Any:
        def add(total: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, function(params, part)), None

        batches = jax.tree.map(split, batch)
        shapes = jax.eval_shape(function, params, jax.tree.map(lambda leaf: leaf[0], batches))
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        total, _ = jax.lax.scan(add, zero, batches)
        return jax.tree.map(lambda leaf: leaf / parts, total)

    return mean_over_parts


def make_job_step(
    flags: Flags, settings: Settings, mesh: Mesh, state: TrainState
) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return the step of the job, its first state, and a function that returns the parameters in a state."""
    train_step = make_train_step(
        settings.model,
        settings.optimizer,
        mesh,
        mean=(lambda local: local)
        if flags.diloco_every
        else functools.partial(jaxft.pmean, quantize=flags.quantize),
        accumulate=settings.accumulate,
        grad_dtype=flags.grad_dtype,
    )
    if flags.diloco_every is None:
        return train_step, state, lambda state: state.params
    rounds = jaxft.diloco(
        train_step,
        params=lambda state: state.params,
        outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        every=flags.diloco_every,
        carry=flags.diloco_carry,
        quantize=flags.quantize,
    )
    return rounds, rounds.init(state), lambda state: state["params"]


def train(flags: Flags) -> None:
    """Run until the job has committed its last step.

    Raises:
        SettingsError: a flag, the corpus or the mesh is invalid; the job does not know of this group.
        jaxft.JaxftError: the job refused this group, is unreachable, or has finished already.
    """
    settings = check_settings(flags)
    start_jax(cpu_devices=flags.cpu_devices, compilation_cache=flags.compilation_cache)
    join_group()
    mesh = choose_mesh(flags)
    shared = job_settings(flags, settings, mesh)
    manager = make_manager(flags, shared)
    keep_config(flags, shared)
    tracker = make_tracker(flags, shared)
    placement = batch_sharding(mesh)

    def batch_for(step: int, shard: int) -> Batch:
        return placed(settings.batches(step, shard), placement)

    # From here on the job knows this group; it takes part from the first call of `step`.
    with manager or contextlib.nullcontext():
        state = init_state(
            settings.model, settings.optimizer, mesh, seed=flags.seed, weights=flags.initial_weights
        )
        train_step, state, params_of = make_job_step(flags, settings, mesh, state)
        if manager is not None and flags.checkpoints is not None:
            state = manager.restore(state, changed=flags.changed)
        step = jaxft.fault_tolerant(
            train_step, manager, shards=flags.shards, nonfinite="raise", overlap=flags.overlap
        )
        state = step.join(state, batch_for)
        if step.step < flags.steps:
            check_export(flags)
        loss_of = jax.jit(accumulated(make_loss(settings.model, mesh), parts=settings.accumulate))

        def held_out_loss() -> float:
            batches = settings.batches.held_out_batches(flags.eval_batches)
            losses = [loss_of(params_of(state), placed(batch, placement)) for batch in batches]
            return float(sum(losses)) / len(losses)

        workload = describe(flags, settings, params_of(state), mesh)
        folder = folder_of(flags)
        profiled = flags.profile if is_first_process() else None
        with Report(flags, workload, manager, tracker) as report, Profile(profiled, folder) as profile:
            for number in step.steps(flags.steps):
                profile.before(number + 1)
                started_s = time.monotonic()
                state, metrics = step(state, batch_for)
                # Waits until the step is done: steps that queue up on simulated devices stall each other.
                metrics = {name: float(value) for name, value in metrics.items()}
                report.committed(step.step, metrics, step_s=time.monotonic() - started_s)
                profile.after(step.step)
                if flags.eval_every is not None and step.step % flags.eval_every == 0:
                    report.evaluated(step.step, held_out_loss())

            report.finished(step.step, digest=jaxft.digest(state) if flags.digest_at_end else None)
            if flags.export_weights is not None:
                save_weights(params_of(state), settings.model, flags.export_weights)


def make_manager(flags: Flags, shared: dict[str, str]) -> jaxft.Manager | None:
    """Return the manager of this group, or None for a run without groups."""
    if flags.coordinator is None:
        return None
    checkpoints = flags.checkpoints and jaxft.Checkpoints(
        flags.checkpoints, every_steps=flags.checkpoint_every, keep=flags.keep_checkpoints
    )
    return jaxft.Manager(
        flags.coordinator,
        group=flags.group,
        job=flags.job,
        failure_timeout_s=flags.failure_timeout_s,
        settings=shared,
        checkpoints=checkpoints,
        spare=flags.spare,
        other_meshes=flags.other_meshes,
        network=jaxft.Network(host=flags.host),
    )


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    for name in ("llama3", "jaxft"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        train(parse_flags(description=__doc__))
    except jaxft.JobFinished as over:
        logger.info("%s", over)
    except (SettingsError, jaxft.JaxftError) as error:
        logger.error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_status if isinstance(error, jaxft.JaxftError) else 2)


if __name__ == "__main__":
    main()
