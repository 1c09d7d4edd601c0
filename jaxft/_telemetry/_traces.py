"""OpenTelemetry spans for the calls of the step, made with the user's tracer."""

from typing import Any

from opentelemetry.trace import Status, StatusCode

from jaxft._report import StepReport
from jaxft._telemetry._call import Call


class Traces:
    """Makes one span for each call of the step. An `Observer`.

    It is named after what the call did: `jaxft.step`, `jaxft.heal`, `jaxft.replay` if the group caught up without
    fetching a state, as spares do, or `jaxft.join`. The span that is current in the caller becomes its parent.
    """

    def __init__(self, tracer: Any, *, job: str, group: str) -> None:
        """`tracer`: an `opentelemetry.trace.Tracer`."""
        self._tracer = tracer
        self._own = {"jaxft.job": job, "jaxft.group": group}

    def called(self, call: Call) -> None:
        report = call.report
        span = self._tracer.start_span(
            _name(call), start_time=call.began_ns, attributes={**self._own, **_attributes(report)}
        )
        for group in report.joined:
            span.add_event("jaxft.member_joined", {"jaxft.member": group}, call.ended_ns)
        for group, reason in report.left:
            span.add_event(
                "jaxft.member_left", {"jaxft.member": group, "jaxft.reason": reason}, call.ended_ns
            )
        if call.error is not None:
            span.record_exception(call.error, timestamp=call.ended_ns)
            span.set_status(Status(StatusCode.ERROR, f"{type(call.error).__name__}: {call.error}"))
        span.end(call.ended_ns)

    def close(self, reason: str) -> None:
        """The provider belongs to the user, who flushes it."""


def _name(call: Call) -> str:
    if call.report.heal is not None:
        return "jaxft.heal"
    if call.report.attempts:
        return "jaxft.step"
    return "jaxft.replay" if call.report.step > call.before else "jaxft.join"


def _attributes(report: StepReport) -> dict[str, Any]:
    """Attributes of a span; times in seconds."""
    found: dict[str, Any] = {
        "jaxft.step": report.step,
        "jaxft.quorum_id": int(report.quorum_id),
        "jaxft.members": len(report.members),
    }
    if report.attempts:
        found |= {"jaxft.attempts": report.attempts, "jaxft.shards": len(report.shards)}
        for part in ("compute_s", "exchange_s", "vote_s", "apply_s"):
            found[f"jaxft.{part}"] = getattr(report, part)
    if (heal := report.heal) is not None:
        found |= {
            "jaxft.snapshot_step": heal.snapshot_step,
            "jaxft.replayed_steps": heal.replayed_steps,
            "jaxft.transferred_bytes": heal.transferred_bytes,
            "jaxft.donors": list(heal.donors),
        }
    return found
