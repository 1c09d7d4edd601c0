"""The simulation finds every planted bug. `make mutants` prints in how many seeds."""

import pytest

from .campaign import run_seeds
from .mutants import MUTANTS, Mutant
from .mutants._table import is_due_to, main

SEEDS = 800
# Where those were found that take more than a hundred seeds from the first one on: looked at before all others.
FOUND_IN = {
    "a checkpoint is left to readers that are dead": (956,),
    "the odd one is believed": (507,),
    "after an error a job begins from nothing": (135,),
    "a stale vote counts": (270,),
    "a welcome is taken for the decision": (213,),
    "terms are not looked at": (145,),
    "a group that is needed is stood aside": (105,),
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
