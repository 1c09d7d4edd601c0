"""The side of a training worker that speaks with its parent: events out; "make", "enter" and "stop" in.

Standard library only: the peer's workers use it as well. The lines are those of `benchmarks._worker`.
"""

import json
import os
import sys
import threading
import time
from typing import Any


class Words:
    """What a training loop says and is told.

    Attributes:
        until: the step at which the loop is to end; None while nobody has said.
    """

    def __init__(self) -> None:
        self.until: int | None = None

    def say(self, event: str, **values: Any) -> None:
        """Tell the parent of something that has just happened."""
        line = json.dumps({"result": {"event": event, "at_s": time.monotonic(), **values}})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def hear(self, word: str) -> dict[str, Any]:
        """Wait until the parent says this word, and return what it says with it."""
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        told = json.loads(line)
        assert told["do"] == word, f"told to {told['do']}, and not to {word}"
        return told["with"]

    def listen(self) -> None:
        """From now on hear when to stop, and end when the parent is gone."""
        threading.Thread(target=self._listen, daemon=True).start()

    def over(self, step: int) -> bool:
        return self.until is not None and step >= self.until

    def _listen(self) -> None:
        for line in sys.stdin:
            self.until = json.loads(line)["with"]["step"]
        os._exit(0)  # the parent is gone
