"""The ports: each alone, in a job with a kill, and as the plain loop that its docs page makes of it."""

import re
from pathlib import Path

import pytest

from tests import patience
from tests.clusters import cluster
from tests.forks import Script
from tests.shared import compiled

ROOT = Path(__file__).parents[2]
PORTS = sorted((ROOT / "examples" / "ports").glob("*.py"))
DILOCO = ROOT / "examples" / "diloco" / "train.py"
PAGE = (ROOT / "docs" / "ports.md").read_text()
GROUP = Path(__file__).with_name("port_group.py")
# Lines of the log may follow without a new line between: print writes the end of a line by itself.
DIGEST = re.compile(r"finished: digest ([0-9a-f]{32})")
STEPS = 30

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
# The first runs in each run of the tests: it has two exchanges.
each_port = pytest.mark.parametrize(
    "port",
    [
        pytest.param(port, id=port.stem, marks=() if port.stem == "gan" else pytest.mark.storm)
        for port in PORTS
    ],
)


def output_of(program: Path, steps: int, folder: Path) -> str:
    log = folder / f"{program.stem}.log"
    process = Script(program, [str(steps)], log, jax_platforms="cpu", **compiled())
    patience.until(
        lambda: process.poll() is not None, f"{program.stem} to end", limit_s=120, context=log.read_text
    )
    assert process.returncode == 0, log.read_text()
    return log.read_text()


def plain(port: Path) -> str:
    """The plain loop: the port with the diff of the docs page undone."""
    section = PAGE.split(f"`examples/ports/{port.name}`")[1]
    (diff, *_) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    text = port.read_text()
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        ours = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        theirs = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        assert text.count(ours) == 1, f"the page's diff does not fit {port.name}:\n{hunk}"
        text = text.replace(ours, theirs)
    return text


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.stem)
def test_the_page_shows_what_differs_from_a_plain_loop(port: Path) -> None:
    text = plain(port)
    assert "jaxft" not in text
    compile(text, port.name, "exec")


@pytest.mark.long
@each_port
def test_the_plain_loop_of_the_page_runs_and_learns(port: Path, tmp_path: Path) -> None:
    program = tmp_path / port.name
    program.write_text(plain(port))
    losses = re.findall(r"loss ([\d.]+)", output_of(program, STEPS, tmp_path))
    assert len(losses) == STEPS // 10
    if port.stem != "gan":  # there the loss is a contest's
        assert float(losses[-1]) < float(losses[0]) / 2


@pytest.mark.long
def test_rounds_of_the_diloco_example_learn(tmp_path: Path) -> None:
    readme = re.findall(r"round \d+  loss [\d.]+", DILOCO.with_name("README.md").read_text())
    shown = re.findall(r"round \d+  loss [\d.]+", output_of(DILOCO, STEPS, tmp_path))
    assert [line[:-2] for line in shown] == [line[:-2] for line in readme]


@pytest.mark.long
def test_a_kill_changes_no_bit_of_the_diloco_example(tmp_path: Path) -> None:
    kill_a_group_of(DILOCO, tmp_path)


@pytest.mark.long
@each_port
def test_a_kill_changes_no_bit_of_a_run_alone(port: Path, tmp_path: Path) -> None:
    kill_a_group_of(port, tmp_path)


def kill_a_group_of(port: Path, tmp_path: Path) -> None:
    flags = ("--port", str(port), "--steps", str(STEPS))
    with cluster(tmp_path) as here:
        alone = here.start("alone", *flags, script=GROUP, coordinated=False)
        here.until_finished(alone)  # its compiled programs serve the others
        # Of two groups that are needed one dies, so the job cannot end before it is back.
        here.start_coordinator("--min-replicas", "2")
        survivor = here.start("group-0", *flags, script=GROUP)
        victim = here.start("group-1", *flags, "--die", f"exchange step {STEPS // 2}", script=GROUP)
        here.until_dead(victim)
        back = here.start("group-1", *flags, script=GROUP)
        here.until_finished(alone, survivor, back)
        assert back.logged("heals to step")
        digests = {DIGEST.findall(worker.log())[-1] for worker in (alone, survivor, back)}
        assert len(digests) == 1, digests
        assert not DIGEST.findall(victim.log())
