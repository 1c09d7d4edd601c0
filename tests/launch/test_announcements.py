"""What a program under a launcher logs of jaxft: as without one."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from jaxft._supervised._announcements import follow

heard = []
{before}
for _ in range({followers}):
    follow(lambda phase, step: heard.append((phase, step)))
{after}
log = logging.getLogger("jaxft")
log.debug("compute step 3 shard 0")
log.info("informs")
log.warning("warns")
assert heard == [("compute", 3)] * {followers}
"""


@pytest.mark.parametrize(("before", "followers"), [(True, 0), (True, 1), (False, 2)])
@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ("logging.basicConfig()", ["WARNING:jaxft:warns"]),
        ("logging.basicConfig(level=logging.INFO)", ["INFO:jaxft:informs", "WARNING:jaxft:warns"]),
        (
            "logging.basicConfig(); logging.getLogger('jaxft').setLevel('DEBUG')",
            ["DEBUG:jaxft:compute step 3 shard 0", "INFO:jaxft:informs", "WARNING:jaxft:warns"],
        ),
        ("logging.basicConfig(level=logging.INFO); logging.getLogger('jaxft').setLevel(logging.ERROR)", []),
    ],
)
def test_a_programs_own_levels_count(settings: str, lines: list[str], before: bool, followers: int) -> None:
    parts = {"before": settings if before else "", "after": "" if before else settings}
    program = PROGRAM.format(followers=followers, **parts)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines() == lines
