"""A step is called by one thread at a time: its state is consumed, so a second call could only harm the first."""

import threading
from types import TracebackType

from jaxft._errors import ConfigurationError


class OneCaller:
    """A context for one thread at a time. What an interrupted thread has left behind stops no later call."""

    def __init__(self) -> None:
        self._within: dict[str, threading.Thread] = {}

    def __enter__(self) -> None:
        mine = threading.current_thread()
        other = self._within.setdefault("thread", mine)  # atomic
        if other is mine:
            return
        if other.is_alive():
            raise ConfigurationError(
                f"The step is called in thread {mine.name!r} while its call in thread {other.name!r} is under way. "
                "Each call consumes the state and returns the next one, so there is one at a time: call it from one "
                "thread. Batches can be loaded ahead in others, as jaxft.data does."
            )
        self._within["thread"] = mine

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._within.pop("thread", None)
