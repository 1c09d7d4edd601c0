"""Compiles the programs of a partitioned step ahead of time."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxft._arrays._layout import result_dtype
from jaxft._programs import _closed_over, _compat
from jaxft._programs._closed_over import ClosedOver, refuse_deleted
from jaxft._programs._compat import AnyJaxpr, Atom, Var
from jaxft._programs._fingerprint import part_digest
from jaxft._programs._leaves import Part, all_alive
from jaxft._programs._partition import Cut

Spec = jax.ShapeDtypeStruct
# The number of a shard: the last of the inputs that count as the batch.
SHARD_SPEC = Spec((), jnp.int32)
# Compiled `apply` programs by their source: steps on batches of different shapes share one.
Applies = dict[Hashable, "Program"]


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled program, over the flat leaves that it reads."""

    compiled: jax.stages.Compiled
    call: Callable[..., list[jax.Array]]

    def __call__(self, *inputs: Any) -> list[jax.Array]:
        """Run it. Raises ValueError or TypeError if the inputs do not have the types it was compiled for."""
        return self.call(*inputs)

    @property
    def output_shardings(self) -> Any:
        return self.compiled.output_shardings

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()


@dataclass(frozen=True)
class Executables:
    """The compiled programs of a step, each over the flat leaves that it reads."""

    computes: tuple[Program, ...]  # one for each stage
    means: tuple[Spec, ...]  # the types of the means of all stages, as later programs and `apply` take them
    apply: Program
    report: Program | None
    apply_key: Hashable  # equal keys mean the same apply program
    pins: tuple[Sharding | None, ...]  # how the contributions of all stages leave them

    @property
    def flops(self) -> float | None:
        """Floating point operations of each compute and of apply, run once, as far as XLA can tell."""
        costs = [program.cost_analysis() for program in (*self.computes, self.apply)]
        if not all(isinstance(cost, dict) and "flops" in cost for cost in costs):
            return None
        return float(sum(cost["flops"] for cost in costs if cost is not None))


def compile_cut(
    cut: Cut,
    state: Sequence[Spec],
    batch: Sequence[Spec],
    pins: Sequence[Sharding | None],
    applies: Applies,
    closed_over: ClosedOver,
) -> Executables:
    """Compile all programs for leaves of these types.

    `compute` donates nothing, so that a step can be retried. `apply` donates each leaf of the state that it
    replaces; it makes the new ones in the order of the donated inputs, so that XLA can write them in place.

    Args:
        cut: the programs' jaxprs.
        state: the types of the leaves of the state; new ones are pinned to the same shardings.
        batch: the types of the leaves of the batch, and then SHARD_SPEC.
        pins: the sharding in which each contribution of all stages leaves `compute`; None leaves it to XLA.
        applies: the `apply` programs compiled so far; extended.
        closed_over: the large arrays that the step closes over.
    """
    computes, means, rest = compile_computes(cut, state, batch, pins, closed_over)
    left = [
        program.output_shardings[: len(stage.contributions)]
        for program, stage in zip(computes, cut.stages, strict=True)
    ]
    inputs, step = cut.apply.inputs(state, means=means), _Step([*state, *batch], closed_over)
    apply_key = _key(cut, inputs, state, closed_over)
    if apply_key not in applies:
        donated = [position for position, i in enumerate(cut.apply.state) if i in set(cut.donated)]
        shardings = [state[i].sharding for i in cut.made]
        applies[apply_key] = _compile("apply", cut.apply, inputs, shardings, step, donated)
    report = None
    if cut.report is not None:
        inputs = cut.report.inputs(state, means=means, rest=rest)
        report = _compile("report", cut.report, inputs, (), step)
    return Executables(
        computes=computes,
        means=tuple(means),
        apply=applies[apply_key],
        report=report,
        apply_key=apply_key,
        pins=tuple(itertools.chain(*left)),
    )


def compile_computes(
    cut: Cut,
    state: Sequence[Spec],
    batch: Sequence[Spec],
    pins: Sequence[Sharding | None],
    closed_over: ClosedOver,
) -> tuple[tuple[Program, ...], list[Spec], list[Spec]]:
    """Compile `compute` of each stage; return the types of the means and of the passed values, too.

    Equal stages have one program: the rounds of a loop, except the first and the last.
    """
    # Without committed inputs nothing is pinned, so that results stay uncommitted, as under jit.
    step = _Step([*state, *batch], closed_over)
    devices = max((_devices(spec.sharding) for spec in step.specs), default=0)
    computes: list[Program] = []
    means: list[Spec] = []
    rest: list[Spec] = []
    twins = Twins()
    known: dict[Hashable, Program] = {}
    for number, stage in enumerate(cut.stages):
        part, count = stage.compute, len(stage.contributions)
        pinned = pins[len(means) : len(means) + count]
        name = f"compute_{number}" if number else "compute"
        inputs = part.inputs(state, batch=batch, means=means, rest=rest)
        key = twins.number(part), _types(inputs), tuple(pinned)
        compute = known[key] if key in known else _compile(name, part, inputs, pinned, step)
        known[key] = compute
        # If `compute` does not read the state, its results on one device may move to the state's devices.
        shardings = compute.output_shardings
        made = _output_specs(part, [each if _devices(each) == devices else None for each in shardings])
        computes.append(compute)
        means += [
            spec.update(dtype=jnp.dtype(result_dtype(spec.dtype.name, one.operation)))
            for spec, one in zip(made, stage.contributions, strict=False)
        ]
        rest += made[count + len(stage.direct) :]
    return tuple(computes), means, rest


def _devices(sharding: Sharding | None) -> int:
    return 0 if sharding is None else len(sharding.device_set)


class _Step(NamedTuple):
    """Input of all programs of a step: the types of its leaves, and its closed-over arrays."""

    specs: Sequence[Spec]
    closed_over: ClosedOver


def _compile(
    name: str,
    part: Part,
    inputs: Sequence[Spec],
    out_shardings: Sequence[Sharding | None],
    step: _Step,
    donated: Sequence[int] = (),
) -> Program:
    count = len(inputs)
    inputs = [*inputs, *_closed_over.specs(part.closed_over, step.specs)]
    function = part.function()
    function.__name__ = name  # shown by profilers
    shardings = [*out_shardings, *_of_types(part.output_avals[len(out_shardings) :], step.specs)]
    # Unused inputs are kept because they are donated: the new leaves reuse their memory.
    program = jax.jit(
        function,
        donate_argnums=tuple(donated),
        in_shardings=tuple(spec.sharding for spec in inputs),
        out_shardings=shardings,
        keep_unused=True,
    )
    compiled = program.trace(*inputs).lower().compile()
    call = _checked(program, inputs) if any(_is_packed(spec) for spec in inputs) else compiled
    shardings = compiled.input_shardings[0][count:]
    arrays = list(map(step.closed_over.placed, part.closed_over, shardings))
    return Program(compiled, _with(call, arrays) if arrays else call)


def _of_types(avals: Sequence[Any], step: Sequence[Spec]) -> list[Sharding | None]:
    """The shardings of results that nothing else decides; None leaves one to XLA.

    On a mesh with explicit axes a sharding is part of a type, and the next program is traced with the types of the
    step. XLA keeps the explicit shardings of values on a mesh, and shards them over its other axes as it likes. A
    value that the step has on no mesh, such as a row of a numpy batch, is whole on each device.
    """
    meshes = [spec.sharding.mesh for spec in step if isinstance(spec.sharding, NamedSharding)]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return [None] * len(avals)
    return [NamedSharding(mesh, P()) if _compat.lies_nowhere(aval) else None for aval in avals]


def _with(call: Callable[..., Any], arrays: Sequence[jax.Array]) -> Callable[..., list[jax.Array]]:
    """A program that is also given these arrays, after its other inputs."""

    def program(*inputs: Any) -> list[jax.Array]:
        if not all_alive(arrays):
            refuse_deleted(arrays)
        return call(*inputs, *arrays)

    return program


def _is_packed(spec: Spec) -> bool:
    """Whether XLA packs several elements into a byte, as for int4."""
    kinds = ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo))
    return any(jnp.issubdtype(spec.dtype, kind) and info(spec.dtype).bits < 8 for kind, info in kinds)


def _checked(program: Callable[..., Any], inputs: Sequence[Spec]) -> Callable[..., list[jax.Array]]:
    """A jitted program that refuses inputs of other types, as compiled programs do.

    A compiled program refuses committed packed arrays: it expects them packed, and on the CPU they report that they
    are not (JAX 0.10 to 0.12). Called through `jax.jit`, the same program accepts them.
    """

    def call(*given: Any) -> list[jax.Array]:
        for number, (array, spec) in enumerate(zip(given, inputs, strict=True)):
            if (array.shape, array.dtype) != (spec.shape, spec.dtype) or not _lies(array, spec.sharding):
                raise ValueError(
                    f"Input {number} is {array.dtype}{list(array.shape)}, but the program takes {spec}."
                )
        return program(*given)

    return call


def _lies(array: Any, wanted: Sharding | None) -> bool:
    committed = isinstance(array, jax.Array) and array.committed
    return wanted is None or not committed or array.sharding.is_equivalent_to(wanted, array.ndim)


def _output_specs(part: Part, shardings: Sequence[Sharding | None]) -> list[Spec]:
    avals = part.output_avals
    return [
        Spec(aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))
        for aval, sharding in zip(avals, shardings, strict=True)
    ]


def _key(cut: Cut, inputs: Sequence[Spec], state: Sequence[Spec], closed_over: ClosedOver) -> Hashable:
    results = tuple(state[i].sharding for i in cut.made)
    values = closed_over.text(cut.apply.consts)
    digest = part_digest(cut.apply)
    return digest, values, cut.made, cut.donated, tuple(cut.forwarded.items()), _types(inputs), results


def _types(inputs: Sequence[Spec]) -> Hashable:
    return tuple((str(spec.dtype), spec.shape, spec.weak_type, spec.sharding) for spec in inputs)


_PLAIN = (bool, int, str, bytes, type(None))
_NUMBERS = (float, complex, np.generic)


class Twins:
    """Numbers programs: twins have the same number. The programs must stay alive as long as this object.

    Two programs are twins if they have the same equations over the same types, whatever the names of their inputs,
    such as the rounds of a loop: one executable serves them all. Plain values (numbers, texts, tuples of them) are
    compared by value. All else in an equation (functions, host callbacks, arrays, contexts) must be the same object.
    So programs with callbacks that close over different values are no twins, though they have the same fingerprint
    (`_fingerprint.py`), which describes functions by names.
    """

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
    """A number by its bits: 0.0 equals -0.0, and a NaN nothing. JAX wraps numpy's numbers."""
    return type(value), id(value) if isinstance(value, jax.Array) else np.asarray(value).tobytes()


def _type(aval: Any) -> Hashable:
    return str(aval), getattr(aval, "weak_type", False), getattr(aval, "sharding", None)
