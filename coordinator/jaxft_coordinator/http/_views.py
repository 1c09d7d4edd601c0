"""The JSON that the API returns. docs/operate-api.md documents it; within version 1, fields are only added."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping

from jaxft_protocol.messages import GroupName

from jaxft_coordinator._version import __version__
from jaxft_coordinator.observe._watched import GONE, WatchedGroup, WatchedJob
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._jobs import Jobs
from jaxft_coordinator.shell._server import Server

Json = dict[str, object]


def coordinator(server: Server) -> Json:
    """Describe the coordinator itself."""
    groups, unauthenticated = server.streams
    jobs = server.jobs
    return {
        "version": __version__,
        "role": role(server),
        "leader": server.leader,
        "term": jobs.term,
        "jobs": len(jobs),
        "groups": groups,
        "unauthenticated_streams": unauthenticated,
        "time": time.time(),
    }


def role(server: Server) -> str:
    """Return "leader", "standby", or "starting" if it neither leads nor knows which coordinator does."""
    if server.jobs.leading:
        return "leader"
    return "standby" if server.leader else "starting"


def who_leads(server: Server) -> str:
    """Return which coordinator to ask instead of this one; "" if this one leads."""
    if server.jobs.leading:
        return ""
    if server.leader:
        return f"this coordinator stands by, and {server.leader} leads: ask the HTTP port of that one"
    return "this coordinator does not lead yet, and knows of no other that does: see its log"


def summary(watched: WatchedJob, jobs: Jobs, now_s: float) -> Json:
    """Describe a job in a few fields."""
    job, account, blocked = watched.job, watched.account, jobs.blocked(watched.name)
    assert job is not None
    quorum, ratio = job.quorum, account.ratio(now_s)
    return {
        "job": watched.name,
        "state": "waiting" if blocked and state(watched) == "training" else state(watched),
        "step": None if job.frontier is None else job.frontier.step,
        "quorum_id": job.last_quorum_id,
        "members": 0 if quorum is None else len(quorum.members),
        "places": job.places,
        "min_replicas": job.min_replicas,
        "groups": states(watched),
        "steps_per_s": round(watched.steps_per_s, 4),
        "goodput": None if ratio is None else round(ratio, 4),
        "paused": job.paused,
        "waiting": blocked or job.waiting,
        "halted": "" if job.halted is None else job.halted.reason,
        "committed_at": watched.committed_unix_s,
        "values": dict(watched.values),
    }


def state(watched: WatchedJob) -> str:
    """Return the activity of a job: "idle" if it has not finished and no group is connected."""
    assert watched.job is not None
    standing = watched.account.standing.value
    return standing if watched.job.groups or standing == "finished" else "idle"


def states(watched: WatchedJob) -> Mapping[str, int]:
    """Return how many groups are in each state."""
    return dict(Counter(group.state for group in watched.groups.values()))


def detail(watched: WatchedJob, jobs: Jobs, now_s: float, *, history: bool) -> Json:
    """Describe a job and each of its groups; with `history`, also the kept events and points of its curve."""
    assert watched.job is not None
    good_s, lost_s = watched.account.seconds(now_s)
    whole: Json = {
        **summary(watched, jobs, now_s),
        "goodput_seconds": round(good_s, 3),
        "badput_seconds": {source.value: round(seconds, 3) for source, seconds in lost_s.items()},
        "steps_committed": watched.committed,
        "steps_retried": dict(watched.retried),
        "shards_recomputed": watched.shards_again,
        "departures": dict(watched.departures),
        "group_list": [_group(name, group, watched, now_s) for name, group in watched.groups.items()],
    }
    if history:
        whole["points"] = list(watched.points)
        whole["events"] = [{"seq": number, **json.loads(text)} for number, text in watched.events]
    elif watched.points:
        whole["points"] = [watched.points[-1]]
    return whole


def _group(name: GroupName, known: WatchedGroup, watched: WatchedJob, now_s: float) -> Json:
    assert watched.job is not None
    group = watched.job.groups.get(name)
    good_s, lost_s = known.account.seconds(watched.account, now_s)
    ratio = known.account.ratio(watched.account, now_s)
    view: Json = {
        "group": name,
        "state": known.state,
        "since": round(known.since_unix_s, 3),
        "losses": known.losses,
        "seconds": {state: round(seconds, 1) for state, seconds in known.seconds_in(now_s).items()},
        "goodput": None if ratio is None else round(ratio, 4),
        "goodput_seconds": round(good_s, 1),
        "badput_seconds": {source.value: round(seconds, 1) for source, seconds in lost_s.items() if seconds},
    }
    if known.state == GONE:
        view |= {"reason": known.reason, "ended": known.ended}
    if group is not None:
        view |= {
            "spare": group.spare,
            "away": group.away,
            "draining": group.draining,
            "address": group.address,
            "incarnation": f"{group.incarnation:016x}",
            "heard_s_ago": round(max(0.0, now_s - watched.heard_s(group)), 1),
        }
    if (sample := known.sample) is not None and sample.steps:
        view["step"] = sample.step
        parts = ("compute_s", "exchange_s", "vote_s", "apply_s")
        view |= {part: round(getattr(sample, part) / sample.steps, 6) for part in parts}
    return view


class Snapshots:
    """The texts that all viewers share: each job's description is made at most once a second."""

    def __init__(self, observer: Observer, jobs: Jobs) -> None:
        self._observer = observer
        self._jobs = jobs
        self._made: dict[str, tuple[float, str]] = {}

    def job(self, name: str) -> str | None:
        """Return a job's description without its history, as JSON; None if there is no such job."""
        watched = self._observer.jobs.get(name)
        if watched is None or watched.job is None:
            self._made.pop(name, None)
            return None
        return self._fresh(f"job {name}", lambda now_s: detail(watched, self._jobs, now_s, history=False))

    def jobs(self) -> str:
        """Return a summary of all jobs, as JSON."""
        return self._fresh("jobs", lambda now_s: {"jobs": summaries(self._observer, self._jobs, now_s)})

    def _fresh(self, key: str, make: Callable[[float], Json]) -> str:
        now_s = time.monotonic()
        made_s, text = self._made.get(key, (-1e9, ""))
        if now_s - made_s >= 0.9:
            text = json.dumps(make(now_s))
            if len(self._made) > 2 * len(self._observer.jobs) + 2:
                self._made.clear()  # of jobs that are forgotten
            self._made[key] = (now_s, text)
        return text


def summaries(observer: Observer, jobs: Jobs, now_s: float) -> list[Json]:
    """Describe all jobs, in order of their names."""
    return [summary(each, jobs, now_s) for _, each in sorted(observer.jobs.items()) if each.job is not None]
