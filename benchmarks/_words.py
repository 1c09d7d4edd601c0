"""The side of a training worker that speaks with its parent: events out, "go" and "stop" in.

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

    def wait_for_go(self) -> dict[str, Any]:
        """Return the options of this run; from then on "stop" is heard."""
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        threading.Thread(target=self._listen, daemon=True).start()
        return json.loads(line)["with"]

    def over(self, step: int) -> bool:
        return self.until is not None and step >= self.until

    def _listen(self) -> None:
        for line in sys.stdin:
            self.until = json.loads(line)["with"]["step"]
        os._exit(0)  # the parent is gone
