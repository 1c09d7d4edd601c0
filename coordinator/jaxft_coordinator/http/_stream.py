"""Server-sent events: each viewer gets events as they come, and once a second the state of its job or of all jobs."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from jaxft_protocol.host.admission import crowded_out

from jaxft_coordinator.http._views import Snapshots
from jaxft_coordinator.observe.observer import Observer

_log = logging.getLogger("jaxft_coordinator.http")

MAX_VIEWERS = 64
# Unread events of a viewer; the oldest are dropped, and the page reloads the list when it sees the gap.
MAX_UNREAD = 500
STATE_EVERY_S = 1.0


class TooManyViewers(Exception):
    """There are `MAX_VIEWERS` already."""


@dataclass(eq=False)
class _Viewer:
    address: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False

    def end(self) -> None:
        self.ended = True
        self.wake.set()


class Streams:
    """All viewers of a coordinator."""

    def __init__(self, observer: Observer, snapshots: Snapshots) -> None:
        self._observer = observer
        self._snapshots = snapshots
        self._viewers: dict[_Viewer, str] = {}  # with their addresses, oldest first
        self._closing = False

    def open(self, job: str, address: str) -> AsyncIterator[bytes]:
        """Return the stream of a new viewer of `job`; of all jobs, if "".

        When there are too many, the address with the most of them loses its oldest.

        Raises:
            TooManyViewers: it cannot be admitted.
        """
        if self._closing or (len(self._viewers) >= MAX_VIEWERS and not self._make_room(address)):
            raise TooManyViewers(
                f"{MAX_VIEWERS} viewers are connected to this coordinator, its limit: close another page, or poll "
                "/api/v1/jobs"
            )
        viewer = _Viewer(address)
        self._viewers[viewer] = address
        return self._stream(job, viewer)

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._closing = True
        for viewer in self._viewers:
            viewer.end()

    def _make_room(self, address: str) -> bool:
        """End a viewer for a new one at `address`; False if no other address has more than this one then has."""
        (oldest,) = crowded_out(self._viewers.items(), MAX_VIEWERS - 1)
        counts = Counter(self._viewers.values())
        if counts[oldest.address] <= counts[address] + 1:
            return False
        del self._viewers[oldest]
        oldest.end()
        return True

    async def _stream(self, job: str, viewer: _Viewer) -> AsyncIterator[bytes]:
        wake = viewer.wake
        unread: deque[tuple[int, str]] = deque(maxlen=MAX_UNREAD)

        def hear(of: str, number: int, text: str) -> None:
            if not job or of in ("", job):
                unread.append((number, text))
                wake.set()

        unlisten = self._observer.listen(hear)
        try:
            loop = asyncio.get_running_loop()
            due_s, shown = loop.time(), ""
            while not viewer.ended:
                if loop.time() >= due_s:
                    due_s = loop.time() + STATE_EVERY_S
                    state = self._state(job)
                    # A comment keeps proxies from closing a quiet stream.
                    yield b": \n\n" if state == shown else _event("state", state)
                    shown = state
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
            self._viewers.pop(viewer, None)

    def _state(self, job: str) -> str:
        return (self._snapshots.job(job) or "null") if job else self._snapshots.jobs()


def _event(name: str, data: str, number: int | None = None) -> bytes:
    identity = "" if number is None else f"id: {number}\n"
    return f"{identity}event: {name}\ndata: {data}\n\n".encode()
