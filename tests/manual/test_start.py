"""The start page and the one-page manual, followed to the letter with the built wheels, far from the clone."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.release import ROOT, build
from tests import patience
from tests.manual.blocks import blocks
from tests.manual.fresh import fresh_environment, needs_uv, run, variables

pytestmark = [pytest.mark.long, pytest.mark.processes, pytest.mark.timeout(600), needs_uv]
PORT = "29511"
LOOK = re.compile(r"time\.sleep\(0\.[12]\) +# so that there is time to .*")
# In place of that: time for the test, as long as it needs.
HOLD = """while manager.step == 60 and not __import__("pathlib").Path("go-on").exists():
            time.sleep(0.01)"""


def block_with(text: str, page: str = "start.md") -> str:
    [found] = [block.text for block in blocks() if block.page.name == page and text in block.text]
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment with the wheels of the pages' pip commands."""
    folder = tmp_path_factory.mktemp("fresh")
    build(ROOT, folder / "dist")
    assert "./protocol ./coordinator . ./launcher" in block_with("pip install")
    assert "./protocol ./coordinator '.[checkpoints]' ./launcher" in block_with("pip install", "impatient.md")
    return fresh_environment(
        folder, folder / "dist", "jaxft[checkpoints]", "jaxft-coordinator", "jaxft-launch"
    )


@dataclass
class Running:
    process: "subprocess.Popen[bytes]"
    log: Path

    def prints(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.log.read_text())
            assert match or not ended, f"{pattern}: {self.log.read_text()}"
            return match

        match = patience.until(found, pattern, limit_s=120.0, context=self.log.read_text)
        assert match is not None
        return match

    def ended(self) -> str:
        assert patience.wait(self.process, limit_s=120.0) == 0, self.log.read_text()
        return self.log.read_text()


@contextlib.contextmanager
def started(words: list[str], folder: Path, programs: Path, **own: str) -> Iterator[Running]:
    log = folder / f"{len([*folder.glob('*.out')])}.out"
    environment = {**variables(programs), **own}
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        yield Running(process, log)
    finally:
        process.terminate()  # a launcher ends its groups
        patience.wait(process)


def killed_once(words: list[str], folder: Path, programs: Path, begun: str) -> str:
    """Run a launch, kill the process of group-1 once it trains, and return the output."""
    with started(words, folder, programs) as launch:
        launch.prints(begun)
        os.kill(int(launch.prints(r"started group-1 \(pid (\d+)\)")[1]), signal.SIGKILL)
        (folder / "go-on").touch()
        output = launch.ended()
    assert "(killed)" in output
    return output


def test_the_start_page_holds(programs: Path, tmp_path: Path) -> None:
    text, count = LOOK.subn(HOLD, block_with("import jaxft"))
    assert count == 1
    (tmp_path / "train.py").write_text(text)
    assert "FAIL" not in run("jaxft", "doctor", cwd=tmp_path, programs=programs)
    three, one = (block_with(text).replace(PORT, "0").split() for text in ("--groups 3", "--groups 1"))
    output = killed_once(three, tmp_path, programs, "step 50  loss")
    [log] = tmp_path.glob("jaxft-launch-*/coordinator.log")
    assert "page, API and metrics are at http://localhost:" in log.read_text()
    digests = set(re.findall(r"digest (\w+)", output + run(*one, cwd=tmp_path, programs=programs)))
    assert len(digests) == 1, output


def test_the_page_for_the_impatient_holds(programs: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "impatient.md").read_text()
    [diff] = re.findall(r"```diff\n(.*?)```", page, re.S)
    text, count = LOOK.subn(HOLD, "\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-"))
    assert count == 1
    (tmp_path / "train.py").write_text(text)
    coordinator, group = block_with("jaxft-coordinator", "impatient.md").splitlines()
    served = coordinator.removesuffix(" &").replace("29510", "0").split()
    with started(served, tmp_path, programs) as server, contextlib.ExitStack() as groups:
        port = server.prints(r"\(port (\d+)\)")[1]
        assert group.split()[2:] == ["python", "train.py"]
        own = dict(word.replace("29510", port).split("=") for word in group.split()[:2])

        def terminal(name: str) -> Running:
            names = {**own, "JAXFT_GROUP": name}
            return groups.enter_context(started(["python", "train.py"], tmp_path, programs, **names))

        first, second = terminal("group-0"), terminal("group-1")
        second.prints(r"(?m)^50 ")
        second.process.send_signal(signal.SIGQUIT)
        patience.wait(second.process)
        first.prints(r"(?m)^59 ")
        third = terminal("group-1")
        third.prints(r"(?m)^60 |heal|fetch")
        (tmp_path / "go-on").touch()
        digests = {*re.findall(r"digest (\w+)", first.ended() + third.ended())}
    assert len(digests) == 1
    assert [*(tmp_path / "checkpoints").glob("400*")]
    remove, launch = block_with("rm -r", "impatient.md").splitlines()
    for path in ("checkpoints", "go-on"):
        run("rm", "-r", path, cwd=tmp_path)
    assert remove.startswith("rm -r checkpoints ")
    words = launch.replace(PORT, "0").split()
    assert digests == {*re.findall(r"digest (\w+)", killed_once(words, tmp_path, programs, r"(?m) 50 "))}
