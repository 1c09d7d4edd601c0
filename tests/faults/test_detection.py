"""How soon the coordinator knows of a death: at once if the process is gone, in time if it only fell silent."""

import signal
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.faults.trial import HEARTBEAT_S, Trial, figures, slack_s, trial

# By default, tests/coordinator/test_server.py shows the effects of a closed stream and of silence, without times.
pytestmark = [pytest.mark.storm, pytest.mark.processes, pytest.mark.timeout(240)]

# A machine that stalls may be late once; with nothing in the way it takes a few milliseconds.
DEATH_S = 0.1
TICK_S = 0.1


def noticed_s(job: Trial, text: str, since_s: float) -> float:
    """How long after a moment the coordinator has logged something of a group."""
    job.until_coordinator_says(text)
    line = next(line for line in job.here.coordinator_log.read_text().splitlines() if text in line)
    logged = datetime.strptime(line[: len("2000-01-01 00:00:00,000")], "%Y-%m-%d %H:%M:%S,%f")
    return logged.timestamp() - since_s


def test_deaths_are_noticed_in_time(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path) as job:
        stopped_s = time.time()
        job.workers["group-0"].process.send_signal(signal.SIGSTOP)
        silent_s = noticed_s(job, "lost group-0 (no heartbeat for", stopped_s)
        job.workers["group-0"].process.send_signal(signal.SIGCONT)
        job.until_back("group-0")
        deaths_s: list[float] = []
        for group in ("group-2", "group-1"):
            killed_s = time.time()
            job.workers[group].process.send_signal(signal.SIGKILL)
            deaths_s.append(noticed_s(job, f"lost {group} (its connection closed)", killed_s))
            job.until_step("group-0", 2)
            job.former.append(job.workers.pop(group))
        figures.info("silence noticed after %.2f s, deaths after %s s", silent_s, deaths_s)
        assert min(deaths_s) < DEATH_S
        assert max(deaths_s) < DEATH_S + slack_s()
        # It was last heard up to a third of the timeout before it fell silent.
        assert 2 / 3 * HEARTBEAT_S - TICK_S <= silent_s < HEARTBEAT_S + slack_s()
        job.finish(undisturbed)
