"""Real storms over the real example, like `make chaos`."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.storm._faults import FAULTS
from lab.chaos import LabChaosOptions, run_chaos

pytestmark = pytest.mark.processes


def check(options: LabChaosOptions, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chaos(options) == 0, capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["kills"] == options.kills
    assert result["steps_lost"] == 0
    assert result["matches_undisturbed"]
    assert set(result["ledger"].values()) == {True}


@pytest.mark.storm
@pytest.mark.timeout(300)
def test_a_small_storm_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In groups of one, two and four devices; the undisturbed run uses one."""
    file = tmp_path / "verdict.json"
    options = LabChaosOptions(
        kills=4, steps=110, seed=5, devices=(1, 2, 4), json=file, keep=tmp_path / "keep"
    )
    check(options, file, capsys)


@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_a_hundred_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verdict.json"
    check(LabChaosOptions(kills=100, json=file, keep=tmp_path / "keep"), file, capsys)


ALL_KINDS: dict[str, Any] = {
    "faults": ",".join(FAULTS),
    "heartbeat_timeout_ms": 2000,
    "failure_timeout_s": 20.0,
}


@pytest.mark.storm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_storm_of_all_faults_changes_nothing(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    options = LabChaosOptions(kills=28, seed=seed, json=file, keep=tmp_path / "keep", **ALL_KINDS)
    assert run_chaos(options) == 0, capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["steps_lost"] == 0
    assert result["matches_undisturbed"]
    assert set(result["ledger"].values()) == {True}
    assert set(result["faults_by_kind"]) == set(FAULTS) - {"kill"}


@pytest.mark.storm
@pytest.mark.timeout(7200)
def test_half_an_hour_of_all_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Like `make adversary`: groups that could take part did so at least 90 % of the time."""
    file = tmp_path / "verdict.json"
    options = LabChaosOptions(minutes=30, json=file, keep=tmp_path / "keep", **ALL_KINDS)
    assert run_chaos(options) == 0, capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["matches_undisturbed"]
    assert result["participation"] >= 0.9
