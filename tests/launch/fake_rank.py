"""A program under the launcher that does not train: it does what its arguments say, one argument for each life.

    fake_rank.py FOLDER LIFE...    the last LIFE is for all further lives too

A LIFE is a list of words: `steps:N` commits N steps; `phase:NAME:STEP` writes a phase of a step; `say:TEXT`;
`gate:NAME` waits for a file in FOLDER; `made:NAME` makes it; `exit:STATUS`; `kill`; `stop` (SIGSTOP); `shows` prints
its stacks on SIGUSR2; `alive` touches the phase file forever; `mute` waits forever; `drains:STEP` is drained on
SIGTERM; `deaf` ignores SIGTERM. A word `1=WORD` is only for rank 1, and `group-1=WORD` for that group.
"""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

# Without `jaxft/__init__.py`, and so without the seconds to import JAX.
sys.modules["jaxft"] = type(sys)("jaxft")
sys.modules["jaxft"].__path__ = [str(Path(__file__).parents[2] / "jaxft")]

from jaxft._supervised._phase_file import Word, WordFile  # noqa: E402

PACE_S = 0.005


def main() -> None:
    folder, lives = Path(sys.argv[1]), sys.argv[2:]
    group, rank = os.environ["JAXFT_GROUP"], os.environ["JAXFT_RANK"]
    starts = folder / f"{group}.{rank}.starts"
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    life = len(starts.read_text().split()) - 1
    file, began_s = WordFile(Path(os.environ["JAXFT_PHASE_FILE"])), time.time()
    for word in lives[min(life, len(lives) - 1)].split():
        whom, _, rest = word.rpartition("=")
        if whom in ("", rank, group):
            do(*rest.split(":"), folder=folder, file=file, began_s=began_s)


def do(what: str, *values: str, folder: Path, file: WordFile, began_s: float) -> None:  # noqa: C901 - one case a word
    def tell(phase: str, step: int, committed: int = 0) -> None:
        times = {"t_s": time.time(), "first_t_s": began_s}
        file.write(Word(phase=phase, step=step, members=0, committed=committed, **times))

    match what, *values:
        case ["steps", count]:
            for step in range(int(count)):
                tell("compute", step, step)
                time.sleep(PACE_S)
            tell("outside", int(count), int(count))
        case ["phase", name, step]:
            tell(name, int(step))
        case ["say", text]:
            sys.stdout.write(f"{text}\n")
        case ["gate", name]:
            while not (folder / name).exists():
                time.sleep(0.01)
        case ["made", name]:
            (folder / name).touch()
        case ["exit", status]:
            sys.exit(int(status))
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["shows"]:
            faulthandler.register(signal.SIGUSR2)
        case ["alive"]:
            while True:
                file.touch()
                time.sleep(0.05)
        case ["mute"]:
            while True:  # a signal that came just before `signal.pause` would not end that
                time.sleep(0.05)
        case ["drains", step]:

            def drain(*_: object) -> None:
                tell("drained", int(step))
                sys.exit(0)

            signal.signal(signal.SIGTERM, drain)
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case _:
            raise ValueError(what)


if __name__ == "__main__":
    main()
