"""How much a coordinator logs in a storm: a bounded number of lines for each death, however many groups there are."""

import pytest
from jaxft_protocol.coordinator.job import Event

from tests.operate.test_happened import Watching, watching
from tests.protocol.coordinator.helpers import Done

DEATHS = 20
# A death, the retried step's quorum, the new life, its heal, and the quorum in which it is back.
LINES_PER_DEATH = 6
# A line names some groups and counts the others.
LONGEST = 300


def commit(desk: Watching) -> None:
    """Let every member that is still there vote. One with nothing to compute leaves the quorum at the boundary."""
    for member in desk.quorum.members:
        if member.group in desk.job.groups:
            desk.vote(member.group)


def storm(groups: int) -> list[str]:
    """Kill one group after the other, each back before the next dies; return all lines that the job logs."""
    names = [f"group-{number}" for number in range(groups)]
    desk = watching(*names, shards=groups)
    do, lines = desk.do, []

    def counting(event: Event) -> Done:
        done = do(event)
        lines.extend(done.reports)
        return done

    desk.do = counting
    for death in range(DEATHS):
        victim = names[death % groups]
        desk.close(victim)
        commit(desk)
        desk.come(victim, digest="fresh", incarnation=death + 2, shards=groups)
        desk.ready(victim)
        commit(desk)
        assert len(desk.quorum.members) == groups
    return lines


@pytest.mark.parametrize("groups", [3, 30])
def test_each_death_has_a_bounded_number_of_lines(groups: int) -> None:
    lines = storm(groups)
    assert sum("lost group-" in line and "quorum" not in line for line in lines) == DEATHS
    assert len(lines) <= LINES_PER_DEATH * DEATHS
    assert max(map(len, lines)) <= LONGEST
