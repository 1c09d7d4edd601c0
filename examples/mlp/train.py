"""Train a small perceptron in groups of devices that may die and come back at any time.

Without flags it trains alone. With --coordinator HOST:PORT --group NAME it is one of a job's replica groups: start
one per NAME. At the end it checks that every sample was used as often as expected.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh

import jaxft
from examples.llama3._runtime import join_group, start_jax, user_cache
from examples.llama3._sharding import placed
from examples.mlp._data import expected_ledger, ledger_text, make_samples
from examples.mlp._events import Events
from examples.mlp._model import OPTIMIZER, init_state, make_mesh, predict, replicated
from jaxft.data import Batch, Batches

logger = logging.getLogger("mlp")

_LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Every setting of a run. The groups of a job share all but their own names, files and devices."""

    steps: int = 200
    """Train until the job has committed this many steps."""
    samples: int = 1000
    """Samples in the data set. With the other defaults the last step of an epoch is an uneven one."""
    shards: int = 6
    """Slices of a step's global batch, fixed for the life of the job. The groups that are up divide them."""
    samples_per_shard: int = 8
    """Samples in a shard."""
    work: int = 1
    """Run the hidden layer this many times, for longer steps."""
    overlap: int = 1
    """Into how many parts to divide the gradients, to exchange the first while others are computed. Same bits."""
    seed: int = 0
    """Determines the data set, the initial parameters and the order of the samples."""

    coordinator: str | None = field(default_factory=lambda: os.environ.get("JAXFT_COORDINATOR"))
    """The coordinator's HOST:PORT, which `jaxft launch` sets. None trains alone, with the same results."""
    group: str = field(default_factory=lambda: os.environ.get("JAXFT_GROUP", "group-0"))
    """This replica group's permanent name within the job, which `jaxft launch` sets."""
    job: str = "mlp"
    """The job's name at the coordinator."""
    host: str | None = None
    """The HOST or HOST:PORT at which the other groups reach this one. None detects it."""
    failure_timeout_s: float = 60.0
    """How long recovery from one failure may take before this group gives up. Long steps do not count."""

    spare: bool = False
    """Stand by, and replace a group that is lost."""
    other_meshes: bool = False
    """Let groups have different numbers of devices. Set it in all groups."""
    checkpoints: Path | None = None
    """Save checkpoints in this folder, in case all groups die at once. None saves none."""
    checkpoint_every: int = 100
    """Committed steps between two checkpoints."""
    changed: tuple[str, ...] = ()
    """Settings that were changed on purpose since the checkpoint was saved, such as shards or job."""

    cpu_devices: int | None = None
    """Simulate this many devices on the CPU. None uses the machine's own devices."""
    compilation_cache: Path | None = field(default_factory=user_cache)
    """Keep compiled programs in this folder, so that a relaunched group starts at once. None keeps none."""
    events: Path | None = None
    """Append one JSON object per committed step to this file."""
    digest_at_end: bool = False
    """Report a digest of the final state. Equal digests mean equal bits."""


def make_train_step(mesh: Mesh, *, work: int) -> Callable[[Any, Batch], tuple[Any, Any]]:
    """Return the pure train step over a state and one shard's batch."""

    def whole(tree: Any) -> Any:
        # Devices share the storage but not the arithmetic, so the bits are the same on any number of them. The
        # barrier keeps XLA on one device from simplifying across this line, which it cannot do on several devices.
        return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(tree), replicated(mesh))

    def train_step(state: dict[str, Any], batch: Batch) -> tuple[Any, Any]:
        def total_loss(params: Any) -> jax.Array:
            predicted = predict(whole(params), batch.samples["x"], work=work)
            return jnp.sum(batch.weight * (predicted - batch.samples["y"]) ** 2)

        loss, grads = jax.value_and_grad(total_loss)(state["params"])
        # Padding has the index -1, which is no sample's.
        used = jnp.sum(jax.nn.one_hot(batch.index, len(state["seen"]), dtype=jnp.int32), axis=0)
        loss, grads, count, used = jaxft.psum((loss, grads, jnp.sum(batch.weight), used))
        # From here on everything is over the whole batch, and the same in all groups.
        grads = whole(jax.tree.map(lambda total: total / count, grads))
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "seen": state["seen"] + used}, {"loss": loss / count}

    return train_step


def train(flags: Flags) -> str | None:
    """Run until the job has committed its last step; return the digest of the state, if it is asked for.

    Raises:
        jaxft.JaxftError: a flag is invalid, or the job refused this group, is unreachable, or has finished already.
    """
    start_jax(cpu_devices=flags.cpu_devices, compilation_cache=flags.compilation_cache)
    join_group()
    samples = make_samples(flags.samples, seed=flags.seed)
    batches = Batches(
        samples, shards=flags.shards, samples_per_shard=flags.samples_per_shard, seed=flags.seed
    )
    manager = make_manager(flags)
    events = Events(flags.events)
    with manager or contextlib.nullcontext():
        mesh = make_mesh()
        state = init_state(mesh, samples=flags.samples, seed=flags.seed)
        if manager is not None and flags.checkpoints is not None:
            state = manager.restore(state, changed=flags.changed)
        step = jaxft.fault_tolerant(
            make_train_step(mesh, work=flags.work),
            manager,
            shards=flags.shards,
            nonfinite="raise",
            overlap=flags.overlap,
        )

        def batch_for(number: int, shard: int) -> Batch:
            return placed(batches(number, shard), replicated(mesh))

        state = step.join(state, batch_for)
        for _ in step.steps(flags.steps):
            started_s = time.monotonic()
            state, metrics = step(state, batch_for)
            loss = float(metrics["loss"])  # waits until the step is done
            events.step(_report(manager, step.step, time.monotonic() - started_s, flags.shards), loss=loss)
            if step.step % _LOG_EVERY == 0 or step.step == 1:
                logger.info("step %d/%d  loss %.4f", step.step, flags.steps, loss)

        digest = jaxft.digest(state) if flags.digest_at_end else None
        seen, expected = np.asarray(state["seen"]), expected_ledger(batches, step.step)
        ledger = ledger_text(seen, expected)
        events.finished(step.step, digest=digest, ledger=bool((seen == expected).all()), ledger_text=ledger)
        logger.info("finished after %d committed steps: %s, digest %s", step.step, ledger, digest)
        return digest


def make_manager(flags: Flags) -> jaxft.Manager | None:
    """Return the manager of this group, or None for a run without groups."""
    if flags.coordinator is None:
        return None
    checkpoints = flags.checkpoints and jaxft.Checkpoints(
        flags.checkpoints, every_steps=flags.checkpoint_every
    )
    return jaxft.Manager(
        flags.coordinator,
        group=flags.group,
        job=flags.job,
        failure_timeout_s=flags.failure_timeout_s,
        # These determine the data set, so it needs no fingerprint.
        settings={
            "samples": flags.samples,
            "samples_per_shard": flags.samples_per_shard,
            "seed": flags.seed,
            "work": flags.work,
        },
        checkpoints=checkpoints,
        spare=flags.spare,
        other_meshes=flags.other_meshes,
        network=jaxft.Network(host=flags.host),
    )


def _report(manager: jaxft.Manager | None, step: int, step_s: float, shards: int) -> jaxft.StepReport:
    """How the last step was committed. Without a manager, every shard is computed in one attempt."""
    if manager is not None:
        return manager.report
    return jaxft.StepReport(step=step, attempts=1, shards=tuple(range(shards)), compute_s=step_s)


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    for name in ("mlp", "jaxft"):
        logging.getLogger(name).setLevel(logging.INFO)
    flags = tyro.cli(Flags, prog="python -m examples.mlp.train", description=__doc__)
    try:
        train(flags)
    except jaxft.JobFinished as over:
        logger.info("%s", over)
    except jaxft.JaxftError as error:
        logger.error("%s: %s", type(error).__name__, error)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
