"""Finds programs of one step that do the same, such as those of the rounds of a loop: one executable serves them all.

Two programs are *twins* if they have the same equations over the same types, whatever their inputs are called. What
an equation says in plain values (numbers, texts, tuples of them) is compared by value. All else that it may hold
(functions, host callbacks, arrays, contexts) must be the same object. So programs that differ in what a host callback
closes over are none, though they have the same fingerprint (`_fingerprint.py`), which describes functions by names.
"""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Atom, Var
from jaxft._programs._slice import Part

_PLAIN = (bool, int, str, bytes, type(None))
_NUMBERS = (float, complex, np.generic)


class Twins:
    """Numbers programs: twins have the same number. The programs must stay alive as long as this object."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}  # of jaxprs, by their identity

    def number(self, part: Part) -> int:
        """The number of a program. Where its inputs come from does not count; which arrays it closes over does."""
        return self._numbered(
            ("part", tuple(map(id, part.consts)), tuple(map(_type, part.zeros)), self._jaxpr(part.jaxpr))
        )

    def _numbered(self, content: Hashable) -> int:
        return self._numbers.setdefault(content, len(self._numbers))

    def _jaxpr(self, jaxpr: AnyJaxpr) -> int:
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = self._numbered(self._content(jaxpr))
        return self._known[id(jaxpr)]

    def _content(self, jaxpr: AnyJaxpr) -> Hashable:
        inner = _compat.open_jaxpr(jaxpr)
        names: dict[Var, int] = {}

        def name(atom: Atom) -> Hashable:
            if not _compat.is_var(atom):
                return _literal(atom.val), _type(atom.aval)
            return names.setdefault(atom, len(names)), _type(atom.aval)

        return (
            "jaxpr",
            tuple(map(id, _compat.consts_of(jaxpr))),
            tuple(map(name, (*inner.constvars, *inner.invars))),
            tuple(
                (
                    id(eqn.primitive),
                    tuple(map(name, eqn.invars)),
                    tuple(map(name, eqn.outvars)),
                    tuple((key, self._value(value)) for key, value in sorted(eqn.params.items())),
                    id(eqn.ctx),
                )
                for eqn in inner.eqns
            ),
            tuple(map(name, inner.outvars)),
        )

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, _NUMBERS):
            return _literal(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self._value, value))
        if _compat.is_jaxpr(value):
            return "jaxpr", self._jaxpr(value)
        return id(value)


def _literal(value: Any) -> Hashable:
    """A number by its bits: 0.0 equals -0.0, and a NaN nothing. JAX wraps those of numpy."""
    return type(value), id(value) if isinstance(value, jax.Array) else np.asarray(value).tobytes()


def _type(aval: Any) -> Hashable:
    return str(aval), getattr(aval, "weak_type", False), getattr(aval, "sharding", None)
