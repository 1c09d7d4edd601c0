"""The step as users call it: `fault_tolerant`, `from_functions`, and the callable that they return."""

import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxft_protocol.coordinator.sessions import MAX_SHARDS

from jaxft._base._calls import one_caller
from jaxft._base._numbers import whole
from jaxft._base._transfers import MAY_TRANSFER
from jaxft._diloco import Diloco
from jaxft._errors import ConfigurationError, JaxftError
from jaxft._programs._axis import Axis
from jaxft._programs._cache import ProgramCache, check_state
from jaxft._programs._checks import check_batch_function, check_function, refuse_swapped, short
from jaxft._programs._programs import Programs
from jaxft._programs._statics import NOTHING, Given, StaticLeaves, Statics
from jaxft._programs._trace import joined
from jaxft._replica._alone import Alone
from jaxft._replica._call import Call, Policy, checked_policy
from jaxft._replica._engine import AnyManager, Engine
from jaxft._replica._same_state import edited, same_state
from jaxft._replica._steps import steps
from jaxft.data._batch_functions import (
    BatchFor,
    BatchFunctions,
    OwnBatch,
    StateBatches,
    asked_once,
    example_of,
)
from jaxft.data._from_state import FromState

_log = logging.getLogger("jaxft")


def fault_tolerant(  # noqa: PLR0913 - the settings of a step, by name
    train_step: Callable[..., tuple[Any, Any]] | Diloco,
    manager: AnyManager | None,
    *,
    shards: int | None = None,
    axis_name: str | None = None,
    arrays: Callable[[Any], bool] | None = None,
    nonfinite: Policy = "warn",
    overlap: int = 1,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> "Step":
    """Make a train step fault-tolerant across replica groups.

    The step is an ordinary, pure function of a state and a batch which averages with `jaxft.pmean`, or sums with
    `jaxft.psum`. It is traced once for each type of its arguments, cut there, and compiled to two programs: the first
    computes the values to average, the second applies the means. Between the two, groups exchange and vote. Do not
    wrap it in `jax.jit`: `fault_tolerant` compiles it. A step that averages values that depend on earlier means and
    on the batch has several such exchanges, and still one vote.

    If a group fails during a step, the others compute the shards that it had taken and commit that same step.
    An attempt that fails leaves the state untouched. Groups cannot drift apart: tracing refuses a new state that
    derives from the batch other than through pmean.

    A committed step consumes the state that it was given, whose arrays are deleted: keep only the new one.

    Arrays that the step closes over are not part of the state, such as frozen weights: each group brings them. Those
    of 1 MiB or more are inputs of the programs, and a digest of them is compared when a group joins.

    Example:
        >>> import jax, jax.numpy as jnp, jaxft
        >>> def train_step(params, batch):
        ...     grads = jaxft.pmean(jax.grad(lambda p: jnp.mean((batch @ p - 1.0) ** 2))(params))
        ...     return params - 0.1 * grads, {"norm": jnp.sum(grads**2)}
        >>> def batch_for(step, shard):
        ...     return jax.random.normal(jax.random.key(step * 4 + shard), (8, 3))
        >>> step = jaxft.fault_tolerant(train_step, manager=None, shards=4)
        >>> params = jnp.zeros(3)
        >>> while step.step < 10:
        ...     params, metrics = step(params, batch_for)

    Args:
        train_step: `train_step(state, batch, *static) -> (new_state, metrics)`. Both states are pytrees of the
            same structure, shapes and dtypes; metrics are any pytree of arrays. Or what `jaxft.diloco` returns, with
            `manager`, `shards` and `nonfinite` alone.
        manager: the `jaxft.Manager` of this group; None runs the step alone, for tests and baselines, with the
            same bits as a job of any number of groups.
        shards: into how many equal slices the job divides the batch of a step. The members of a quorum share
            them out, and the mean is over all of them, whichever groups are there. Needs a batch function. None:
            one for each group that takes part, so that a lost group's batch is lost. A batch function is then asked
            for shard i by the group at position i of the quorum, so that each of the batches 0 to n-1 counts once.
        axis_name: the name that the step has for the axis of the shards, if it was written for `jax.pmap` or
            `jax.shard_map`. `lax.pmean`, `lax.psum`, `lax.all_gather`, `lax.psum_scatter`, `lax.pmax`, `lax.pmin`,
            `lax.axis_index` and `lax.axis_size` over it then are over all shards, at the top level of the step
            (also in a `scan`, if they exchange), and may be differentiated as in JAX. Needs `shards`, the
            size of the axis.
        arrays: which leaves of the state the step may change, for a state that holds functions and settings too:
            `arrays=equinox.is_array` for a module of equinox. The other leaves are part of the program: the step is
            given them, and returns them as they were. By default all leaves, which are arrays and numbers.
        nonfinite: how the job treats a step whose means (or sums) are not finite. "raise" ends it for all groups
            with `NonFinite`, and nothing of the step is applied. "skip" leaves the state as it was and continues with
            the next step: metrics are blank, and `report.nonfinite` has the reason. "allow" applies it: for steps
            that deal with infinities themselves, such as by scaling their loss. "warn" applies it too, and logs it
            once; it looks at the first 1,024 elements of each leaf only. The decision is the job's, never one
            group's, and must be chosen alike in all groups.
        overlap: into how many programs to divide the computation of the gradients. With 2 or more, a group exchanges
            the gradients that are ready first while its devices compute the others (see docs/performance.md). Must be
            equal in all groups.
        static_argnums: positions of further arguments of `train_step` that are part of the program, as in
            `jax.jit`. They must be hashable; the first two arguments cannot be static.
        static_argnames: the same by name.

    Returns:
        A `Step`: call it as `state, metrics = step(state, batch)`.

    Raises:
        ConfigurationError: the arguments contradict each other.
    """
    options = _Options(Axis(axis_name, shards), nonfinite, overlap)
    if isinstance(train_step, Diloco):
        given = {"axis_name": axis_name, "arrays": arrays, "static_argnums": static_argnums}
        given |= {"static_argnames": static_argnames, "overlap": None if overlap == 1 else overlap}
        if found := ", ".join(name for name, value in given.items() if value not in (None, ())):
            raise ConfigurationError(
                f"{found} does not go with jaxft.diloco: a round exchanges once, at its end, and its state has "
                "only arrays. Leave it out."
            )
        return Step(train_step.step, manager, options._replace(rounds=train_step), Statics.none())
    statics = Statics.of(train_step, static_argnums, static_argnames)
    return Step(train_step, manager, options, statics, arrays)


def from_functions(
    grad_fn: Callable[[Any, Any], tuple[Any, Any]],
    update_fn: Callable[[Any, Any, Any], tuple[Any, Any]],
    manager: AnyManager | None,
    *,
    shards: int | None = None,
    nonfinite: Policy = "warn",
    overlap: int = 1,
) -> "Step":
    """Make a fault-tolerant step of two functions, for those who would rather cut it themselves.

    As with `jaxft.fault_tolerant`: the same programs, checks and failures.

    Example:
        >>> import jax, jax.numpy as jnp, jaxft
        >>> def grad_fn(params, batch):
        ...     loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        ...     return grads, loss
        >>> def update_fn(params, grads, loss):
        ...     return params - 0.1 * grads, {"loss of this group": loss}
        >>> step = jaxft.from_functions(grad_fn, update_fn, manager=None)
        >>> params, metrics = step(jnp.ones(3), jnp.eye(3))

    Args:
        grad_fn: `grad_fn(state, batch) -> (contribution, local)`, once for each shard. The contribution, a
            pytree of floating point arrays, is averaged; `local`, any pytree, stays in the group.
        update_fn: `update_fn(state, means, local) -> (new_state, metrics)`, once the job has committed. Its
            metrics may derive from `local`, its new state may not. If the group computed several shards,
            `local` is the lowest shard's. A group that joins calls it without a `local`.
        manager: as in `jaxft.fault_tolerant`.
        shards: as there.
        nonfinite: as there.
        overlap: as there.

    Returns:
        A `Step`: call it as `state, metrics = step(state, batch)`.
    """

    check_function(
        "grad_fn", grad_fn, "a state and a batch", 2, "Let it return a pair, `contribution, local`."
    )
    check_function(
        *("update_fn", update_fn, "a state, the means and the local value", 3),
        "Let it return a pair, `new_state, metrics`.",
    )
    options = _Options(Axis(shards=shards), nonfinite, overlap)
    return Step(joined(grad_fn, update_fn), manager, options, Statics.none())


class _Options(NamedTuple):
    """The options of a step."""

    axis: Axis
    nonfinite: Policy
    overlap: int
    rounds: Diloco | None = None


class Step:
    """A fault-tolerant train step; made by `jaxft.fault_tolerant` and `jaxft.from_functions`."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        manager: AnyManager | None,
        options: "_Options",
        statics: Statics,
        arrays: Callable[[Any], bool] | None = None,
    ) -> None:
        axis = _checked_axis(options.axis)
        if manager is not None and not hasattr(type(manager), "_engine"):
            raise ConfigurationError(
                f"manager is {manager!r}. It is a jaxft.Manager, which is entered before the first step: `with "
                'jaxft.Manager("host:29510", group="group-0") as manager:`. None runs the step alone.'
            )
        if not callable(train_step):
            raise ConfigurationError(
                f"train_step is {short(train_step)}, a {type(train_step).__name__}. It is a function of a state and "
                "a batch, which is not called yet: `jaxft.fault_tolerant(train_step, manager)`."
            )
        self._static_leaves = None if arrays is None else StaticLeaves(arrays)
        if self._static_leaves is not None:
            train_step = self._static_leaves.wrapped(train_step)
        self._statics = statics
        self._rounds = options.rounds
        self._manager = manager
        self._alone = Alone()
        self._shards = axis.shards
        self._nonfinite: Policy = checked_policy(options.nonfinite)
        self._overlap = whole(
            "overlap, the number of programs that compute the gradients,", options.overlap, 1
        )
        self._cache = ProgramCache(
            *(train_step, axis, self._overlap),
            compiling=lambda: self._engine.compiling(),
            before_first=self._compare_ranks,
            settings=dict if self._rounds is None else self._rounds.settings,
        )
        self._batches = BatchFunctions(axis.shards, alone=manager is None, held=lambda: self._engine.handed)
        self._last: Programs | None = None  # of the last call
        self._caller: dict[str, threading.Thread] = {}  # the thread that is in a call

    @property
    def step(self) -> int:
        """How many steps have been committed: by the job, or, without a manager, by this object."""
        if self._manager is not None:
            return self._manager.step
        self._alone.loop.read()
        return self._alone.step

    def steps(self, total: int | None) -> Iterator[int]:
        """As `Manager.steps`, also without a manager: iterate over the steps that are still to be done."""
        return steps(self._engine, total)

    @MAY_TRANSFER
    def join(self, state: Any, batch: Any, *static: Any, **static_kw: Any) -> Any:
        """Join the job before the first step; return the job's state, and let `manager.step` be its step.

        Compiles the step, and heals if the job is under way. So an evaluation before the first step, for example, has
        the state of the job, not a fresh one. It returns once this group is ready for a step: a member of the job,
        with the newest state; a spare, after the job's next step. Without a manager it returns `state`.

        Args:
            state: a state of the job's structure, shapes and dtypes: the initial one, or what `restore` returned.
            batch: as for a call of the step.
            *static: as there.
            **static_kw: as there.

        Returns:
            The job's newest state, on this group's devices. Numbers and numpy arrays have become JAX arrays.

        Raises:
            JobFinished: the job is over, and its state is gone. A program that does not catch it ends with status 0.
            ConfigurationError: as from a call of the step.
        """
        one_caller(self._caller)
        try:
            call, leaves = self._checked(state, batch, static, static_kw)
            result = self._whole(call.programs.unflatten(self._engine.join(call, leaves)))
        finally:
            self._caller.clear()
        return self._returned(result)

    @MAY_TRANSFER
    def edit(self, state: Any, function: Callable[[Any], Any]) -> Any:
        """Change the state between two steps, in the whole job: a learning rate, metrics that begin again at zero.

        Call it in a loop over `steps`, before the step of the iteration. The edit is then part of that step: all
        groups must make the same one, or the step is not committed. It is logged for joiners with the step's means. A
        checkpoint of state `n` is from before the edit of step `n`; a run that resumes there makes the edit again.

        So whether it is called at a step, and what `function` does, may depend only on the number of the step and on
        the state: a group that joins knows no other history. The basis of a decision, such as the losses of the last
        steps, belongs into the state. If groups differ, groups outside the majority end with `Evicted`, and
        without a majority the job halts with `JobHalted`.

        An edit stays if an exception leaves the step that follows it. An iteration that is tried again then does not
        make it once more.

        Example:
            >>> import jax.numpy as jnp, jaxft
            >>> def train_step(state, batch):
            ...     w, rate = state
            ...     return (w - rate * jaxft.pmean(batch), rate), {}
            >>> step = jaxft.fault_tolerant(train_step, manager=None)
            >>> state = step.join((jnp.ones(3), 0.5), jnp.ones(3))
            >>> for number in step.steps(4):
            ...     if number == 2:
            ...         state = step.edit(state, lambda state: (state[0], state[1] / 2))
            ...     state, metrics = step(state, jnp.ones(3))
            >>> state[0].tolist()
            [-0.5, -0.5, -0.5]

        Args:
            state: the result of the step; not consumed.
            function: returns the new state: a pytree of the same structure, shapes and dtypes. It may return leaves
                as they are, and must not donate them.

        Returns:
            The new state, for the next call of the step.

        Raises:
            ConfigurationError: this is not the beginning of an iteration over `steps`, or `function` has changed the
                structure or a type.
        """
        engine = self._engine
        programs, held = self._last, engine.handed
        if not engine.loop.at_top or programs is None or held is None:
            raise ConfigurationError(
                f"step.edit was called at step {engine.step}, but not at the beginning of an iteration over `steps`. "
                "An edit is part of the step that follows it, so that a group that joins or resumes at this step "
                "makes it too. Write `for number in manager.steps(total):` (`step.steps(total)` without a manager), "
                "and call step.edit in its body before the step."
            )
        if engine.loop.repeats_edit():
            return self._returned(self._whole(programs.unflatten(held)))
        check_function(
            "The function of an edit",
            function,
            "the state",
            1,
            "Write a function that returns the new state.",
        )
        before = programs.unflatten(self._leaves(programs, self._without(state)))
        tree = jax.tree.structure(before)
        after = self._without(function(self._whole(before)))
        engine.edit(edited(tree, after, held))
        engine.loop.edited()
        assert engine.handed is not None
        return self._returned(self._whole(programs.unflatten(engine.handed)))

    @MAY_TRANSFER
    def __call__(self, state: Any, batch: Any, *static: Any, **static_kw: Any) -> tuple[Any, Any]:
        """Run one step, until the job has committed it.

        Args:
            state: the state; consumed.
            batch: this group's batch, or a function `batch(step, shard)` that returns the batch of any shard:
                then the others can compute a lost group's shards, and no sample is lost. It must be pure.
                A `jaxft.data.FromState` makes batches of the state, too.
            *static: the static arguments that were declared.
            **static_kw: static arguments by name.

        Returns:
            The new state and the metrics. Metrics that derive from the batch without passing through pmean are
            this group's own: of the lowest shard that it computed, NaN if it computed none.

        Raises:
            StepError: the step cannot be cut; the first call of each type of arguments finds out.
            ConfigurationError: the state was consumed before, the batch function is not pure, or the arguments are
                wrong.
            JobHalted: the step raises an exception in every group.
            NonFinite: the means are not finite, with `nonfinite="raise"`; the state is as it was.
        """
        one_caller(self._caller)
        try:
            call, given = self._checked(state, batch, static, static_kw)
        except BaseException:
            self._caller.clear()
            with contextlib.suppress(JaxftError):  # outside of a job there is no loop
                self._engine.loop.not_called()
            raise
        try:
            leaves, metrics = self._engine.run(call, given)
            result = self._whole(call.programs.unflatten(leaves)), metrics
        finally:
            self._caller.clear()
        return self._returned(result)

    def _checked(
        self, state: Any, batch: Any, static: Sequence[Any], static_kw: Mapping[str, Any]
    ) -> tuple[Call, Sequence[jax.Array]]:
        """The call of the step that these arguments make, and the leaves of the state."""
        if isinstance(state, FromState):
            raise ConfigurationError(
                "The step is called with a FromState as its state. Write `step(state, batches)`, and "
                "`step.join(state, batches)`."
            )
        try:
            given = self._statics.given(static, static_kw) if static or static_kw else NOTHING
            state = self._without(state)
            programs, batch_for = self._prepared(given, state, batch)
            call = Call(programs, batch_for, self._shards, self._nonfinite)
            leaves = self._leaves(programs, state)
        except (JaxftError, TypeError):
            refuse_swapped(state, batch)
            raise
        self._engine.loop.given(leaves)
        return call, leaves

    def _without(self, state: Any) -> Any:
        """A state without its static leaves."""
        return state if self._static_leaves is None else self._static_leaves.without(state)

    def _whole(self, state: Any) -> Any:
        """A state with its static leaves, as the user knows it."""
        return state if self._static_leaves is None else self._static_leaves.whole(state)

    def _returned(self, result: Any) -> Any:
        """Return a result from a call: the last thing before the user has it."""
        self._engine.loop.returned()
        return result

    def _prepared(self, given: Given, state: Any, batch: Any) -> tuple[Programs, BatchFor]:
        """The programs for these arguments, and the batch of each shard."""
        batch_for = self._batches.of(batch, state, self._whole)
        if self._rounds is not None:
            batch_for = self._rounds.over(
                batch_for, lambda: self._engine.handed or jax.tree.leaves(state), state
            )
        programs = self._cache.known(given)
        if programs is None:
            if callable(batch):
                check_batch_function(batch)
            batch_for = asked_once(batch_for)
            programs = self._first(given, state, batch_for)
        self._last = programs
        return programs, batch_for

    def _first(self, given: Given, state: Any, batch_for: BatchFor) -> Programs:
        """The programs of the first call with these static arguments."""
        if isinstance(batch_for, StateBatches):  # the user's code is given the state now
            check_state(state)
        batch_for, own = example_of(batch_for), isinstance(batch_for, OwnBatch)
        batch = batch_for(self._engine.step, 0)
        if self._manager is None:
            return self._cache.first(given, state, batch)
        if own:
            return self._cache.first_of_own_batch(given, state, batch)
        return self._cache.first_compared(given, state, batch, common=batch_for(0, 0))

    def _compare_ranks(self) -> None:
        """With overlap the first batch is computed while programs are built, by all ranks of a group together."""
        if self._manager is not None:
            self._manager._compare_ranks({"overlap": str(self._overlap)})

    def _leaves(self, programs: Programs, state: Any) -> Sequence[jax.Array]:
        """The leaves of a state, which is the newest that a call returned.

        If the last call could not return the state that it had come to, `state` is an older one, which may be
        consumed: it stands for the newest.
        """
        held = self._engine.handed
        if held is None:
            self._engine.loop.returned()
            return programs.state_leaves(state)
        if self._engine.loop.lacks(held):
            _log.warning(
                "the last call of the step was interrupted before it could return the state: continues with the "
                "state of step %d",
                self._engine.step,
            )
            return held
        leaves = programs.state_leaves(state)
        if all(map(operator.is_, leaves, held)):
            return held  # as in nearly every call
        return same_state(state, leaves, held, self._engine.step)

    @property
    def _engine(self) -> Engine:
        return self._alone if self._manager is None else self._manager._engine


def _checked_axis(axis: Axis) -> Axis:
    """Raise ConfigurationError for a number of shards, or a name of their axis, that cannot be right."""
    shards, name = axis.shards, axis.name
    if shards is not None:
        shards = whole("shards, the number of slices of a step's batch,", shards, 1, MAX_SHARDS)
    if name is not None and (not isinstance(name, str) or shards is None):
        raise ConfigurationError(
            f"axis_name is {name!r} and shards is {shards!r}. The axis has a name, a str, and a size, which is the "
            'number of shards: pass, say, `axis_name="batch", shards=8`.'
        )
    return Axis(name, shards)
