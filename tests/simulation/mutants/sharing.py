"""The coordinator's shell: several jobs, records that its store refuses, evictions by operators, forgotten jobs."""

from typing import Any

from jaxft_coordinator.shell._jobs import Jobs
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import SessionClosed

from ..coordinator import Life
from ._mutant import mutant
from ._settings import of

_REFUSES = of(3, guests=2, refuses=0.1, memoryless=False, raises=False, die_at_end=False)


@mutant(Life, "sessions_of", "kill", "break", "drain", **_REFUSES)
def _a_session_that_nobody_ends(sessions_of: Any) -> Any:
    """A session that a refused decision had ended hears nothing, and its heartbeats are answered forever."""

    def mutated(self: Life, job: str) -> Any:
        known = self._jobs.get(job)
        return [] if known is None else sorted(set(sessions_of(self, job)) & known.sessions.keys())

    return mutated


@mutant(Life, "refused", "kill", **_REFUSES)
def _a_refused_decision_stays_in_memory(_refused: Any) -> Any:
    """The job continues from a decision that was never written."""
    return lambda _self, _job: None


@mutant(Jobs, "evict", "evict", **of(4, guests=1, memoryless=False, flaky=0.0))
def _an_operators_eviction_is_not_told(_evict: Any) -> Any:
    """The group's session is over for the job, and the group does not learn that."""

    def mutated(self: Jobs, name: str, group: Any, reason: str) -> str:
        job = self.get(name)
        if job is None or group not in job.groups:
            return "there is no such group"
        self.step(name, SessionClosed(job.groups[group].session, reason))
        return ""

    return mutated


@mutant(durable, "first_to_forget", **of(3, guests=3, faults=(), storm_s=4.0, memoryless=False))
def _a_job_with_groups_is_forgotten_for_another(_first: Any) -> Any:
    """When a coordinator has too many jobs, any job goes, whether groups are there or not."""
    return lambda jobs: min(jobs, key=lambda job: job.name != "job", default=None)
