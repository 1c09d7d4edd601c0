"""`jaxft drain` without --job: which job is meant."""

from typing import Any

import pytest

from jaxft._errors import ConfigurationError
from jaxft_launch.client import _drain
from jaxft_launch.client._drain import DrainOptions, run_drain
from jaxft_launch.client._port import PortError


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of a coordinator's jobs; each has a group group-2, which leaves at once."""
    names: list[str] = []

    def jobs(url: str, **options: Any) -> Any:
        return [{"job": name} for name in names]

    monkeypatch.setattr(_drain, "jobs", jobs)
    monkeypatch.setattr(_drain, "ask", lambda url, path, **options: {"group_list": []})
    monkeypatch.setattr(_drain, "act", lambda url, path, **options: f"asked {path}")
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


@pytest.mark.parametrize(("names", "said"), [(["a", "b"], r"2 jobs \('a', 'b'\)"), ([], r"0 jobs \(none\)")])
def test_several_jobs_need_a_name(jobs: list[str], names: list[str], said: str) -> None:
    jobs += names
    with pytest.raises(PortError, match=rf"{said}. Say which one group 'group-2' belongs to: --job"):
        run_drain(DrainOptions("group-2"))


@pytest.mark.parametrize("wait_s", [-1.0, float("nan")])
def test_a_wait_that_is_no_time_is_refused_before_anything_is_asked(jobs: list[str], wait_s: float) -> None:
    with pytest.raises(ConfigurationError, match=f"--wait-s must be at least 0, not {wait_s:g}"):
        run_drain(DrainOptions("group-2", job="a", wait_s=wait_s))
