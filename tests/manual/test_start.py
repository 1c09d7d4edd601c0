"""The start page, followed to the letter in a fresh environment, far from the clone, with the built wheels."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.release import ROOT, build
from tests import patience
from tests.manual.blocks import Block, blocks

UV = Path(sys.executable).parent / "uv"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not UV.exists(), reason="needs uv, which make setup installs"),
]
PAGE = [block for block in blocks() if block.page.name == "start.md"]
PORT = "29511"
LOOK = "time.sleep(0.2)  # so that there is time to look"
# In place of that: time for the test, as long as it needs.
HOLD = """while manager.step == 60 and not __import__("pathlib").Path("go-on").exists():
            time.sleep(0.01)"""


def block_with(text: str) -> Block:
    [found] = [block for block in PAGE if text in block.text]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with what the page's pip command installs, from wheels; the folder of its programs."""
    folder = tmp_path_factory.mktemp("fresh")
    built = build(ROOT, folder / "dist")
    names = [re.sub(r"-\d.*", "", path.name) for path in built if path.suffix == ".whl"]
    assert sorted(names) == ["jaxft", "jaxft_coordinator", "jaxft_protocol"]
    [extras] = re.findall(r"'\.(\[[\w,]+\])'", block_with("pip install").text)
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "env")
    # The versions that everything else is tested with; they are in uv's cache.
    frozen = run(UV, "pip", "freeze", "--python", sys.executable, "--exclude-editable")
    (folder / "versions.txt").write_text(frozen)
    words = ["--constraint", folder / "versions.txt", "--find-links", folder / "dist", f"jaxft{extras}"]
    run(UV, "pip", "install", "--quiet", "--python", folder / "env/bin/python", *words)
    return folder / "env" / "bin"


def run(*words: str | Path, cwd: Path | None = None, programs: Path | None = None) -> str:
    done = patience.run(
        list(map(str, words)), capture_output=True, text=True, limit_s=120.0, cwd=cwd, env=variables(programs)
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def variables(programs: Path | None) -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAXFT", "PYTHON", "VIRTUAL"))
    }
    path = own["PATH"] if programs is None else f"{programs}{os.pathsep}{own['PATH']}"
    return {**own, "PATH": path, "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's program, which waits at step 60 until the test has looked."""
    text = block_with("import jaxft").text
    assert text.count(LOOK) == 1
    (tmp_path / "train.py").write_text(text.replace(LOOK, HOLD))
    return tmp_path


def test_doctor_finds_the_wheels_in_order(environment: Path, tmp_path: Path) -> None:
    said = run("jaxft", "doctor", cwd=tmp_path, programs=environment)
    assert "FAIL" not in said
    where = run("python", "-c", "import jaxft; print(jaxft.__file__)", cwd=tmp_path, programs=environment)
    assert Path(where.strip()).is_relative_to(environment.parent)


def test_the_start_page_holds(environment: Path, folder: Path) -> None:
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
