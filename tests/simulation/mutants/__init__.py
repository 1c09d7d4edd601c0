"""Planted bugs: small changes of one function each, which the simulation must find.

`python -m tests.simulation.mutants` prints in how many seeds each is found, and by which invariant.
Many are faults that others have had: TorchFT's are marked with its name.
"""

from . import (
    deciding,
    draining,
    founding,
    healing,
    later,
    memory,
    quorums,
    ranks,
    regressions,
    sharing,
    supervising,
    waiting,
)
from ._mutant import MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "Mutant",
    "deciding",
    "draining",
    "founding",
    "healing",
    "later",
    "memory",
    "quorums",
    "ranks",
    "regressions",
    "sharing",
    "supervising",
    "waiting",
]
