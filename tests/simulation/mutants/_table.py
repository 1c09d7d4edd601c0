"""Prints in how many seeds each planted bug is found, and by which invariant."""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator

from jaxft_launch.processes._die_with_parent import bind_to

from ..campaign import Finding, run_seeds
from . import MUTANTS
from ._mutant import Mutant

SEEDS = 1500


def hunt(name: str, seeds: int) -> tuple[str, list[Finding]]:
    """Look for one mutant in some seeds. Findings without it as well are not due to it."""
    (found,) = (mutant for mutant in MUTANTS if mutant.name == name)
    with found.planted():
        findings = run_seeds(found.among(seeds), kinds=found.kinds, changes=found.changes).findings
    return name, [finding for finding in findings if is_due_to(found, finding)]


def is_due_to(found: Mutant, finding: Finding) -> bool:
    """Whether nothing is found in this seed without the planted bug; and the mutant itself has no bug."""
    if finding.text.startswith(("AttributeError", "NameError", "TypeError")):
        return False  # a core was changed, and the mutant was not
    return not run_seeds([finding.seed], kinds=found.kinds, changes=found.changes).findings


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a mutant was not found."""
    parser = argparse.ArgumentParser("python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args(arguments)
    mutants = {mutant.name: mutant for mutant in MUTANTS if options.only in mutant.name}
    missed = 0
    say(f"{'mutant':48}  found in  first seed  by")
    for name, findings in _hunts(list(mutants), options.seeds, options.jobs):
        missed += not findings
        by = Counter(finding.invariant for finding in findings).most_common(3)
        words = ", ".join(f"{what} ({number})" for what, number in by) or "NOT FOUND"
        first = findings[0].seed if findings else "-"
        among = len(mutants[name].among(options.seeds))
        say(f"{name:48}  {len(findings):4d}/{among:<4d} {first!s:>10}  {words}")
    say(f"{len(mutants) - missed} of {len(mutants)} mutants found")
    return 1 if missed else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _hunts(names: list[str], seeds: int, jobs: int) -> Iterator[tuple[str, list[Finding]]]:
    if jobs == 1:
        yield from (hunt(name, seeds) for name in names)
        return
    with concurrent.futures.ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=bind_to,
        initargs=(os.getpid(),),
    ) as pool:
        for future in [pool.submit(hunt, name, seeds) for name in names]:
            yield future.result()
