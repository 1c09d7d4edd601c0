"""Server-sent events: each viewer gets events as they come, and once a second the state of what it looks at."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

from jaxft_coordinator.http._views import Snapshots
from jaxft_coordinator.observe.observer import Observer

_log = logging.getLogger("jaxft_coordinator.http")

MAX_VIEWERS = 64
# Unread events of a viewer; the oldest are dropped, and the page reloads the list when it sees the gap.
MAX_UNREAD = 500
STATE_EVERY_S = 1.0


class TooManyViewers(Exception):
    """There are `MAX_VIEWERS` already."""


class Streams:
    """All viewers of a coordinator.

    Args:
        observer: where events come from.
        snapshots: where states come from.
    """

    def __init__(self, observer: Observer, snapshots: Snapshots) -> None:
        self._observer = observer
        self._snapshots = snapshots
        self._viewers: set[asyncio.Event] = set()
        self._closing = False

    def open(self, job: str) -> AsyncIterator[bytes]:
        """Return the stream of a new viewer of `job`; of all jobs, if "".

        Raises:
            TooManyViewers: it cannot be admitted.
        """
        if len(self._viewers) >= MAX_VIEWERS or self._closing:
            raise TooManyViewers(
                f"{MAX_VIEWERS} viewers are connected to this coordinator, its limit: close another page, or poll "
                "/api/v1/jobs"
            )
        wake = asyncio.Event()
        self._viewers.add(wake)
        return self._stream(job, wake)

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._closing = True
        for wake in self._viewers:
            wake.set()

    async def _stream(self, job: str, wake: asyncio.Event) -> AsyncIterator[bytes]:
        unread: deque[tuple[int, str]] = deque(maxlen=MAX_UNREAD)

        def hear(of: str, number: int, text: str) -> None:
            if not job or of in ("", job):
                unread.append((number, text))
                wake.set()

        unlisten = self._observer.listen(hear)
        try:
            loop = asyncio.get_running_loop()
            due_s, said = loop.time(), ""
            while not self._closing:
                if loop.time() >= due_s:
                    due_s = loop.time() + STATE_EVERY_S
                    state = self._state(job)
                    # A comment keeps proxies from closing a quiet stream.
                    yield b": \n\n" if state == said else _event("state", state)
                    said = state
                wake.clear()
                while unread:
                    number, text = unread.popleft()
                    yield _event("event", text, number)
                try:
                    async with asyncio.timeout(max(0.0, due_s - loop.time())):
                        await wake.wait()
                except TimeoutError:
                    pass
        finally:
            unlisten()
            self._viewers.discard(wake)

    def _state(self, job: str) -> str:
        return (self._snapshots.job(job) or "null") if job else self._snapshots.jobs()


def _event(name: str, data: str, number: int | None = None) -> bytes:
    identity = "" if number is None else f"id: {number}\n"
    return f"{identity}event: {name}\ndata: {data}\n\n".encode()
