"""A victim that announces the phases of each step like the library, without any training.

Takes the trainer's flags; sets its own log level, before and after, as programs do; ends after --steps steps.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from jaxft._supervised._victim import obey

PHASE_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--events", type=Path, required=True)
    flags = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logger = logging.getLogger("jaxft")
    logger.setLevel(logging.WARNING)
    obey(flags.events)
    for step in range(flags.steps):
        logger.setLevel("INFO")
        # Repeatedly: an order to die in a heal may arrive after the first one.
        logger.info("[jaxft group-0] heals to step %d from group-1", step)
        for phase in ("compute", "exchange", "vote", "apply"):
            logger.debug("%s step %d", phase, step)
            time.sleep(PHASE_S)  # a phase takes its time


if __name__ == "__main__":
    main()
