import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.check._devices import METRICS
from jaxft_launch.check._readings import Level, Limits
from jaxft_launch.check._rules import COMMON, SOURCES, Action, Rule, read_rules, rule_of
from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.supervise._journal import HealthActed, HealthChanged, name_of

MANUAL = Path(__file__).parents[2] / "docs" / "health.md"
HTTP = "http://localhost:29511"
DISK = {"name": "disk", "source": "disk", "action": "drain", "path": "/", "critical": 5}


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    return file


def test_a_rule_with_all_keys(tmp_path: Path) -> None:
    text = """
        [[rule]]
        name = "hot"
        source = "disk"
        path = "/"
        action = "kill"
        interval_s = 5
        timeout_s = 2.5
        consecutive = 4
        warning = 20
        critical = 10.5
    """
    (rule,) = read_rules(written(tmp_path, text), http="")
    assert rule == Rule(
        name="hot",
        source="disk",
        action=Action.KILL,
        interval_s=5.0,
        timeout_s=2.5,
        consecutive=4,
        limits=Limits(warning=20.0, critical=10.5, high_is_bad=False),
        path="/",
    )


def test_defaults() -> None:
    rule = rule_of(DISK)
    assert (rule.interval_s, rule.timeout_s, rule.consecutive) == (30.0, 10.0, 3)
    assert rule.limits.level_of(4.0) is Level.CRITICAL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"source": "moon"},
            "`source` must be one of command, memory, disk, step_time, clock, nvml, amdsmi, not 'moon'",
        ),
        ({"action": "restart"}, "`action` must be one of warn, drain, kill, not 'restart'"),
        ({"action": None}, "`action` must be one of warn, drain, kill, not None"),
        ({"name": ""}, "`name` must be a text that is not empty, not ''"),
        ({"interval_s": 0}, "`interval_s` must be a number of at least 0.1, not 0"),
        ({"interval_s": True}, "`interval_s` must be a number of at least 0.1, not True"),
        ({"timeout_s": float("inf")}, "`timeout_s` must be a number of at least 0.1, not inf"),
        ({"timeout_s": float("nan")}, "`timeout_s` must be a number of at least 0.1, not nan"),
        ({"consecutive": 1.5}, "`consecutive` must be a whole number of at least 1, not 1.5"),
        ({"critical": "5"}, "`critical` must be a number of at least 0, not '5'"),
        ({"warning": 1}, "`critical` must lie below `warning`, but they are 5 and 1"),
        ({"critical": None}, "`critical` must be a number of at least 0, not None"),
        ({"metric": "x"}, "a rule with source 'disk' has no key 'metric'. Its keys: name, source, action,"),
        ({"path": 3}, "`path` must be a text that is not empty, not 3"),
    ],
)
def test_a_bad_rule_says_what_is_wrong(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)):
        rule_of({**DISK, **change})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"source": "memory"}, "a rule with action 'drain' needs the limit `critical`, a number"),
        (
            {"source": "memory", "warning": 3},
            "a rule with action 'drain' needs the limit `critical`, a number",
        ),
        (
            {"source": "step_time", "warning": 3, "critical": 2},
            "`critical` must lie above `warning`, but they are 2 and 3",
        ),
        (
            {"source": "command", "command": "df"},
            '`command` must be a list of words such as ["check-fabric", "--f',
        ),
        ({"source": "command", "command": []}, "not []"),
        (
            {"source": "nvml", "critical": 3},
            "`metric` must be one of temperature_c, uncorrected_errors, throttled",
        ),
        (
            {"source": "nvml", "metric": "xgmi_errors", "critical": 1},
            "`metric` must be one of temperature_c, uncorrected_errors, throttled, not 'xgmi_errors'",
        ),
        (
            {"source": "clock", "critical": 1},
            "a rule with source 'clock' can only warn, not drain: of two clocks that differ, the coordinator's",
        ),
    ],
)
def test_what_a_source_needs(table: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)):
        rule_of({"name": "rule", "action": "drain", **table})


def test_a_rule_that_only_warns_needs_no_critical_limit() -> None:
    rule = rule_of({"name": "memory", "source": "memory", "action": "warn", "warning": 8})
    assert rule.limits.level_of(3.0) is Level.WARNING


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rule = ", "cannot be read as TOML"),
        ("", "has nothing at its top. Write one table [[rule]]"),
        ("[rule]\nname = 'x'", "at its top. Write one table [[rule]]"),
        ("[[rules]]\nname = 'x'", "has ['rules'] at its top"),
        ("rule = [1]", "rule 1 (None): write a table [[rule]], not 1"),
        (
            "[[rule]]\nname='a'\nsource='command'\naction='warn'\ncommand=['no-such-program']",
            "rule 1 ('a'): there is no program 'no-such-program' to run",
        ),
        (
            "[[rule]]\nname='a'\nsource='disk'\naction='warn'\nwarning=1\npath='/no/such'",
            "rule 1 ('a'): there is no folder '/no/such'",
        ),
        (
            "[[rule]]\nname='a'\nsource='step_time'\naction='warn'\nwarning=2",
            "rule 1 ('a'): step times come from the coordinator's HTTP port. Start it with --http HOST:PORT",
        ),
        (
            "[[rule]]\nname='a'\nsource='clock'\naction='warn'\nwarning=1",
            "rule 1 ('a'): its time comes from the coordinator's HTTP port. Start it with --http HOST:PORT",
        ),
        (
            "[[rule]]\nname='a'\nsource='memory'\naction='warn'\nwarning=2\n" * 2,
            "rule 2 ('a'): another rule has",
        ),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)) as caught:
        read_rules(written(tmp_path, text), http="")
    assert "rules.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"none\.toml cannot be read"):
        read_rules(tmp_path / "none.toml", http="")


@pytest.mark.parametrize(("source", "remedy"), [("nvml", "jaxft[nvml]"), ("amdsmi", "amdsmi==X.Y.Z")])
def test_a_missing_library_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, remedy: str
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for module in ("pynvml", "amdsmi"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    text = f"[[rule]]\nname='hot'\nsource='{source}'\naction='warn'\nwarning=90\nmetric='temperature_c'"
    with pytest.raises(LaunchError, match=re.escape(remedy)):
        read_rules(written(tmp_path, text), http="")


def test_the_manual_has_each_source_key_metric_and_event() -> None:
    manual = MANUAL.read_text()
    for key in COMMON:
        assert f"| `{key}` |" in manual, key
    for source, keys in SOURCES.items():
        (row,) = [line for line in manual.splitlines() if line.startswith(f"| `{source}` |")]
        for key in keys:
            assert key in ("warning", "critical") or f"`{key}`" in row, (source, key)
        for metric in METRICS.get(source, ()):
            name, _, block = metric.partition("uncorrected_errors_")
            assert f"`{name or 'uncorrected_errors_BLOCK'}`" in row, (source, metric)
            assert f"`{block}`" in manual or not block, (source, metric)
    for event in (HealthChanged, HealthActed):
        assert f"`{name_of(event)}`" in manual


def test_the_example_of_the_manual_is_a_file_of_rules(tmp_path: Path) -> None:
    """As far as this machine can tell: its commands and libraries belong to others."""
    example, _ = re.findall(r"```toml\n(.*?)^```$", MANUAL.read_text(), re.M | re.S)
    text = re.sub(r'command = \["[\w-]+"', f'command = ["{sys.executable}"', example)
    text = re.sub(r'path = "[^"]+"', 'path = "/"', text)
    file = tmp_path / "pynvml.py"
    file.touch()
    sys.path.insert(0, str(tmp_path))
    try:
        rules = read_rules(written(tmp_path, text), http=HTTP)
    finally:
        sys.path.remove(str(tmp_path))
    assert {rule.source for rule in rules} == {"command", "memory", "disk", "step_time", "clock", "nvml"}
    assert {rule.action for rule in rules} == set(Action)
