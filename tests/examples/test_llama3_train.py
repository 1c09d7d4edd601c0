"""The command: its help, its checks before anything is changed, and a run."""

import functools
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxft
from examples.llama3 import train as script
from examples.llama3._config import MODEL_SIZES, Size
from examples.llama3._flags import Flags
from examples.llama3._runtime import XLA_FLAGS, start_jax, with_default_flags
from examples.llama3._settings import choose_mesh

pytestmark = pytest.mark.unoptimized


@pytest.fixture
def command(run_example: Callable[..., int]) -> Callable[..., int]:
    return functools.partial(run_example, script)


# The flags.


def test_help_explains_every_flag(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == 0
    text = capsys.readouterr().out
    assert "usage: python -m examples.llama3.train" in text
    assert "{debug,50m,1B,3B,8B,70B,405B}" in text
    for name in Flags.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
    for words in (
        "HOST:PORT",
        "Python's standard library",
        "Committed steps over",
        "Simulate this many devices",
    ):
        assert words in " ".join(text.replace("│", " ").split())


def test_the_sizes_to_choose_from_are_those_there_are() -> None:
    assert typing.get_args(Size) == tuple(MODEL_SIZES)


# Checks before anything is changed.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--corpus", "nowhere.txt"), "There is no corpus at 'nowhere.txt'"),
        (("--seq-len", "100000", "--corpus-bytes", "1000"), "but one sequence takes 100001"),
        (("--tp", "8"), "needs 8 devices, but there are 4 here"),
        (("--log-every", "0"), "--log-every must be above 0 and finite, not 0"),
        (("--failure-timeout-s", "0"), "--failure-timeout-s must be above 0 and finite, not 0.0"),
        (("--tokenizer", "nowhere.json"), "The tokenizer 'nowhere.json' cannot be read"),
        (("--config", "nowhere.json"), "The configuration 'nowhere.json' cannot be read"),
        (("--initial-weights", "nowhere"), "There are no weights in 'nowhere': it has no config.json"),
        (("--cpu-devices", "0"), "--cpu-devices must be above 0 and finite, not 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_changed(
    command: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, words: tuple[str, ...], message: str
) -> None:
    events = tmp_path / "events.jsonl"
    assert command("--events", str(events), *words) == 2
    assert message in caplog.text
    assert not events.exists()


def test_the_mesh_takes_all_devices_that_tp_leaves() -> None:
    def sizes(flags: Flags) -> tuple[int, ...]:
        return tuple(choose_mesh(flags).shape[axis] for axis in ("pipeline", "fsdp", "context", "tp"))

    assert sizes(Flags()) == (1, 2, 1, 1)
    assert sizes(Flags(tp=2)) == (1, 2, 1, 2)
    assert sizes(Flags(fsdp=1)) == (1, 1, 1, 1)
    assert sizes(Flags(context=2, tp=2)) == (1, 1, 2, 2)
    assert sizes(Flags(pipeline=3, microbatches=2, seq_len=96)) == (3, 1, 1, 1)


# The runtime.


def test_xla_flags_are_set_unless_the_user_has() -> None:
    assert with_default_flags("").split() == list(XLA_FLAGS)
    mine = "--xla_cpu_collective_call_terminate_timeout_seconds=7 --xla_dump_to=here"
    assert with_default_flags(mine).split() == [*mine.split(), XLA_FLAGS[1]]
    assert with_default_flags(with_default_flags(mine)) == with_default_flags(mine)


def test_the_compilation_cache_keeps_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    monkeypatch.setenv("XLA_FLAGS", "")
    start_jax(cpu_devices=3, compilation_cache=tmp_path)
    assert settings == {
        "jax_platforms": "cpu",
        "jax_num_cpu_devices": 3,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


# A run.


SHORT = ("--shards", "2", "--fsdp", "1", "--seq-len", "32", "--corpus-bytes", "50000")


@pytest.mark.long
def test_a_run_keeps_its_configuration_curves_trace_and_weights(
    command: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, weights, events = tmp_path / "run", tmp_path / "weights", tmp_path / "events.jsonl"
    kept = ("--run", str(run), "--tracker", "tensorboard", "--profile", "2", "2", "--events", str(events))
    more = ("--batch-tokens", "256", "--grad-dtype", "bfloat16", "--eval-every", "2", "--eval-batches", "1")
    assert command(*SHORT, *kept, *more, "--steps", "4", "--export-weights", str(weights)) == 0

    found = [json.loads(line) for line in events.read_text().splitlines()]
    evaluated = [(event["step"], event["loss"]) for event in found if event["event"] == "evaluation"]
    assert [step for step, _ in evaluated] == [2, 4]
    assert 5.0 < evaluated[1][1] < evaluated[0][1] < 7.0
    assert "a step: 2 shards x 4 sequences x 32 tokens = 256 tokens" in caplog.text
    assert list((run / "group-0" / "tensorboard").iterdir())
    assert list((run / "group-0" / "plugins" / "profile").rglob("*.xplane.pb"))

    # The same again, from the saved configuration and the weights at the end.
    caplog.clear()
    begin = ("--config", str(run / "group-0" / "config.json"), "--export-weights", "None")
    again = ("--run", "None", "--tracker", "None", "--profile", "None", "--initial-weights", str(weights))
    assert command(*begin, *again, "--steps", "1", "--events", str(tmp_path / "again.jsonl")) == 0
    first = json.loads((tmp_path / "again.jsonl").read_text().splitlines()[0])
    assert first["loss"] < found[0]["loss"] - 0.1
    assert "= 256 tokens" in caplog.text

    # And not with other settings in its place.
    assert command(*begin, "--beta2", "0.5") == 2
    assert "beta2: saved '0.95', now '0.5'" in caplog.text


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize("carry", ["average", "reset"])
def test_rounds_of_inner_steps_on_a_mesh(command: Any, tmp_path: Path, carry: str) -> None:
    events, weights = tmp_path / "events.jsonl", tmp_path / "weights"
    rounds = ("--steps", "3", "--diloco-every", "4", "--diloco-carry", carry, "--fsdp", "2")
    more = ("--eval-every", "1", "--eval-batches", "1", "--events", str(events))
    command(*SHORT, *rounds, *more, "--digest-at-end", "--export-weights", str(weights))
    written = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["step"] for event in written if event["event"] == "step"] == [1, 2, 3]
    losses = [event["loss"] for event in written if event["event"] == "evaluation"]
    assert losses[-1] < losses[0]
    assert written[-1]["digest"]
    assert (weights / "config.json").is_file()


def test_a_loss_that_is_not_finite_ends_the_run(command: Any, caplog: pytest.LogCaptureFixture) -> None:
    status = command(*SHORT, "--steps", "20", "--learning-rate", "1e38", "--warmup-steps", "0")
    assert status == 75, "as of a program that does not catch it"
    assert "NonFinite: " in caplog.text


def test_a_job_that_was_over_is_a_clean_end(
    command: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def over(_flags: Flags) -> None:
        raise jaxft.JobFinished("The job has reached its end.")

    monkeypatch.setattr(script, "train", over)
    assert command() == 0
    assert "The job has reached its end." in caplog.text
