"""One replica group of a small job, as a separate process: `python worker.py --coordinator ... --group ...`.

Trains a two-layer network with Adam, or a model of `tests/staged_models.py`. Writes one JSON line per event, and can
kill itself when the library announces a phase on its logger (`--die "exchange step 5"`), so that a death
falls exactly there.
"""

import argparse
import ctypes
import functools
import json
import logging
import os
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax._src.lib import _jax

import jaxft
import lab._rank_caches  # noqa: F401  (ranks keep their compiled programs)
from jaxft._exchange import _grid_links
from jaxft._replica import _joining
from tests.accelerators import pretend

GATE_TIMEOUT_S = 3600.0  # the test comes to its end before it
PAUSE_TIMEOUT_S = 3600.0


def init(width: int) -> dict[str, Any]:
    """The first state, made by NumPy: each operation of JAX would be traced and lowered in each process."""
    rng = np.random.default_rng(7)
    params = {
        "hidden": rng.standard_normal((16, width), np.float32) * np.float32(0.3),
        "out": (rng.standard_normal((width, 4), np.float32) * np.float32(0.3)).astype(jnp.bfloat16),
    }
    mu, nu = ({name: np.zeros_like(leaf) for name, leaf in params.items()} for _ in range(2))
    return jax.device_put({"params": params, "mu": mu, "nu": nu, "count": np.int32(0)})


def loss_fn(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ params["hidden"])
    return jnp.mean((hidden @ params["out"].astype(jnp.float32) - y) ** 2)


def train_step(
    state: dict[str, Any], batch: Any, rate: float, mean: Callable[[Any], Any] = jaxft.pmean
) -> tuple[dict[str, Any], dict[str, Any]]:
    local, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    grads, loss = mean((grads, local))
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: (0.9 * m + 0.1 * g).astype(m.dtype), state["mu"], grads)
    nu = jax.tree.map(lambda n, g: (0.99 * n + 0.01 * g * g).astype(n.dtype), state["nu"], grads)
    params = jax.tree.map(
        lambda p, m, n: (p - rate * m / (jnp.sqrt(n) + 1e-6)).astype(p.dtype), state["params"], mu, nu
    )
    return {"params": params, "mu": mu, "nu": nu, "count": count}, {"loss": loss, "local": local}


def over(frozen: tuple[jax.Array, jax.Array]) -> Callable[..., Any]:
    """The same step on what frozen weights make of a batch: the step closes over them."""
    matrix, vector = frozen

    def step(state: dict[str, Any], batch: Any, rate: float) -> tuple[dict[str, Any], dict[str, Any]]:
        x, y = batch
        return train_step(state, (x + jnp.tanh(x @ matrix + vector) @ matrix.T, y), rate)

    return step


def frozen_weights(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """At least 1 MiB each: enough to be inputs of the programs."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape, np.float32) / 600 for shape in ((16, 1 << 18), 1 << 18))


def make_batch(step: int, shard: int, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, shard])
    x = rng.standard_normal((rows, 16), dtype=np.float32)
    return x, np.tanh(x[:, :4] * 2)


@jax.jit
def answered(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """A batch whose wanted values depend on the weights."""
    x, y = batch
    return x, y + 0.1 * jnp.tanh(x @ params["hidden"])[:, :4]


def flip(state: dict[str, Any], path: str) -> None:
    """Change a high bit of one mantissa in the leaf `path`, where it lies, as faulty memory would do it."""
    kind, name = path.split(".")
    leaf = jax.block_until_ready(state[kind][name])
    address = leaf.unsafe_buffer_pointer() + (leaf.size // 2 + 1) * leaf.dtype.itemsize - 2
    ctypes.c_uint8.from_address(address).value ^= 0x40


def join_world(
    rank: int, ranks: int, port: int, devices: int = 1, *, meet: str = "localhost", host: str | None = None
) -> None:
    """Become a process, with `devices` devices, of a group whose devices are one mesh.

    Args:
        meet: the host of its rank 0.
        host: this process's own address, if it is on a separate host.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if host is not None:
        # By default gloo uses the address of this machine's name.
        make = _jax.make_gloo_tcp_collectives
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=host)
    jax.distributed.initialize(f"{meet}:{port}", ranks, rank, initialization_timeout=round(GATE_TIMEOUT_S))


def spread(tree: Any) -> Any:
    """The arrays on the mesh of all processes: matrices by rows, everything else replicated."""
    mesh = jax.sharding.get_mesh()  # of `--set-mesh`
    if mesh.empty:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))

    def put(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)))
        host = np.asarray(leaf)
        rows = jax.sharding.PartitionSpec("fsdp") if host.ndim > 1 else jax.sharding.PartitionSpec()
        sharding = jax.sharding.NamedSharding(mesh, rows)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree)


class KillAt(logging.Handler):
    """Sends a signal to a process, such as kill -9 does, when the library logs `text` for the first time."""

    def __init__(self, text: str, pid: int, number: int = signal.SIGKILL) -> None:
        super().__init__(logging.DEBUG)
        self.text = text
        self.pid = pid
        self.number = number

    def emit(self, record: logging.LogRecord) -> None:
        if self.text and self.text in record.getMessage():
            self.text = ""
            os.kill(self.pid, self.number)


def hold_at(text: str, gate: Path) -> Callable[[logging.LogRecord], bool]:
    """Have the thread in which the library says `text` for the first time wait there for a file.

    It is a filter: a handler would hold up what other threads say. The file `gate`.held shows that it waits.
    """
    done: list[bool] = []

    def hold(record: logging.LogRecord) -> bool:
        if not done and text in record.getMessage():
            done.append(True)
            gate.with_suffix(".held").touch()
            wait_for(gate)
        return True

    return hold


def export(folder: Path, state: Any) -> None:
    """Save as users do who save themselves. Orbax refuses a folder that is there."""
    from orbax.checkpoint.experimental import v1 as ocp

    ocp.save(folder, state)


def wait_for(path: Path, timeout_s: float = GATE_TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"gate {path} did not open in {timeout_s:.0f} s")
        time.sleep(0.005)


def main() -> None:  # noqa: C901 (a branch for each flag)
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--group", default="alone")
    parser.add_argument("--job", default="toy")
    parser.add_argument("--model", default="", help="a model of tests/staged_models.py")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shards", type=int, default=4, help="0: one for each member")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--die", default="")
    parser.add_argument(
        "--murder", default="", help="PID:TEXT: kill -9 that process when the library logs TEXT"
    )
    parser.add_argument("--hold", default="", help="TEXT:FILE: wait for FILE when the library logs TEXT")
    parser.add_argument("--gate", action="append", default=[], help="STEP:FILE or start:FILE: wait for FILE")
    parser.add_argument(
        "--pause", default="", help="STEP:FILE: after that step, wait for FILE between two calls"
    )
    parser.add_argument("--precision", help="of products of matrices, a setting of JAX")
    parser.add_argument(
        "--diloco", default="", help="CARRY: rounds of three inner steps, of which gates count the rounds"
    )
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--frozen", type=int, metavar="SEED", help="close over frozen weights")
    parser.add_argument("--shift", type=float, default=0.0, help="added to each sample: other data")
    parser.add_argument("--data-plane", type=int, help="of another checkout of jaxft")
    parser.add_argument("--failure-timeout-s", type=float, default=600.0)
    parser.add_argument("--min-replicas", type=int)
    parser.add_argument("--token")
    parser.add_argument("--tls", nargs=3, metavar=("CA", "CERT", "KEY"))
    parser.add_argument("--host")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each shard's batch takes")
    parser.add_argument("--hurry", type=Path, default=Path(), help="no longer, once this file is there")
    parser.add_argument("--spare", action="store_true")
    parser.add_argument("--show", action="store_true", help="show the loss at the coordinator")
    parser.add_argument("--digest-every", type=int)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--export", type=Path, help="where the writer saves every tenth state with Orbax")
    parser.add_argument("--nonfinite", default="warn")
    parser.add_argument("--overlap", type=int, default=1)
    parser.add_argument("--exchange-threads", type=int)
    parser.add_argument("--group-events")
    parser.add_argument("--vary", action="store_true", help="batches of another shape at each step")
    parser.add_argument("--poison", default="", help="STEP:SHARD: that shard's batch is not finite")
    parser.add_argument("--of-state", action="store_true", help="batches are made of the state, too")
    parser.add_argument("--unreadable", default="", help="STEP:SHARD: that shard's batch cannot be read")
    parser.add_argument("--times", type=int, default=1 << 30, help="so often, then it can")
    parser.add_argument("--interrupt", default="", help="Ctrl-C when the library logs this")
    parser.add_argument("--again", action="store_true", help="call the step again after an exception")
    parser.add_argument(
        "--flip", default="", help="LEAF:STEP, such as mu.hidden:7: flip a bit of it after that step"
    )
    parser.add_argument(
        "--accelerator",
        type=int,
        metavar="BYTES",
        help="have the CPU devices count as an accelerator, with buckets of this size in bytes",
    )
    parser.add_argument(
        "--rows-from", type=int, help="exchange in rows and columns in quorums of this many groups or more"
    )
    parser.add_argument("--enter", type=Path, help="wait for this file before the Manager is entered")
    parser.add_argument(
        "--sum-after", type=int, help="after that step, sum over all ranks outside of the step"
    )
    parser.add_argument("--count", type=int, default=0, help="of the first state, which is replicated")
    parser.add_argument(
        "--own-rows", action="store_true", help="each rank's batch is its rows, as plain arrays"
    )
    parser.add_argument(
        "--world",
        default="",
        help="RANK:RANKS:PORT[:DEVICES]: one process of a group of several; env: from `jaxft launch`",
    )
    parser.add_argument(
        "--meet", default="localhost", help="the host of rank 0, if each rank is on --host, a separate host"
    )
    parser.add_argument("--set-mesh", action="store_true", help="of the devices in reverse order")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logger = logging.getLogger("jaxft")
    if arguments.die or arguments.murder:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(KillAt(arguments.die, os.getpid()))
    if arguments.interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(KillAt(arguments.interrupt, os.getpid(), signal.SIGINT))
    if arguments.murder:
        pid, text = arguments.murder.split(":", 1)
        logger.addHandler(KillAt(text, int(pid)))
    if arguments.hold:
        text, _, gate = arguments.hold.rpartition(":")
        logger.setLevel(logging.DEBUG)
        logger.addFilter(hold_at(text, Path(gate)))
    if arguments.accelerator:
        pretend(bucket_bytes=arguments.accelerator)
    if arguments.rows_from:
        _grid_links.LEAST_MEMBERS = arguments.rows_from
    if arguments.data_plane:
        _joining.DATA_PLANE_VERSION = arguments.data_plane
    if arguments.precision:
        jax.config.update("jax_default_matmul_precision", arguments.precision)
    if arguments.world == "env":
        port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]
        join_world(int(os.environ["JAXFT_RANK"]), int(os.environ["JAXFT_NPROC"]), int(port))
    elif arguments.world:
        join_world(*map(int, arguments.world.split(":")), meet=arguments.meet, host=arguments.host)
    not_placed = None
    if arguments.set_mesh:
        not_placed = jnp.asarray(arguments.count)  # of weak type, and made while no mesh is set
        jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("fsdp",)))
    gates = {step: Path(path) for step, path in (gate.split(":", 1) for gate in arguments.gate)}

    every = 3 if arguments.diloco else 1

    def batch_for(step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        if step % every == 0 and str(step // every) in gates:
            wait_for(gates[str(step // every)])
        if arguments.pace and not arguments.hurry.is_file():
            # Before `hurry` slower and slower: a slow machine must not let the job end before the test has done all.
            left = arguments.steps - step if arguments.hurry.name else arguments.steps
            time.sleep(arguments.pace * arguments.steps / max(1, left))
        if f"{step}:{shard}" == arguments.unreadable and arguments.times:
            arguments.times -= 1
            raise OSError("cannot read sample 17")
        x, y = make_batch(step, shard, 8 + 4 * (step % 3) if arguments.vary else 8)
        x = x + np.float32(arguments.shift)
        x = x * np.float32(np.inf) if f"{step}:{shard}" == arguments.poison else x
        if arguments.own_rows:
            mine = slice(jax.process_index(), None, jax.process_count())
            return x[mine], y[mine]
        return spread((x, y)) if arguments.world else (x, y)

    batches = batch_for
    if arguments.of_state:
        batches = jaxft.data.FromState(
            lambda step, shard, state: answered(state["params"], batch_for(step, shard))
        )

    with arguments.events.open("a", buffering=1) as events:

        def write(**event: Any) -> None:
            events.write(json.dumps({"t": time.time(), **event}) + "\n")

        state, a_step, axis_name = init(arguments.width), train_step, None
        if arguments.count:
            state["count"] = jnp.int32(arguments.count)
        if arguments.model:
            found = runpy.run_path(str(Path(__file__).parents[1] / "staged_models.py"))
            model = (found["MODELS"] | found["OVER_AXIS"] | found["OWN"])[arguments.model]
            axis_name = found["AXIS"] if arguments.model in found["OVER_AXIS"] else None
            state, a_step = model.state(), model.step(jaxft.pmean)
        if arguments.frozen is not None:
            weights = frozen_weights(arguments.frozen)
            a_step = over(spread(weights) if arguments.world else weights)
        if arguments.world:
            state = spread(state)
        static: dict[str, Any] = {"static_argnums": 2}
        statics: tuple[float, ...] = (arguments.rate,)
        if arguments.diloco:
            a_step = jaxft.diloco(
                functools.partial(train_step, rate=arguments.rate, mean=lambda local: local),
                params=lambda state: state["params"],
                outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
                every=every,
                carry=arguments.diloco,
            )
            state, static, statics = a_step.init(state), {}, ()
        if not_placed is not None:
            state["count"] = not_placed
        if not arguments.coordinator:
            step = jaxft.fault_tolerant(
                a_step,
                None,
                shards=arguments.shards or None,
                nonfinite=arguments.nonfinite,
                overlap=arguments.overlap,
                axis_name=axis_name,
                **static,
            )
            while step.step < arguments.steps:
                state, _ = step(state, batches, *statics)
                write(event="finished", step=step.step, digest=jaxft.digest(state))
            return
        manager = jaxft.Manager(
            arguments.coordinator,
            group=arguments.group,
            job=arguments.job,
            failure_timeout_s=arguments.failure_timeout_s,
            min_replicas=arguments.min_replicas,
            network=jaxft.Network(
                token=arguments.token,
                tls=arguments.tls and jaxft.TLS(*arguments.tls),
                host=arguments.host,
                threads=arguments.exchange_threads,
            ),
            events=arguments.group_events,
            spare=arguments.spare,
            digest_every=arguments.digest_every,
            checkpoints=arguments.checkpoints
            and jaxft.Checkpoints(arguments.checkpoints, every_steps=arguments.checkpoint_every),
        )
        pause_step, _, pause_path = arguments.pause.partition(":")
        flip_leaf, _, flip_step = arguments.flip.partition(":")
        if arguments.enter:
            wait_for(arguments.enter)
        with manager:
            if "start" in gates:
                wait_for(gates["start"])
            step = jaxft.fault_tolerant(
                a_step,
                manager,
                shards=arguments.shards or None,
                nonfinite=arguments.nonfinite,
                overlap=arguments.overlap,
                axis_name=axis_name,
                **static,
            )
            if arguments.checkpoints:
                state = manager.restore(state)
                write(event="began", step=manager.step)
            while manager.step < arguments.steps:
                try:
                    state, metrics = step(state, batches, *statics)
                except (OSError, KeyboardInterrupt) as error:
                    write(
                        event="raised",
                        error=repr(error),
                        notes=getattr(error, "__notes__", []),
                        step=manager.step,
                    )
                    if not arguments.again:
                        raise
                    continue
                report, writes = manager.report, manager.is_writer
                if arguments.export and writes and report.step % 10 == 0:
                    export(arguments.export / str(report.step), state["params"])
                if arguments.show:
                    manager.show(loss=float(metrics["loss"]))
                write(
                    event="step",
                    step=report.step,
                    loss=float(metrics["loss"]) if np.isfinite(metrics["loss"]) else None,
                    attempts=report.attempts,
                    shards=report.shards,
                    quorum_id=report.quorum_id,
                    is_writer=writes,
                    writer=report.writer,
                    members=report.members,
                    nonfinite=report.nonfinite,
                    healed=None if report.heal is None else report.heal.replayed_steps,
                    healed_bytes=0 if report.heal is None else report.heal.transferred_bytes,
                )
                if manager.step == arguments.sum_after:
                    logger.debug("sums after step %d", manager.step)
                    float(jax.jit(jnp.sum)(spread(np.ones((jax.device_count(), 1)))))
                if pause_path and manager.step >= int(pause_step):
                    write(event="paused", step=manager.step)
                    wait_for(Path(pause_path), PAUSE_TIMEOUT_S)
                    pause_path = ""
                if flip_leaf and manager.step == int(flip_step):
                    flip(state, flip_leaf)
                    flip_leaf = ""
            write(event="finished", step=manager.step, digest=jaxft.digest(state))


if __name__ == "__main__":
    main()
