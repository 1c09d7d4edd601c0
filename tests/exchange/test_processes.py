"""Real processes that are killed and stopped in the middle of an exchange."""

import logging
import os
import signal
import statistics
import time

import pytest

from jaxft._arrays._layout import Layout
from tests import patience

from .members import BIG, reference_means
from .processes import Member, digest, join, started

figures = logging.getLogger("figures")

pytestmark = pytest.mark.processes

SPECS = Layout.of(BIG).specs
# Each strand connects for itself, so one may still do so when another moves bytes.
UNCONNECTED = "could not connect to all members of quorum 1"


def exchange_with_trap(members: list[Member], trapped: int, trap: int, *, progress_timeout_s: float) -> None:
    """Start an exchange in all processes, and return when one has stopped in the middle of it."""
    for number, member in enumerate(members):
        member.tell("exchange", trap if number == trapped else None, progress_timeout_s)
    assert members[trapped].answer() == "in the trap"


@pytest.mark.parametrize("shards", [[[0], [1]], [[0], [2, 3], [1]], [[4, 5], [0, 1, 2], [3], []]], ids=str)
def test_processes_agree_with_the_reference(lane: str, shards: list[list[int]]) -> None:
    total = sum(map(len, shards))
    with started(shards, total, lane) as members:
        join(1, members, shards)
        for member in members:
            member.tell("exchange", None, 30.0)
        wanted = digest(reference_means(SPECS, total))
        assert [member.answer() for member in members] == [wanted] * len(members)


@pytest.mark.parametrize("strands", [1, 3])
@pytest.mark.parametrize("trap", [1, 6, 11])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_kill_end_the_same_step_with_the_undisturbed_bits(
    lane: str, victim: int, trap: int, strands: int
) -> None:
    shards = [[0, 1], [2], [3]]
    with started(shards, 4, lane, strands) as members:
        before = [member.ask("held") for member in members]
        join(1, members, shards)
        # With such a timeout, they notice the kill by the end of its connections, or never.
        exchange_with_trap(members, victim, trap, progress_timeout_s=patience.FAR_S)
        members[victim].process.kill()
        survivors = [number for number in range(3) if number != victim]
        for number in survivors:
            peers, text, _ = members[number].answer()
            assert peers
            assert set(peers) <= {f"group-{other}" for other in range(3) if other != number}
            assert "step 11 in quorum 1 lost a peer" in text or (strands > 1 and UNCONNECTED in text)
            assert members[number].ask("held") == before[number]

        # The next quorum: the first survivor computes the missing shard.
        first, second = (members[number] for number in survivors)
        first.ask("add", shards[victim])
        dealt = [sorted(shards[survivors[0]] + shards[victim]), shards[survivors[1]]]
        join(2, [first, second], dealt)
        for member in (first, second):
            member.tell("exchange", None, 30.0)
        wanted = digest(reference_means(SPECS, 4))
        assert [first.answer(), second.answer()] == [wanted, wanted]


@pytest.mark.parametrize("trap", [1, 9])
@pytest.mark.parametrize("victim", [0, 4])
def test_survivors_of_a_kill_in_rows_and_columns_end_the_same_step_with_the_undisturbed_bits(
    lane: str, victim: int, trap: int
) -> None:
    """Of two rows, of two and of three: the last member has no column. The four that are left are two and two."""
    shards = [[0], [1], [2, 3], [4], [5]]
    with started(shards, 6, lane, large=4) as members:
        join(1, members, shards)
        exchange_with_trap(members, victim, trap, progress_timeout_s=patience.FAR_S)
        members[victim].process.kill()
        left = [number for number in range(5) if number != victim]
        for number in left:
            peers, text, _ = members[number].answer()
            assert peers
            assert "step 11 in quorum 1 lost a peer" in text or UNCONNECTED in text
        members[left[0]].ask("add", shards[victim])
        dealt = [sorted(shards[left[0]] + shards[victim]), *(shards[number] for number in left[1:])]
        survivors = [members[number] for number in left]
        join(2, survivors, dealt)
        for member in survivors:
            member.tell("exchange", None, 30.0)
        assert [member.answer() for member in survivors] == [digest(reference_means(SPECS, 6))] * 4


def test_a_stopped_process_is_noticed_by_its_silence_and_may_come_back(lane: str) -> None:
    shards = [[0], [1], [2]]
    with started(shards, 3, lane) as members:
        join(1, members, shards)
        exchange_with_trap(members, 1, 4, progress_timeout_s=0.5)
        os.kill(members[1].pid, signal.SIGSTOP)
        failures = [members[number].answer() for number in (0, 2)]
        assert any("made no progress for" in text for _, text, _ in failures)
        assert all(peers for peers, _, _ in failures)
        assert ("group-1",) in [peers for peers, _, _ in failures]
        os.kill(members[1].pid, signal.SIGCONT)
        peers, text, _ = members[1].go_on()
        assert peers
        assert "lost a peer" in text or "made no progress" in text  # it slept through its own patience
        join(2, members, shards)
        for member in members:
            member.tell("exchange", None, 30.0)
        assert [member.answer() for member in members] == [digest(reference_means(SPECS, 3))] * 3


@pytest.mark.storm
@pytest.mark.parametrize("strands", [1, 2])
def test_64_members(lane: str, strands: int) -> None:
    shards = [[number] for number in range(64)]
    with started(shards, 64, lane, strands) as members:
        join(1, members, shards)
        exchange_with_trap(members, 63, 3, progress_timeout_s=patience.FAR_S)
        members[63].process.kill()
        for member in members[:63]:
            peers, text, _ = member.answer()
            assert peers
            assert "lost a peer" in text or (strands > 1 and UNCONNECTED in text)
        members[0].ask("add", [63])
        dealt = [[0, 63], *shards[1:63]]
        join(2, members[:63], dealt)
        began_s = time.monotonic()
        for member in members[:63]:
            member.tell("exchange", None, patience.FAR_S)
        wanted = digest(reference_means(SPECS, 64))
        assert [member.answer() for member in members[:63]] == [wanted] * 63
        figures.info("63 members exchanged in %.1f s, in %d strands", time.monotonic() - began_s, strands)


@pytest.mark.storm
def test_how_soon_survivors_notice(lane: str) -> None:
    """A kill is an end of file: no timeout, no heartbeat. 1 to 3 ms where each process has a core."""
    delays_s: list[float] = []
    for trap in (3, 7):
        with started([[0], [1], [2], [3]], 4, lane) as members:
            join(1, members, [[0], [1], [2], [3]])
            exchange_with_trap(members, 3, trap, progress_timeout_s=30.0)
            killed_s = time.monotonic()
            members[3].process.kill()
            delays_s += [members[number].answer()[2] - killed_s for number in range(3)]
    # Tests share few cores with much else: the quickest shows the cost of the mechanism.
    assert min(delays_s) < 0.1
    assert statistics.median(delays_s) < 1.0
