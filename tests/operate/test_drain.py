"""`jaxft drain` without --job: which job is meant."""

from types import SimpleNamespace

import pytest

from jaxft_launch.client import _drain
from jaxft_launch.client._drain import DrainOptions, run_drain
from jaxft_launch.client._port import PortError


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of a coordinator's jobs; each has a group group-2, which leaves at once."""
    names: list[str] = []

    monkeypatch.setattr(_drain, "jobs", lambda _: [{"job": name} for name in names])
    monkeypatch.setattr(_drain, "ask", lambda *_: {"group_list": []})
    monkeypatch.setattr(_drain, "act", lambda _, path, **__: f"asked {path}")
    return names


@pytest.mark.parametrize(
    ("names", "given", "meant"),
    [
        (["start"], "", "start"),
        (["a", "default"], "", "default"),
        (["a", "b"], "b", "b"),
    ],
)
def test_the_job_that_is_meant(
    jobs: list[str], names: list[str], given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs += names
    assert run_drain(DrainOptions("group-2", job=given)) == 0
    assert capsys.readouterr().out.startswith(f"asked jobs/{meant}/groups/group-2/drain\n")


@pytest.mark.parametrize(
    ("names", "output"), [(["a", "b"], r"2 jobs \('a', 'b'\)"), ([], r"0 jobs \(none\)")]
)
def test_several_jobs_need_a_name(jobs: list[str], names: list[str], output: str) -> None:
    jobs += names
    with pytest.raises(PortError, match=rf"{output}. Say which one group 'group-2' belongs to: --job"):
        run_drain(DrainOptions("group-2"))


@pytest.mark.usefixtures("jobs")
def test_a_wait_names_its_group_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as for a step that waits for another group."""
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    clock.sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + 30 * seconds)
    monkeypatch.setattr(_drain, "time", clock)
    member = {"group": "group-2", "state": "member"}
    monkeypatch.setattr(_drain, "ask", lambda *_: {"group_list": [member]})
    with pytest.raises(PortError, match=r"still takes part after 600 s \(member\)\. It leaves when its step"):
        run_drain(DrainOptions("group-2", job="a"))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0] == "group 'group-2' of job 'a' still takes part after 6 s (member)"
    assert len(lines) == 7
