"""The programs of one step, for each type of its arguments: built in the first call that needs them, and kept."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxft._arrays._layout import LeafSpec
from jaxft._errors import ConfigurationError, StepError
from jaxft._programs._axis import Axis
from jaxft._programs._build import Shared, cut_only, cut_programs, program_settings
from jaxft._programs._checks import (
    check_signature,
    refuse_disabled_jit,
    refuse_others,
    refuse_too_large,
)
from jaxft._programs._fingerprint import static_text
from jaxft._programs._leaves import own, refuse_tracers
from jaxft._programs._partition import Cut
from jaxft._programs._programs import Programs
from jaxft._programs._shardings import placed
from jaxft._programs._statics import Given

# Options that are compiled into a step, and that a `with` statement may set for some of its calls only.
_COMPILED_IN = (
    *("jax_default_matmul_precision", "jax_enable_x64"),
    *("jax_threefry_partitionable", "jax_default_prng_impl"),
)


class ProgramCache:
    """All programs of a step. They share one `apply`, which a group that joins replays."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        axis: Axis,
        overlap: int,
        *,
        compiling: Callable[[], contextlib.AbstractContextManager[None]],
        before_first: Callable[[], None],
        settings: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._train_step = train_step
        self._compiling = compiling
        self._before_first = before_first
        self._settings = settings
        self._shared = Shared(axis, overlap)
        self._programs: dict[Any, Programs] = {}
        self._current: dict[tuple[Any, ...], Programs] = {}
        self._reference: dict[Any, Programs] = {}
        self._options: tuple[Any, ...] | None = None  # of JAX, with which all programs are compiled

    @property
    def all(self) -> Sequence[Programs]:
        """All programs that were built."""
        return list(self._programs.values())

    def known(self, given: Given) -> Programs | None:
        """The programs of the first call with these static arguments; None if this is that call.

        Raises:
            ConfigurationError: JAX has other options than when the step was compiled.
        """
        if self._options is not None:
            _refuse_other_options(self._options)
        return self._current.get(given.key)

    def first(self, given: Given, state: Any, batch: Any) -> Programs:
        """The programs of a first call, outside of a job or before anything is compared with it."""
        return self._kept(given, self._find(given, state, batch), {})

    def first_compared(self, given: Given, state: Any, batch: Any, common: Any) -> Programs:
        """The programs of a first call in a job whose groups all have the batch `common`, of step 0 and shard 0.

        Their fingerprint must not depend on when this group came. The shape of a batch may vary from step to step,
        and `compute` with it, so all groups compare the programs for `common`.
        """
        alike = _types(common) == _types(batch)
        if self._shared.overlap > 1 and not alike:
            self._cut_only(given, state, common)  # an overlapped step is divided as for that batch
        programs = self._find(given, state, batch)
        text = static_text(given.args, given.kwargs)
        settings = {"static arguments": text} if text else {}
        if not alike:
            parts = self._cut_only(given, state, common).programs
            settings |= program_settings(parts, self._shared.closed_over)
        return self._kept(given, programs, settings)

    def first_of_own_batch(self, given: Given, state: Any, batch: Any) -> Programs:
        """The programs of a first call in a job whose groups have no batch in common.

        They compare `apply`, which is the same for all batches and static arguments.
        """
        programs = self._find(given, state, batch)
        settings = program_settings([programs.cut.apply], self._shared.closed_over)
        return self._kept(given, programs, settings)

    def _kept(self, given: Given, programs: Programs, settings: Mapping[str, str]) -> Programs:
        if settings := {**settings, **self._settings()}:
            programs = replace(programs, fingerprint={**programs.fingerprint, **settings})
        self._current[given.key] = programs
        self._options = _options()
        return programs

    def _cut_only(self, given: Given, state: Any, batch: Any) -> Cut:
        return cut_only(self._train_step, state, batch, self._shared, given)

    def _find(self, given: Given, state: Any, batch: Any) -> Programs:
        """The programs for these types of arguments, built if they are new."""
        refuse_tracers([*jax.tree.leaves(state), *jax.tree.leaves(batch)])
        refuse_others("state", state)
        refuse_others("batch", batch)
        refuse_too_large(state)
        state_types = _types_of_state(state)
        signature = (given.key, state_types, _types(batch))
        if signature not in self._programs:
            refuse_disabled_jit()
            check_signature(self._train_step, given.args, given.kwargs)
            if state_types not in self._reference:
                self._before_first()
            built = self._built(given, state, batch)
            check_repeatable(built, self._reference.setdefault(state_types, built))
            self._programs[signature] = replace(built, siblings=functools.partial(self._find, given))
        return self._programs[signature]

    def _built(self, given: Given, state: Any, batch: Any) -> Programs:
        with self._compiling():
            built = cut_programs(self._train_step, state, batch, self._shared, given)
            if (self._shared.axis.shards or 1) > 1:
                built.device.compile_sums()
        return built


def _options() -> tuple[Any, ...]:
    """The values in this thread of the options that a step is compiled with."""
    return tuple(getattr(jax.config, name) for name in _COMPILED_IN)


def _refuse_other_options(compiled: tuple[Any, ...]) -> None:
    """Raise ConfigurationError if a step that was compiled with these options is called with others.

    `jax.jit` compiles again, and groups that compute the same shard could then differ. Without this they would have
    no effect.
    """
    now = _options()
    for name, one, other in zip(_COMPILED_IN, compiled, now, strict=True):
        if one != other:
            raise ConfigurationError(
                f"{name} is {other!r} in this call of the step, which was compiled with {one!r} when it joined or "
                "was first called. Let it be the same in all calls: set it before `step.join`, or have the `with` "
                "statement that sets it contain `step.join` and the whole loop, or be in the train step."
            )


def check_state(state: Any) -> None:
    """Raise ConfigurationError for a first state that is wrong, before the user's code is given it."""
    leaves = jax.tree.leaves(state)
    refuse_tracers(leaves)
    refuse_others("state", state)
    own(leaves, state)


def check_repeatable(built: Programs, reference: Programs) -> None:
    """Refuse programs whose means another group could not apply with the programs of an earlier call (`reference`).

    A group that joins replays the means of a step through the only `apply` that it knows.

    Raises:
        StepError: they exchange other values, or have another `apply`.
    """
    same_apply = built.executables.apply_key == reference.executables.apply_key
    if built.contribution == reference.contribution and same_apply:
        return
    raise StepError(
        "An averaged value, or its use, depends on the batch's structure, shape or "
        "placement or on a static argument: it differs from an earlier call's"
        f"{_other_values(built, reference)}. Every group must be able to repeat a step from the state and the means "
        "alone, whatever they came from. Do what depends on the batch (such as dividing by its size) before "
        "jaxft.pmean or psum, and keep static arguments to what happens before it."
    )


def _other_values(built: Programs, reference: Programs) -> str:
    """The values that only this call or only the earlier call exchanges, as a part of a message."""
    now, before = Counter(built.contribution), Counter(reference.contribution)
    differing = [
        f"{call} exchanges {_values(list(more.elements()))}, which {other} does not"
        for call, other, more in (
            ("this one", "that one", now - before),
            ("that one", "this one", before - now),
        )
        if more
    ]
    if not differing:
        return ""
    return (
        f" ({'; '.join(differing)}; a value that is the same in all shards, such as jnp.zeros(()), is not exchanged: "
        "to exchange it all the same, let it derive from the batch, as `0 * loss` does)"
    )


def _values(specs: Sequence[LeafSpec]) -> str:
    """The types of the first values, with their paths in the arguments of pmean and psum."""
    first = [f"{spec.dtype}{list(spec.shape)} {spec.path}".rstrip() for spec in specs[:3]]
    return ", ".join(first) + (f" and {len(specs) - 3} more" if specs[3:] else "")


def _types(tree: Any) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, *((jax.typeof(leaf), placed(leaf)) for leaf in leaves)


def _types_of_state(state: Any) -> tuple[Any, ...]:
    """As `_types`. A state may come back with other weak types than it had; the programs for it are the same."""
    leaves, treedef = jax.tree.flatten(state)
    avals: list[Any] = list(map(jax.typeof, leaves))
    return treedef, *(
        (aval.shape, aval.dtype, placed(leaf)) for aval, leaf in zip(avals, leaves, strict=True)
    )
