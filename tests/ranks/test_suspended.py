"""All ranks of a group are stopped, as on a machine that is suspended, for longer than one may be silent."""

import os
import signal
import subprocess
import sys
import time

from tests import patience

SILENCE_S = 2.0


def test_ranks_that_are_suspended_together_go_on() -> None:
    command = [sys.executable, "-m", "tests.ranks.talking", str(SILENCE_S)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, text=True, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as both:
        assert both.stdout is not None
        assert [both.stdout.readline() for _ in range(20)] == [f"{number}\n" for number in range(20)]
        for _ in range(2):
            os.killpg(both.pid, signal.SIGSTOP)
            over_s = time.monotonic() + 1.5 * SILENCE_S
            patience.until(lambda over_s=over_s: time.monotonic() > over_s, "the stop to have lasted")
            os.killpg(both.pid, signal.SIGCONT)
        logged, log = patience.communicate(both, "", limit_s=patience.FAR_S)
    assert logged == "the other rank has ended\n", log
    assert both.returncode == 0
