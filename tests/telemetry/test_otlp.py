"""Spans go by OTLP to a real collector's port, in this process."""

import logging
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from jaxft import ConfigurationError
from jaxft._telemetry._observer import observers_of
from tests.clusters import cluster
from tests.telemetry.collector import collector
from tests.telemetry.test_observing import HEALED, ME, STEP, config, tell


def test_the_spans_of_a_group_reach_the_collector_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as there:
        monkeypatch.setenv("JAXFT_OTLP", there.url)
        observers_of(config(), ME, rank=1).close("")  # rank 0 speaks for its group
        observers = observers_of(config(), ME, rank=0)
        tell(observers, 0, HEALED)
        tell(observers, 7, STEP)
        observers.close("")
        assert [span.name for span in there.spans] == ["jaxft.heal", "jaxft.step"]
    done = there.spans[-1]
    assert (done.service, done.instance) == ("jaxft", "toy/group-0")
    wanted = {"jaxft.job": "toy", "jaxft.group": "group-0", "jaxft.step": 8, "jaxft.exchange_s": 0.25}
    assert wanted.items() <= done.attributes.items()


def test_a_collector_that_refuses_costs_spans_and_no_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with collector() as there:
        there.status = 400
        monkeypatch.setenv("JAXFT_OTLP", there.url)
        observers = observers_of(config(), ME, rank=0)
        with caplog.at_level(logging.ERROR):
            tell(observers, 7, STEP)
            observers.close("")
        assert (there.refused, there.spans) == (1, [])
    assert "Failed to export spans batch code: 400" in caplog.text


def test_a_tracer_of_the_users_comes_first_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as there:
        monkeypatch.setenv("JAXFT_OTLP", there.url)
        observers = observers_of(config(tracer=TracerProvider().get_tracer("a test")), ME, rank=0)
        tell(observers, 7, STEP)
        observers.close("")
        assert there.spans == []


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://"])
def test_an_address_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("JAXFT_OTLP", url)
    with pytest.raises(
        ConfigurationError, match=r"JAXFT_OTLP must be the URL of a collector's port .*, not '"
    ):
        observers_of(config(), ME, rank=0)


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFT_OTLP", "http://collector:4318")
    monkeypatch.delitem(sys.modules, "jaxft._telemetry._otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r'JAXFT_OTLP .* pip install "jaxft\[otlp\]"'):
        observers_of(config(), ME, rank=0)


@pytest.mark.processes
def test_a_program_that_says_nothing_of_traces_has_a_span_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as there, cluster(tmp_path) as here:
        monkeypatch.setenv("JAXFT_OTLP", there.url)
        here.start_coordinator()
        worker = here.start("group-0", "--steps", "4")
        here.until_finished(worker)
        steps = [span.attributes["jaxft.step"] for span in there.spans if span.name == "jaxft.step"]
    assert steps == [1, 2, 3, 4]
    assert {span.instance for span in there.spans} == {"toy/group-0"}
