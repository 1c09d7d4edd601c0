"""Fault-tolerant training for JAX: failures change the speed of a run, never the run.

Each name is imported when it is first used, and JAX with the first name that needs it: the commands start without it.
"""

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

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
    NotSaved,
    StepError,
)
from jaxft._version import __version__

if TYPE_CHECKING:
    from jaxft import data
    from jaxft._arrays._digest import digest
    from jaxft._arrays._norm import global_norm
    from jaxft._checkpoints import Checkpoints
    from jaxft._diloco import diloco
    from jaxft._manager import Manager
    from jaxft._programs._primitive import pmean, psum, shard_index
    from jaxft._report import StepReport
    from jaxft._session._credentials import TLS
    from jaxft._session._network import Network
    from jaxft._step import fault_tolerant, from_functions

__all__ = [
    "TLS",
    "CannotHeal",
    "CannotRestore",
    "Checkpoints",
    "ConfigurationError",
    "CoordinatorUnreachable",
    "Diverged",
    "Evicted",
    "JaxftError",
    "JobFinished",
    "JobHalted",
    "JoinRefused",
    "Manager",
    "Network",
    "NonFinite",
    "NotSaved",
    "StepError",
    "StepReport",
    "__version__",
    "data",
    "digest",
    "diloco",
    "fault_tolerant",
    "from_functions",
    "global_norm",
    "pmean",
    "psum",
    "shard_index",
]

# The same as above for type checkers, at run time.
_MODULE_OF = {
    "Checkpoints": "_checkpoints",
    "Manager": "_manager",
    "Network": "_session._network",
    "StepReport": "_report",
    "TLS": "_session._credentials",
    "digest": "_arrays._digest",
    "diloco": "_diloco",
    "fault_tolerant": "_step",
    "from_functions": "_step",
    "global_norm": "_arrays._norm",
    "pmean": "_programs._primitive",
    "psum": "_programs._primitive",
    "shard_index": "_programs._primitive",
}

# A traceback gives an error the name by which a program catches it.
for _name in __all__:
    if isinstance(globals().get(_name), type):
        globals()[_name].__module__ = __name__


def __getattr__(name: str) -> _Any:
    if name == "data":
        return _importlib.import_module("jaxft.data")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxft' has no attribute {name!r}", name=name)
    value = getattr(_importlib.import_module(f"jaxft.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
