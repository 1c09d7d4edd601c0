"""The start page, followed to the letter in a fresh environment, far from the clone, with the built wheels."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from deploy.release import ROOT, build
from tests import patience
from tests.manual.blocks import Block, blocks
from tests.manual.fresh import fresh_environment, needs_uv, run, variables

pytestmark = [pytest.mark.processes, needs_uv]
PAGE = [block for block in blocks() if block.page.name == "start.md"]
PORT = "29511"
LOOK = "time.sleep(0.2)  # so that there is time to look"
# In place of that: time for the test, as long as it needs.
HOLD = """while manager.step == 60 and not __import__("pathlib").Path("go-on").exists():
            time.sleep(0.01)"""


def block_with(text: str) -> Block:
    [found] = [block for block in PAGE if text in block.text]
    return found


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with what the page's pip command installs, from wheels; the folder of its programs."""
    folder = tmp_path_factory.mktemp("fresh")
    built = build(ROOT, folder / "dist")
    names = [re.sub(r"-\d.*", "", path.name) for path in built if path.suffix == ".whl"]
    assert sorted(names) == ["jaxft", "jaxft_coordinator", "jaxft_protocol"]
    [extras] = re.findall(r"'\.(\[[\w,]+\])'", block_with("pip install").text)
    return fresh_environment(folder, folder / "dist", f"jaxft{extras}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's program, which waits at step 60 until the test has looked."""
    text = block_with("import jaxft").text
    assert text.count(LOOK) == 1
    (tmp_path / "train.py").write_text(text.replace(LOOK, HOLD))
    return tmp_path


# One test, since each worker of pytest-xdist would make the environment again.
@pytest.mark.long
def test_the_start_page_holds(environment: Path, folder: Path) -> None:
    doctor_finds_the_wheels_in_order(environment, folder)
    three, one = (block_with(text).text.replace(PORT, "0").split() for text in ("--groups 3", "--groups 1"))
    log = folder / "launch.log"
    with log.open("wb") as output:
        launch = subprocess.Popen(
            three,
            cwd=folder,
            env=variables(environment),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    try:
        begun = "step 50  loss"
        patience.until(lambda: begun in log.read_text(), begun, limit_s=120.0, context=log.read_text)
        [coordinator] = folder.glob("jaxft-launch-*/coordinator.log")
        [port] = re.findall(r"page, API and metrics are at http://localhost:(\d+)/", coordinator.read_text())
        shows = block_with("jaxft status").text.replace(PORT, port).split()
        assert "start: " in run(*shows, cwd=folder, programs=environment)
        [pid] = re.findall(r"started group-1 \(pid (\d+)\)", log.read_text())
        os.kill(int(pid), signal.SIGKILL)
        (folder / "go-on").touch()
        assert patience.wait(launch, limit_s=120.0) == 0, log.read_text()
    finally:
        launch.terminate()  # it ends its groups
        patience.wait(launch)
    assert "(killed)" in log.read_text()
    digests = set(re.findall(r"digest (\w+)", log.read_text() + run(*one, cwd=folder, programs=environment)))
    assert len(digests) == 1, log.read_text()


def doctor_finds_the_wheels_in_order(environment: Path, folder: Path) -> None:
    said = run("jaxft", "doctor", cwd=folder, programs=environment)
    assert "FAIL" not in said
    where = run("python", "-c", "import jaxft; print(jaxft.__file__)", cwd=folder, programs=environment)
    assert Path(where.strip()).is_relative_to(environment.parent)
