"""Two ranks whose system calls fail: for a moment, or from some moment on."""

import re
import subprocess
import sys

import pytest

from tests import injection, patience

pytestmark = pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not() or "it can")

AGAIN = 75


def talking(*injections: str) -> subprocess.CompletedProcess[str]:
    command = [*injection.failing(*injections), sys.executable, "-m", "tests.ranks.talking"]
    return patience.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "error",
    ["ENOBUFS", *(pytest.param(error, marks=pytest.mark.long) for error in ("ENOMEM", "EINTR", "EAGAIN"))],
)
def test_calls_that_fail_for_a_moment_lose_no_message(error: str) -> None:
    """A lost message would leave the ranks at different points of the program."""
    done = talking(f"sendmsg:error={error}:when=1+3", f"recvfrom:error={error}:when=1+3")
    assert done.stdout.splitlines() == [*map(str, range(20)), "the other rank has ended"], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("injected", "logged"),
    [
        ("sendmsg:error=ENOBUFS:when=3+", "a message could not be sent to it: .*No buffer space available"),
        pytest.param(
            "sendmsg:error=EPERM:when=3+",
            "a message could not be sent to it: .*Operation not permitted",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "recvfrom:error=ETIMEDOUT:when=3+",
            "The connection is lost: Connection timed out",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_call_that_goes_on_failing_ends_the_group_with_the_reason(injected: str, logged: str) -> None:
    done = talking(injected)
    assert done.returncode == AGAIN, done.stderr
    assert "CameApart" not in done.stderr
    assert re.search(rf"a group shares fate: rank \d is lost \({logged}", done.stderr), done.stderr
