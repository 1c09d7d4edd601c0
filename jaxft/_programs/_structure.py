"""Says where the structures of two pytrees differ: a text of both would fill pages, for a module of a model."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxft._programs._checks import short
from jaxft._programs._compat import PyTreeDef


def first_difference(before: PyTreeDef, tree: Any) -> str:
    """Say where the structure of `tree` first differs from another, in one line; "" if they are equal."""
    return _difference(before, tree, ())


def _difference(before: PyTreeDef, tree: Any, path: tuple[Any, ...]) -> str:
    after = jax.tree.structure(tree)
    if after == before:
        return ""
    where = f"at {jax.tree_util.keystr(path)}, " if path else ""
    (was, old), (now, new) = before.node_data() or (None, None), after.node_data() or (None, None)
    if was is not now:
        return f"{where}{_kind(was)} became {_kind(now)}"
    assert was is not None, "two leaves have one structure"
    inner = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: node is not tree)
    children = before.children()
    if issubclass(was, Mapping) and isinstance(old, list) and isinstance(new, list) and old != new:
        return f"{where}the keys {short(old)} became {short(new)}"
    if len(inner) != len(children):
        return f"{where}{_kind(was)} of {len(children)} became one of {len(inner)}"
    for (key, child), one in zip(inner, children, strict=True):
        if found := _difference(one, child, path + key):
            return found
    one, other = _parts(old, new)
    return f"{where}a setting of {_kind(was)} was {short(one)} and is {short(other)}"


def _kind(node: Any) -> str:
    if node is None:
        return "a leaf"
    return "None" if node is type(None) else f"a {node.__name__}"


def _parts(one: Any, other: Any) -> tuple[Any, Any]:
    """Of what two nodes have beside their children, the first parts that differ."""
    if type(one) is type(other) and isinstance(one, tuple | list) and len(one) == len(other):
        pairs = list(zip(one, other, strict=True))
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(one[key], other[key]) for key in one]
    else:
        return one, other
    return next((_parts(*pair) for pair in pairs if not _same(*pair)), (one, other))


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # of another library's comparison
        return False
