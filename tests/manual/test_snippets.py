"""Every Python block of the docs runs, as it stands there, with what its reader has: data, a loss, a folder."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import EllipsisType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxft
from jaxft.data import Batches
from tests.clusters import cluster
from tests.manual.blocks import ROOT, Block, blocks

Stage = Callable[[str], None]
PYTHON = [block for block in blocks() if block.kind == "python"]
# Blocks that another test runs: the page, a part of the block, and the test.
ELSEWHERE = {
    ("start.md", "TRUTH"): "tests/manual/test_start.py",
    ("porting.md", "manager.is_writer"): "tests/test_porting.py",
}
STAGES: dict[tuple[str, str], Stage] = {}
SOURCE = np.random.default_rng(0).standard_normal((50, 3), dtype=np.float32)
EIGHT = Batches(SOURCE, shards=8, samples_per_shard=2)
# Where a page ends a step with `...`, its reader updates the parameters.
UPDATE = (
    '    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {"loss": loss}\n'
)


def stage(page: str, part: str) -> Callable[[Stage], Stage]:
    """Have this function run the block with this part, in an empty folder, and check the result."""

    def add(function: Stage) -> Stage:
        STAGES[page, part] = function
        return function

    return add


def keys_of(block: Block) -> list[tuple[str, str]]:
    return [key for key in [*STAGES, *ELSEWHERE] if key[0] == block.page.name and key[1] in block.text]


def ran(text: str, **given: Any) -> SimpleNamespace:
    """Run a block with the imports of its page and the given names; return all names after it."""
    names = {"jax": jax, "jnp": jnp, "np": np, "nnx": nnx, "optax": optax, "jaxft": jaxft, **given}
    exec(compile(text, "docs", "exec"), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if name != "__builtins__"})


def loss_of_each(params: jax.Array, samples: jax.Array) -> jax.Array:
    return (samples @ params - 1.0) ** 2


def total_loss(params: jax.Array, batch: Any) -> jax.Array:
    return jnp.sum(batch.weight * loss_of_each(params, batch.samples))


def train_step(params: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
    loss, grads = jaxft.pmean(jax.value_and_grad(total_loss)(params, batch))
    return params - 0.01 * grads, {"loss": loss}


def falls(step_of_page: Any) -> bool:
    """Whether the loss falls with a step that a page defines, over padded shards."""
    batches = Batches(SOURCE, shards=3, samples_per_shard=4)
    step, state = jaxft.fault_tolerant(step_of_page, None, shards=3), {"params": jnp.zeros(3)}
    state, first = step(state, batches)
    state, second = step(state, batches)
    return bool(second["loss"] < first["loss"])


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("coordinator")) as here:
        here.start_coordinator("--heartbeat-timeout-ms", "1000")  # a job resumes after this time
        yield f"localhost:{here.port}"


@pytest.mark.processes
@pytest.mark.parametrize(
    "block", [block for block in PYTHON if not {*keys_of(block)} & {*ELSEWHERE}], ids=str
)
def test_a_block_runs(
    block: Block, coordinator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = jaxft.Manager

    def manager(_: str | EllipsisType, **arguments: Any) -> jaxft.Manager:
        own = {"group": "group-0", "failure_timeout_s": 600.0, **arguments}
        return made(coordinator, **{**own, "job": f"{block.page.stem}-{block.line}"})

    monkeypatch.setattr(jaxft, "Manager", manager)
    monkeypatch.chdir(tmp_path)
    [key] = keys_of(block)
    STAGES[key](block.text)


def test_every_block_runs_here_or_in_another_test() -> None:
    for block in PYTHON:
        assert len(keys_of(block)) == 1, f"{block}: {keys_of(block) or 'nothing runs it: add a stage here'}"
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())
    used = {key for block in PYTHON for key in keys_of(block)}
    assert used == {*STAGES, *ELSEWHERE}


class Failing:
    """Batches of eight shards; the shards of one step cannot be read."""

    def __init__(self, fails_at: int) -> None:
        self.asked: set[int] = set()
        self._fails_at = fails_at

    def __call__(self, step: int, shard: int) -> Any:
        self.asked.add(step)
        if step == self._fails_at:
            raise KeyError("no such file")
        return EIGHT(step, shard)


@stage("checkpoints.md", "manager.restore(init_state())")
def restores(text: str) -> None:
    """Once until a batch fails, and again from the newest checkpoint."""
    text = text.replace("Checkpoints(folder)", "Checkpoints(folder, every_steps=2)")
    names = {
        "folder": Path("saved"),
        "init_state": lambda: jnp.zeros(3),
        "total": 8,
        "train_step": train_step,
    }
    with pytest.raises(KeyError, match="no such file"):
        ran(text, batch_for=Failing(4), **names)
    saved = {int(path.name) for path in Path("saved").iterdir() if path.name.isdigit()}
    after = ran(text, batch_for=(batches := Failing(-1)), **names)
    assert after.manager.step == 8
    assert batches.asked == {0, *range(max(saved), 8)}  # step 0 for the comparison of programs


@stage("checkpoints.md", "state is shapes")
def restores_from_types(text: str) -> None:
    for found in (None, jnp.ones(3)):
        restore = mock.Mock(side_effect=lambda shapes, found=found: shapes if found is None else found)
        after = ran(text, manager=SimpleNamespace(restore=restore), init_state=lambda: jnp.zeros(3))
        assert isinstance(restore.call_args.args[0], jax.ShapeDtypeStruct)
        assert after.state.tolist() == ([0.0] * 3 if found is None else found.tolist())


@stage("checkpoints.md", "CheckpointManager")
def goes_on_from_a_checkpoint_of_its_own(text: str) -> None:
    """Once until a batch fails, and again: at its coordinator the job has committed more than the checkpoint."""
    text = text.replace("gs://bucket/run-1", str(Path.cwd() / "saved")).replace("% 100 ", "% 2 ")

    def of_dict(state: Any, batch: Any) -> Any:
        params, metrics = train_step(state["w"], batch)
        return {"w": params}, metrics

    names = {"init_state": lambda: {"w": jnp.zeros(3)}, "total": 8, "train_step": of_dict}
    with pytest.raises(KeyError, match="no such file"):
        ran(text, batch_for=Failing(5), **names)
    after = ran(text, batch_for=Failing(-1), **names)
    assert (after.manager.step, after.number) == (8, 7)
    assert after.history == after.manager.history > 0
    step = jaxft.fault_tolerant(of_dict, None, shards=8)
    state = {"w": jnp.zeros(3)}
    while step.step < 8:
        state, _ = step(state, EIGHT)
    assert jaxft.digest(after.state) == jaxft.digest(state)


@stage("checkpoints.md", "ocp.load")
def reads_a_checkpoint_without_jaxft(text: str) -> None:
    with jaxft.Manager("localhost:0", checkpoints=jaxft.Checkpoints("saved", every_steps=5)) as manager:
        step = jaxft.fault_tolerant(train_step, manager, shards=8)
        state = step.join(jnp.zeros(3), EIGHT)
        for _ in manager.steps(5):
            state, _ = step(state, EIGHT)
    assert text.count("/data/checkpoints/200") == 2
    text = text.replace("/data/checkpoints/200", str(Path.cwd() / "saved" / "5"))
    read = ran(text)
    np.testing.assert_array_equal(read.state, state)
    [metadata] = [line for line in text.splitlines() if "custom_metadata" in line]
    described = eval(metadata.partition("#")[0], vars(read))
    assert {"step", "job", "history", "digest"} <= {*described}
    assert described["digest"] == jaxft.digest(state)


@stage("clusters.md", "jax.distributed.initialize")
def meets_other_processes(text: str) -> None:
    """The real call is in tests/launch; here, its arguments."""
    called = mock.create_autospec(jax.distributed.initialize)
    with mock.patch.dict(os.environ, JAXFT_NPROC="2", JAXFT_RANK="1"):
        ran(text, os=os, jax=SimpleNamespace(distributed=SimpleNamespace(initialize=called)))
    called.assert_called_once_with(num_processes=2, process_id=1)


@stage("data.md", "batches.fingerprint")
def trains_for_three_epochs(text: str) -> None:
    after = ran(text, source=SOURCE, train_step=train_step, state=jnp.zeros(3))
    assert after.manager.step == 3 * after.batches.steps_per_epoch > 3
    assert np.all(np.isfinite(after.state))


@stage("data.md", "jaxft.data.Prefetch")
def reads_ahead(text: str) -> None:
    batches = ran(text, source=SOURCE, Batches=Batches).batches
    plain = Batches(SOURCE, shards=6, samples_per_shard=8)
    np.testing.assert_array_equal(batches(3, 2).samples, plain(3, 2).samples)


@stage("data.md", "from_iterator")
def takes_streams(text: str) -> None:
    streams = ran(text, open_stream=lambda shard: (np.full(2, 100 * shard + step) for step in range(100)))
    batches = streams.batches
    assert [int(batches(step, 5)[0]) for step in (0, 1, 2)] == [500, 501, 502]


@stage("data.md", "manager.steps(None)")
def ends_with_its_source(text: str) -> None:
    batches = jaxft.data.from_iterator(lambda _: iter(np.ones((4, 3), np.float32)), 1)
    step = jaxft.fault_tolerant(lambda w, batch: (w + jaxft.pmean(batch), {}), None, shards=1)
    state = step.join(jnp.zeros(3), batches)
    with pytest.raises(jaxft.JobFinished):
        ran(text, manager=step, step=step, state=state, batches=batches)
    assert step.step == 4


@stage("data.md", "losses = loss_of_each")
def weighs_the_last_batch(text: str) -> None:
    assert text.endswith("    ...\n")
    assert falls(ran(text.removesuffix("    ...\n") + UPDATE, loss_of_each=loss_of_each).train_step)


@stage("data.md", "use = jax.random.fold_in")
def draws_separate_noise(text: str) -> None:
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        drawn = ran(text, state=SimpleNamespace(**state))
        noise = jax.random.normal(drawn.use) + 0 * batch
        mean, square = jaxft.pmean((noise, noise**2))
        return {**state, "key": drawn.key}, {"variance": square - mean**2}

    step = jaxft.fault_tolerant(train_step, None, shards=4)
    _, metrics = step({"key": jax.random.key(0)}, lambda _, shard: jnp.float32(shard))
    assert metrics["variance"] > 0.01


class Noisy(nnx.Module):
    def __init__(self) -> None:
        self.out = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(x))


@stage("data.md", "nnx.RngKey")
def drops_other_inputs_in_each_shard_and_step(text: str) -> None:
    drawn: list[np.ndarray] = []

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        noise = model.drop(jnp.ones(64))
        jax.debug.callback(lambda noise: drawn.append(np.asarray(noise)), noise)
        return jnp.mean(model(batch) ** 2)

    model = Noisy()
    step = jaxft.fault_tolerant(ran(text, loss_fn=loss_fn).train_step, None, shards=2)
    state: Any = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(3):
        state, metrics = step(state, lambda *_: np.ones((4, 3), np.float32))
        assert np.isfinite(metrics["loss"])
    jax.effects_barrier()
    assert len({noise.tobytes() for noise in drawn}) == 3 * 2


@stage("porting.md", "jax.lax.all_gather(texts")
def compares_each_row_with_those_of_all_shards(text: str) -> None:
    def encode(params: Any, batch: Any) -> Any:
        return batch[0] @ params, batch[1] @ params

    def batch_for(step: int, shard: int) -> np.ndarray:
        return np.random.default_rng([step, shard]).standard_normal((2, 4, 3), np.float32)

    made = ran(text, encode=encode, manager=None)
    params = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5), np.float32))
    whole = np.concatenate([batch_for(0, shard) for shard in range(8)], axis=1)

    def of_all_pairs(params: Any) -> jax.Array:
        images, texts = encode(params, whole)
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(images @ texts.T)))

    expected = params - 0.1 * jax.grad(of_all_pairs)(params)
    found, _ = made.step(params, batch_for)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@stage("porting.md", 'batch["held_out"]')
def scores_held_out_samples_in_some_steps(text: str) -> None:
    """Each shard has a part of them, in every second step."""

    def mean_of(params: Any, rows: Any) -> Any:
        return jnp.mean((rows @ params - 1.0) ** 2)

    def rows_of(step: int, shard: int) -> np.ndarray:
        return np.random.default_rng([step, shard]).standard_normal((4, 3), np.float32)

    def batch_for(step: int, shard: int) -> dict[str, np.ndarray]:
        held_out = {"held_out": rows_of(99, shard)} if step % 2 else {}
        return {"train": rows_of(step, shard), **held_out}

    step_of_page = ran(text, loss_fn=mean_of, score_fn=mean_of).train_step
    step = jaxft.fault_tolerant(step_of_page, None, shards=2)
    params: Any = jnp.zeros(3)
    for number in range(4):
        before = np.asarray(params)
        params, metrics = step(params, batch_for)
        expected = np.mean([mean_of(before, rows_of(99, shard)) for shard in range(2)]) if number % 2 else 0.0
        np.testing.assert_allclose(metrics["score"], expected, rtol=1e-5)


@stage("performance.md", "quantize=")
def quantises_all_but_embeddings(text: str) -> None:
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        return ran(text, grads=jax.tree.map(lambda leaf: leaf * batch, state)).grads, {}

    rows = np.random.default_rng(0).standard_normal((256, 256), np.float32)
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    after, _ = step(
        {"embed": jnp.asarray(rows), "dense": jnp.asarray(rows)}, lambda _, shard: np.float32(shard)
    )
    np.testing.assert_array_equal(after["embed"], rows / 2)
    np.testing.assert_allclose(after["dense"], rows / 2, atol=np.abs(rows).max() / 127)
    assert np.any(after["dense"] != rows / 2)


@stage("porting.md", "def pmax(tree, shards)")
def takes_the_maximum_over_shards(text: str) -> None:
    pmax = ran(text).pmax
    batch = {"amax": np.float32([[-3.0, 1.0], [-7.0, np.nan], [-5.0, 2.0]]), "count": np.int32([3, 9, 4])}

    state: Any = {"amax": jnp.zeros(2), "count": jnp.int32(0)}
    step = jaxft.fault_tolerant(lambda _, batch: (pmax(batch, 3), {}), None, shards=3)
    state, _ = step(state, lambda _, shard: jax.tree.map(lambda leaf: leaf[shard], batch))
    assert state["amax"][0] == -3.0
    assert np.isnan(state["amax"][1])  # as in numpy, if one is NaN
    assert state["count"] == 9


@stage("porting.md", "def rollout(step, shard, state)")
def trains_on_rollouts(text: str) -> None:
    """A bandit: the answer that is rewarded becomes the most probable one."""

    class Policy(NamedTuple):
        params: jax.Array

    @jax.jit
    def sample(params: jax.Array, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        answers = jax.random.categorical(key, params, shape=(len(prompts), 8))
        return answers, jax.nn.log_softmax(params)[answers]

    def train_step(state: Policy, batch: Any) -> tuple[Policy, Any]:
        _, answers, _, rewards = batch
        better = rewards - rewards.mean()
        grads = jax.grad(lambda params: -jnp.mean(better * jax.nn.log_softmax(params)[answers]))
        return Policy(state.params - 5.0 * jaxft.pmean(grads(state.params))), {}

    batches = Batches(SOURCE, shards=2, samples_per_shard=4)
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    after = ran(
        text,
        **{"batches": batches, "sample": sample, "step": step, "manager": step, "total": 20},
        state=Policy(jnp.zeros(4)),
        rewards_of=lambda _, answers: (answers == 2).astype(np.float32),
    )
    assert int(jnp.argmax(after.state.params)) == 2


@stage("porting.md", "nnx.LoRAParam")
def trains_adapters_of_frozen_weights(text: str) -> None:
    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return jnp.mean((model(batch) - 1) ** 2)

    model = nnx.LoRALinear(3, 3, lora_rank=2, rngs=nnx.Rngs(0))
    optimizer = optax.sgd(0.1)
    made = ran(text, model=model, loss_fn=loss_fn, optimizer=optimizer)
    step = jaxft.fault_tolerant(made.train_step, None, shards=2)
    key = (jax.random.key(0),) if "key" in text else ()
    state: Any = made.adapters, optimizer.init(made.adapters), *key
    losses: list[float] = []
    for _ in range(4):
        state, metrics = step(state, lambda *_: np.ones((4, 3), np.float32))
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) > 1
    assert {path[-1] for path, _ in nnx.to_flat_state(state[0])} == {"lora_a", "lora_b"}


@stage("porting.md", "once.reset()")
def adds_up_metrics_and_begins_again(text: str) -> None:
    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch) + 0 * jnp.sum(model(jnp.ones(3)))

    def at_zero(state: Any) -> Any:
        metrics = nnx.clone(state[2])
        metrics.reset()
        return (*state[:2], metrics)

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    train_step = ran(text, loss_fn=loss_fn).train_step
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    state: Any = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), nnx.metrics.Average("loss")
    means: list[float] = []

    def batch_for(step: int, shard: int) -> np.ndarray:
        return np.full(2, 10.0 * step + shard, np.float32)

    state = step.join(state, batch_for)
    for number in step.steps(4):
        if number == 3:
            state = step.edit(state, at_zero)
        state, _ = step(state, batch_for)
        means.append(float(state[2].total[...]) / int(state[2].count[...]))
    assert means == [0.5, 5.5, 10.5, 30.5]


@stage("diloco.md", "jaxft.diloco")
def trains_in_rounds(text: str) -> None:
    class State(NamedTuple):
        params: jax.Array
        moments: Any

    def loss_fn(params: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.mean(loss_of_each(params, batch))

    assert text.count("every=100") == 1
    names = {
        "inner": optax.sgd(0.1, momentum=0.9),
        "params": jnp.zeros(3),
        "manager": None,
        "State": State,
        "rounds": 3,
    }
    batches = np.random.default_rng(0).standard_normal((6, 8, 4, 3), np.float32)
    after = ran(
        text.replace("every=100", "every=2"),
        **{**names, "loss_fn": loss_fn, "batch_for": lambda step, shard: batches[step, shard]},
    )
    assert after.step.step == 3
    assert np.all(np.isfinite(after.state["params"]))
    assert float(jnp.abs(after.state["params"]).max()) > 0


@stage("data.md", "optax.microbatching")
def accumulates(text: str) -> None:
    assert text.endswith("    ...\n")
    divided = UPDATE.replace(" * g,", " * g / count,")
    assert falls(ran(text.removesuffix("    ...\n") + divided, total_loss=total_loss).train_step)


@stage("operate.md", "manager.show")
def shows_its_loss(text: str) -> None:
    manager = mock.Mock(steps=range)
    names = {
        "step": lambda state, _: (state + 1, {"loss": jnp.float32(state)}),
        "state": 0,
        "batch_for": None,
    }
    ran(text, manager=manager, total_steps=20, **names)
    assert [call.kwargs for call in manager.show.call_args_list] == [{"loss": 0.0}, {"loss": 10.0}]


@stage("operate.md", "logging.basicConfig")
def shows_the_log(text: str) -> None:
    own = logging.getLogger("jaxft")
    with mock.patch.object(logging.getLogger(), "handlers", []), mock.patch.object(own, "level", own.level):
        ran(text)
        assert len(logging.getLogger().handlers) == 1
        assert own.level == logging.INFO


@stage("ray.md", "ray.init")
def starts_groups_in_ray(text: str) -> None:
    """tests/ray runs the example under a real Ray; here, its arguments."""
    ray = mock.MagicMock()
    with mock.patch.dict(sys.modules, ray=ray):
        from examples.ray import train as example
    run = mock.create_autospec(example.run)
    ran(text, ray=ray, run=run, train=lambda: None, Options=example.Options, Path=Path)
    assert run.call_args.args[1].groups == 8


@stage("security.md", "jaxft.TLS")
def encrypts(text: str) -> None:
    """tests/security encrypts; here, that the block passes what jaxft takes."""
    own = mock.create_autospec(jaxft)
    ran(text, jaxft=own)
    assert own.Manager.call_args.kwargs["network"] is own.Network.return_value
