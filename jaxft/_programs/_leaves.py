"""Leaves: which of them a program reads, and the leaves of a state, made safe for programs that consume them."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxft._errors import ConfigurationError
from jaxft._programs import _compat
from jaxft._programs._checks import short
from jaxft._programs._closed_over import is_large
from jaxft._programs._compat import AnyJaxpr, PyTreeDef

Picker = Callable[[Sequence[Any]], Sequence[Any]]


def picker(indices: Sequence[int]) -> Picker:
    """A function that picks these entries of a sequence; in C if there are several."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda entries: [entries[index] for index in indices]


@dataclass(frozen=True)
class Part:
    """One program: a jaxpr over the closed-over values, then the inputs of each kind that it reads, then zeros.

    `state`, `batch`, `means` and `rest` are the indices of the leaves that it reads, by kind.
    """

    jaxpr: AnyJaxpr
    consts: tuple[Any, ...]
    state: tuple[int, ...]
    batch: tuple[int, ...]
    means: tuple[int, ...]
    rest: tuple[int, ...]
    zeros: tuple[Any, ...]  # their abstract values

    def inputs(
        self,
        state: Sequence[Any],
        batch: Sequence[Any] = (),
        means: Sequence[Any] = (),
        rest: Sequence[Any] = (),
    ) -> tuple[Any, ...]:
        """The program's inputs, in order."""
        pick_state, pick_batch, pick_means, pick_rest = self._pickers
        return (*pick_state(state), *pick_batch(batch), *pick_means(means), *pick_rest(rest))

    @functools.cached_property
    def _pickers(self) -> tuple[Picker, ...]:
        return tuple(map(picker, (self.state, self.batch, self.means, self.rest)))

    @property
    def output_avals(self) -> list[Any]:
        return [atom.aval for atom in self.jaxpr.outvars]

    @functools.cached_property
    def closed_over(self) -> tuple[Any, ...]:
        """The large arrays among `consts`."""
        return tuple(filter(is_large, self.consts))

    def function(self) -> Callable[..., list[Any]]:
        """The program as a function of flat positional inputs: its leaves of state, batch, means and rest.

        After them come as many arrays as `closed_over` has, in their places.
        """
        call = _compat.as_function(self.jaxpr)
        small = [None if is_large(value) else value for value in self.consts]
        places = [at for at, value in enumerate(self.consts) if is_large(value)]

        def program(*inputs: Any) -> list[Any]:
            leaves = inputs[: len(inputs) - len(places)]
            consts = list(small)
            for at, value in zip(places, inputs[len(leaves) :], strict=True):
                consts[at] = value
            return call(*consts, *leaves, *map(_compat.zeros_like_aval, self.zeros))

        return program


def own(leaves: Sequence[Any], state: Any) -> list[jax.Array]:
    """Return the leaves of `state` as arrays that a program may consume.

    Numbers and numpy arrays are copied to the device. Arrays are returned as they are.

    Raises:
        ConfigurationError: a leaf is a tracer, or was consumed. Dispatching a deleted array
            to two or more CPU devices is a segmentation fault (jaxlib 0.9 and 0.10), so this checks first.
    """
    try:
        if True not in [leaf.is_deleted() for leaf in leaves]:
            return list(leaves)
    except (AttributeError, TypeError):  # numpy arrays and numbers; tracers
        refuse_tracers(leaves)
        leaves = [_as_array(leaf) for leaf in leaves]
        if not any(leaf.is_deleted() for leaf in leaves):
            return leaves
    dead = next(index for index, leaf in enumerate(leaves) if leaf.is_deleted())
    name = labels(state)[dead]
    raise ConfigurationError(
        f"{f'The leaf {name} of the state' if name else 'The state'}, {jax.typeof(leaves[dead]).str_short()}, was "
        "consumed by an earlier step, by `manager.restore`, or by a function of your own that donates it: its "
        "memory is used again. Use only the state that the step returned (`state, metrics = step(state, batch)`); to "
        "keep an older state too, copy it first (`jax.tree.map(jax.numpy.copy, state)`)."
    )


def all_alive(leaves: Sequence[Any]) -> bool:
    """Whether no array was consumed. Raises TypeError or AttributeError unless all are arrays of one class."""
    return not leaves or not any(map(type(leaves[0]).is_deleted, leaves))


def refuse_tracers(leaves: Sequence[Any]) -> None:
    """Raise ConfigurationError if a step is called while something else is being traced."""
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise ConfigurationError(
            "A fault-tolerant step was called on tracers: inside jax.jit, jax.grad, jax.vmap or the like. It "
            "communicates with other groups between its two programs, so it cannot be part of a larger one. Call it "
            "from plain Python."
        )


def _as_array(leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    # Copied, because JAX may alias an aligned numpy array, and the caller may write to it. Numbers keep their weak
    # type.
    return jnp.array(leaf, copy=True) if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def strong(leaf: Any) -> jax.Array:
    """Return a leaf as an array that does not give way to other types, as a Python number does in JAX."""
    array = _as_array(leaf)
    is_weak = getattr(array, "weak_type", False)  # keys have no such attribute
    return jax.lax.convert_element_type(array, array.dtype) if is_weak else array


def labels(tree: Any) -> list[str]:
    """The paths of a tree's leaves, as in `['params']['w']`.

    Of the tree, not of its structure: there are nodes that cannot be made with anything else than their own leaves.
    """
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


class DonationGuard:
    """Ensures that no two donated arrays share memory.

    Donating one buffer twice is an error on one device and a segmentation fault on several (jaxlib 0.10). It
    happens easily: an average of the parameters that starts as the parameters themselves, or as a
    `jax.device_put` of them. The results of `apply` never share memory. They are recognised by identity, and kept
    here until the next step so that no other array can get their identity.
    """

    def __init__(self) -> None:
        self._made: Sequence[jax.Array] = ()

    def __call__(
        self, leaves: Sequence[jax.Array], donated: Sequence[int], others: Sequence[Any] = ()
    ) -> Sequence[jax.Array]:
        """Copy donated leaves whose memory also belongs to another leaf, or is in `others`; return all leaves.

        `others` are the arrays that the step closes over, such as the initial parameters for a regularizer.
        """
        if len(leaves) == len(self._made) and all(map(operator.is_, leaves, self._made)):
            return leaves
        consumed = set(donated)
        taken: set[int] = set().union(*(_pointers(each) for each in others if isinstance(each, jax.Array)))
        for index, leaf in enumerate(leaves):
            if index not in consumed:
                taken |= _pointers(leaf)
        result = list(leaves)
        for index in sorted(consumed):
            pointers = _pointers(leaves[index])
            if pointers & taken:
                result[index] = jnp.copy(leaves[index])
            taken |= pointers
        return result

    def made(self, leaves: Sequence[jax.Array]) -> None:
        """Remember the leaves of a new state, which share no memory."""
        self._made = leaves


def _pointers(leaf: jax.Array) -> set[int]:
    if leaf.size == 0:
        return set()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}


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
        return f"{where}{_kind(was)} of {len(children)} became {_kind(was)} of {len(inner)}"
    for (key, child), was_there in zip(inner, children, strict=True):
        if found := _difference(was_there, child, path + key):
            return found
    one, other = _parts(old, new)
    return f"{where}a setting of {_kind(was)} was {short(one)} and is {short(other)}"


def _kind(node: Any) -> str:
    if node is None:
        return "a leaf"
    return "None" if node is type(None) else f"a {node.__name__}"


def _parts(one: Any, other: Any) -> tuple[Any, Any]:
    """The first parts of two nodes' settings, without their children, that differ."""
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
