"""The exchange in Python: the definition of the compiled lane, and what runs where that was not built."""

import select
import time
from collections.abc import Iterable, Iterator

from jaxft._exchange._channel import Channel, Frame
from jaxft._exchange._links import Links
from jaxft._exchange._plan import PeerLost, Planned, Task, Turn, partials_to, results_from
from jaxft._exchange._reducer import Reducer


class PythonLane:
    def __init__(self, links: Links, task: Task) -> None:
        self.task = task
        layout = task.layout
        plan = task.plan or links.plan(layout, task.partials.shards, task.strands)
        stamps = links.stamps(layout, task.step)
        self._reducer = Reducer(
            plan,
            me=links.me,
            layout=layout,
            partials=task.partials,
            scratch=links.scratch,
            result=task.result,
            kept=task.kept,
        )
        self._abort = links.abort
        self._results = results_from(stamp=stamps[links.me], plan=plan, layout=layout)
        self._channels = {
            number: Channel(
                connection,
                outgoing=self._outgoing(
                    partials_to(number, stamp=stamps[links.me], plan=plan, layout=layout)
                ),
                partials=partials_to(links.me, stamp=stamps[number], plan=plan, layout=layout),
                results=results_from(stamp=stamps[number], plan=plan, layout=layout),
                buffer_for=self._reducer.buffer_for,
                arrived=self._reducer.arrived,
                progress_in=None if task.heeds_progress is None else stamps[number].progress_header(),
                heeds_progress=bool(task.heeds_progress),
            )
            for number, connection in links.connections.items()
        }
        self._by_fd = {channel.sock.fileno(): number for number, channel in self._channels.items()}
        self._poller = select.poll()
        self._poller.register(links.abort, select.POLLIN)
        self._watched: dict[int, int] = {}  # poll events by descriptor, where there are any
        self._moved_s = dict.fromkeys(self._channels, time.monotonic())

    def turn(self, seconds: float) -> Turn:
        if self._reducer.can_combine:
            self._combine()
        self._watch()
        if self._reducer.done and not self._watched:
            return Turn.DONE
        events = self._poller.poll(0.0 if self._reducer.can_combine else 1000 * seconds)
        if self._abort.is_set:
            return Turn.STILL
        moved_bytes = sum(self._serve(self._by_fd[fd], event) for fd, event in events)
        return Turn.MOVED if moved_bytes else Turn.STILL

    def owing(self) -> list[int]:
        return [number for number, channel in self._channels.items() if channel.owes_partials]

    def unfinished(self) -> list[int]:
        return [number for fd, number in self._by_fd.items() if fd in self._watched]

    def idle(self) -> list[int]:
        return [number for number, channel in self._channels.items() if not channel.sending]

    def moved_s(self, number: int) -> float:
        return self._moved_s[number]

    def close(self) -> None:
        pass

    def _outgoing(self, planned: Iterable[Planned]) -> Iterator[Frame]:
        for frame in planned:
            assert frame.node is not None
            payload = self._reducer.partial_bytes(frame.chunk, frame.node)
            assert payload.nbytes == frame.length_bytes
            yield frame.header, payload

    def _combine(self) -> None:
        number = self._reducer.combine()
        for peer, channel in self._channels.items():
            if channel.paused:
                channel.resume()
                self._moved_s[peer] = time.monotonic()  # we paused it, so it is not late
            if self._results:
                frame = self._results[number]
                channel.push((frame.header, self._reducer.result_bytes(frame.chunk)))

    def _watch(self) -> None:
        """Poll each connection for what its channel can do next, and stop polling it when it is done."""
        for channel in self._channels.values():
            events = select.POLLOUT if channel.sending else 0
            if channel.paused:
                events |= select.POLLRDHUP  # no buffer for its bytes, but notice a disconnect
            elif channel.receiving:
                events |= select.POLLIN
            fd = channel.sock.fileno()
            if events == self._watched.get(fd, 0):
                continue
            if events:
                self._poller.register(fd, events)
                self._watched[fd] = events
            else:
                self._poller.unregister(fd)
                del self._watched[fd]

    def _serve(self, number: int, event: int) -> int:
        channel = self._channels[number]
        moved_bytes = 0
        try:
            if channel.receiving and event & ~select.POLLOUT:
                moved_bytes += channel.receive()
            if channel.sending and event & ~select.POLLIN:
                moved_bytes += channel.send()
        except OSError as error:
            raise PeerLost(number, error.strerror or str(error)) from error
        if moved_bytes:
            self._moved_s[number] = time.monotonic()
        return moved_bytes
