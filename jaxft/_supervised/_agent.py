"""The storm's agent in a program of `jaxft chaos`: reports its steps, and carries out orders.

A Manager creates one if the environment names an event file (JAXFT_CHAOS). The agent records every committed step
with a digest of the state after it, so the program itself reports nothing.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jaxft_protocol.host.lines import append

from jaxft._arrays._device_digest import StateDigest
from jaxft._errors import ConfigurationError
from jaxft._report import StepReport
from jaxft._supervised._phase_file import steps_beside
from jaxft._supervised._victim import obey
from jaxft._telemetry._call import WAIT, Call


class Agent:
    """Observes the steps of one process of a group, and writes its event file."""

    def __init__(self, events: Path) -> None:
        self._file = steps_beside(events)
        append(self._file, "")
        self._digest = StateDigest()
        self._last: tuple[int, str] | None = None
        self._doom = obey(events)

    @classmethod
    def of_environment(cls, *, coordinator: str, group: str) -> "Agent":
        """Return the agent of this process, which `jaxft chaos` has started.

        Raises:
            ConfigurationError: the program joins another job than the storm's.
        """
        wanted = (os.environ["JAXFT_COORDINATOR"], os.environ["JAXFT_GROUP"])
        if (coordinator, group) != wanted:
            raise ConfigurationError(
                f"`jaxft chaos` started this program as group {wanted[1]!r} of the coordinator {wanted[0]}, but it "
                f"joins {coordinator} as {group!r}. Leave both arguments out of jaxft.Manager(...), or pass them to "
                "the program as {coordinator} and {group} in its command."
            )
        # Every rank takes the digests, since they are programs of the whole group.
        return cls(Path(os.environ["JAXFT_CHAOS"]))

    def entered(self, port: int) -> None:
        """Report the port on which this group listens."""
        self._write("entered", port=port)

    def begins(self, step: int) -> None:
        pass

    def enters(self, phase: str, step: int) -> None:
        if phase != WAIT:  # for a storm, a group that waits is still in the phase that made it wait
            self._doom.enter(phase, step)

    def called(self, call: Call) -> None:
        if call.error is None and not call.joins:
            self._stepped(call.report, call.state, call.shards)

    def close(self, reason: str) -> None:
        pass

    def _stepped(self, report: StepReport, state: Sequence[jax.Array], shards: int | None) -> None:
        """Report a committed step and the digest of the state after it.

        Raises:
            ConfigurationError: the result of the training depends on the number of groups, so it cannot be compared
                with another run.
        """
        if shards is None:
            raise ConfigurationError(
                "`jaxft chaos` compares a job of several groups with one group, so the step needs a fixed number of "
                "shards: pass shards=... to jaxft.fault_tolerant, and a batch function."
            )
        digest = f"{self._digest.start(state).result():016x}"
        self._last = report.step, digest
        self._write(
            "step",
            step=report.step,
            loss=None,
            attempts=report.attempts,
            compute_s=report.compute_s,
            exchange_s=report.exchange_s,
            vote_s=report.vote_s,
            apply_s=report.apply_s,
            shards=report.shards,
            quorum_id=report.quorum_id or None,
            members=report.members,
            digest=digest,
        )

    def finished(self) -> None:
        """Report that the program's loop has ended."""
        if self._last is not None:
            step, digest = self._last
            self._write("finished", step=step, digest=digest)

    def _write(self, event: str, **fields: Any) -> None:
        append(self._file, json.dumps({"t": time.time(), "event": event, **fields}) + "\n")
