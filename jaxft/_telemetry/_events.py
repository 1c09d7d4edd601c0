"""The events of a group as a file, one JSON object a line: docs/operate-api.md documents them."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxft_protocol.host.lines import LineFile
from jaxft_protocol.replica.state import Identity

from jaxft._base._room import start_thread
from jaxft._errors import ConfigurationError
from jaxft._report import StepReport
from jaxft._telemetry._call import Call

_log = logging.getLogger("jaxft")

# As in the coordinator's events.
MAX_LISTED = 50
MAX_REASON_LENGTH = 2000
_NS = 1_000_000_000


def events_of(identity: Identity, path: str | Path, *, step: int, spare: bool) -> "GroupEvents":
    """Return the observer that writes a group's events. `step`: with which the group begins.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    path = Path(str(path).replace("{group}", identity.group))
    try:
        return GroupEvents(path, identity, step=step, spare=spare)
    except OSError as error:
        raise ConfigurationError(
            f"the events of group {identity.group!r} cannot be written to {str(path)!r}: {error}. Pass another file "
            "as `events`."
        ) from error


class GroupEvents:
    """Writes the events of one life of a group. An `Observer`.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, identity: Identity, *, step: int, spare: bool) -> None:
        self._own = {"job": identity.job, "group": identity.group}
        self._step = step
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path, _log, start=start_thread)
        incarnation = f"{identity.incarnation:016x}"
        began = {"incarnation": incarnation, "address": identity.address, "spare": spare}
        self._put("life_began", began)

    def called(self, call: Call) -> None:
        self._step = call.report.step
        for event, fields in _events(call):
            self._put(event, {"step": self._step, **fields}, call.ended_ns / _NS)

    def close(self, reason: str) -> None:
        self._put("life_ended", {"step": self._step, **_told(reason)})
        self._file.close()

    def _put(self, event: str, fields: Mapping[str, Any], t_s: float | None = None) -> None:
        t_s = round(time.time() if t_s is None else t_s, 3)
        if dropped := self._file.take_lost():
            self._put_line({"t": t_s, "event": "events_dropped", **self._own, "count": dropped})
        self._put_line({"t": t_s, "event": event, **self._own, **fields})

    def _put_line(self, event: dict[str, Any]) -> None:
        self._file.put(json.dumps(event, allow_nan=False))


def _events(call: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a call, and their fields."""
    report = call.report
    if report.joined or report.left:
        yield "members_changed", _changed(report)
    if (heal := report.heal) is not None:
        yield (
            "heal_done",
            {
                "snapshot_step": heal.snapshot_step,
                "replayed_steps": heal.replayed_steps,
                "transferred_bytes": heal.transferred_bytes,
                "seconds": round(heal.seconds, 6),
                "donors": list(heal.donors[:MAX_LISTED]),
            },
        )
    if call.error is not None:
        yield "step_raised", _told(f"{type(call.error).__name__}: {call.error}")
    elif report.attempts:
        yield "step_done", _done(report)
    elif report.step > call.before:
        yield "caught_up", {"steps": report.step - call.before}


def _done(report: StepReport) -> dict[str, Any]:
    parts = ("compute_s", "exchange_s", "vote_s", "apply_s")
    return {
        "quorum_id": int(report.quorum_id),
        "members": len(report.members),
        "attempts": report.attempts,
        "shards": list(report.shards),
        **{part: round(getattr(report, part), 6) for part in parts},
        **({"nonfinite": report.nonfinite} if report.nonfinite else {}),
    }


def _changed(report: StepReport) -> dict[str, Any]:
    return {
        "quorum_id": int(report.quorum_id),
        "members": len(report.members),
        **({"joined": list(report.joined[:MAX_LISTED])} if report.joined else {}),
        **(
            {"left": [{"group": group, **_told(why)} for group, why in report.left[:MAX_LISTED]]}
            if report.left
            else {}
        ),
    }


def _told(reason: str) -> dict[str, str]:
    return {"reason": reason[:MAX_REASON_LENGTH]} if reason else {}
