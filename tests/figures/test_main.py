"""`python -m benchmarks NAME --json FILE`."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks._result import Row


@dataclass(frozen=True)
class Options:
    size: int = 3


def run(options: Options) -> tuple[list[Row], list[str]]:
    return [Row(f"size {options.size}", "ms", 1.0)], ["a note"]


@pytest.fixture(autouse=True)
def only_tiny_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> SimpleNamespace:
        if name == "benchmarks.kill":
            raise RuntimeError("no signals here")
        return SimpleNamespace(Options=Options, run=run, __doc__="Tiny.")

    monkeypatch.setattr(command.importlib, "import_module", load)


def test_what_was_measured_before_an_end_is_kept(tmp_path: Path):
    with pytest.raises(RuntimeError, match="no signals here"):
        command.main(["all", "--json", str(tmp_path / "x.json")])
    found = json.loads((tmp_path / "x.json").read_text())
    assert [each["name"] for each in found] == ["rendezvous", "exchange", "heal", "join"]
    assert command.main(["exchange", "--json", str(tmp_path / "x.json"), "--size", "5"]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["rows"][0]["case"], found["notes"]) == ("size 5", ["a note"])


def test_all_takes_no_options_of_one(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(["all", "--size", "5"])
    assert "`all` takes no options: --size 5" in capsys.readouterr().err
