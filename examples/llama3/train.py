"""Train Llama 3 in groups of devices that may die and come back at any time.

Without flags it trains the debug size on one device, alone. With --coordinator HOST:PORT --group NAME it is one
of a job's replica groups: start one per NAME, each on its own devices.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
import tyro
from flax import nnx
from jax.sharding import Mesh

import jaxft
from examples.llama3._config import ModelConfig, SettingsError
from examples.llama3._flags import Flags, Settings, check_settings, choose_mesh
from examples.llama3._metrics import Workload, flops_per_token, peak_flops_per_s
from examples.llama3._model import Llama
from examples.llama3._optimizer import OptimizerConfig, learning_rate, make_optimizer
from examples.llama3._report import Report
from examples.llama3._runtime import start_jax
from examples.llama3._sharding import ActivationSharding, batch_sharding
from examples.llama3._state import TrainState, init_state, parameter_count

logger = logging.getLogger("llama3")

TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


def make_train_step(
    model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh | None = None, *, mean: Callable[[Any], Any]
) -> TrainStep:
    """Return the pure train step. `mean` is `jaxft.pmean`, or the identity for a plain step on one batch."""
    shard = ActivationSharding(None if mesh is None else mesh.abstract_mesh)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(model, rngs=nnx.Rngs(0), shard=shard)))
    transform = make_optimizer(optimizer)

    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        return nnx.merge(graph, params).loss(batch[:, :-1], batch[:, 1:])

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        grads, loss = mean((grads, loss))
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        rate = learning_rate(optimizer, state.step)
        params = jax.tree.map(lambda param, update: param - rate * update, state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), metrics

    return train_step


def train(flags: Flags) -> None:
    """Run until the job has committed its last step.

    Raises:
        SettingsError: a flag, the corpus or the mesh is invalid; nothing was opened or compiled.
        jaxft.JaxftError: the job refused this group, is unreachable, or has finished already.
    """
    settings = check_settings(flags)
    manager = make_manager(flags, settings)
    start_jax(cpu_devices=flags.cpu_devices, compilation_cache=flags.compilation_cache)
    mesh = choose_mesh(flags)
    placement = batch_sharding(mesh)

    def batch_for(step: int, shard: int) -> jax.Array:
        return jax.device_put(settings.batches(step, shard), placement)

    # From here on the job knows this group; it takes part from the first call of `step`.
    with manager or contextlib.nullcontext():
        state = init_state(settings.model, settings.optimizer, mesh, seed=flags.seed)
        if manager is not None and flags.checkpoints is not None:
            state = manager.restore(state, changed=flags.changed)
        train_step = make_train_step(settings.model, settings.optimizer, mesh, mean=jaxft.pmean)
        step = jaxft.fault_tolerant(train_step, manager, shards=flags.shards, nonfinite="raise")

        with Report(flags, describe(flags, settings, state, mesh), manager) as report:
            while step.step < flags.steps:
                started_s = time.monotonic()
                state, metrics = step(state, batch_for)
                # Waits until the step is done: steps that queue up on simulated devices stall each other.
                metrics = {name: float(value) for name, value in metrics.items()}
                report.committed(step.step, metrics, step_s=time.monotonic() - started_s)

            report.finished(step.step, digest=jaxft.digest(state) if flags.digest_at_end else None)


def make_manager(flags: Flags, settings: Settings) -> jaxft.Manager | None:
    """Return the manager of this group, or None for a run without groups."""
    if flags.coordinator is None:
        if flags.checkpoints is not None:
            raise SettingsError(
                "--checkpoints needs --coordinator: a run without groups has no job to resume."
            )
        return None
    checkpoints = flags.checkpoints and jaxft.Checkpoints(
        flags.checkpoints, every_steps=flags.checkpoint_every, keep=flags.keep_checkpoints
    )
    return jaxft.Manager(
        flags.coordinator,
        group=flags.group,
        job=flags.job,
        failure_timeout_s=flags.failure_timeout_s,
        settings=job_settings(flags, settings),
        checkpoints=checkpoints,
        spare=flags.spare,
        host=flags.host,
    )


def job_settings(flags: Flags, settings: Settings) -> dict[str, str]:
    """Return the settings that must be the same in all groups and over all restarts."""
    names = ("size", "steps", "seed", "seq_len", "batch_per_shard")
    schedule = ("learning_rate", "warmup_steps", "weight_decay", "clip_norm")
    chosen = {name: str(getattr(flags, name)) for name in (*names, *schedule)}
    return chosen | {"corpus": settings.batches.corpus.fingerprint}


def describe(flags: Flags, settings: Settings, state: TrainState, mesh: Mesh) -> Workload:
    """Log a description of the run, and return its workload."""
    model, batches = settings.model, settings.batches
    device = mesh.devices.flat[0]
    tokens_per_step = flags.shards * flags.batch_per_shard * flags.seq_len
    logger.info(
        "model %s: %s parameters, %s on %d of %d %s devices, %s",
        flags.size,
        f"{parameter_count(state.params):,}",
        model.compute_dtype,
        mesh.size,
        jax.device_count(),
        device.device_kind,
        " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1 or axis in ("fsdp", "tp")),
    )
    logger.info(
        "corpus: %s tokens in %d documents, %s windows, fingerprint %s",
        f"{len(batches.corpus.tokens):,}",
        batches.corpus.documents,
        f"{batches.window_count:,}",
        batches.corpus.fingerprint,
    )
    logger.info(
        "a step: %d shards x %d sequences x %d tokens = %s tokens",
        flags.shards,
        flags.batch_per_shard,
        flags.seq_len,
        f"{tokens_per_step:,}",
    )
    return Workload(
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(model, state.params, seq_len=flags.seq_len),
        devices_per_replica=mesh.size,
        peak_flops_per_s=peak_flops_per_s(device.device_kind),
    )


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    for name in ("llama3", "jaxft"):
        logging.getLogger(name).setLevel(logging.INFO)
    flags = tyro.cli(Flags, prog="python -m examples.llama3.train", description=__doc__)
    try:
        train(flags)
    except jaxft.JobFinished as over:
        logger.info("%s", over)
    except (SettingsError, jaxft.JaxftError) as error:
        logger.error("%s: %s", type(error).__name__, error)
        sys.exit(2 if isinstance(error, SettingsError) else 1)


if __name__ == "__main__":
    main()
