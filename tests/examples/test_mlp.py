"""The smallest example: its ledger, its bits and its events."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxft
from examples.mlp import train as script
from examples.mlp._data import expected_ledger, ledger_text, make_samples
from examples.mlp._model import init_state
from examples.mlp.train import Flags, make_train_step, train
from jaxft.data import Batches
from jaxft_launch.storm._events import FinishedEvent, parse_event
from tests import patience

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


def mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shards", "0"), "shards must be at least 1, not 0"),
        (("--samples", "0"), "The source has 0 samples"),
        (("--coordinator", "nowhere"), "separated by commas, not 'nowhere'"),
    ],
)
def test_bad_input_is_refused(
    run_example: Callable[..., int], caplog: pytest.LogCaptureFixture, words: tuple[str, ...], message: str
) -> None:
    assert run_example(script, *words) == 1
    assert message in caplog.text


def test_it_imports_only_what_it_needs() -> None:
    """It is what fault tests start over and over: scipy alone would cost a relaunched group half a second."""
    code = "import sys, examples.mlp.train; print(*sys.modules)"
    done = patience.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, limit_s=DEADLINE_S, check=True
    )
    heavy = {"scipy", "orbax", "flax", "grain", "pandas"}
    assert heavy.isdisjoint(name.split(".")[0] for name in done.stdout.split())
