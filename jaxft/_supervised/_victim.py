"""Turns a process into a victim, which dies or hangs as ordered.

It gets the phases of its group, and records the current phase in a file. Orders arrive
through a named pipe. `die PHASE DEPTH` makes the process send itself a real SIGKILL the next time that phase begins:
at its start, or after the fraction DEPTH of its recent length. `hang PHASE SECONDS` makes the training thread hang
for that long when the phase begins, while the other threads continue. `pace SECONDS` adds that much time to each
later step, before it computes, like a slow input.
"""

import os
import signal
import threading
import time
import traceback
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path

from jaxft._supervised._phase_file import Word, WordFile, orders_beside, words_beside

# The assumed length of a phase that has not occurred yet: most take a few milliseconds.
UNKNOWN_LENGTH_S = 0.005
# The shortest of this many recent lengths of a phase counts, so that the death usually falls within the phase.
LENGTHS_KEPT = 8


class Doom:
    """Gets the phases, and kills the process in the ordered one."""

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
        """Accept an order. It replaces the last order of its kind."""
        match line.split():
            case ["die", phase, depth]:
                self._ordered = (phase, float(depth))
            case ["hang", phase, seconds]:
                self._hang = (phase, float(seconds))
            case ["pace", seconds]:
                self._pace_s = float(seconds)
            case _:
                raise ValueError(
                    f"{line!r} is not an order; use die PHASE DEPTH, hang PHASE SECONDS or pace SECONDS"
                )

    def enter(self, phase: str, step: int) -> None:
        """Record that a phase begins, and die if it is the ordered one."""
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
        finally:  # die as ordered, even if the record could not be written
            os.kill(os.getpid(), signal.SIGKILL)


def obey(events: Path) -> Doom:
    """Make this process a victim; its phase file and orders are next to its event file. Tell it each phase."""
    doom = Doom(WordFile(words_beside(events)))
    take_orders(doom, os.open(orders_beside(events), os.O_RDONLY))
    return doom


def take_orders(doom: Doom, descriptor: int) -> None:
    """Read orders in a separate thread until the pipe closes.

    An order that cannot be carried out ends the process: the storm would wait for a death that never comes.
    """

    def read() -> None:
        try:
            take()
        except BaseException:  # top level of the thread
            traceback.print_exc()
            os._exit(os.EX_SOFTWARE)

    def take() -> None:
        rest = b""
        while new := os.read(descriptor, 4096):
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                doom.order(line.decode())

    threading.Thread(target=read, name="orders", daemon=True).start()
