"""Rounds of inner steps: kills in other phases, checkpoints between two rounds, and groups of two processes."""

import signal
from pathlib import Path

import pytest

from tests.clusters import Worker, cluster, digest_alone
from tests.processes.ranks import digest_of
from tests.processes.returns import group_that_returns, ranks_that_return

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.long]

ROUNDS = 14
EVERY = 3  # of the workers


def flags(carry: str) -> tuple[str, ...]:
    return "--steps", str(ROUNDS), "--diloco", carry


@pytest.mark.parametrize(
    ("die", "carry"),
    [
        (f"inner step {5 * EVERY - 1} shard", "reset"),
        ("exchange step 4", "second"),
        ("vote step 4", "average"),
        ("apply step 4", "reset"),
    ],
)
def test_a_kill_in_a_round_changes_nothing(die: str, carry: str, tmp_path: Path) -> None:
    stayed, back = group_that_returns(tmp_path, flags(carry), die=die)
    taken = next(event["shards"] for event in stayed.steps() if event["step"] == 5)
    assert len(set(taken)) == len(taken), "computed twice"
    assert stayed.digest == back.digest == digest_alone(ROUNDS, *flags(carry)[2:])


def test_a_dead_groups_shards_are_dealt_while_the_others_compute(tmp_path: Path) -> None:
    """A spare takes them from the start of the round, and the survivor keeps what it has."""
    started, gate = tmp_path / "started", tmp_path / "gate"
    own = {
        "group-0": ("--hold", f"inner step {4 * EVERY + 2} shard 0:{gate}"),
        "group-1": ("--die", f"inner step {4 * EVERY + 1} shard"),
        "spare": ("--spare", "--die", "not at all"),  # for what it logs
    }
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = here.start_together(
            tuple(own), lambda group: (*flags("average"), "--gate", f"3:{started}", *own[group])
        )
        here.until(lambda: groups["spare"].step == 3, "the spare to follow")
        started.touch()
        here.until_dead(groups["group-1"])
        here.until(gate.with_suffix(".held").exists, "the survivor to be held in an inner step")
        here.until(
            lambda: groups["spare"].logged(f"inner step {5 * EVERY - 1} shard 3"),
            "the spare to compute the dead group's shards",
        )
        gate.touch()
        here.until_finished(groups["group-0"], groups["spare"])
    survivor, spare = groups["group-0"], groups["spare"]
    assert [next(e["shards"] for e in one.steps() if e["step"] == 5) for one in (survivor, spare)] == [
        [0, 1],
        [2, 3],
    ]
    assert survivor.digest == spare.digest == digest_alone(ROUNDS, "--diloco", "average")


def test_a_drain_does_not_wait_for_the_end_of_the_round(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    held = ("--hold", f"inner step {4 * EVERY + 1} shard:{gate}")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = here.start_together(
            ("group-0", "group-1"), lambda group: (*flags("reset"), *(held if group == "group-1" else ()))
        )
        here.until(gate.with_suffix(".held").exists, "the group to be in an inner step")
        groups["group-1"].process.send_signal(signal.SIGTERM)
        here.until(lambda: groups["group-1"].logged("leaves the job now"), "the group to be drained")
        gate.touch()
        here.until_finished(groups["group-1"], groups["group-0"])
    assert groups["group-1"].steps()[-1]["step"] == 4
    assert groups["group-0"].digest == digest_alone(ROUNDS, "--diloco", "reset")


def test_a_resumed_job_goes_on_between_two_rounds(tmp_path: Path) -> None:
    saved = ("--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "3")
    lives: list[Worker] = []
    for life, rounds in enumerate((6, ROUNDS)):
        folder = tmp_path / str(life)
        folder.mkdir()
        with cluster(folder) as here:
            here.start_coordinator()
            lives.append(here.start("group-0", "--steps", str(rounds), "--diloco", "average", *saved))
            here.until_finished(lives[-1])
    assert lives[-1].steps()[0]["step"] == 7
    assert lives[-1].digest == digest_alone(ROUNDS, "--diloco", "average")


def test_groups_of_several_processes(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    die = f"inner step {4 * EVERY + 1} shard"
    first, back = ranks_that_return(tmp_path, flags("average"), die=die)
    assert first.leader.digest == back.leader.digest == digest_of(tmp_path / "alone", 2, *flags("average"))
