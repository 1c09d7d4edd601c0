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
    """Read everything at the moment of a scrape: nothing is counted twice, and a forgotten job disappears."""
    now_s = time.monotonic()
    jobs = [watched for _, watched in sorted(observer.jobs.items()) if watched.job is not None]
    return [*_of_the_coordinator(server, observer), *_of_jobs(jobs, now_s), *_of_groups(jobs, now_s)]


def as_text(metrics: list[Metric]) -> bytes:
    """Return metrics, also of this process, in Prometheus' text format. For a thread."""
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
    # From 0 on: alerts see the growth of a counter, not its first value.
    for name in sorted(observer.jobs.keys() | jobs.failures.keys()):
        failures.add_metric([name], jobs.failures[name])
    yield failures


_G, _C = GaugeMetricFamily, CounterMetricFamily
# The metrics of a job, each with its labels besides the job.
_FAMILIES: dict[str, tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str]] = {
    "jaxft_step": (_G, "Committed steps behind the job's frontier.", ""),
    "jaxft_quorum_id": (_G, "The last quorum's number.", ""),
    "jaxft_quorum_members": (_G, "Groups that take part.", ""),
    "jaxft_quorum_places": (_G, "The most groups that have taken part so far, without spares.", ""),
    "jaxft_waiting": (_G, "1 while the job waits and trains no step.", ""),
    "jaxft_idle": (_G, "1 while the job has not finished and no group is connected.", ""),
    "jaxft_halted": (_G, "1 while the job is halted.", ""),
    "jaxft_paused": (_G, "1 while an operator has paused the job.", ""),
    "jaxft_finished": (_G, "1 if the job has finished.", ""),
    "jaxft_goodput_ratio": (_G, "Productive part of the job's time, 0 to 1.", ""),
    "jaxft_last_commit_timestamp_seconds": (_G, "When the last step was committed, in Unix time.", ""),
    "jaxft_groups": (_G, "Groups by state.", "state"),
    "jaxft_goodput_seconds": (_C, "Productive time.", ""),
    "jaxft_badput_seconds": (_C, "Time lost, by source of the loss.", "source"),
    "jaxft_steps_committed": (_C, "Steps committed.", ""),
    "jaxft_steps_retried": (_C, "Attempts at a step that had to be repeated.", "reason"),
    "jaxft_shards_computed": (_C, "Shards computed.", ""),
    "jaxft_shards_recomputed": (_C, "Shards computed more than once for a step.", ""),
    "jaxft_departures": (_C, "Groups that went, by how.", "how"),
    "jaxft_heal_bytes": (_C, "Bytes that joiners fetched.", ""),
}


def _of_jobs(jobs: list[WatchedJob], now_s: float) -> Iterator[Metric]:
    families = {
        name: kind(name, text, labels=["job", *label.split()])
        for name, (kind, text, label) in _FAMILIES.items()
    }
    for watched in jobs:
        for name, label, value in _of_job(watched, now_s):
            families[f"jaxft_{name}"].add_metric([watched.name, *([label] if label else [])], value)
    yield from families.values()
    yield _seconds("jaxft_step_seconds", "A step's last attempt.", {w.name: w.step_s for w in jobs})
    yield _seconds("jaxft_exchange_seconds", "A step's exchange.", {w.name: w.exchange_s for w in jobs})
    yield _seconds("jaxft_vote_seconds", "From a vote to its decision.", {w.name: w.vote_s for w in jobs})
    yield _seconds("jaxft_heal_seconds", "A group's heal.", {w.name: w.heal_s for w in jobs})


def _of_job(watched: WatchedJob, now_s: float) -> Iterator[tuple[str, str, float]]:
    """Yield the name, the label and the value of each series."""
    job, standing = watched.job, watched.account.standing
    assert job is not None
    if job.frontier is not None:
        yield "step", "", job.frontier.step
    yield "quorum_id", "", job.last_quorum_id
    yield "quorum_members", "", 0 if job.quorum is None else len(job.quorum.members)
    yield "quorum_places", "", job.places
    yield "waiting", "", _waits(job, standing)
    yield "idle", "", _views.state(watched) == "idle"
    yield "halted", "", standing is Standing.HALTED
    yield "paused", "", job.paused
    yield "finished", "", standing is Standing.FINISHED
    if (share := watched.account.ratio(now_s)) is not None:
        yield "goodput_ratio", "", share
    if watched.committed_unix_s is not None:
        yield "last_commit_timestamp_seconds", "", watched.committed_unix_s
    good_s, lost_s = watched.account.seconds(now_s)
    yield "goodput_seconds", "", good_s
    yield "steps_committed", "", watched.committed
    yield "shards_computed", "", watched.shards
    yield "shards_recomputed", "", watched.shards_again
    yield "heal_bytes", "", watched.heal_bytes
    yield from (("groups", state, count) for state, count in _views.states(watched).items())
    yield from (("badput_seconds", source.value, seconds) for source, seconds in lost_s.items())
    yield from (("steps_retried", reason, watched.retried[reason]) for reason in RETRIED)
    yield from (("departures", how, watched.departures[how]) for how in DEPARTURES.values())


def _waits(job: Job, standing: Standing) -> bool:
    """Whether groups wait for a quorum. Before the first one, compiling groups do not."""
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
        "Time that a group lost, by source of the loss.",
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
