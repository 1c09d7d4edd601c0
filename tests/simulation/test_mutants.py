"""The simulation finds every planted bug. `make mutants` prints in how many seeds."""

import pytest

from .campaign import run_seeds
from .mutants import MUTANTS, Mutant
from .mutants._table import is_due_to, main

SEEDS = 800
# Seeds that found them, where that takes many from the first on: looked at before all others.
FOUND_IN = {
    "a checkpoint is left to readers that are dead": (956,),
    "the odd one is believed": (507,),
    "after an error a job begins from nothing": (135,),
    "a stale vote counts": (270,),
    "a welcome is taken for the decision": (213,),
    "terms are not looked at": (145,),
    "a group that is needed is stood aside": (105,),
    "a step that fails in every group is tried forever": (247,),
    "the majority of states is ignored": (45,),
    "a fenced coordinator tells all the same": (9,),
    "only the last vote says that the means are not finite": (36,),
    "a founding is dropped at a restart": (30,),
    "quorum ids restart at zero": (18,),
    "a fresh state becomes the truth": (20,),
    "a heartbeat is taken for progress": (12,),
    "positions in string order": (12,),
    "an exchange waits no longer than its timeout": (10,),
    "a pause between two steps is taken for a hang": (10,),
    "the frontier is not restored": (8,),
    "an equal step number proves enough": (8,),
    "heal ids restart at one": (8,),
    "a place is given up that was never taken": (6,),
}
# What takes rare faults in a rare order to show: among the storms, and given more seeds.
RARE = {mutant.name for mutant in MUTANTS if (mutant.kinds or mutant.changes) and not mutant.seeds}
RARE_SEEDS = 5000


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=pytest.mark.storm if mutant.name in RARE else (), id=mutant.name)
        for mutant in MUTANTS
    ],
)
@pytest.mark.timeout(1200)
def test_it_is_found(mutant: Mutant):
    seeds = RARE_SEEDS if mutant.name in RARE else SEEDS
    original = getattr(mutant.owner, mutant.attribute)
    looked_at = (*FOUND_IN.get(mutant.name, ()), *mutant.among(seeds))
    with mutant.planted():
        assert getattr(mutant.owner, mutant.attribute) is not original
        tally = run_seeds(looked_at, kinds=mutant.kinds, changes=mutant.changes, stop_at_first=True)
    assert getattr(mutant.owner, mutant.attribute) is original
    assert tally.findings, f"not found in {seeds} seeds: {mutant.sentence}"
    assert is_due_to(mutant, tally.findings[0]), "it is found without the planted bug as well"


def test_there_are_enough_and_each_is_told():
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.sentence.endswith((".", ")")) for mutant in MUTANTS)
    assert sum("TorchFT" in mutant.sentence for mutant in MUTANTS) >= 7


def test_the_table_says_where_and_by_what(capfd: pytest.CaptureFixture[str]):
    assert main(["--seeds", "3", "--jobs", "1", "--only", "told before"]) == 0
    head, row, end = capfd.readouterr().out.splitlines()
    assert head.split() == ["mutant", "found", "in", "first", "seed", "by"]
    assert row.split("  ")[0] == "told before it is durable"
    assert row.endswith("3/3             0  durable before told (3)")
    assert end == "1 of 1 mutants found"


def test_the_table_fails_where_one_is_missed(capfd: pytest.CaptureFixture[str]):
    assert main(["--seeds", "1", "--jobs", "1", "--only", "majority of states"]) == 1
    assert "NOT FOUND" in capfd.readouterr().out
