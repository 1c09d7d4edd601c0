"""Real storms over the real example, like `make chaos`."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.storm._faults import FAULTS
from lab.chaos import LabChaosOptions, run_chaos

pytestmark = pytest.mark.processes


@pytest.fixture
def keep(tmp_path: Path) -> Path:
    return tmp_path / "keep"


def verdict_of(options: LabChaosOptions, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run_chaos(options) == 0, capsys.readouterr().out
    assert options.keep is not None
    result = json.loads((options.keep / "verdict.json").read_text())
    assert result["steps_lost"] == 0
    assert result["matches_undisturbed"]
    assert set(result["ledger"].values()) == {True}
    return result


@pytest.mark.storm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "options",
    [{"kills": 4, "steps": 110, "seed": 5, "devices": (1, 2, 4)}, {"kills": 100}],
    ids=["other meshes", "a hundred"],
)
def test_kills_change_nothing(
    options: dict[str, Any], keep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In groups of one, two and four devices; the undisturbed run uses one."""
    assert verdict_of(LabChaosOptions(**options, keep=keep), capsys)["kills"] == options["kills"]


ALL_KINDS: dict[str, Any] = {
    "faults": ",".join(FAULTS),
    "heartbeat_timeout_ms": 2000,
    "failure_timeout_s": 20.0,
}


@pytest.mark.storm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_storm_of_all_faults_changes_nothing(
    seed: int, keep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = verdict_of(LabChaosOptions(kills=28, seed=seed, keep=keep, **ALL_KINDS), capsys)
    assert set(result["faults_by_kind"]) == set(FAULTS) - {"kill"}


@pytest.mark.storm
@pytest.mark.timeout(7200)
def test_half_an_hour_of_all_faults(keep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Like `make adversary`: groups that could take part did so at least 90 % of the time."""
    result = verdict_of(LabChaosOptions(minutes=30, keep=keep, **ALL_KINDS), capsys)
    assert result["participation"] >= 0.9
