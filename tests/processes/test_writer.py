"""`Manager.is_writer` on real processes: at most one group for each step, also when the writer dies and is back."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

GROUPS = ("group-0", "group-1", "group-2")
STEPS, FIRST_GATE, GATE = 100, 8, 20


def test_one_group_writes_and_another_when_it_is_gone(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        hurry, killed, healing = tmp_path / "hurry", tmp_path / "killed", tmp_path / "healing"
        # Paced, so that the group that is back is in before the end, and held until it heals, however slowly it
        # starts.
        paced = ("--pace", "0.1", "--hurry", str(hurry))
        exports = tmp_path / "exports"
        # The first writer dies before it saves: else it might have saved a step that it has not recorded.
        gates = ("--gate", f"{FIRST_GATE}:{killed}", "--gate", f"{GATE}:{healing}")
        flags = ("--steps", str(STEPS), *paced, *gates, "--export", str(exports))
        workers = here.start_together(GROUPS, lambda _group: flags)
        first, second, third = workers.values()
        here.until(lambda: first.step >= 3, "three steps")
        first.process.send_signal(signal.SIGKILL)
        here.until_dead(first)
        killed.touch()
        here.until(lambda: second.logged("[jaxft group-1] writes for the job, from step"), "another writer")
        back = here.start("group-0", *flags)
        here.until(lambda: back.logged("heals to step"), "it to heal")
        healing.touch()
        here.until(lambda: back.logged("[jaxft group-0] writes for the job, from step"), "it to write again")
        lost = "[jaxft group-1] no longer writes for the job, from step"
        here.until(lambda: second.logged(lost), "the other to write no longer")
        hurry.touch()
        here.until_finished(second, third, back)
        assert second.digest == digest_alone(STEPS)
        lines = [event for worker in (first, second, third, back) for event in worker.steps()]
        writers = Counter(event["step"] for event in lines if event["is_writer"])
        assert set(writers.values()) == {1}
        # The dead group's last commit, if not written, is missing: at most one step.
        assert len(set(range(1, STEPS + 1)) - set(writers)) <= 1
        # Saved once each: a second group that saves the same step would fail.
        saved = {int(path.name) for path in exports.iterdir() if path.name.isdigit()}
        assert saved == {step for step in writers if step % 10 == 0}
        assert not any(event["is_writer"] for event in third.steps())
        assert all(event["writer"] in ("group-0", "group-1") for event in third.steps())
