"""What makes a process a victim that can be told when to die.

It listens to what the library announces on its logger, and keeps its last words in a file. Orders come through a
named pipe. `die PHASE DEPTH` makes the process send itself a real SIGKILL in that phase, the next time it begins: at
its very beginning, or after the fraction DEPTH of the time that the phase has taken lately. `hang PHASE SECONDS`
makes the thread that trains stand still for so long when that phase begins, while all others of the process go on.
`pace SECONDS` makes it spend so much more on each step from then on, before it computes, as a slow input would.
"""

import logging
import os
import signal
import threading
import time
import traceback
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path

from jaxft._chaos._phase_file import Word, WordFile, words_beside
from jaxft._chaos._phases import announced
from jaxft._launch._events import orders_beside

# The length of a phase that this process has not been through yet: most take a few milliseconds.
UNKNOWN_LENGTH_S = 0.005
# Of the lengths of a phase so far, the shortest of so many counts, so that the death mostly falls within it.
LENGTHS_KEPT = 8


class Doom:
    """Follows the announced phases, and ends the process in the one that was ordered."""

    def __init__(self, words: WordFile) -> None:
        self._words = words
        self._word: Word | None = None
        self._lengths_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LENGTHS_KEPT))
        self._ordered: tuple[str, float] | None = None
        self._hang: tuple[str, float] | None = None
        self._hung_t_s: float | None = None
        self._pace_s = 0.0
        self._paced_step = -1

    def order(self, line: str) -> None:
        """Take in an order. It replaces the former one of its kind."""
        match line.split():
            case ["die", phase, depth]:
                self._ordered = (phase, float(depth))
            case ["hang", phase, seconds]:
                self._hang = (phase, float(seconds))
            case ["pace", seconds]:
                self._pace_s = float(seconds)
            case _:
                raise ValueError(f"{line!r} is no order: die PHASE DEPTH, hang PHASE SECONDS or pace SECONDS")

    def enter(self, phase: str, step: int) -> None:
        """Note that a phase begins, and die if it is the ordered one."""
        now_s, former = time.time(), self._word
        if former is not None:
            self._lengths_s[former.phase].append(now_s - former.t_s)
        first_t_s = now_s if former is None else former.first_t_s
        hangs_s = self._hang[1] if self._hang is not None and self._hang[0] == phase else 0.0
        if hangs_s:
            self._hang, self._hung_t_s = None, now_s
        self._word = Word(phase=phase, step=step, t_s=now_s, first_t_s=first_t_s, hung_t_s=self._hung_t_s)
        self._words.write(self._word)
        if hangs_s:
            time.sleep(hangs_s)
        if self._ordered is not None and self._ordered[0] == phase:
            self._die_soon(phase)
        if phase == "compute" and step != self._paced_step:
            self._paced_step = step
            time.sleep(self._pace_s)

    def _die_soon(self, phase: str) -> None:
        assert self._ordered is not None
        delay_s = self._ordered[1] * min(self._lengths_s[phase], default=UNKNOWN_LENGTH_S)
        self._ordered = None
        if delay_s == 0.0:
            self._die()
        else:
            threading.Timer(delay_s, self._die).start()

    def _die(self) -> None:
        assert self._word is not None
        try:
            self._words.write(replace(self._word, dies_t_s=time.time()))
        finally:  # ordered to die, it dies, though it may be without a word
            os.kill(os.getpid(), signal.SIGKILL)


def obey(events: Path) -> None:
    """Make this process a victim: last words and orders are beside its event file."""
    doom = Doom(WordFile(words_beside(events)))
    take_orders(doom, os.open(orders_beside(events), os.O_RDONLY))
    listen(doom)


def listen(doom: Doom) -> None:
    """Have the library's announcements reach `doom`, and keep them out of the log."""
    logger = logging.getLogger("jaxft")
    shown = max(logging.INFO, logger.getEffectiveLevel())

    def hear(record: logging.LogRecord) -> bool:
        if found := announced(record.getMessage()):
            doom.enter(*found)
        return record.levelno >= shown

    logger.addFilter(hear)
    logger.setLevel(logging.DEBUG)
    # The program may set the level that it wants to log; what we hear must not depend on it.
    vars(logger)["setLevel"] = lambda level: None


def take_orders(doom: Doom, descriptor: int) -> None:
    """Take in orders as they come, in a thread of its own, until there can be no more.

    An order that cannot be carried out ends the process: the storm would wait for a death that never comes.
    """

    def read() -> None:
        try:
            take()
        except BaseException:  # the top of a thread
            traceback.print_exc()
            os._exit(os.EX_SOFTWARE)

    def take() -> None:
        rest = b""
        while new := os.read(descriptor, 4096):
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                doom.order(line.decode())

    threading.Thread(target=read, name="orders", daemon=True).start()
