"""What lies between groups and coordinators: ordered streams, and the cables that they run through."""

from collections import deque
from typing import TYPE_CHECKING

from jaxft_protocol.coordinator.job import SessionId
from jaxft_protocol.messages import CoordinatorMessage, GroupMessage
from jaxft_protocol.replica import state as r

if TYPE_CHECKING:
    from .coordinator import Life
    from .process import Process
    from .world import World

NEVER = float("inf")


class Cables:
    """Which directions are cut, and until when: of a group to the coordinators, and from one group to another."""

    def __init__(self, world: "World") -> None:
        self.up: dict[str, float] = {}
        self.down: dict[str, float] = {}
        self.between: dict[tuple[str, str], float] = {}
        self._blocked: dict[tuple[str, str], float] = {}
        self._world = world

    def cut(self, name: str, until_s: float, *, up: bool, down: bool) -> None:
        """Cut a group off from the coordinators. Mail waits; who waits too long takes the stream for dead."""
        if up:
            self.up[name] = max(until_s, self.up.get(name, 0.0))
        if down:
            self.down[name] = max(until_s, self.down.get(name, 0.0))
        process = self._world.processes.get(name)
        if process is not None and process.stream is not None:
            process.stream.falls_silent()
            self._world.after(self._world.setting.keepalive_s, process.stream.check_alive)

    def block(self, name: str, host: str, until_s: float) -> None:
        """Let no new stream of a group come to that host."""
        self._blocked[name, host] = until_s

    def is_blocked(self, name: str, host: str) -> bool:
        return self._world.now_s < self._blocked.get((name, host), 0.0)

    def is_cut(self, name: str) -> bool:
        now_s = self._world.now_s
        return now_s < self.up.get(name, 0.0) or now_s < self.down.get(name, 0.0)

    def cut_link(self, source: str, target: str, until_s: float) -> None:
        self.between[source, target] = max(until_s, self.between.get((source, target), 0.0))

    def link_is_cut(self, source: str, target: str) -> bool:
        return self._world.now_s < self.between.get((source, target), 0.0)

    def repair(self) -> None:
        for cut in (self.up, self.down):
            for name in cut:
                cut[name] = min(cut[name], self._world.now_s)
        self.between.clear()
        self._blocked.clear()


class Stream:
    """One stream, two ordered directions. A break ends each of them at a different moment."""

    def __init__(self, world: "World", process: "Process", life: "Life") -> None:
        self.world = world
        self.process = process
        self.life = life
        self.id = life.accept(self)
        self.broken = False
        self.silent_since_s: float | None = None  # whether or not an end has noticed
        self._ups: deque[GroupMessage | None] = deque()  # under way; None is the end
        self._downs: deque[CoordinatorMessage | None] = deque()
        self._up_s = self._down_s = world.now_s  # when the last one arrives
        self._up_ends_s = self._down_ends_s = NEVER
        self._up_held_s = 0.0  # mail that is still under way arrives only then

    def up(self, message: GroupMessage | None) -> None:
        world = self.world
        self._ups.append(message)
        self._up_s = max(self._up_s, world.now_s + 0.0002 + world.random() * world.setting.delay_s)
        world.at(self._up_s, self._arrive_up)

    def down(self, message: CoordinatorMessage | None) -> None:
        world = self.world
        self._downs.append(message)
        self._down_s = max(self._down_s, world.now_s + 0.0002 + world.random() * world.setting.delay_s)
        world.at(self._down_s, self._arrive_down)

    def _arrive_up(self) -> None:
        now_s, world = self.world.now_s, self.world
        held_s = max(self._up_held_s, world.cables.up.get(self.process.name, 0.0))
        if now_s < held_s:
            world.at(held_s, self._arrive_up)
        elif self._ups:
            message = self._ups.popleft()
            if now_s > self._up_ends_s and message is not None:
                return
            if self.process.stream is not self and message is not None:
                world.sometimes.note("late message")
            self.life.receive(self, message)

    def _arrive_down(self) -> None:
        now_s, world = self.world.now_s, self.world
        held_s = world.cables.down.get(self.process.name, 0.0)
        if now_s < held_s:
            world.at(held_s, self._arrive_down)
        elif self._downs:
            message = self._downs.popleft()
            if now_s > self._down_ends_s:
                return
            if message is None:
                self._group_sees("the coordinator ended the session")
            else:
                self.process.from_stream(self, r.Received(message))

    def break_off(self, *, group: bool, coordinator: bool, late_s: float = 0.0) -> None:
        """Cut both directions. Who is to notice does so at once; the other by its keepalive, or by silence.

        With `late_s` the group's mail is not lost, but arrives that much later.
        """
        if self.broken:
            return
        self.broken = True
        self.falls_silent()
        world = self.world
        delay_s = world.setting.delay_s
        self._down_ends_s = world.now_s + world.random() * delay_s
        if late_s:
            self._up_held_s = world.now_s + late_s
            self.up(None)
        else:
            self._up_ends_s = world.now_s + world.random() * delay_s
            if coordinator:
                world.at(self._up_ends_s, self._coordinator_sees)
        noticed_s = self._down_ends_s + (0.0 if group else world.setting.keepalive_s)
        world.at(noticed_s, self._group_sees, "connection reset")

    def answers(self) -> bool:
        """Whether the process at its other end lives, and pings reach it: gRPC answers them without Python's lock."""
        cut = self.world.cables.is_cut(self.process.name)
        return not (self.broken or cut or self.process.dead or self.process.is_stopped)

    def falls_silent(self) -> None:
        if self.silent_since_s is None:
            self.silent_since_s = self.world.now_s

    def hang_up(self) -> None:
        """The group ends the stream."""
        self.broken = True
        self._down_ends_s = self.world.now_s
        self.up(None)

    def check_alive(self) -> None:
        """The group's keepalive: nothing has come through for too long."""
        if not self.broken and self.world.cables.is_cut(self.process.name):
            self.broken = True
            self._down_ends_s = self._up_ends_s = self.world.now_s
            self._group_sees("keepalive: no answer")
            self._coordinator_sees()

    def _coordinator_sees(self) -> None:
        held_s = self.world.cables.up.get(self.process.name, 0.0)
        if self.world.now_s < held_s:
            self.world.at(held_s, self._coordinator_sees)
        else:
            self.life.receive(self, None)

    def _group_sees(self, reason: str) -> None:
        self.broken = True
        if not self._up_held_s:
            self._up_ends_s = min(self._up_ends_s, self.world.now_s)
        self.process.from_stream(self, r.Disconnected(reason))


__all__ = ["Cables", "SessionId", "Stream"]
