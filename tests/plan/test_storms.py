"""The planner and reality: storms of `jaxft chaos` at three rates, measured against the prediction.

For a quiet machine (`make storm`): where other work takes the cores, steps take whatever time is left.
"""

import json
import sys
from pathlib import Path

import pytest

from jaxft_launch.plan.events import measure, read
from jaxft_launch.plan.plan import PlanOptions, run_plan
from jaxft_launch.processes._coordinator import COORDINATOR
from jaxft_launch.storm.chaos import ChaosOptions, run_chaos
from tests.shared import compiled_environment

PROGRAM = Path(__file__).with_name("storm_program.py")
SHARD_S = 0.2


def of_the_last_coordinator(path: Path) -> Path:
    """Keep the events of the storm: the coordinator of the undisturbed run writes to the same file before."""
    lines = path.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if json.loads(line)["event"] == "leads")
    path.write_text("".join(f"{line}\n" for line in lines[last:]))
    return path


@pytest.mark.storm
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kills", "steps"), [(3, 300), (6, 300), (12, 400)])
def test_a_storm_has_the_predicted_goodput(
    kills: int,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**compiled_environment(), "JAX_PLATFORMS": "cpu"}.items():
        monkeypatch.setenv(name, value)
    events, keep = tmp_path / "events.jsonl", tmp_path / "keep"
    options = ChaosOptions(kills=kills, groups=3, keep=keep)
    program = (sys.executable, str(PROGRAM), str(steps), "{folder}", str(SHARD_S))
    assert run_chaos(options, program, coordinator=(*COORDINATOR, "--events", str(events))) == 0
    files = (of_the_last_coordinator(events), *sorted((keep / "storm").glob("group-?.jsonl")))
    found = measure(read(files), 2)
    assert (found.groups, found.shards_per_group) == (3, 2)
    assert found.failures >= kills / 2  # a kill may hit a group that starts
    capsys.readouterr()
    run_plan(PlanOptions(params=1.0, events=files, json=True))
    run = json.loads(capsys.readouterr().out)["measured"]
    assert run["goodput"] == pytest.approx(run["predicted"], rel=0.1), run
