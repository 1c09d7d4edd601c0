"""Lines that are appended whole, or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience

# The kernel writes what fits, and says no to the rest, as on a full disk.
SCRIPT = """
import resource, sys, time
from pathlib import Path

def limit(size_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

def wait_until(done):
    while not done():
        time.sleep(0.01)

path = Path(sys.argv[1])
"""
DIRECTLY = """
from jaxft_protocol.host.lines import append
append(path, "one\\n")
limit(6)
try:
    append(path, "two\\nthree\\n")
except OSError:
    limit(-1)
    append(path, "four\\n")
"""
COORDINATOR = """
import asyncio
from jaxft_coordinator.observe._event_file import EventFile

async def write():
    file = EventFile(path)
    writing = asyncio.create_task(file.run())
    file.put("job", 1, "one")
    while path.read_text() != "one\\n":
        await asyncio.sleep(0.01)
    limit(6)
    file.put("job", 2, "two")
    file.put("job", 3, "three")
    while file.lost != 2:
        await asyncio.sleep(0.01)
    limit(-1)
    writing.cancel()
    file.put("job", 4, "four")
    file.close()

asyncio.run(write())
"""
GROUP = """
from jaxft._telemetry._line_file import LineFile
file = LineFile(path)
file.put("one")
wait_until(lambda: path.read_text() == "one\\n")
limit(6)
with file._lock:
    file._waiting.extend(["two", "three"])
wait_until(lambda: file._dropped == 2)
limit(-1)
file.put("four")
file.close()
"""


@pytest.mark.parametrize("writes", [DIRECTLY, COORDINATOR, GROUP], ids=["directly", "coordinator", "group"])
def test_a_full_disk_leaves_no_part_of_a_line(writes: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    patience.run(
        [sys.executable, "-c", SCRIPT + writes, str(path)], check=True, stderr=subprocess.PIPE, text=True
    )
    assert path.read_text() == "one\nfour\n"
