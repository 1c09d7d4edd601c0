"""Whole storms with real processes and real kills, but with a fake coordinator and fake groups that do not train."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import jaxft
from jaxft_launch.processes._checks import LaunchError
from lab._examples import Example
from lab.chaos import LabChaosOptions, plan, run_chaos, timed

HERE = Path(__file__).parent
PACE_S = 0.01
STEPS_PER_KILL = 20
# Without `jaxft/__init__.py`, and so without the seconds that JAX takes to import.
WITHOUT_JAX = (
    "import sys, types\n"
    f"sys.path.append({str(HERE)!r})\n"
    "sys.modules['jaxft'] = types.ModuleType('jaxft')\n"
    f"sys.modules['jaxft'].__path__ = [{str(Path(jaxft.__file__).parent)!r}]\n"
)
pytestmark = [pytest.mark.processes, pytest.mark.timeout(100)]


class FakeExample(Example):
    __slots__ = ()

    @property
    def trainer(self) -> tuple[str, ...]:
        return (sys.executable, "-S", "-c", WITHOUT_JAX + "import fake_group\nfake_group.main()\n")


def storm(options: LabChaosOptions, *flags: tuple[str, str], launches: int = 3) -> int:
    """Run a storm. The job does not run to its end before there were so many launches."""
    example = FakeExample(
        module="tests.chaos.fake_group", flags=flags, needs=(), steps_per_kill=STEPS_PER_KILL
    )
    fake = HERE.parent / "demo" / "fake_coordinator.py"
    command = (sys.executable, "-S", str(fake), str(PACE_S), str(launches))
    return run_chaos(options, example=example, coordinator=command)


def run(
    tmp_path: Path, *flags: tuple[str, str], launches: int = 3, **changes: Any
) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "verdict.json"
    status = storm(LabChaosOptions(json=file, **changes), *flags, launches=launches)
    return status, json.loads(file.read_text())


@pytest.mark.long
def test_every_kill_is_placed_in_the_order_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kills, keep = 20, tmp_path / "keep"
    status, result = run(tmp_path, kills=kills, seed=4, keep=keep, launches=3 + kills)
    text = capsys.readouterr().out
    assert status == 0, text
    assert "VERDICT: nothing was lost" in text
    assert result["kills"] == kills
    assert sum(result["hit_phases"].values()) == sum(result["hit_groups"].values()) == kills
    assert result["double_deaths"] == 2
    assert result["stall_ms_max"] >= result["stall_ms_p99"] >= result["stall_ms_median"] > 0
    assert result["back_s_max"] >= result["back_s_median"] > 0
    example = FakeExample(module="", flags=(), needs=(), steps_per_kill=STEPS_PER_KILL)
    strikes = plan(LabChaosOptions(kills=kills, seed=4), example, result["steps_planned"])
    planned = [(n, v.group, v.phase) for n, strike in enumerate(strikes) for v in strike.victims]
    hits = [(hit["strike"], hit["group"], hit["aim"]) for hit in result["hits"]]
    assert sorted(hits) == sorted(planned)
    assert [hit[0] for hit in hits] == sorted(hit[0] for hit in planned)
    exact = [hit for hit, (_, _, aim) in zip(result["hits"], hits, strict=True) if aim in ("heal", "replay")]
    assert exact
    assert {path.suffix for path in keep.iterdir()} >= {".log", ".jsonl", ".phase"}


@pytest.mark.long
def test_all_kinds_that_need_no_network_are_placed_and_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"kills": 9, "seed": 2, "faults": "kill,stop,hang", "heartbeat_timeout_ms": 400}
    status, result = run(tmp_path, launches=3 + 3, **changes)
    text = capsys.readouterr().out
    assert status == 0, text
    assert (result["kills"], len(result["faults"]), result["faults_planned"]) == (3, 6, 6)
    assert {kind: costs["count"] for kind, costs in result["faults_by_kind"].items()} == {
        "stop": 3,
        "hang": 3,
    }
    assert "other faults       6 of 6" in text
    for fault in result["faults"]:
        assert fault["standstill_s"] > 0
        assert list(fault["back_s"]) == [fault["group"]]
    assert 0.0 < result["participation"] <= 1.0


@pytest.mark.long
def test_never_was_the_last_group_killed(tmp_path: Path) -> None:
    """By the groups' events, at each kill of a member another group was alive that had taken part before."""
    keep = tmp_path / "keep"
    status, result = run(tmp_path, kills=12, groups=3, seed=6, keep=keep, launches=3 + 12)
    assert status == 0
    assert all(stall_ms is not None for stall_ms in result["stall_ms"])
    assert result["steps_lost"] == 0


def test_kills_that_do_not_fit_any_more_make_it_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = run(tmp_path, kills=9, steps=10)
    assert status == 1
    assert not result["ok"]
    text = capsys.readouterr().out
    assert "of 9 kills could be placed" in text or "returned only after the job was over" in text


def test_another_state_in_the_end_makes_it_fail(tmp_path: Path) -> None:
    status, result = run(tmp_path, ("--digest-again", "other"), kills=1, launches=3 + 1)
    assert status == 1
    assert not result["digests_equal"]
    assert not result["matches_undisturbed"]


def test_only_the_named_groups_and_phases_are_struck(tmp_path: Path) -> None:
    status, result = run(tmp_path, kills=3, only="group-2", phases="vote,compute", launches=3 + 3)
    assert status == 0
    assert result["hit_groups"] == {"group-0": 0, "group-1": 0, "group-2": 3}
    assert set(result["aimed_phases"]) <= {"vote", "compute"}


@pytest.mark.long
def test_a_storm_by_time_has_as_many_faults_and_steps_as_fit(tmp_path: Path) -> None:
    options = timed(LabChaosOptions(minutes=2.0))
    assert (options.kills, options.steps) == (6, 240)
    for minutes, steps in ((0.0, None), (-1.0, None), (float("nan"), None), (1.0, 100)):
        with pytest.raises(LaunchError, match="--minutes must be more than 0, and replaces --steps"):
            timed(LabChaosOptions(minutes=minutes, steps=steps))
    began_s = time.monotonic()
    status, result = run(tmp_path, minutes=0.1, launches=3 + 1)
    assert status == 0
    assert (result["kills"], result["steps_committed"]) == (1, 12)
    # The fake groups make steps longer as ordered; they start quickly, and there are few steps.
    assert time.monotonic() - began_s > 3.0


def test_a_plan_that_cannot_be_made_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--phases does not know voting"):
        storm(LabChaosOptions(phases="voting", keep=tmp_path / "keep"))
    assert not (tmp_path / "keep").exists()
