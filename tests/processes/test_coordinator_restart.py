"""The coordinator is killed and restarted without its memory: groups wait, come back, and lose nothing."""

from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 20


@pytest.mark.long
def test_groups_outlive_their_coordinator(tmp_path: Path) -> None:
    gate = tmp_path / "coordinator-back"
    flags = ("--steps", str(STEPS), "--gate", f"6:{gate}")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = here.start_together(("group-0", "group-1"), lambda _group: flags, fresh=True)
        here.until(lambda: all(group.step == 6 for group in groups.values()), "six steps")
        assert here.coordinator is not None
        here.coordinator.kill()
        here.coordinator.wait()
        for group in groups.values():
            here.until(lambda group=group: group.logged("dials again"), "a group to notice")
        here.start_coordinator(port=here.port)
        for name in groups:
            text = f"{name} is present"
            here.until(lambda text=text: text in here.coordinator_log.read_text(), f"{name} to come back")
        gate.touch()
        here.until_finished(*groups.values())
        assert {group.digest for group in groups.values()} == {digest_alone(STEPS)}
        for group in groups.values():
            steps = [event["step"] for event in group.steps()]
            assert steps == sorted(set(steps)), "a committed step was done again"
        # A group may have gone on alone while the other healed, up to the end.
        ids = [event["quorum_id"] for group in groups.values() for event in group.steps()]
        assert max(ids) > 1, "quorum ids grow over a restart"


def test_a_coordinator_that_refuses_running_groups_can_be_put_right(tmp_path: Path) -> None:
    """As after an upgrade to a version with another protocol, or with a wrong secret."""
    state = ("--state", str(tmp_path / "state"))
    flags = ("--steps", str(STEPS), "--gate", f"6:{tmp_path / 'gate'}")
    with cluster(tmp_path) as here:
        here.start_coordinator(*state)
        groups = here.start_together(("group-0", "group-1"), lambda _group: flags)
        here.until(lambda: all(group.step == 6 for group in groups.values()), "six steps")
        for program in (Path(__file__).with_name("other_protocol.py"), "jaxft_coordinator"):
            assert here.coordinator is not None
            here.coordinator.kill()
            here.coordinator.wait()
            # Nor do other options of the coordinator concern a job that runs.
            here.start_coordinator(*state, "--min-replicas", "2", port=here.port, program=program)
            if program != "jaxft_coordinator":
                for group in groups.values():
                    here.until(
                        lambda group=group: group.logged("This group was in its job before: it dials again"),
                        "a group to be refused",
                    )
        (tmp_path / "gate").touch()
        here.until_finished(*groups.values())
        assert {group.digest for group in groups.values()} == {digest_alone(STEPS)}
    for group in groups.values():
        assert "install the same jaxft on both. This group was in its job before" in group.log()
        steps = [event["step"] for event in group.steps()]
        assert steps == sorted(set(steps)), "a committed step was done again"
