"""A step is called by one thread at a time: its state is consumed, so a second call could only harm the first."""

import threading

from jaxft._errors import ConfigurationError


def one_caller(within: dict[str, threading.Thread]) -> None:
    """Note that this thread begins a call. What an interrupted call has left behind does not stop its thread.

    Args:
        within: the thread that is in a call, if any; cleared at its end.

    Raises:
        ConfigurationError: another thread is in a call.
    """
    mine = threading.current_thread()
    other = within.setdefault("thread", mine)  # atomic
    if other is mine:
        return
    if other.is_alive():
        raise ConfigurationError(
            f"The step is called in thread {mine.name!r} while its call in thread {other.name!r} is under way. Each "
            "call consumes the state and returns the next one, so there is one at a time: call it from one thread. "
            "Batches can be loaded ahead in others, as jaxft.data does."
        )
    within["thread"] = mine
