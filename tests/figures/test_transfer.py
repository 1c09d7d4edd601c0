"""The comparison with `jax.experimental.transfer` runs at tiny sizes; the figures are not checked."""

import pytest

from benchmarks._worker import ROOT
from lab import transfer
from lab.transfer import FAULTS, Arguments


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it prints with one sound pull, and one fault that ends at once."""
    chosen = ("none", "the joiner expects half of the elements")
    monkeypatch.setattr(transfer, "FAULTS", {name: FAULTS[name] for name in chosen})
    transfer.main(Arguments(megabytes=(2,), leaves=12, rounds=1, patience_s=60))
    return capsys.readouterr().out.splitlines()


@pytest.mark.long
@pytest.mark.processes
def test_it_tells_what_each_fault_comes_to_and_what_each_way_takes(said: list[str]):
    assert said[2] == "| none | ends well |"
    # The pull looks at the size if it comes in time.
    assert said[3].removeprefix("| the joiner expects half of the elements | ") in (
        "raises JaxRuntimeError |",
        "ends well, with other values |",
    )
    state, pull, heal, ratio = (cell.strip() for cell in said[-1].strip("|").split("|"))
    assert state == "2 MB"
    assert pull.endswith(" ms")
    assert heal.endswith(" ms")
    assert float(ratio) > 0


def test_its_faults_are_those_of_the_documentation():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in page for name in FAULTS if name != "none")
