"""A trace of chosen steps, for XProf or Perfetto."""

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

logger = logging.getLogger("llama3")


class Profile:
    """Traces the steps from `first` to `last`; nothing without them."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None) -> None:
        """Trace into `folder`. Steps are counted from 1, as in the log."""
        self._steps = steps
        self._folder = folder
        self._tracing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Say that this step comes next."""
        if self._steps is not None and not self._tracing and self._steps[0] <= step <= self._steps[1]:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def after(self, step: int) -> None:
        """Say that this step is committed."""
        if self._steps is not None and step >= self._steps[1]:
            self._stop()

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            logger.info("trace written to %s", self._folder)
