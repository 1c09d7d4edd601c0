"""The event file: one JSON object per committed step, in the format of examples/llama3."""

import json
import math
import time
from pathlib import Path
from typing import Any

import jaxft


class Events:
    """Appends to a file line by line, after the lines of earlier incarnations; does nothing without a file."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def step(self, report: jaxft.StepReport, *, loss: float) -> None:
        """Record a committed step."""
        self._write(
            "step",
            step=report.step,
            # JSON has no NaN. A group that only caught up in this call has computed no loss.
            loss=loss if math.isfinite(loss) else None,
            nonfinite=report.nonfinite,
            attempts=report.attempts,
            compute_s=report.compute_s,
            exchange_s=report.exchange_s,
            vote_s=report.vote_s,
            apply_s=report.apply_s,
            shards=report.shards,
            quorum_id=report.quorum_id or None,
            members=report.members,
        )

    def finished(self, step: int, *, digest: str | None, ledger: bool, ledger_text: str) -> None:
        """Record the job's end. `ledger`: whether every sample was used as often as expected."""
        self._write("finished", step=step, digest=digest, ledger=ledger, ledger_text=ledger_text)

    def _write(self, event: str, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"t": time.time(), "event": event, **fields}, allow_nan=False) + "\n")
            self._file.flush()
