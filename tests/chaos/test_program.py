"""`jaxft chaos` over a user's program, with real processes: kills, restarts, and the same bits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm.chaos import ChaosOptions, run_chaos
from tests.shared import compiled_environment

SLOW_S = 20
PROGRAM = (sys.executable, str(Path(__file__).with_name("user_program.py")))
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def _compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bits do not matter, groups share the first group's compiled programs."""
    for name, value in compiled_environment().items():
        monkeypatch.setenv(name, value)


def chaos(*words: str, **options: Any) -> int:
    return run_chaos(ChaosOptions(**{"kills": 1, "groups": 2, **options}), (*PROGRAM, *words))


@pytest.mark.long
def test_a_program_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started by a shell, like many programs; and with checkpoints in a separate folder for each run."""
    keep = tmp_path / "keep"
    words = (*PROGRAM, "100", "checkpoints", "{folder}/checkpoints")
    options = ChaosOptions(kills=2, groups=2, keep=keep)
    status = run_chaos(options, ("sh", "-c", '"$@"; exit $?', "sh", *words))
    text = capsys.readouterr().out
    assert status == 0, text
    result = json.loads((keep / "verdict.json").read_text())
    assert (result["kills"], result["steps_committed"], result["steps_lost"]) == (2, 100, 0)
    assert result["matches_undisturbed"]
    (digest,) = {*result["digests"].values(), *result["undisturbed_digests"].values()}
    assert digest
    assert text.count("  restarted group-") == 2
    assert (keep / "storm" / "checkpoints").is_dir()


@pytest.mark.storm
def test_ranks_that_are_killed_and_stopped_change_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = tmp_path / "keep"
    assert chaos("100", kills=4, nproc=2, faults="kill,stop", keep=keep) == 0, capsys.readouterr().out
    result = json.loads((keep / "verdict.json").read_text())
    assert (result["ranks_per_group"], result["kills"], len(result["faults"])) == (2, 2, 2)
    assert (result["steps_committed"], result["steps_lost"]) == (100, 0)
    assert result["matches_undisturbed"]
    assert sum(result["hit_ranks"].values()) == 2


@pytest.mark.long
@pytest.mark.usefixtures("_compiled_once")
def test_a_program_that_is_not_deterministic_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("20", "random") == 1
    text = capsys.readouterr().out
    assert "The result is not the undisturbed run's." in text
    assert "the program is not deterministic: it ran undisturbed twice" in text
    assert "their states differ from step 1 on" in text


@pytest.mark.long
@pytest.mark.usefixtures("_compiled_once")
@pytest.mark.parametrize(
    ("oddity", "error", "output"),
    [
        ("crash", "fails without a storm: .* failed with exit status 1", "fails on purpose"),
        ("members", "fails without a storm", "needs a fixed number of shards: pass shards=..."),
    ],
)
def test_a_program_that_cannot_be_compared_is_an_error(
    oddity: str, error: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError, match=error):
        chaos("5", oddity)
    assert output in " ".join(capsys.readouterr().out.split())
