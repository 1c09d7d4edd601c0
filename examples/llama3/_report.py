"""A run's output: one aligned line per logged step, and one JSON object per committed step."""

import json
import logging
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Self

import jaxft
from examples.llama3._flags import Flags
from examples.llama3._metrics import Progress, Workload, log_line

logger = logging.getLogger("llama3")


class Report:
    """Writes a run's progress to the log and the event file. The event file is flushed after each line."""

    def __init__(self, flags: Flags, workload: Workload, manager: jaxft.Manager | None) -> None:
        """Open the event file, if there is one, to append to the lines of earlier incarnations."""
        self._flags = flags
        self._workload = workload
        self._manager = manager
        self._timings_s: list[float] = []
        self._file: IO[str] | None = None
        if flags.events is not None:
            flags.events.parent.mkdir(parents=True, exist_ok=True)
            self._file = flags.events.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def committed(self, step: int, metrics: Mapping[str, float], *, step_s: float) -> None:
        """Record a committed step."""
        self._timings_s.append(step_s)
        fields = step_fields(self._manager, step_s=step_s, shards=self._flags.shards)
        loss = metrics["loss"]
        self._write("step", step=step, loss=loss if math.isfinite(loss) else None, **fields)
        if step % self._flags.log_every == 0 or step in (1, self._flags.steps):
            logger.info(log_line(self._progress(step, metrics, fields)))
            self._timings_s.clear()

    def finished(self, step: int, *, digest: str | None) -> None:
        """Record that the job has committed its last step."""
        self._write("finished", step=step, digest=digest)
        logger.info("finished after %d committed steps%s", step, f", digest {digest}" if digest else "")

    def _progress(self, step: int, metrics: Mapping[str, float], fields: Mapping[str, Any]) -> Progress:
        s_per_step = sum(self._timings_s) / len(self._timings_s)
        replicas = max(1, len(fields["members"]))
        return Progress(
            step=step,
            total_steps=self._flags.steps,
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
            s_per_step=s_per_step,
            tokens_per_s=self._workload.tokens_per_s(s_per_step),
            mfu=self._workload.mfu(s_per_step, replicas=replicas),
            replicas=replicas,
            quorum_id=fields["quorum_id"],
        )

    def _write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"t": time.time(), "event": event, **fields}, allow_nan=False) + "\n")
        self._file.flush()


def step_fields(manager: jaxft.Manager | None, *, step_s: float, shards: int) -> dict[str, Any]:
    """Return how the last step was committed. Without a manager, every shard is computed in one attempt."""
    if manager is None:
        return {
            "attempts": 1,
            "compute_s": step_s,
            "exchange_s": 0.0,
            "vote_s": 0.0,
            "apply_s": 0.0,
            "shards": list(range(shards)),
            "quorum_id": None,
            "members": [],
            "nonfinite": "",
        }
    report = manager.report
    return {
        "attempts": report.attempts,
        "compute_s": report.compute_s,
        "exchange_s": report.exchange_s,
        "vote_s": report.vote_s,
        "apply_s": report.apply_s,
        "shards": list(report.shards),
        "quorum_id": report.quorum_id,
        "members": list(report.members),
        "nonfinite": report.nonfinite,
    }
