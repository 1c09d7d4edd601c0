"""The ports: each alone, in a job with a kill, and as the plain loop that its docs page makes of it."""

import json
import re
import sys
from pathlib import Path

import pytest

from jaxft._chaos.chaos import ChaosOptions, run_chaos
from tests import patience
from tests.forks import Script

ROOT = Path(__file__).parents[2]
PORTS = sorted((ROOT / "examples" / "ports").glob("*.py"))
PAGE = (ROOT / "docs" / "ports.md").read_text()
STEPS = 30

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
each_port = pytest.mark.parametrize("port", PORTS, ids=lambda port: port.stem)


def output_of(program: Path, steps: int, folder: Path) -> str:
    log = folder / f"{program.stem}.log"
    process = Script(program, [str(steps)], log, jax_platforms="cpu")
    patience.until(
        lambda: process.poll() is not None, f"{program.stem} to end", limit_s=120, context=log.read_text
    )
    assert process.returncode == 0, log.read_text()
    return log.read_text()


def plain(port: Path) -> str:
    """The plain loop: the port without what the diff on the docs page adds, and with what it removes."""
    section = PAGE.split(f"`examples/ports/{port.name}`")[1]
    (diff, *_) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    text = port.read_text()
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        ours = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        theirs = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        assert text.count(ours) == 1, f"the page's diff is not that of {port.name}:\n{hunk}"
        text = text.replace(ours, theirs)
    return text


@each_port
def test_the_plain_loop_of_the_page_runs_and_learns(port: Path, tmp_path: Path) -> None:
    text = plain(port)
    assert "jaxft" not in text
    program = tmp_path / port.name
    program.write_text(text)
    losses = re.findall(r"loss ([\d.]+)", output_of(program, STEPS, tmp_path))
    assert len(losses) == STEPS // 10
    if port.stem != "gan":  # there the loss is a contest's
        assert float(losses[-1]) < float(losses[0]) / 2


@pytest.mark.parametrize(
    "port",
    # One of them in each run of the tests: it has two exchanges.
    [pytest.param(port, id=port.stem, marks=() if port.stem == "gan" else pytest.mark.storm) for port in PORTS],
)
def test_a_kill_changes_no_bit_of_a_run_alone(
    port: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    file = tmp_path / "verdict.json"
    options = ChaosOptions(kills=1, groups=2, phases="exchange", json=file)
    status = run_chaos(options, (sys.executable, str(port), str(STEPS)))
    assert status == 0, capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["kills"], found["steps_committed"], found["steps_lost"]) == (1, STEPS, 0)
    (digest,) = set(found["digests"].values())
    assert f"finished: digest {digest}" in output_of(port, STEPS, tmp_path)
