"""Groups that exchange in rows and columns, killed and back, on real processes: the bits of one process alone."""

from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone
from tests.processes.test_kill_phases import (
    GATE,
    KILLED_AT,
    LAST_GATE,
    STEPS,
    assert_no_step_lost,
    assert_same_run,
    gates_in,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

# Two rows, of two and of three: the last group has no column. Of the four that are left, each is in a row of two.
GROUPS = tuple(f"group-{number}" for number in range(5))
SHARDS = ("--shards", "7")
ROWS = (*SHARDS, "--rows-from", "4")


@pytest.mark.long
@pytest.mark.parametrize("victim", ["group-1", "group-4"])
def test_a_kill_in_rows_and_columns_changes_nothing(victim: str, tmp_path: Path) -> None:
    undisturbed = digest_alone(STEPS, *SHARDS)
    first, last, gates = gates_in(tmp_path)
    flags = ("--steps", str(STEPS), *gates, *ROWS)
    with cluster(tmp_path) as here:
        here.start_coordinator()
        die = ("--die", f"exchange step {KILLED_AT}")
        others = ("--die", "never")  # for the debug log
        workers = here.start_together(GROUPS, lambda group: (*flags, *(die if group == victim else others)))
        here.until_dead(workers[victim])
        back = here.start(victim, *flags, *others)
        here.until(lambda: back.logged("heals to step"), f"{victim} to heal")
        first.touch()
        survivors = [worker for group, worker in workers.items() if group != victim]
        # It enters before the step that the last gate holds, or after it.
        here.until(
            lambda: any(event["shards"] for event in back.steps()) or back.logged(f"wait step {LAST_GATE}"),
            f"{victim} to contribute, or to stand by",
        )
        last.touch()
        here.until_finished(back, *survivors)
        assert_same_run([back, *survivors], undisturbed)
        assert_no_step_lost(survivors)
        for worker in survivors:
            assert worker.logged("exchanges in 2 rows: connected to 2 of 3 other groups")
            assert worker.step > GATE
        peers = {"group-0": "2", "group-2": "3", "group-3": "3", "group-1": "2", "group-4": "2"}
        for worker, group in zip(survivors, (each for each in GROUPS if each != victim), strict=True):
            assert worker.logged(f"connected to {peers[group]} of 4 other groups")
