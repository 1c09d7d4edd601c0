"""The alert rules and the dashboard, against the real metrics of a coordinator, by promtool."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from cryptography import x509
from jaxft_coordinator.http._metrics import MOST_GROUPS, MOST_GROUPS_IN_ALL, as_text, read
from jaxft_coordinator.observe._watched import WatchedGroup
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.host.tls import Pem, read_pem
from jaxft_protocol.messages import GroupName

from tests import patience
from tests.operate.test_happened import watching
from tests.protocol.coordinator.helpers import healing

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "jaxft-alerts.yaml"
BOARD = ROOT / "deploy" / "grafana" / "jaxft.json"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
NAME = re.compile(r"\bjaxft_[a-z_]+\b")


def text_of(observer: Observer, tls: Pem | None = None) -> str:
    return as_text(read(Server("localhost:0", Options(), tls=tls), observer)).decode()


def samples() -> list[str]:
    """The metrics once everything has happened to a job: names with labels, and values."""
    desk = watching("a", "b", "c")
    desk.now_s += 1.0
    desk.commit()
    desk.close("b")
    healing(desk, "b", incarnation=2)
    text = text_of(desk.observer, Pem(until_s=1.0))
    return [line for line in text.splitlines() if not line.startswith("#")]


def exported() -> set[str]:
    """The names of all series of `samples`."""
    names = {line.partition("{")[0].partition(" ")[0] for line in samples()}
    return {name for name in names if not name.startswith(("process_", "python_"))}


def queries() -> Iterator[tuple[str, str]]:
    yield from ((rule["alert"], rule["expr"]) for rule in ALERTS)
    for panel in json.loads(BOARD.read_text())["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def test_every_metric_that_is_asked_for_is_exported() -> None:
    known = exported()
    wanted = {name for _, query in queries() for name in NAME.findall(query)}
    assert len(wanted) > 20
    assert wanted <= known, wanted - known


def test_every_exported_metric_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "operate-metrics.md").read_text()
    documented = set(re.findall(r"^\| `(jaxft_\w+)`", text, re.MULTILINE))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported()}
    assert documented == families


def test_the_end_of_the_certificate_is_that_of_the_file(tmp_path: Path) -> None:
    issued, files = trustme.CA().issue_cert("localhost"), [tmp_path / "cert.pem", tmp_path / "key.pem"]
    issued.cert_chain_pems[0].write_to_path(str(files[0]))
    issued.private_key_pem.write_to_path(str(files[1]))
    text = text_of(Observer(), read_pem(ca=None, cert=files[0], key=files[1]))
    (found,) = re.findall(rf"^{EXPIRES} (.*)$", text, re.MULTILINE)
    until = x509.load_pem_x509_certificate(files[0].read_bytes()).not_valid_after_utc
    assert float(found) == until.timestamp()
    assert EXPIRES not in text_of(Observer())


def test_series_of_groups_are_bounded_in_all_and_those_of_jobs_with_groups_come_first() -> None:
    """A scrape of very many groups would hold up every job."""
    desk = watching("a", "b")
    for number in range(MOST_GROUPS_IN_ALL // MOST_GROUPS):
        name = f"a-before-{number}"  # in the alphabet
        desk.observer.saw(durable.new(name, Options()), None, (), desk.now_s)
        desk.observer.jobs[name].groups |= {
            GroupName(f"gone-{n}"): WatchedGroup("gone", 0.0, 0.0) for n in range(MOST_GROUPS)
        }
    lines = text_of(desk.observer).splitlines()
    named = {tuple(re.findall('(?:group|job)="(.*?)"', line)) for line in lines if "group=" in line}
    job = desk.job.name
    assert {("a", job), ("b", job)} <= named
    assert len(named) == 2 + MOST_GROUPS_IN_ALL - MOST_GROUPS
    assert f'jaxft_groups{{job="{name}",state="gone"}} {MOST_GROUPS:.1f}' in lines


def test_of_groups_that_are_gone_those_that_went_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxft_coordinator.observe.observer.KEPT_GROUPS", 4)
    desk = watching("a", "b", "c", "d")
    other = durable.new("other", Options())
    desk.observer.saw(other, None, (), desk.now_s)  # each job has half of them
    for name in ("c", "b", "d"):
        desk.now_s += 1.0
        desk.close(name)
    assert set(desk.observer.jobs[desk.job.name].groups) == {"a", "b", "d"}


def test_every_alert_says_what_to_do() -> None:
    text = (ROOT / "docs" / "operate-alerts.md").read_text()
    sections = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert sections == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/operate-alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def promtool(*words: str) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    done = patience.run([found, *words], capture_output=True, text=True, limit_s=60.0)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


# Metrics of a coordinator; all others are of job "j".
OF_COORDINATOR = (
    "leads",
    "store_blocked_seconds",
    "certificate_expires_timestamp_seconds",
    "job_failures_total",
)
EXPIRES, TWO_WEEKS_S = "jaxft_certificate_expires_timestamp_seconds", 14 * 24 * 3600
J, C = {"job": "j"}, {"instance": "c"}


def case(alert: str, at: str, series: str, *firing: dict[str, str]) -> dict[str, Any]:
    """One test of promtool: these series, one value a minute, and the labels of alerts that fire.

    Series in short: `waiting=1x10; departures_total{how="lost"}=0+1x40`.
    """
    severity = next(rule["labels"]["severity"] for rule in ALERTS if rule["alert"] == alert)
    given: list[dict[str, str]] = []
    for each in series.split("; "):
        name, values = each.rsplit("=", 1)
        name, _, labels = name.rstrip("}").partition("{")
        labels = ",".join(filter(None, ("" if name in OF_COORDINATOR else 'job="j"', labels)))
        given.append({"series": f"jaxft_{name}{{{labels}}}", "values": values})
    expected = [{"exp_labels": {**labels, "severity": severity}} for labels in firing]
    asked = {"eval_time": at, "alertname": alert, "exp_alerts": expected}
    return {"interval": "1m", "input_series": given, "alert_rule_test": [asked]}


# Alerts about the last half hour or hour, with series that make them fire.
WHILE_IT_LASTED = {
    "JaxftGroupsFlap": 'departures_total{how="lost"}=0+1x200',
    "JaxftStepsRetried": 'steps_retried_total{reason="failed"}=0+1x200; steps_committed_total=0+10x200',
    "JaxftGoodputLow": 'goodput_seconds_total=0+30x200; badput_seconds_total{source="OTHER"}=0+30x200',
}
CASES = [
    case("JaxftNoLeader", "5m", "leads=0x10", {}),
    case("JaxftNoLeader", "5m", 'leads{i="1"}=0x10; leads{i="2"}=1x10'),
    # Where one Prometheus scrapes several, each namespace has its own.
    case(
        "JaxftNoLeader",
        "8m",
        'leads{namespace="one"}=1x20; leads{namespace="two",i="1"}=1 1 1 stale _x20',
        {"namespace": "two"},
    ),
    # The other one took over.
    case(
        "JaxftNoLeader",
        "8m",
        'leads{namespace="two",i="1"}=1 1 1 stale _x20; leads{namespace="two",i="2"}=0 0 0 1x20',
    ),
    case("JaxftNoLeader", "8m", "leads=1 1 stale _x20", {}),
    case("JaxftJobHalted", "1m", "halted=0 1", J),
    case("JaxftJobWaiting", "4m", "waiting=1x10"),
    case("JaxftJobWaiting", "6m", "waiting=1x10; paused=0x10", J),
    case("JaxftJobWaiting", "6m", "waiting=1x10; paused=1x10"),
    case("JaxftJobGone", "4m", "idle=1x10; halted=0x10"),
    case("JaxftJobGone", "6m", "idle=1x10; halted=0x10", J),
    case("JaxftJobGone", "6m", "idle=1x10; halted=1x10"),  # JaxftJobHalted fires
    case("JaxftJobGone", "9m", "idle=1 1 1 1 0 1x10; halted=0x20"),
    # No commit since the coordinator leads, as after its restart, has no time of the last one.
    case("JaxftJobStalled", "40m", "steps_committed_total=0x60; quorum_members=3x60", J),
    case("JaxftJobStalled", "40m", "steps_committed_total=0 1 2 3x60; quorum_members=3x60", J),
    case("JaxftJobStalled", "40m", "steps_committed_total=0+1x60; quorum_members=3x60"),
    case(
        "JaxftJobStalled", "40m", "steps_committed_total=0x60; quorum_members=0x60"
    ),  # JaxftJobWaiting fires
    # Of two coordinators with a job of one name, each has its own.
    case(
        "JaxftJobStalled",
        "40m",
        'steps_committed_total{namespace="done"}=9x60; quorum_members{namespace="done"}=0x60; '
        'steps_committed_total{namespace="busy"}=0+1x60; quorum_members{namespace="busy"}=3x60',
    ),
    case(
        "JaxftGroupsFlap",
        "30m",
        "; ".join(f'departures_total{{how="lost",namespace="{n}"}}=0 3 4x40' for n in ("one", "two")),
    ),
    case("JaxftGroupsMissing", "20m", "quorum_members=2x30; quorum_places=3x30", J),
    case("JaxftGroupsFlap", "30m", 'departures_total{how="lost"}=0+1x40', J),
    case("JaxftGroupsFlap", "30m", 'departures_total{how="left"}=0+1x40'),
    case(
        "JaxftStepsRetried",
        "60m",
        'steps_retried_total{reason="failed"}=0+1x90; steps_committed_total=0+10x90',
        J,
    ),
    case("JaxftGoodputLow", "2h", WHILE_IT_LASTED["JaxftGoodputLow"], J),
    # Ten minutes in which the groups of a healthy job start are much of its first hour, and then no more.
    *(
        case(
            "JaxftGoodputLow",
            at,
            'goodput_seconds_total=0x10 0+60x200; badput_seconds_total{source="PROGRAM_STARTUP"}=0+60x10 600x200',
        )
        for at in ("32m", "48m", "80m")
    ),
    # Losses before a job finished are over: nothing is to be done about them.
    *(
        case(alert, "2h", f"{series}; finished={finished}", *firing)
        for alert, series in WHILE_IT_LASTED.items()
        for finished, firing in (("0x200", [J]), ("0x60 1x140", []))
    ),
    # A job of one name that another coordinator has, and that has not finished.
    case(
        "JaxftGroupsFlap",
        "2h",
        'departures_total{how="lost",namespace="busy"}=0+1x200; finished{namespace="done"}=1x200; '
        'finished{namespace="busy"}=0x200',
        {"job": "j", "namespace": "busy"},
    ),
    # A scrape that fails, as of a busy coordinator, neither begins the wait again nor ends an alert.
    *(
        case(
            alert,
            at,
            "; ".join(f"{name}={value}x4 stale {value}x40" for name, value in series.items()),
            firing,
        )
        for alert, ats, firing, series in (
            ("JaxftJobHalted", ("5m",), J, {"halted": 1}),
            ("JaxftJobWaiting", ("5m", "6m"), J, {"waiting": 1, "paused": 0}),
            ("JaxftJobGone", ("5m", "6m"), J, {"idle": 1, "halted": 0}),
            ("JaxftJobStalled", ("27m",), J, {"steps_committed_total": 7, "quorum_members": 3}),
            ("JaxftGroupsMissing", ("16m",), J, {"quorum_members": 2, "quorum_places": 3}),
            ("JaxftStoreSlow", ("5m", "6m"), C, {'store_blocked_seconds{instance="c"}': 9}),
        )
        for at in ats
    ),
    # Nor does a finished job start again by it.
    case(
        "JaxftGroupsFlap",
        "60m",
        'departures_total{how="lost"}=0+1x59 stale 60x40; finished=0x40 1x18 stale 1x40',
    ),
    case("JaxftStoreSlow", "10m", 'store_blocked_seconds{instance="c"}=9x20', C),
    # promtool's time begins at 0. A scrape that fails takes nothing back.
    *(
        case(
            "JaxftCertificateExpires",
            at,
            f'{EXPIRES.removeprefix("jaxft_")}{{instance="c"}}={values}',
            *firing,
        )
        for at, values, *firing in (
            ("1m", f"{TWO_WEEKS_S + 90}x20"),
            ("2m", f"{TWO_WEEKS_S + 90}x20", C),
            ("300m", f"{TWO_WEEKS_S + 90}x1 stale _x400", C),
            ("2m", f"{2 * TWO_WEEKS_S}x20"),
        )
    ),
    case(
        "JaxftCoordinatorError",
        "10m",
        'job_failures_total{instance="c",job="j"}=0 0 1x20',
        {"instance": "c", "job": "j"},
    ),
]


def test_every_alert_fires_when_it_should(tmp_path: Path) -> None:
    assert {each["alert_rule_test"][0]["alertname"] for each in CASES} == {rule["alert"] for rule in ALERTS}
    file = tmp_path / "test.yaml"
    rules = tmp_path / "rules.yaml"
    text = yaml.safe_load(RULES.read_text())
    for rule in text["groups"][0]["rules"]:
        del rule["annotations"]  # promtool would compare their texts
    rules.write_text(yaml.safe_dump(text))
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": CASES}))
    promtool("test", "rules", str(file))


def test_the_dashboards_queries_stand_a_takeover_and_two_jobs_of_one_name(tmp_path: Path) -> None:
    """A rate still has the series of the coordinator that led before. Two namespaces have a job of one name."""
    lives = {
        'instance="a",namespace="one"': "1+1x5 stale",
        'instance="b",namespace="one"': "_x6 1+1x14",
        'instance="c",namespace="two"': "1+1x20",
    }
    series = [
        {"series": _with_labels(line.rpartition(" ")[0], labels), "values": values}
        for line in samples()
        for labels, values in lives.items()
    ]
    asked = [_filled(query).replace("[1m]", "[5m]") for _, query in queries()]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    last = {"expr": "vector(1)", "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 1}]}
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [last]}]
    answer = {"rule_files": [str(tmp_path / "rules.yaml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(answer))
    promtool("test", "rules", str(tmp_path / "test.yaml"))


def _with_labels(name: str, more: str) -> str:
    return f"{name[:-1]},{more}}}" if name.endswith("}") else f"{name}{{{more}}}"


def _filled(query: str) -> str:
    """A query of the dashboard, with Grafana's variables filled in."""
    return query.replace("$job", ".*").replace("$__rate_interval", "1m")
