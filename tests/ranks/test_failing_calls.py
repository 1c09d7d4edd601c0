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


@pytest.mark.parametrize("error", ["ENOBUFS", "ENOMEM", "EINTR", "EAGAIN"])
@pytest.mark.parametrize("call", ["sendmsg", "recvfrom"])
def test_a_call_that_fails_for_a_moment_loses_no_message(call: str, error: str) -> None:
    """A lost message would leave the ranks at different points of the program."""
    done = talking(f"{call}:error={error}:when=1+3")
    assert done.stdout.splitlines() == [*map(str, range(20)), "the other rank has ended"], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("injected", "logged"),
    [
        ("sendmsg:error=EPERM:when=3+", "a message could not be sent to it: .*Operation not permitted"),
        ("sendmsg:error=ENOBUFS:when=3+", "a message could not be sent to it: .*No buffer space available"),
        ("recvfrom:error=ENOMEM:when=3+", "The connection is lost: Cannot allocate memory"),
        ("recvfrom:error=ETIMEDOUT:when=3+", "The connection is lost: Connection timed out"),
    ],
)
def test_a_call_that_goes_on_failing_ends_the_group_with_the_reason(injected: str, logged: str) -> None:
    done = talking(injected)
    assert done.returncode == AGAIN, done.stderr
    assert "CameApart" not in done.stderr
    assert re.search(rf"a group shares fate: rank \d is lost \({logged}", done.stderr), done.stderr
