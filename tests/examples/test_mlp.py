"""The smallest example: its ledger, its bits, its events, and the same run in two groups."""

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jaxft
from examples.mlp import _model
from examples.mlp import train as script
from examples.mlp._data import expected_ledger, ledger_text, make_samples
from examples.mlp._events import Events
from examples.mlp._model import init_state, predict
from examples.mlp.train import Flags, make_train_step, train
from jaxft.data import Batches
from jaxft_launch.storm._events import FinishedEvent, parse_event
from tests import patience
from tests.clusters import cluster
from tests.forks import Script
from tests.shared import shared

pytestmark = pytest.mark.unoptimized

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0
SMALL = {"samples": 50, "shards": 3, "samples_per_shard": 4, "compilation_cache": None}  # 5 steps an epoch

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a training alone, in this process; returns its events."""
    monkeypatch.setenv("XLA_FLAGS", "")
    runs = 0

    def run(**flags: Any) -> list[dict[str, Any]]:
        nonlocal runs
        runs += 1
        events = tmp_path / f"{runs}.jsonl"
        train(Flags(**{**SMALL, "events": events, "digest_at_end": True, **flags}))
        return [json.loads(line) for line in events.read_text().splitlines()]

    return run


# The ledger.


def test_every_sample_is_used_once_an_epoch_with_an_uneven_last_batch(run: Run) -> None:
    *steps, finished = run(steps=10)
    assert [event["step"] for event in steps] == list(range(1, 11))
    assert finished["ledger"] is True
    assert finished["ledger_text"] == "every sample 2 times"


def test_the_ledger_in_the_midst_of_an_epoch(run: Run) -> None:
    finished = run(steps=7)[-1]
    assert finished["ledger"] is True
    assert finished["ledger_text"] == "every sample 1 or 2 times"


def test_a_wrong_ledger_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Batches.__call__

    def one_step_late(batches: Batches, step: int, shard: int) -> Any:
        return asked(batches, step + (shard == 1), shard)

    monkeypatch.setattr(script, "expected_ledger", lambda *_: np.full(50, 2, np.int32))
    monkeypatch.setattr(Batches, "__call__", one_step_late)
    finished = run(steps=10)[-1]
    assert finished["ledger"] is False
    assert re.fullmatch(r"\d+ samples wrong; sample \d+ used \d times instead of 2", finished["ledger_text"])


def test_what_the_ledger_must_be() -> None:
    batches = Batches(range(50), shards=3, samples_per_shard=4, seed=None)
    assert expected_ledger(batches, 0).tolist() == [0] * 50
    assert expected_ledger(batches, 5).tolist() == [1] * 50
    assert expected_ledger(batches, 11).tolist() == [3] * 12 + [2] * 38
    assert ledger_text(np.array([1, 2, 1]), np.array([1, 1, 1])) == (
        "1 samples wrong; sample 1 used 2 times instead of 1"
    )


# The arithmetic.


@pytest.mark.long
@pytest.mark.unoptimized(False)
def test_a_run_can_be_repeated(run: Run) -> None:
    one, other, another_seed = run(steps=7), run(steps=7), run(steps=7, seed=1)
    assert one[-1]["digest"] == other[-1]["digest"]
    assert [event.get("loss") for event in one] == [event.get("loss") for event in other]
    assert one[-1]["digest"] != another_seed[-1]["digest"]


@pytest.mark.long
def test_it_learns(run: Run) -> None:
    """More samples than it could learn by heart."""
    losses = [event["loss"] for event in run(steps=210, samples=1000, samples_per_shard=16)[:-1]]
    assert np.mean(losses[-10:]) < 0.1 * np.mean(losses[:10])


@pytest.mark.long
def test_the_mean_is_over_samples_however_they_are_cut_into_shards(run: Run) -> None:
    """A step takes the same 12 samples, or in the last one of an epoch 2, whatever the number of shards."""
    losses = [
        [event["loss"] for event in run(steps=10, shards=shards, samples_per_shard=12 // shards)[:-1]]
        for shards in (1, 3, 4)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-4)


def mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


@pytest.mark.long
def test_an_epoch_is_plain_training_on_whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step has 2 samples and the others 12: as a gradient, each is the mean over its own."""
    plain = optax.sgd(0.01)  # clipping would hide a wrong scale
    monkeypatch.setattr(script, "OPTIMIZER", plain)
    monkeypatch.setattr(_model, "OPTIMIZER", plain)
    samples = make_samples(50, seed=0)
    batches = Batches(samples, shards=3, samples_per_shard=4)
    params = jax.tree.map(jnp.copy, init_state(mesh(1), samples=50, seed=0)["params"])
    for number in range(batches.steps_per_epoch):
        index = np.concatenate([batches(number, shard).index for shard in range(3)])
        x, y = (np.stack([samples[i][name] for i in index if i >= 0]) for name in ("x", "y"))
        grads = jax.grad(lambda p, x=x, y=y: jnp.mean((predict(p, x, work=1) - y) ** 2))(params)
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    state = init_state(mesh(1), samples=50, seed=0)
    step = jaxft.fault_tolerant(make_train_step(mesh(1), work=1), None, shards=3)
    while step.step < batches.steps_per_epoch:
        state, _ = step(state, batches)
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, atol=2e-5), state["params"], params
    )


@pytest.mark.long
@pytest.mark.unoptimized(False)
def test_the_bits_are_the_same_on_any_number_of_devices() -> None:
    batches = Batches(make_samples(50, seed=0), shards=2, samples_per_shard=4)

    def digest(devices: int) -> str:
        state = init_state(mesh(devices), samples=50, seed=0)
        assert len(state["params"]["hidden"].sharding.device_set) == devices
        assert state["params"]["hidden"].addressable_shards[0].data.shape[0] * devices == 128
        step = jaxft.fault_tolerant(make_train_step(mesh(devices), work=2), None, shards=2)
        while step.step < 12:
            state, _ = step(state, batches)
        return jaxft.digest(state)

    assert digest(1) == digest(2) == digest(4)


# The command.


def test_events_are_those_that_launchers_read(run: Run) -> None:
    *steps, finished = [parse_event(json.dumps(event).encode()) for event in run(steps=3)]
    assert [(event.step, event.shards, event.attempts) for event in steps] == [
        (number, (0, 1, 2), 1) for number in (1, 2, 3)
    ]
    assert isinstance(finished, FinishedEvent)
    assert finished.step == 3
    assert finished.digest


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    Events(path).step(jaxft.StepReport(1), loss=float("nan"))
    assert json.loads(path.read_text())["loss"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shards", "0"), "shards must be at least 1, not 0"),
        (("--samples", "0"), "The source has 0 samples"),
        (("--coordinator", "nowhere"), "separated by commas, not 'nowhere'"),
    ],
)
def test_bad_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(sys, "argv", ["train.py", "--compilation-cache", "None", *words])
    levels = {name: logging.getLogger(name).level for name in ("mlp", "jaxft")}
    try:
        with pytest.raises(SystemExit) as stopped:
            script.main()
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert stopped.value.code == 1
    assert message in caplog.text


def test_it_imports_only_what_it_needs() -> None:
    """It is what fault tests start over and over: scipy alone would cost a relaunched group half a second."""
    code = "import sys, examples.mlp.train; print(*sys.modules)"
    done = patience.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, limit_s=DEADLINE_S, check=True
    )
    heavy = {"scipy", "orbax", "flax", "grain", "pandas"}
    assert heavy.isdisjoint(name.split(".")[0] for name in done.stdout.split())


# Groups.


@pytest.mark.long
@pytest.mark.processes
def test_two_groups_end_as_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    flags = (
        "--steps",
        "10",
        "--samples",
        "50",
        "--shards",
        "3",
        "--samples-per-shard",
        "4",
        "--digest-at-end",
    )
    flags += ("--compilation-cache", str(shared("compiled")))
    with cluster(tmp_path) as here:
        here.start_coordinator("--min-replicas", "2")
        for group, devices in (("a", 2), ("b", 2), ("alone", 1)):
            joins = () if group == "alone" else ("--coordinator", f"localhost:{here.port}", "--group", group)
            events = ("--events", str(tmp_path / f"{group}.jsonl"), "--cpu-devices", str(devices))
            process = Script("examples.mlp.train", (*flags, *joins, *events), tmp_path / f"{group}.log")
            here.started.append(process)
        for process in here.started[1:]:
            here.until(lambda process=process: process.poll() == 0, "all to end")
    told = {
        group: [json.loads(line) for line in (tmp_path / f"{group}.jsonl").read_text().splitlines()]
        for group in ("a", "b", "alone")
    }
    assert len({events[-1]["digest"] for events in told.values()}) == 1
    for events in told.values():
        assert events[-1]["ledger_text"] == "every sample 2 times"
    for mine, theirs in zip(told["a"][:-1], told["b"][:-1], strict=True):
        assert sorted(mine["shards"] + theirs["shards"]) == [0, 1, 2]
        assert mine["members"] == ["a", "b"]
