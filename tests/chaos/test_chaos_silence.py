"""`jaxft chaos` over programs that do not train, with a fake coordinator."""

import sys

import pytest

from jaxft._chaos.chaos import ChaosOptions, run_chaos
from jaxft._launch._checks import LaunchError

LISTENER = (
    "import socket, sys, time\n"
    "server = socket.create_server(('localhost', 0))\n"
    "print(f'listens (port {server.getsockname()[1]})', flush=True)\n"
    "time.sleep(600)\n"
)
SILENT = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nsignal.pause()\n"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (
            SILENT,
            r"fails without a storm: the job hangs: no group reported a step for 1 s \(compiling may take longer: "
            r"then pass a larger --silence-timeout-s\)\.$",
        ),
        ("", "ended without a step of jaxft, so there is nothing to disturb"),
    ],
)
def test_a_program_that_is_silent_is_told_from_one_that_ends_without_a_step(program: str, error: str) -> None:
    """Also if it ends with status 0 once we end it, as a program that drains does."""
    options = ChaosOptions(kills=1, groups=2, silence_timeout_s=1.0)
    with pytest.raises(LaunchError, match=error):
        run_chaos(
            options,
            (sys.executable, "-S", "-c", program),
            coordinator=(sys.executable, "-S", "-c", LISTENER),
        )
