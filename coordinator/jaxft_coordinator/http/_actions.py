"""What operators may do over HTTP, with a token, if the coordinator was started with `--http-actions`.

Every attempt is logged, and so is its outcome: the audit log. Tokens never appear in it.
"""

import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxft_protocol import credentials
from jaxft_protocol.host.admission import RateLimitFilter
from jaxft_protocol.messages import GroupName
from jaxft_protocol.names import one_line

from jaxft_coordinator.http._views import who_leads
from jaxft_coordinator.observe._happened import Happened
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._server import Server

_log = logging.getLogger("jaxft_coordinator.audit")
# Those without a token must not be able to fill the disk.
_refused_log = logging.getLogger("jaxft_coordinator.audit.refused")
_refused_log.addFilter(RateLimitFilter())

GROUP_ACTIONS = ("evict", "drain")
ACTIONS = (*GROUP_ACTIONS, "pause", "resume")
MAX_REASON_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """The HTTP status, and what to tell the operator."""

    status: int
    text: str


class Actions:
    """Carries out actions for those who hold a job's token, or the operator's."""

    def __init__(self, server: Server, observer: Observer, secret: bytes | None) -> None:
        self._server = server
        self._jobs = server.jobs
        self._observer = observer
        self._secret = secret

    @property
    def enabled(self) -> bool:
        return self._secret is not None

    def act(self, request: Mapping[str, Any], token: str, peer: str) -> Outcome:
        """Carry out an action."""
        if self._secret is None:
            return Outcome(
                403,
                "actions are off: start the coordinator with --http-actions and --token-file. Without them, SIGTERM "
                "to a group's process drains it",
            )
        action, job, group, why = (request.get(name, "") for name in ("action", "job", "group", "reason"))
        if not all(map(_is_text, (action, job, group, why))):
            return Outcome(400, "action, job, group and reason must be texts")
        holder = self._holder(job, token)
        if not holder:
            outcome = Outcome(
                401,
                f"the bearer token is neither the token of job {job[:200]!r} nor the operator's: `jaxft-coordinator "
                "token --help` explains how to print both. The coordinator has read its secret when it started",
            )
        elif action not in ACTIONS:
            outcome = Outcome(400, f"the action must be evict, drain, pause or resume, not {action[:40]!r}")
        elif group and action not in GROUP_ACTIONS:
            outcome = Outcome(400, f"{action} is for a whole job: leave out the group, {group[:200]!r}")
        elif not group and action in GROUP_ACTIONS:
            outcome = Outcome(400, f"{action} is for one group of job {job[:200]!r}: name it")
        elif elsewhere := who_leads(self._server):
            outcome = Outcome(503, elsewhere)
        else:
            outcome = self._carry_out(action, job, GroupName(group), one_line(why[:MAX_REASON_LENGTH]))
        (_log if holder else _refused_log).warning(
            "audit: %s asks to %s group %.200r of job %.200r (%.200r): %d %s",
            *(f"{peer}, with the {holder}'s token," if holder else f"{peer}, without a valid token,",),
            *(_named(action), group, job, why, outcome.status, outcome.text),
        )
        if holder:
            more = {"action": action[:40], "by": holder, "peer": peer, "status": outcome.status}
            self._observer.tell(
                job, Happened("operator_action", group[:200], reason=one_line(why[:200]), more=more)
            )
        return outcome

    def _holder(self, job: str, token: str) -> str:
        """Return whose token this is: "job" or "operator"; "" if it is neither's."""
        assert self._secret is not None
        given = token.strip().lower().encode()
        keys = {"operator": credentials.operator_key(self._secret)}
        if job:
            keys["job"] = credentials.job_key(self._secret, job)
        # Compare with all keys: the time then reveals nothing.
        found = [name for name, key in keys.items() if hmac.compare_digest(key.hex().encode(), given)]
        return found[0] if found else ""

    def _carry_out(self, action: str, job: str, group: GroupName, why: str) -> Outcome:
        more = f": {why}" if why else ""
        match action:
            case "evict":
                problem = self._jobs.evict(job, group, f"an operator evicted it{more}")
                done = f"group {group!r} is evicted: its process ends, and joins again when it is restarted"
            case "drain":
                problem = self._jobs.drain(job, group, f"an operator asks for it{more}")
                done = f"group {group!r} is drained: it finishes its step, and its process ends with status 0"
            case _:
                problem = self._jobs.pause(job, paused=action == "pause")
                done = f"job {job!r} {'pauses after its current step' if action == 'pause' else 'continues'}"
        return Outcome(404, problem) if problem else Outcome(200, done)


def _named(action: str) -> str:
    """An action for the log. Anything else is quoted, so that it cannot pass for another line."""
    return action if action in ACTIONS else f"{action[:40]!r}"


def _is_text(value: object) -> bool:
    """Whether a value is a text that UTF-8 can encode. JSON can also express halves of characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
