"""Fault-tolerant training for JAX: failures change the speed of a run, never the run."""

import logging as _logging

from jaxft import data
from jaxft._arrays._digest import digest
from jaxft._arrays._norm import global_norm
from jaxft._checkpoints import Checkpoints
from jaxft._errors import (
    CannotHeal,
    CannotRestore,
    ConfigurationError,
    CoordinatorUnreachable,
    Diverged,
    Evicted,
    JaxftError,
    JobFinished,
    JobHalted,
    JoinRefused,
    NonFinite,
    StepError,
)
from jaxft._manager import Manager
from jaxft._programs._primitive import pmean, psum, shard_index
from jaxft._replica._credentials import TLS
from jaxft._report import HealReport, StepReport
from jaxft._step import fault_tolerant, from_functions
from jaxft._version import __version__

__all__ = [
    "TLS",
    "CannotHeal",
    "CannotRestore",
    "Checkpoints",
    "ConfigurationError",
    "CoordinatorUnreachable",
    "Diverged",
    "Evicted",
    "HealReport",
    "JaxftError",
    "JobFinished",
    "JobHalted",
    "JoinRefused",
    "Manager",
    "NonFinite",
    "StepError",
    "StepReport",
    "__version__",
    "data",
    "digest",
    "fault_tolerant",
    "from_functions",
    "global_norm",
    "pmean",
    "psum",
    "shard_index",
]

_logging.getLogger("jaxft").addHandler(_logging.NullHandler())
