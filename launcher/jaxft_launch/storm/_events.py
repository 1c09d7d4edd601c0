"""The event file of a group: one JSON object per line, readable while it is written."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class EventError(ValueError):
    """A whole line of an event file is not an event. A line cut short by a kill is not an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A step that a group committed, or to which it caught up.

    Attributes:
        t_s: when the group had finished the step, in seconds since 1970.
        step: the number of committed steps after it.
        loss: the job's loss; NaN from a group that caught up and does not know it.
        attempts: how often this group tried the step; 0 if it only caught up.
        seconds: the total time in compute, exchange, vote and apply.
        shards: the shards that this group computed, each time it computed one.
        quorum_id: the quorum that committed it.
        members: the groups of that quorum.
        digest: the digest of the state after the step, from the library; "" if it reports none.
    """

    t_s: float
    step: int
    loss: float = 0.0
    attempts: int = 1
    seconds: float = 0.0
    shards: tuple[int, ...] = ()
    quorum_id: int | None = None
    members: tuple[str, ...] = ()
    digest: str = ""

    @property
    def live(self) -> bool:
        """Whether the group took part in the step instead of catching up later."""
        return self.attempts > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent:
    """A group's report after the job's last step.

    Attributes:
        digest: the digest of the state.
        ledger: whether every sample was used as often as it should be; None if the training does not track it.
        ledger_text: the result as text.
    """

    t_s: float
    step: int
    digest: str | None
    ledger: bool | None = None
    ledger_text: str = ""


Event = StepEvent | FinishedEvent


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line, or None for a kind of event that is not used here.

    Raises:
        EventError: the line is not a JSON object, or lacks a field.
    """
    try:
        fields = json.loads(line)
        match fields["event"]:
            case "step":
                return _step_event(fields)
            case "finished":
                return FinishedEvent(
                    t_s=fields["t"],
                    step=fields["step"],
                    digest=fields["digest"],
                    ledger=fields.get("ledger"),
                    ledger_text=fields.get("ledger_text", ""),
                )
            case _:
                return None
    except (ValueError, TypeError, KeyError) as error:
        raise EventError(f"{line!r} is not an event: {type(error).__name__}: {error}") from error


def _step_event(fields: dict[str, Any]) -> StepEvent:
    return StepEvent(
        t_s=fields["t"],
        step=fields["step"],
        loss=math.nan if fields["loss"] is None else fields["loss"],
        attempts=fields["attempts"],
        seconds=sum(fields[part] for part in ("compute_s", "exchange_s", "vote_s", "apply_s")),
        shards=tuple(fields["shards"]),
        quorum_id=fields["quorum_id"],
        members=tuple(fields["members"]),
        digest=fields.get("digest", ""),
    )


class EventFile:
    """Reads the new lines of an event file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset_bytes = 0

    def read(self) -> list[Event]:
        """Return the new events. The file need not exist yet, and its last line may still be incomplete.

        Raises:
            EventError: a whole line is not an event; the message names the file.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset_bytes)
                new = file.read()
        except FileNotFoundError:
            return []
        whole_bytes = new.rfind(b"\n") + 1
        self._offset_bytes += whole_bytes
        try:
            parsed = [parse_event(line) for line in new[:whole_bytes].splitlines() if line.strip()]
        except EventError as error:
            raise EventError(f"{self.path}: {error}") from error
        return [event for event in parsed if event is not None]
