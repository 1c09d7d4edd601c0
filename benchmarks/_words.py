"""A training worker's connection to its parent: events out; "make", "enter" and "stop" in.

Standard library only, because the peer's workers use it too. `benchmarks._worker` documents the lines.
"""

import json
import os
import sys
import threading
import time
from typing import Any

# Of the step that both sides train.
LEARNING_RATE, DECAY, MOMENT = 0.1, 0.01, 0.9


class Words:
    """The messages of a training loop.

    Attributes:
        until: the step at which the loop must end; None if not known yet.
    """

    def __init__(self) -> None:
        self.until: int | None = None

    def say(self, event: str, **values: Any) -> None:
        """Send the parent an event that has just happened."""
        line = json.dumps({"result": {"event": event, "at_s": time.monotonic(), **values}})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def hear(self, word: str) -> dict[str, Any]:
        """Wait for this command from the parent, and return its arguments."""
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        command = json.loads(line)
        assert command["do"] == word, f"got the command {command['do']} instead of {word}"
        return command["with"]

    def listen(self) -> None:
        """Start to listen for the parent's stop, and end when the parent is gone."""
        threading.Thread(target=self._listen, daemon=True).start()

    def over(self, step: int) -> bool:
        return self.until is not None and step >= self.until

    def _listen(self) -> None:
        for line in sys.stdin:
            self.until = json.loads(line)["with"]["step"]
        os._exit(0)  # the parent is gone
