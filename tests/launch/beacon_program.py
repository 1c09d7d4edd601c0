"""A program with a beacon that observes made-up steps: beacon_program.py WHAT [STDERR]."""

import io
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxft._report import StepReport
from jaxft._supervised._beacon import Beacon, beacon_of_process
from jaxft._telemetry._call import Call


def run(beacon: Beacon, step: int, within: Callable[[], None]) -> None:
    """Take a step as an engine does, and call `within` in the middle."""
    beacon.begins(step)
    beacon.enters("compute", step)
    within()
    beacon.enters("apply", step)
    report = StepReport(step=step + 1, members=("group-0", "group-1"))
    beacon.called(Call(report, before=step, began_ns=0, ended_ns=0))
    sys.stdout.write(f"took step {step + 1}\n")
    sys.stdout.flush()


def forever() -> None:
    while True:
        time.sleep(0.01)


def heal(beacon: Beacon) -> None:
    """Act as a group that is behind the others, and then fails in its own step."""
    beacon.enters("heal", 7)
    beacon.enters("replay", 7)
    for phase in ("wait", "compute", "exchange", "vote"):
        beacon.enters(phase, 8)
    forever()


def main(what: str, stderr: str = "") -> None:
    if stderr:
        sys.stderr = io.StringIO()
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    beacon = beacon_of_process()
    assert isinstance(beacon, Beacon)
    assert beacon_of_process() is beacon
    if what == "broken":
        assert beacon._words is not None
        os.close(beacon._words._file)
    if what == "heals":
        heal(beacon)
    if what == "over":
        beacon.begins(0)
        threading.Thread(target=forever).start()
        return
    if what == "in-vain":
        beacon.begins(0)
        beacon.stranded_while(lambda: not Path(os.environ["JAXFT_PHASE_FILE"]).with_name("held").exists())
        forever()
    if what == "stranded":
        beacon.begins(0)
        beacon.stranded_while(lambda: False)
        beacon.stranded()
        forever()
    for step in itertools.count():
        run(beacon, step, forever if what == "hang" else lambda: time.sleep(0.2))


if __name__ == "__main__":
    main(*sys.argv[1:])
