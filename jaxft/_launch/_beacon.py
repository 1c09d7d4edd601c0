"""What a process of a group tells its supervisor, which is another process.

It writes its current phase to the file that the environment names (JAXFT_PHASE_FILE), and touches the file every
second as long as its threads run. On SIGTERM it finishes its step and ends with the status that asks for another
start; several processes of a group finish the same one, after SIGTERM to the first of them. On SIGUSR2 it prints
where its threads stand, which its supervisor wants to know before it kills it.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from jaxft._launch._announcements import WAIT, follow
from jaxft._launch._phase_file import Word, WordFile
from jaxft._launch._statuses import AGAIN
from jaxft._ranks._ranks import OneRank, Ranks
from jaxft._replica._engine import Call, Engine
from jaxft._replica._steps import LoopWatch

VARIABLE = "JAXFT_PHASE_FILE"
# Between two calls of the step, in the user's own code.
OUTSIDE = "outside"
TOUCH_EVERY_S = 1.0


class Leaves(SystemExit):
    """All processes of this group leave the job after the same step."""


@functools.cache
def beacon_of_process() -> "Beacon | None":
    """Return the beacon of this process, or None if no supervisor asks for one."""
    file = os.environ.get(VARIABLE)
    return Beacon(Path(file)) if file else None


class Beacon:
    """Tells the supervisor about this process, until the process ends."""

    def __init__(self, file: Path) -> None:
        self._words = WordFile(file)
        self._first_t_s = time.time()
        self._leaves = False
        self._ranks: Ranks = OneRank()
        follow(self._tell)
        self._take_signals()
        threading.Thread(target=self._touch, name="beacon", daemon=True).start()

    def of_group(self, ranks: Ranks) -> None:
        """Leave the job together with the other ranks of this group."""
        self._ranks = ranks

    def watching(self, engine: Engine) -> "Watched":
        """Return an engine that tells when a call of the step begins and ends."""
        return Watched(self, engine)

    def begins(self, step: int) -> None:
        """Tell that a call of the step begins, or leave the job as ordered.

        Raises:
            SystemExit: the supervisor sent SIGTERM.
        """
        if self._ranks.size == 1:  # several ranks agree at the end of a call
            self._leave_if_told()
        self._tell(WAIT, step)

    def ends(self, step: int) -> None:
        """Tell that a call of the step has ended, or leave the job as ordered.

        Raises:
            SystemExit: the supervisor sent SIGTERM.
        """
        self._tell(OUTSIDE, step)
        self._leave_if_told()

    def _leave_if_told(self) -> None:
        if self._ranks.decide("leave", self._leaves):
            raise Leaves(AGAIN)

    def _tell(self, phase: str, step: int) -> None:
        self._words.write(Word(phase=phase, step=step, t_s=time.time(), first_t_s=self._first_t_s))

    def _touch(self) -> None:
        while True:
            self._words.touch()
            time.sleep(TOUCH_EVERY_S)

    def _take_signals(self) -> None:
        """Handle signals for which the program itself has no handler."""
        if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR2, all_threads=True)
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows handlers only there; SIGTERM then ends the process at once
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._leaves = True


class Watched:
    """An `Engine` whose calls a beacon tells."""

    def __init__(self, beacon: Beacon, engine: Engine) -> None:
        self._beacon = beacon
        self._engine = engine

    @property
    def step(self) -> int:
        return self._engine.step

    @property
    def handed(self) -> Sequence[jax.Array] | None:
        return self._engine.handed

    @property
    def unreturned(self) -> Sequence[jax.Array] | None:
        return self._engine.unreturned

    @property
    def loop(self) -> LoopWatch:
        return self._engine.loop

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.compiling()

    def join(self, call: Call, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self._beacon.begins(self._engine.step)
        result = self._engine.join(call, state)
        self._beacon.ends(self._engine.step)
        return result

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        self._engine.edit(changes)

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        self._beacon.begins(self._engine.step)
        result = self._engine.run(call, state)
        self._beacon.ends(self._engine.step)
        return result
