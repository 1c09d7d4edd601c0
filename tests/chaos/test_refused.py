"""Programs that `jaxft chaos` refuses after their undisturbed run, with a fake coordinator and without JAX."""

import sys

import pytest

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm import chaos
from jaxft_launch.storm.chaos import ChaosOptions, run_chaos

LISTENER = (
    "import socket, sys, time\n"
    "server = socket.create_server(('localhost', 0))\n"
    "print(f'listens (port {server.getsockname()[1]})', flush=True)\n"
    "time.sleep(600)\n"
)
# Reports steps as the library does in a program with several managers.
SEVERAL_JOBS = """
import json, os
with open(os.environ["JAXFT_CHAOS"].replace(".jsonl", ".steps"), "a") as file:
    def report(event, **fields):
        print(json.dumps({"t": 1.0, "event": event, "digest": "d0", **fields}), file=file)
    for last in 15, 4:
        for step in range(1, last + 1):
            times = {"attempts": 1, "compute_s": 0.0, "exchange_s": 0.0, "vote_s": 0.0, "apply_s": 0.0}
            report("step", step=step, loss=None, shards=[0], quorum_id=1, members=["group-0"], **times)
        report("finished", step=last)
"""
SILENT = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nsignal.pause()\n"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (
            SILENT,
            r"fails without a storm: the job hangs: no group reported a step for 4 s\.$",
        ),
        ("", "ended without a step of jaxft, so there is nothing to disturb"),
        (SEVERAL_JOBS, "has several jobs: its steps begin again at 1 after step 15"),
    ],
)
def test_a_program_that_cannot_be_compared_is_told_why(
    program: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent program hangs, also if it ends with status 0 once we end it, as a program that drains does."""
    monkeypatch.setattr(chaos, "UNDISTURBED_SILENCE_S", 4.0)
    options = ChaosOptions(kills=1, groups=2)
    with pytest.raises(LaunchError, match=error):
        run_chaos(
            options,
            (sys.executable, "-S", "-c", program),
            coordinator=(sys.executable, "-S", "-c", LISTENER),
        )
