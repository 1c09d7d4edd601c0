"""The status with which a rank of several ends, and that it waits for no other then. In fresh interpreters."""

import subprocess
import sys

import pytest

from tests import patience

# In the place of JAX's exit handler, which waits for ranks that never come: it changes the status.
PROGRAM = """
import atexit, os, sys
from jaxft._base import _ending
atexit.register(lambda: os._exit(66))
sys.stdout.write("written")  # not flushed
try:
    {body}
except BaseException as error:
    _ending.keep_status(error)
    {then}
"""


def status(body: str, then: str) -> int:
    program = PROGRAM.format(body=body, then=then)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience.FAR_S, check=False
    )
    assert ended.stdout == "written", ended.stderr
    return ended.returncode


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("ValueError(1)", 1),
        ("KeyboardInterrupt", 130),
        ("SystemExit(3)", 3),
        ("SystemExit(-1)", 255),
        ("SystemExit('the loss is NaN')", 1),
    ],
)
def test_an_error_that_is_not_caught_ends_the_rank_with_its_own_status(error: str, expected: int) -> None:
    assert status(f"raise {error}", "raise") == expected


@pytest.mark.parametrize("error", ["SystemExit(0)", "SystemExit"])
def test_a_rank_that_ends_well_waits_for_the_others(error: str) -> None:
    assert status(f"raise {error}", "raise") == 66


def test_a_rank_that_catches_its_error_ends_as_if_there_had_been_none() -> None:
    assert status("raise ValueError", "pass") == 66
