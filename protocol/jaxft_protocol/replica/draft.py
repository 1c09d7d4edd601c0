"""A draft of the replica's next state and effects, while an event is being handled."""

from typing import Any

from jaxft_protocol.messages import GroupMessage
from jaxft_protocol.replica.state import Effect, Failure, FailureKind, Log, Phase, Replica, Send
from jaxft_protocol.values import changed

# Phases in which the session is over, or may end at any time.
DONE = (Phase.FINISHED, Phase.DRAINED, Phase.LEAVING, Phase.LEFT, Phase.FAILED)


class Draft:
    def __init__(self, replica: Replica, now_s: float) -> None:
        self.replica = replica
        self.now_s = now_s
        self.effects: list[Effect] = []

    def update(self, **changes: Any) -> None:
        self.replica = changed(self.replica, **changes)

    def enter(self, phase: Phase, **changes: Any) -> None:
        self.update(phase=phase, since_s=self.now_s, waiting="", **changes)

    def send(self, message: GroupMessage) -> None:
        self.effects.append(Send(message))

    def log(self, text: str, *, warning: bool = False) -> None:
        self.effects.append(Log(text, warning))

    def fail(self, kind: FailureKind, text: str) -> None:
        self.enter(Phase.FAILED, failure=Failure(kind, text))
