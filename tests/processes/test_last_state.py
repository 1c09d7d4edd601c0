"""The last state of a run is saved although the group that is to save it is killed. Real processes."""

from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone
from tests.processes.test_all_die import flags, saved_steps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
STEPS = 7


@pytest.mark.long
@pytest.mark.parametrize("when", ["before it saves", "while it saves"])
def test_another_group_saves_the_last_state_if_the_writer_is_killed(when: str, tmp_path: Path) -> None:
    """The other one still holds it. Killed while it saves, the writer has written nothing, and holds the lock."""
    with cluster(tmp_path) as here:
        here.start_coordinator()
        never, held = here.folder / "never", here.folder / "held"
        ends = (
            ("--die", f"saves step {STEPS}") if when == "while it saves" else ("--pause", f"{STEPS}:{never}")
        )
        own = {"group-0": ends, "group-1": ("--pause", f"{STEPS}:{held}")}
        workers = here.start_together(tuple(own), lambda group: (*flags(here, STEPS), *own[group]))
        writer, other = workers.values()
        here.until(lambda: writer.step == other.step == STEPS, "both to come to the end")
        assert [each["writer"] for each in other.events() if each["event"] == "step"][-1] == "group-0"
        if when == "before it saves":
            writer.process.kill()
        here.until_dead(writer)
        assert not saved_steps(here)
        held.touch()
        here.until_finished(other)
        assert saved_steps(here) == {str(STEPS)}
        assert other.digest == digest_alone(STEPS)
