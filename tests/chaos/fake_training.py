"""A victim that enters the phases of each step like the library, without any training.

Takes the trainer's flags; ends after --steps steps.
"""

import argparse
import time
from pathlib import Path

from jaxft._supervised._victim import obey

PHASE_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--events", type=Path, required=True)
    flags = parser.parse_args()
    doom = obey(flags.events)
    for step in range(flags.steps):
        # Repeatedly: an order to die in a heal may arrive after the first one.
        doom.enter("heal", step)
        for phase in ("compute", "exchange", "vote", "apply"):
            doom.enter(phase, step)
            time.sleep(PHASE_S)  # a phase takes its time


if __name__ == "__main__":
    main()
