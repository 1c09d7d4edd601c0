"""`/metrics`: what Prometheus scrapes. docs/operate-metrics.md lists every metric."""

import math
import time
from collections.abc import Iterator

from jaxft_protocol.coordinator.job import GroupPhase, Job
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxft_coordinator._version import __version__
from jaxft_coordinator.http import _views
from jaxft_coordinator.observe._goodput import Standing
from jaxft_coordinator.observe._watched import DEPARTURES, RETRIED, Histogram, WatchedJob
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._server import Server

# Beyond these, for a job and in all, series of single groups are left out for a job: its totals stay.
MOST_GROUPS = 512
MOST_GROUPS_IN_ALL = 4096


def read(server: Server, observer: Observer) -> list[Metric]:
    """Read everything at the moment of a scrape: nothing is counted twice, and a forgotten job disappears.

    Args:
        server: the coordinator.
        observer: what it is observed by.
    """
    now_s = time.monotonic()
    jobs = [watched for _, watched in sorted(observer.jobs.items()) if watched.job is not None]
    return [*_of_the_coordinator(server, observer), *_of_jobs(jobs, now_s), *_of_groups(jobs, now_s)]


def as_text(metrics: list[Metric]) -> bytes:
    """Return metrics, and those of this process, in Prometheus' text format. For a thread beside the loop."""
    registry = CollectorRegistry()
    registry.register(_Read(metrics))
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return generate_latest(registry)


class _Read(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _of_the_coordinator(server: Server, observer: Observer) -> Iterator[Metric]:
    build = GaugeMetricFamily("jaxft_build_info", "Version of the coordinator.", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    groups, unauthenticated = server.streams
    jobs = server.jobs
    gauges = {
        "jaxft_leads": ("1 if this coordinator leads.", int(jobs.leading)),
        "jaxft_ready": (
            "1 if it leads, or stands by for a leader.",
            int(_views.role(server) != "starting"),
        ),
        "jaxft_term": ("Number of this coordinator's life.", jobs.term),
        "jaxft_jobs": ("Jobs that it remembers.", len(jobs)),
        "jaxft_streams": ("Streams of admitted groups.", groups),
        "jaxft_unauthenticated_streams": ("Streams that are not admitted yet.", unauthenticated),
        "jaxft_store_blocked_seconds": (
            "How long the job that waits longest has waited for its decision to be written.",
            jobs.blocked_s,
        ),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(name, text, value=value)
    if (until_s := server.certificate_until_s) < math.inf:
        text = "When the certificate that both ports serve with expires, in Unix time."
        yield GaugeMetricFamily("jaxft_certificate_expires_timestamp_seconds", text, value=until_s)
    yield CounterMetricFamily(
        "jaxft_events_dropped", "Events left out because a job had too many.", value=observer.dropped
    )
    yield CounterMetricFamily(
        "jaxft_observer_errors", "Errors of what makes these metrics.", value=observer.errors
    )
    appends = HistogramMetricFamily(
        "jaxft_store_append_seconds", "Time to make decisions durable in the store."
    )
    appends.add_metric([], observer.appends.buckets(), observer.appends.sum)
    yield appends
    failures = CounterMetricFamily(
        "jaxft_job_failures", "Errors of the coordinator that stopped a job.", labels=["job"]
    )
    # From 0 on: what an alert sees of a counter is how it grows, and not with which value it comes.
    for name in sorted(observer.jobs.keys() | jobs.failures.keys()):
        failures.add_metric([name], jobs.failures[name])
    yield failures


def _of_jobs(jobs: list[WatchedJob], now_s: float) -> Iterator[Metric]:
    def gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=["job"])

    def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=["job", *labels])

    step = gauge("jaxft_step", "Committed steps behind the job's frontier.")
    quorum = gauge("jaxft_quorum_id", "The last quorum's number.")
    members = gauge("jaxft_quorum_members", "Groups that take part.")
    places = gauge("jaxft_quorum_places", "The most groups that have taken part so far, without spares.")
    waits = gauge("jaxft_waiting", "1 while the job waits and trains no step.")
    idle = gauge("jaxft_idle", "1 while the job has not finished and no group is connected.")
    halted = gauge("jaxft_halted", "1 while the job is halted.")
    paused = gauge("jaxft_paused", "1 while an operator has paused the job.")
    finished = gauge("jaxft_finished", "1 if the job has finished.")
    ratio = gauge("jaxft_goodput_ratio", "Productive part of the job's time, 0 to 1.")
    commit_at = gauge(
        "jaxft_last_commit_timestamp_seconds", "When the last step was committed, in Unix time."
    )
    states = GaugeMetricFamily("jaxft_groups", "Groups by state.", labels=["job", "state"])
    good = counter("jaxft_goodput_seconds", "Productive time.")
    lost = counter("jaxft_badput_seconds", "Time lost, by what it was lost to.", "source")
    committed = counter("jaxft_steps_committed", "Steps committed.")
    retried = counter("jaxft_steps_retried", "Attempts at a step that had to be repeated.", "reason")
    shards = counter("jaxft_shards_computed", "Shards computed.")
    again = counter("jaxft_shards_recomputed", "Shards computed more than once for a step.")
    departures = counter("jaxft_departures", "Groups that went, by how.", "how")
    healed = counter("jaxft_heal_bytes", "Bytes that joiners fetched.")
    for watched in jobs:
        job, name = watched.job, [watched.name]
        assert job is not None
        if job.frontier is not None:
            step.add_metric(name, job.frontier.step)
        quorum.add_metric(name, job.last_quorum_id)
        members.add_metric(name, 0 if job.quorum is None else len(job.quorum.members))
        places.add_metric(name, job.places)
        standing = watched.account.standing
        waits.add_metric(name, int(_waits(job, standing)))
        idle.add_metric(name, int(_views.state(watched) == "idle"))
        halted.add_metric(name, int(standing is Standing.HALTED))
        paused.add_metric(name, int(job.paused))
        finished.add_metric(name, int(standing is Standing.FINISHED))
        if (share := watched.account.ratio(now_s)) is not None:
            ratio.add_metric(name, share)
        if watched.committed_unix_s is not None:
            commit_at.add_metric(name, watched.committed_unix_s)
        for state, count in _views.states(watched).items():
            states.add_metric([watched.name, state], count)
        good_s, lost_s = watched.account.seconds(now_s)
        good.add_metric(name, good_s)
        for source, seconds in lost_s.items():
            lost.add_metric([watched.name, source.value], seconds)
        committed.add_metric(name, watched.committed)
        for reason in RETRIED:
            retried.add_metric([watched.name, reason], watched.retried[reason])
        shards.add_metric(name, watched.shards)
        again.add_metric(name, watched.shards_again)
        for how in DEPARTURES.values():
            departures.add_metric([watched.name, how], watched.departures[how])
        healed.add_metric(name, watched.heal_bytes)
    yield from (step, quorum, members, places, waits, idle, halted, paused, finished)
    yield from (ratio, commit_at, states)
    yield from (good, lost, committed, retried, shards, again, departures, healed)
    yield _seconds("jaxft_step_seconds", "A step's last attempt.", {w.name: w.step_s for w in jobs})
    yield _seconds("jaxft_exchange_seconds", "A step's exchange.", {w.name: w.exchange_s for w in jobs})
    yield _seconds("jaxft_vote_seconds", "From a vote to its decision.", {w.name: w.vote_s for w in jobs})
    yield _seconds("jaxft_heal_seconds", "A group's heal.", {w.name: w.heal_s for w in jobs})


def _waits(job: Job, standing: Standing) -> bool:
    """Whether groups wait for a quorum. Before the first one, those that compile do not."""
    if standing is Standing.STARTING:
        return any(group.phase is not GroupPhase.PRESENT for group in job.groups.values())
    return standing in (Standing.WAITING, Standing.PAUSED) and bool(job.groups)


def _seconds(name: str, text: str, found: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["job"])
    for job, histogram in found.items():
        family.add_metric([job], histogram.buckets(), histogram.sum)
    return family


def _of_groups(jobs: list[WatchedJob], now_s: float) -> Iterator[Metric]:
    states = CounterMetricFamily(
        "jaxft_group_seconds", "Time that a group spent in a state.", labels=["job", "group", "state"]
    )
    parts = CounterMetricFamily(
        "jaxft_group_step_seconds",
        "Time of a group in the parts of its steps.",
        labels=["job", "group", "part"],
    )
    good = CounterMetricFamily(
        "jaxft_group_goodput_seconds", "Productive time of a group.", labels=["job", "group"]
    )
    lost = CounterMetricFamily(
        "jaxft_group_badput_seconds",
        "Time of a group that was lost, by what it was lost to.",
        labels=["job", "group", "source"],
    )
    for watched in _with_series_of_groups(jobs):
        for name, group in watched.groups.items():
            for state, seconds in group.seconds_in(now_s).items():
                states.add_metric([watched.name, name, state], seconds)
            for part, seconds in group.parts_s.items():
                parts.add_metric([watched.name, name, part], seconds)
            good_s, lost_s = group.account.seconds(watched.account, now_s)
            good.add_metric([watched.name, name], good_s)
            for source, seconds in lost_s.items():
                lost.add_metric([watched.name, name, source.value], seconds)
    yield from (states, parts, good, lost)


def _with_series_of_groups(jobs: list[WatchedJob]) -> Iterator[WatchedJob]:
    """Those with groups that are connected come first."""
    left = MOST_GROUPS_IN_ALL
    for watched in sorted(jobs, key=lambda watched: watched.job is None or not watched.job.groups):
        count = len(watched.groups)
        if count <= min(left, MOST_GROUPS):
            left -= count
            yield watched
