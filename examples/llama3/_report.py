"""A run's output: one aligned line per logged step, and one JSON object per committed step."""

import json
import logging
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Self

import jax
from jax.sharding import Mesh

import jaxft
from examples.llama3._config import SettingsError
from examples.llama3._flags import Flags
from examples.llama3._metrics import Progress, Workload, flops_per_token, log_line, peak_flops_per_s
from examples.llama3._settings import Settings, mesh_text
from examples.llama3._state import parameter_count
from examples.llama3._tracker import Tracker

logger = logging.getLogger("llama3")


class Report:
    """Writes a run's progress to the log, the event file and the tracker. The file is flushed after each line."""

    def __init__(
        self, flags: Flags, workload: Workload, manager: jaxft.Manager | None, tracker: Tracker
    ) -> None:
        """Open the event file, if there is one, to append to the lines of earlier incarnations.

        Raises:
            SettingsError: it cannot be written.
        """
        self._flags = flags
        self._workload = workload
        self._manager = manager
        self._tracker = tracker
        self._timings_s: list[float] = []
        self._file: IO[str] | None = None
        if flags.events is not None:
            try:
                flags.events.parent.mkdir(parents=True, exist_ok=True)
                self._file = flags.events.open("a", encoding="utf-8")
            except OSError as error:
                raise SettingsError(
                    f"--events {str(flags.events)!r} cannot be written: {error.strerror}."
                ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.close()
        if self._file is not None:
            self._file.close()

    def committed(self, step: int, metrics: Mapping[str, float], *, step_s: float) -> None:
        """Record a committed step."""
        self._timings_s.append(step_s)
        fields = step_fields(self._manager, step_s=step_s, shards=self._flags.shards)
        loss = metrics["loss"]
        self._write("step", step=step, loss=loss if math.isfinite(loss) else None, **fields)
        if step % self._flags.log_every == 0 or step in (1, self._flags.steps):
            progress = self._progress(step, metrics, fields)
            logger.info(log_line(progress))
            rates = {"tokens_per_s": progress.tokens_per_s, "s_per_step": progress.s_per_step}
            rates |= {} if progress.mfu is None else {"mfu": progress.mfu}
            self._tracker.write(step, {**metrics, **rates, "replicas": progress.replicas})
            self._timings_s.clear()

    def evaluated(self, step: int, loss: float) -> None:
        """Record the loss on held-out text."""
        self._write("evaluation", step=step, loss=loss if math.isfinite(loss) else None)
        logger.info("step %d: held-out loss %.4f", step, loss)
        self._tracker.write(step, {"held_out_loss": loss})

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


def describe(flags: Flags, settings: Settings, params: Any, mesh: Mesh) -> Workload:
    """Log a description of the run, and return its workload."""
    model, batches = settings.model, settings.batches
    device = mesh.devices.flat[0]
    logger.info(
        "model %s: %s parameters, %s on %d of %d %s devices, %s",
        flags.size,
        f"{parameter_count(params):,}",
        model.compute_dtype,
        mesh.size,
        jax.device_count(),
        device.device_kind,
        mesh_text(mesh),
    )
    for corpus, windows in zip(batches.corpora, batches.training_windows, strict=True):
        logger.info(
            "corpus: %s tokens in %s documents, %s windows, fingerprint %s",
            f"{len(corpus.tokens):,}",
            "?" if corpus.documents is None else corpus.documents,
            f"{windows:,}",
            corpus.fingerprint,
        )
    logger.info(
        "a step: %d shards x %d sequences x %d tokens = %s tokens",
        flags.shards,
        batches.batch_per_shard,
        flags.seq_len,
        f"{settings.tokens_per_step:,}",
    )
    return Workload(
        tokens_per_step=settings.tokens_per_step * (flags.diloco_every or 1),
        flops_per_token=flops_per_token(model, params, seq_len=flags.seq_len),
        devices_per_replica=mesh.size,
        peak_flops_per_s=peak_flops_per_s(device.device_kind),
    )
