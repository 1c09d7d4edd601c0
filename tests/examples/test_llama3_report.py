"""The reports of a run: the figures, the aligned line, the event file."""

import json
import logging
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama3_cases import abstract_params
from tensorboardX.proto.event_pb2 import Event

import jaxft
from examples.llama3._config import MODEL_SIZES, Size
from examples.llama3._flags import Flags
from examples.llama3._metrics import Progress, Workload, flops_per_token, log_line, peak_flops_per_s
from examples.llama3._report import Report
from examples.llama3._tracker import NoTracker, make_tracker

PROGRESS = Progress(
    step=40,
    total_steps=1000,
    loss=3.21431,
    grad_norm=1.2041,
    s_per_step=0.2131,
    tokens_per_s=9616.4,
    mfu=None,
    replicas=2,
    quorum_id=3,
)

WORKLOAD = Workload(
    tokens_per_step=1000, flops_per_token=6_000_000, devices_per_replica=4, peak_flops_per_s=1e10
)


# The figures.


@pytest.mark.parametrize(
    ("size", "multiplied"),
    # All parameters but the looked-up embedding; where it is tied, it is multiplied with as the head.
    [("8B", 8_030_261_248 - 128_256 * 4096), ("1B", 1_235_814_400)],
)
def test_flops_per_token_count_matrices_and_attention(size: Size, multiplied: int) -> None:
    config = MODEL_SIZES[size]
    attention = 12 * config.layers * config.dim * 8192
    assert flops_per_token(config, abstract_params(config), seq_len=8192) == 6 * multiplied + attention


@pytest.mark.parametrize(
    ("device_kind", "teraflops_per_s"),
    [
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI355X", 2516.6),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_known_devices_have_a_peak(device_kind: str, teraflops_per_s: float) -> None:
    assert peak_flops_per_s(device_kind) == teraflops_per_s * 1e12


def test_utilisation_is_of_all_devices_of_all_replicas() -> None:
    assert WORKLOAD.tokens_per_s(0.5) == 2000
    assert WORKLOAD.mfu(0.5, replicas=1) == pytest.approx(2000 * 6e6 / 4e10)
    assert WORKLOAD.mfu(0.5, replicas=3) == pytest.approx(2000 * 6e6 / 12e10)


# The line.


def test_the_line_says_everything_in_order() -> None:
    assert log_line(PROGRESS) == (
        "step   40/1000  loss  3.2143  grad norm   1.2041  s/step    0.213  tokens/s       9,616  "
        "mfu      -  replicas   2  quorum    3"
    )


# The event file.


def manager_at(quorum_id: int, members: tuple[str, ...]) -> Any:
    """Stand in for a `jaxft.Manager` after a step."""
    report = jaxft.StepReport(
        step=1,
        attempts=2,
        compute_s=0.5,
        exchange_s=0.25,
        vote_s=0.125,
        apply_s=0.0625,
        shards=(0, 1, 3),
        quorum_id=quorum_id,
        members=members,
    )
    return SimpleNamespace(report=report)


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_committed_step_is_on_disk_at_once(tmp_path: Path) -> None:
    flags = Flags(events=tmp_path / "new" / "events.jsonl")
    assert flags.events is not None
    with Report(flags, WORKLOAD, manager_at(7, ("group-0", "group-1")), NoTracker()) as report:
        report.committed(1, {"loss": 5.5, "grad_norm": 2.0}, step_s=1.0)
        (event,) = events_in(flags.events)
    assert event.pop("t") > 1.7e9
    assert event == {
        "event": "step",
        "step": 1,
        "loss": 5.5,
        "attempts": 2,
        "compute_s": 0.5,
        "exchange_s": 0.25,
        "vote_s": 0.125,
        "apply_s": 0.0625,
        "shards": [0, 1, 3],
        "quorum_id": 7,
        "members": ["group-0", "group-1"],
        "nonfinite": "",
    }


def test_alone_every_shard_is_its_own(tmp_path: Path) -> None:
    flags = Flags(events=tmp_path / "events.jsonl", shards=3)
    assert flags.events is not None
    with Report(flags, WORKLOAD, None, NoTracker()) as report:
        report.committed(1, {"loss": 5.5, "grad_norm": 2.0}, step_s=1.5)
        report.finished(1, digest="ab12")
    step, finished = events_in(flags.events)
    assert (step["shards"], step["attempts"], step["compute_s"]) == ([0, 1, 2], 1, 1.5)
    assert (step["quorum_id"], step["members"]) == (None, [])
    assert {key: finished[key] for key in ("event", "step", "digest")} == {
        "event": "finished",
        "step": 1,
        "digest": "ab12",
    }


def test_the_first_the_last_and_every_nth_step_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="llama3")
    manager = manager_at(7, ("group-0", "group-1"))
    with Report(Flags(steps=11, log_every=5), WORKLOAD, manager, NoTracker()) as report:
        for step in range(1, 12):
            report.committed(step, {"loss": 5.5, "grad_norm": 2.0}, step_s=step)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("/")[0] for line in lines] == ["step  1", "step  5", "step 10", "step 11"]
    # Seconds and tokens per second are of the steps since the line before.
    assert [f"  s/step {s:8.3f}  " in line for s, line in zip((1, 3.5, 8, 11), lines, strict=True)] == [
        True
    ] * 4
    assert all("replicas   2  quorum    7" in line for line in lines)


# Curves.


def test_tensorboard_gets_what_is_logged(tmp_path: Path) -> None:
    flags = Flags(run=tmp_path, group="group-7", tracker="tensorboard", log_every=2, steps=4)
    with Report(flags, WORKLOAD, None, make_tracker(flags, {})) as report:
        for step in range(1, 5):
            report.committed(step, {"loss": 5.5 - step, "grad_norm": 2.0}, step_s=1.0)
        report.evaluated(4, 1.25)
    (file,) = (tmp_path / "group-7" / "tensorboard").iterdir()
    found = scalars_in(file)
    assert found["loss"] == {1: 4.5, 2: 3.5, 4: 1.5}
    assert found["held_out_loss"] == {4: 1.25}
    assert found["tokens_per_s"][4] == 1000.0
    assert found.keys() == {
        "loss",
        "grad_norm",
        "tokens_per_s",
        "s_per_step",
        "mfu",
        "replicas",
        "held_out_loss",
    }


def scalars_in(file: Path) -> dict[str, dict[int, float]]:
    """Read a file of TensorBoard: records, each with its length, a check of it, the event, and a check of that."""
    data, at, found = file.read_bytes(), 0, {}
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
        at += 16 + length
    return found
