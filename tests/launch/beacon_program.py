"""A program with a beacon and an engine that only announces phases: beacon_program.py WHAT [STDERR]."""

import io
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from jaxft._supervised._beacon import Beacon, beacon_of_process


class Engine:
    """Announces what an engine announces, and asks `within` in the middle of a step."""

    step = 0

    def __init__(self, within: Any) -> None:
        self._within = within

    def compiling(self) -> Any:
        raise NotImplementedError

    def run(self, call: Any, state: Any) -> Any:
        logging.getLogger("jaxft").debug("compute step %d shard 0", self.step)
        self._within()
        logging.getLogger("jaxft").debug("apply step %d", self.step)
        self.step += 1
        sys.stdout.write(f"took step {self.step}\n")
        sys.stdout.flush()
        return state, None


def forever() -> None:
    while True:
        time.sleep(0.01)


def heal() -> None:
    """Announce what a group does that is behind the others, and then fails in its own step."""
    logging.getLogger("jaxft").info("[jaxft group-1] heals to step 7 from group-0")
    for announced in (
        "replay step 7",
        "wait step 8",
        "compute step 8 shard 0",
        "exchange step 8",
        "vote step 8",
    ):
        logging.getLogger("jaxft").debug(announced)
    forever()


class Copied:
    """What programs put in the place of a stream, to copy their output to a file."""

    def write(self, text: str) -> None:
        sys.__stderr__.write(text)  # pyright: ignore[reportOptionalMemberAccess]

    def flush(self) -> None:
        pass


STDERR: dict[str, Any] = {"copied": Copied, "text": io.StringIO, "none": lambda: None}


def main(what: str, stderr: str = "") -> None:
    if stderr == "closed":
        sys.__stderr__.close()  # pyright: ignore[reportOptionalMemberAccess]
    elif stderr:
        sys.stderr = STDERR[stderr]()
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    beacon = beacon_of_process()
    assert isinstance(beacon, Beacon)
    assert beacon_of_process() is beacon
    if what == "broken":
        assert beacon._words is not None
        os.close(beacon._words._file)
    if what == "heals":
        heal()
    engine = beacon.watching(Engine(forever if what == "hang" else lambda: time.sleep(0.2)), lambda: 2)
    if what == "in-vain":
        beacon.begins(0)
        beacon.stranded_while(lambda: not Path(os.environ["JAXFT_PHASE_FILE"]).with_name("held").exists())
        forever()
    if what == "stranded":
        beacon.begins(0)
        beacon.stranded_while(lambda: False)
        beacon.stranded()
        forever()
    while what != "idle":
        engine.run(None, [])  # pyright: ignore
    forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
