"""Semi-synchronous training: each shard takes many inner steps alone, then the job averages how far these went.

A *round* is one step of the job. Its batch is the result of a shard's inner steps, so every promise about a step
holds for a round: the program before the exchange takes a difference, and the program after it takes the outer step.
The inner steps are a loop on the host over one compiled program.

A shard keeps no state between two rounds. At the start of a round its inner state is a function of the job's
state, which `carry` chooses. So any group can compute any shard of a round, and heals, spares, checkpoints, digests
and commits do not know of rounds.

Each leaf of the inner state has a *rule*:

| rule | leaves | at the end of a round |
| --- | --- | --- |
| param | the parameters, which `params` returns | the outer optimizer's step along the mean of `start - end` |
| mean | moments that `carry` keeps | the mean over the shards |
| zero | moments that it drops, and the counts that correct their bias | zero; not a part of the job's state |
| first | all others: counts, keys, hyperparameters | the value in shard 0 |

Parameters of half precision are float32 in the job's state, as is their contribution: the outer step would otherwise
round away small changes.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, get_args

import jax
import jax.numpy as jnp

from jaxft._base._calls import begun, may_go_on
from jaxft._base._numbers import whole
from jaxft._errors import ConfigurationError, StepError
from jaxft._programs import _compat
from jaxft._programs._checks import check_function, other, refuse_others
from jaxft._programs._compat import AnyJaxpr, PyTreeDef
from jaxft._programs._fingerprint import jaxpr_digest
from jaxft._programs._leaves import first_difference, own, strong
from jaxft._programs._primitive import Quantize, call_name, pmean, pmean_p, psum, shard_index, shard_index_p
from jaxft._programs._shardings import specs
from jaxft._programs._trace import described
from jaxft.data._batch_functions import BatchFor, OwnBatch, StateBatches

_log = logging.getLogger("jaxft")

Carry = Literal["average", "second", "reset"]
Rule = Literal["param", "mean", "zero", "first"]
# Arguments of implementations whose shards have states.
_STREAMING = ("delay", "fragments", "mix", "fragment_sync_delay", "fragment_update_alpha", "num_fragments")
# Names of optax: second moments, the count that corrects the bias of moments, and values that a schedule has set.
_SECOND, _COUNT, _HYPERPARAMETERS = "nu", "count", "hyperparams"
_HALF = (jnp.bfloat16, jnp.float16)
_NARROW = (jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)


class Optimizer(Protocol):
    """An `optax.GradientTransformation`."""

    @property
    def init(self) -> Callable[[Any], Any]: ...
    @property
    def update(self) -> Callable[..., tuple[Any, Any]]: ...


class Outer(NamedTuple):
    """The end of a round."""

    optimizer: Optimizer
    every: int
    carry: Carry
    quantize: Quantize | None


def diloco(
    inner_step: Callable[[Any, Any], tuple[Any, Any]],
    *,
    params: Callable[[Any], Any],
    outer: Optimizer,
    every: int = 100,
    carry: Carry,
    quantize: Quantize | None = None,
    **streaming: Any,
) -> "Diloco":
    """Make a train step for `jaxft.fault_tolerant` whose shards take `every` inner steps between two exchanges.

    For links that are too slow for an exchange in each step (DiLoCo, arXiv:2311.08105). The result stands for a train
    step, and one call of it is a round, which is one step of the job. `init` makes the job's state of an inner state.

    The number of shards is the number of workers of the literature: the result depends on it, and not on which groups
    compute the shards. If a group dies in a round, the others compute its shards from the start of the round, and
    commit that same round, with the bits of a run without failures.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jaxft
        >>> inner = optax.sgd(1e-2, momentum=0.9)
        >>> def inner_step(state, batch):
        ...     params, moments = state
        ...     loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p - 1.0) ** 2))(params)
        ...     updates, moments = inner.update(grads, moments, params)
        ...     return (optax.apply_updates(params, updates), moments), {"loss": loss}
        >>> def batch_for(inner_step, shard):
        ...     return jax.random.normal(jax.random.key(inner_step * 4 + shard), (8, 3))
        >>> train = jaxft.diloco(
        ...     inner_step,
        ...     params=lambda state: state[0],
        ...     outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        ...     every=10,
        ...     carry="average",
        ... )
        >>> step = jaxft.fault_tolerant(train, manager=None, shards=4)
        >>> state = train.init((jnp.zeros(3), inner.init(jnp.zeros(3))))
        >>> while step.step < 3:
        ...     state, metrics = step(state, batch_for)
        >>> state["params"].shape
        (3,)

    Args:
        inner_step: `inner_step(inner_state, batch) -> (new_inner_state, metrics)`: a pure step of one shard, with its
            own optimizer, which averages nothing. It is compiled here; do not wrap it in `jax.jit`.
        params: returns the parameters in an inner state, such as `lambda state: state.params`: leaves of it, as they
            are. They must be floating point.
        outer: the optimizer that takes the mean of how far the shards went as a gradient, such as
            `optax.sgd(0.7, momentum=0.9, nesterov=True)`. With `optax.sgd(1.0)` this is LocalSGD.
        every: how many inner steps a round has.
        carry: the rule for the floating point leaves of the inner state that are not parameters, such as moments.
            "average" exchanges them too, and each shard continues from their mean. "second" does so with
            second moments alone (optax calls them `nu`), and sets the others to zero. "reset" sets all to zero, with
            the counts that correct their bias. See docs/diloco.md for what each costs.
        quantize: as in `jaxft.pmean`, for how far the parameters went. Moments are exchanged as they are.
        **streaming: fragments, delays and mixing are not supported, and refused.

    Returns:
        What `jaxft.fault_tolerant` takes in place of a train step. The batch function is then asked for
        `batch_for(inner_step, shard)`, where inner steps count through all rounds. Metrics are means over the round's
        inner steps and over all shards. Integer metrics are values of the last inner step in this group.

    Raises:
        ConfigurationError: an argument is wrong.
    """
    if streaming:
        _refuse_streaming(streaming)
    check_function(
        "inner_step",
        inner_step,
        "an inner state and a batch",
        2,
        "Let it return a pair, `new_inner_state, metrics`.",
    )
    check_function(
        "params", params, "an inner state", 1, "Write `params=lambda state: state.params`, or the like."
    )
    if not (callable(getattr(outer, "init", None)) and callable(getattr(outer, "update", None))):
        raise ConfigurationError(
            f"outer is a {type(outer).__name__}. It must be an optimizer of optax, such as "
            "`optax.sgd(0.7, momentum=0.9, nesterov=True)`; `optax.sgd(1.0)` for LocalSGD."
        )
    if carry not in get_args(Carry):
        raise ConfigurationError(
            f"carry is {carry!r}, and must be one of {', '.join(map(repr, get_args(Carry)))}: the rule for moments "
            "of the inner optimizer at the end of a round, since no shard keeps its own (docs/diloco.md)."
        )
    every = whole("every, the inner steps of a round,", every, 1)
    return Diloco(inner_step, params, Outer(outer, every, carry, quantize))


def _refuse_streaming(given: dict[str, Any]) -> NoReturn:
    names = ", ".join(sorted(given))
    if set(given) <= set(_STREAMING):
        raise ConfigurationError(
            f"jaxft.diloco has no {names}. With fragments, delays or mixing, each shard has other parameters, and "
            "a group that dies would take them with it. Here shards have no state between two rounds, so "
            "that any group can compute any shard: all parameters are exchanged at the end of a round."
        )
    raise TypeError(f"jaxft.diloco has no argument {names}")


class _Leaf(NamedTuple):
    """One leaf of the inner state."""

    path: str
    rule: Rule
    spec: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class _Inner:
    """The structure of the inner state, and the rule of each leaf."""

    tree: PyTreeDef
    params_tree: PyTreeDef
    params_at: tuple[int, ...]
    leaves: tuple[_Leaf, ...]

    def paths(self, *rules: Rule) -> dict[str, int]:
        """Where the leaves of these rules are, by path."""
        return {leaf.path: at for at, leaf in enumerate(self.leaves) if leaf.rule in rules}

    def params(self, leaves: Sequence[Any]) -> Any:
        return self.params_tree.unflatten([leaves[at] for at in self.params_at])

    def start(self, state: Any) -> list[jax.Array]:
        """The leaves with which each shard begins a round: new arrays, which the inner steps consume."""
        params = dict(zip(self.params_at, jax.tree.leaves(state["params"]), strict=True))
        return [
            jnp.zeros(spec.shape, spec.dtype, device=spec.sharding)
            if rule == "zero"
            else _copied(params[at] if rule == "param" else state["inner"][path], spec)
            for at, (path, rule, spec) in enumerate(self.leaves)
        ]


@dataclass(frozen=True)
class _Compiled:
    """The inner step, for one type of inner state.

    Attributes:
        call: from the leaves of an inner state, sums of metrics and a batch to the next leaves and sums, the metrics
            that have no sum, and an array that is ready when the step is done. Consumes the leaves and the sums.
        metrics_tree: the structure of the metrics.
        sums: the types of the metrics that have a sum; None: the last value counts.
        on: where sums lie.
        digest: of the program.
    """

    call: Callable[[Sequence[Any], Sequence[Any], Any], tuple[list[Any], list[Any], list[Any], jax.Array]]
    metrics_tree: PyTreeDef
    sums: tuple[jax.ShapeDtypeStruct | None, ...]
    on: Any
    digest: str

    def zeros(self) -> list[jax.Array]:
        return [jnp.zeros(one.shape, one.dtype, device=self.on) for one in self.sums if one is not None]


class Diloco:
    """A step function for `jaxft.fault_tolerant`; made by `jaxft.diloco`."""

    def __init__(
        self,
        inner_step: Callable[[Any, Any], tuple[Any, Any]],
        params: Callable[[Any], Any],
        outer: Outer,
    ) -> None:
        self._inner_step = inner_step
        self._params = params
        self._outer = outer
        self._known: _Inner | None = None
        self._compiled: _Compiled | None = None

    def init(self, inner_state: Any) -> dict[str, Any]:
        """Return the job's state for a first inner state, which it takes over.

        Args:
            inner_state: parameters, optimizer state and whatever else an inner step reads and writes.

        Returns:
            A dict of "params" (evaluate these; float32 where an inner step has half precision), "outer" (the state of
            the outer optimizer), and "inner" (the leaves carried to the next round, by path in the inner state).

        Raises:
            ConfigurationError: `params` does not return floating point leaves of the state, or `carry` does not fit.
        """
        refuse_others("state", inner_state)
        leaves, tree = jax.tree.flatten(inner_state)
        leaves = list(map(strong, own(leaves, inner_state)))
        inner = self._described(tree, leaves)
        if self._known not in (None, inner):
            raise ConfigurationError(
                "This jaxft.diloco was initialised before, with an inner state of another structure, other types or "
                "another placement. Make one for each model."
            )
        self._known = inner
        params = jax.tree.map(_wide, inner.params(leaves))
        carried = {path: leaves[at] for path, at in inner.paths("mean", "first").items()}
        return {"params": params, "outer": self._outer.optimizer.init(params), "inner": carried}

    def step(self, state: Any, made: Any) -> tuple[Any, Any]:
        """The train step that is cut at its means: takes the result of a shard's inner steps as its batch."""
        inner, compiled = self._learnt()
        starts = jax.tree.leaves(state["params"])
        went = [
            start.astype(end.dtype).astype(start.dtype) - end.astype(start.dtype)
            for start, end in zip(starts, made["params"], strict=True)
        ]
        metrics = [total / self._outer.every for total in made["sums"]]
        kept = {path: made["inner"][path] for path in inner.paths("mean")}
        grads = pmean(inner.params_tree.unflatten(went), quantize=self._outer.quantize)
        if kept or metrics:
            kept, metrics = pmean((kept, metrics))
        firsts = {path: _of_first_shard(made["inner"][path]) for path in inner.paths("first")}
        updates, outer = self._outer.optimizer.update(grads, state["outer"], state["params"])
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), state["params"], updates)
        sums, last = iter(metrics), iter(made["last"])
        shown = [next(last) if one is None else next(sums) for one in compiled.sums]
        new = {"params": params, "outer": outer, "inner": {**kept, **firsts}}
        return new, compiled.metrics_tree.unflatten(shown)

    def settings(self) -> dict[str, str]:
        """Settings that all groups must share, besides the program of a round."""
        return {
            "inner steps": str(self._outer.every),
            "carry": self._outer.carry,
            "inner program": self._learnt()[1].digest,
        }

    def over(self, batch_for: BatchFor, leaves: Callable[[], Sequence[Any]], state: Any) -> StateBatches:
        """The batches of a round: results of a shard's inner steps.

        Args:
            batch_for: asked for each inner step.
            leaves: returns the leaves of the job's newest state, whose structure `state` has.
            state: what the step was called with.

        Raises:
            ConfigurationError: it is not a batch function.
        """
        if isinstance(batch_for, OwnBatch | StateBatches):
            raise ConfigurationError(
                "A round of jaxft.diloco needs a batch for each of its inner steps: pass a batch function, "
                "`batch_for(inner_step, shard)`, such as a jaxft.data.Batches. A single batch, and a FromState, "
                "which makes batches of the job's state, do not fit."
            )
        tree = jax.tree.structure(state)

        def ask(number: int, shard: int, count: int) -> Any:
            return self._run(batch_for, tree.unflatten(leaves()), number * self._outer.every, shard, count)

        return StateBatches(
            ask=lambda number, shard: ask(number, shard, self._outer.every),
            leaves=leaves,
            example=lambda number, shard: ask(number, shard, 1),
            data=lambda number, shard: batch_for(number * self._outer.every, shard),
        )

    def _run(self, batch_for: BatchFor, state: Any, first: int, shard: int, count: int) -> Any:
        """The result of `count` inner steps of a shard, from inner step `first` on.

        The steps are sequential: one is started while the last one runs, and progress is reported once that is done.
        """
        inner = self._checked(state)
        if self._compiled is None:
            self._compiled = self._compile(inner, batch_for(first, shard))
        compiled = self._compiled
        done, leaves, sums, last = begun((first, shard)) or (0, inner.start(state), compiled.zeros(), [])
        running: jax.Array | None = None
        for number in range(done, count):
            _log.debug("inner step %d shard %d", first + number, shard)
            batch = batch_for(first + number, shard)
            leaves, sums, last, ready = compiled.call(leaves, sums, batch)
            if running is not None:
                running.block_until_ready()
            running = ready
            if number + 1 < count:
                may_go_on((first, shard), (number + 1, leaves, sums, last))
        return {
            "params": [leaves[at] for at in inner.params_at],
            "inner": {path: leaves[at] for path, at in inner.paths("mean", "first").items()},
            "sums": sums,
            "last": last,
        }

    def _checked(self, state: Any) -> _Inner:
        """The structure of the inner state, if `state` is what `init` returns."""
        inner = self._known
        if inner is None or not (isinstance(state, dict) and state.keys() == {"params", "outer", "inner"}):
            raise ConfigurationError(
                "A step of jaxft.diloco is called with the state that its `init` returns, in this process: "
                "`train = jaxft.diloco(...)`, `state = train.init(inner_state)`, then `step(state, batch_for)`."
            )
        return inner

    def _learnt(self) -> tuple[_Inner, _Compiled]:
        assert self._known is not None
        assert self._compiled is not None, "an example is made before a step is traced"
        return self._known, self._compiled

    def _described(self, tree: PyTreeDef, leaves: Sequence[jax.Array]) -> _Inner:
        """The structure of an inner state, and the rule of each leaf."""
        at, params_tree = self._params_of(tree, leaves)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree.unflatten(leaves))]
        rules = _rules(paths, leaves, at, self._outer.carry)
        for path, rule, leaf in zip(paths, rules, leaves, strict=True):
            _check_leaf(jax.tree_util.keystr(path), rule, leaf, self._outer.carry)
        types = specs(leaves, ())[0]
        named = map(jax.tree_util.keystr, paths)
        return _Inner(tree, params_tree, at, tuple(map(_Leaf, named, rules, types)))

    def _params_of(self, tree: PyTreeDef, leaves: Sequence[Any]) -> tuple[tuple[int, ...], PyTreeDef]:
        """Which leaves of the inner state `params` returns, and in which structure."""
        found: list[tuple[tuple[int, ...], PyTreeDef]] = []

        def look(*given: Any) -> None:
            number_of = {id(leaf): number for number, leaf in enumerate(given)}
            picked, params_tree = jax.tree.flatten(self._params(tree.unflatten(given)))
            found.append((tuple(number_of.get(id(leaf), -1) for leaf in picked), params_tree))

        jax.eval_shape(look, *leaves)
        at, params_tree = found[-1]
        if not at or -1 in at or len(set(at)) < len(at):
            raise ConfigurationError(
                "`params` must return leaves of the inner state as they are, each once, such as "
                f"`lambda state: state.params`. It returned {len(at)} leaves, of which "
                f"{at.count(-1)} are not leaves of the state."
            )
        return at, params_tree

    def _compile(self, inner: _Inner, batch: Any) -> _Compiled:
        refuse_others("batch", batch)
        types = [leaf.spec for leaf in inner.leaves]
        step = functools.partial(_flat_step, self._inner_step, inner.tree)
        try:
            jaxpr, (_, metrics) = jax.make_jaxpr(step, return_shape=True)(types, batch)
        except NameError as error:
            raise StepError(
                f"inner_step uses a named axis ({error}). An inner step is one shard's and exchanges nothing: "
                "jaxft.diloco averages at the end of the round."
            ) from error
        _refuse_exchanges(jaxpr)
        metric_types, metrics_tree = jax.tree.flatten(metrics)
        sums = tuple(map(_sum_type, metric_types))
        where = max((t.sharding for t in types if t.sharding), key=lambda s: len(s.device_set), default=None)
        on = where
        if isinstance(where, jax.sharding.NamedSharding):
            on = jax.sharding.NamedSharding(where.mesh, jax.sharding.PartitionSpec())

        def call(
            leaves: Sequence[Any], totals: Sequence[Any], batch: Any
        ) -> tuple[list[Any], list[Any], list[Any], Any]:
            new, shown = step(leaves, batch)
            values, shown_tree = jax.tree.flatten(shown)
            if shown_tree != metrics_tree:
                raise StepError("inner_step returns metrics of another structure for another type of batch.")
            totals_iter = iter(totals)
            pairs = list(zip(values, sums, strict=True))
            added = [next(totals_iter) + value.astype(one.dtype) for value, one in pairs if one is not None]
            rest = [value for value, one in pairs if one is None]
            return new, added, rest, jnp.zeros((), jnp.int32)

        kept = [spec.sharding for spec in types]
        totals_on = [on for one in sums if one is not None]
        program = jax.jit(call, donate_argnums=(0, 1), out_shardings=(kept, totals_on, None, None))
        return _Compiled(program, metrics_tree, sums, on, jaxpr_digest(jaxpr))


def _flat_step(inner_step: Any, tree: PyTreeDef, leaves: Sequence[Any], batch: Any) -> tuple[list[Any], Any]:
    """One inner step, from leaves to leaves of the same types; checked when it is traced."""
    result = inner_step(tree.unflatten(leaves), batch)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise StepError(
            f"inner_step returned {described(result)}, but it must return a pair: `return new_inner_state, metrics`, "
            "where metrics can be any pytree, such as {}."
        )
    state, metrics = result
    new, new_tree = jax.tree.flatten(state)
    if new_tree != tree:
        raise StepError(
            "inner_step returned a state of another structure than it was given: "
            f"{first_difference(tree, state)}. It must keep its containers, settings and leaves."
        )
    if found := other("new inner state", state) or other("metrics", metrics):
        raise StepError(f"{found} An inner step returns pytrees of arrays and numbers.")
    new = list(map(jnp.asarray, new))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for path, before, after in zip(paths, leaves, new, strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise StepError(
                f"inner_step returned the leaf {path or 'of the state'} as {after.dtype}{list(after.shape)}, but it "
                f"was given {before.dtype}{list(before.shape)}. It must keep the types of its state: convert the "
                "leaf (`.astype(old.dtype)`)."
            )
    return list(map(strong, new)), jax.tree.map(jnp.asarray, metrics)


def _refuse_exchanges(jaxpr: AnyJaxpr) -> None:
    """Raise StepError if an inner step calls jaxft.pmean, psum or shard_index."""
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive is pmean_p or eqn.primitive is shard_index_p:
            instead = (
                "Put the number of the shard into the batch: `batch_for(inner_step, shard)` knows it."
                if eqn.primitive is shard_index_p
                else "The inner steps of a round exchange nothing: jaxft.diloco averages at its end. For an exchange "
                "in each step, give the step to jaxft.fault_tolerant without jaxft.diloco."
            )
            raise StepError(f"inner_step calls {call_name(eqn)}{_compat.source_line(eqn)}. {instead}")
        for inner in _compat.sub_jaxprs(eqn):
            _refuse_exchanges(inner)


def _rules(
    paths: Sequence[tuple[Any, ...]], leaves: Sequence[jax.Array], params_at: Sequence[int], carry: Carry
) -> list[Rule]:
    """The rule of each leaf of the inner state."""
    names = [tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path) for path in paths]
    moments = [
        at not in params_at and jnp.issubdtype(leaf.dtype, jnp.inexact) and _HYPERPARAMETERS not in names[at]
        for at, leaf in enumerate(leaves)
    ]
    rules: list[Rule] = []
    for at, name in enumerate(names):
        if at in params_at:
            rules.append("param")
        elif moments[at]:
            kept = carry == "average" or (carry == "second" and _SECOND in name)
            rules.append("mean" if kept else "zero")
        else:
            beside = [
                other
                for other, path in enumerate(names)
                if other != at and path[: len(name) - 1] == name[:-1]
            ]
            corrects = (
                bool(name)
                and name[-1] == _COUNT
                and isinstance(paths[at][-1], jax.tree_util.GetAttrKey)
                and any(moments[other] for other in beside)
                and not any(other in params_at or _HYPERPARAMETERS in names[other] for other in beside)
            )
            rules.append("zero" if carry == "reset" and corrects else "first")
    if carry == "second" and any(moments) and "mean" not in rules:
        raise ConfigurationError(
            f'carry="second" keeps second moments, which optax calls `{_SECOND}`, and the inner state has none. Its '
            f"moments are {', '.join(jax.tree_util.keystr(paths[at]) for at in range(len(names)) if moments[at])}. "
            'Take "average" or "reset".'
        )
    return rules


def _check_leaf(path: str, rule: Rule, leaf: jax.Array, carry: Carry) -> None:
    """Raise ConfigurationError for a leaf of a first inner state that does not fit its rule."""
    if rule == "param" and not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ConfigurationError(
            f"The parameter {path or 'itself'} is {leaf.dtype}, and not floating point: a round averages how far it "
            "went. Leave it out of `params`: it stays in the inner state then."
        )
    if rule == "zero" and bool(jnp.any(leaf != 0)):
        raise ConfigurationError(
            f"carry={carry!r} sets moments to zero at the end of a round, and the leaf {path} of the inner state "
            'does not begin at zero. Take carry="average", or begin with zeros.'
        )
    kinds = (jnp.inexact, jnp.int32, jnp.int64, jnp.uint32, jax.dtypes.prng_key)
    if (
        rule == "first"
        and leaf.dtype not in _NARROW
        and not any(jnp.issubdtype(leaf.dtype, k) for k in kinds)
    ):
        raise ConfigurationError(
            f"The leaf {path} of the inner state is {leaf.dtype}, which groups cannot exchange. Keep it as int32."
        )


def _of_first_shard(leaf: jax.Array) -> jax.Array:
    """The value of a leaf in shard 0, in all groups: the others add zeros to it."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _of_first_shard(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    wide = leaf.astype(jnp.int32) if leaf.dtype in _NARROW else leaf
    return psum(jnp.where(shard_index() == 0, wide, jnp.zeros_like(wide))).astype(leaf.dtype)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if leaf.dtype in _HALF else leaf


def _copied(leaf: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """A new array of this type and placement."""
    new = strong(jnp.copy(leaf) if leaf.dtype == spec.dtype else leaf.astype(spec.dtype))
    return new if spec.sharding is None else jax.device_put(new, spec.sharding)


def _sum_type(metric: Any) -> jax.ShapeDtypeStruct | None:
    if not jnp.issubdtype(metric.dtype, jnp.floating):
        return None
    dtype = metric.dtype if metric.dtype == jnp.float64 else jnp.float32
    return jax.ShapeDtypeStruct(metric.shape, dtype)
