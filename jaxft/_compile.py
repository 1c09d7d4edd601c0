"""Compiles the parts of a cut step ahead of time."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from jaxft._cut import Cut
from jaxft._fingerprint import part_digest
from jaxft._part import Part

Spec = jax.ShapeDtypeStruct
# Compiled `apply` programs by what they were compiled from: steps on batches of several shapes share one.
Applies = dict[Hashable, jax.stages.Compiled]


@dataclass(frozen=True)
class Executables:
    """The compiled parts of a cut, each over the flat leaves that its part reads."""

    compute: jax.stages.Compiled
    apply: jax.stages.Compiled
    report: jax.stages.Compiled | None
    apply_key: Hashable  # equal keys, the same apply program

    @property
    def flops(self) -> float | None:
        """Floating point operations of one compute and one apply, as far as XLA can tell."""
        costs = [program.cost_analysis() for program in (self.compute, self.apply)]
        if not all(isinstance(cost, dict) and "flops" in cost for cost in costs):
            return None
        return float(sum(cost["flops"] for cost in costs if cost is not None))


def compile_cut(
    cut: Cut,
    state: Sequence[Spec],
    batch: Sequence[Spec],
    pins: Sequence[Sharding | None],
    applies: Applies,
) -> Executables:
    """Compile all parts for leaves of these types.

    `compute` donates nothing, so that a step can be tried again. `apply` donates each leaf of the state that it
    makes anew; it makes them in the order of the donated inputs, which is how XLA can write them in place.

    Args:
        cut: the parts.
        state: the types of the leaves of the state; new ones are pinned to the same shardings.
        batch: the types of the leaves of the batch.
        pins: the sharding in which each contribution is to leave `compute`; None leaves it to XLA.
        applies: the `apply` programs that exist; extended.
    """
    compute = _compile("compute", cut.compute, cut.compute.inputs(state, batch=batch), pins)
    # Where nothing was placed on purpose nothing is pinned, so that results stay free to move, as under jit.
    placed = any(spec.sharding is not None for spec in (*state, *batch))
    made = _output_specs(cut.compute, compute.output_shardings if placed else None)
    means, rest = made[: len(cut.contributions)], made[len(cut.contributions) + len(cut.direct) :]
    inputs = cut.apply.inputs(state, means=means)
    apply_key = _key(cut, inputs, state)
    if apply_key not in applies:
        donated = [place for place, i in enumerate(cut.apply.state) if i in set(cut.donated)]
        shardings = [state[i].sharding for i in cut.made]
        applies[apply_key] = _compile("apply", cut.apply, inputs, shardings, donated)
    report = None
    if cut.report is not None:
        report = _compile("report", cut.report, cut.report.inputs(state, means=means, rest=rest), ())
    return Executables(compute=compute, apply=applies[apply_key], report=report, apply_key=apply_key)


def _compile(
    name: str,
    part: Part,
    inputs: Sequence[Spec],
    out_shardings: Sequence[Sharding | None],
    donated: Sequence[int] = (),
) -> jax.stages.Compiled:
    function = part.function()
    function.__name__ = name  # shown by profilers
    shardings = [*out_shardings, *[None] * (len(part.output_avals) - len(out_shardings))]
    # Unused leaves are among the inputs only to be donated: their memory serves the new ones.
    program = jax.jit(function, donate_argnums=tuple(donated), out_shardings=shardings, keep_unused=True)
    return program.trace(*inputs).lower().compile()


def _output_specs(part: Part, shardings: Any) -> list[Spec]:
    avals = part.output_avals
    return [
        Spec(aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))
        for aval, sharding in zip(avals, shardings or [None] * len(avals), strict=True)
    ]


def _key(cut: Cut, inputs: Sequence[Spec], state: Sequence[Spec]) -> Hashable:
    types = tuple((str(spec.dtype), spec.shape, spec.weak_type, spec.sharding) for spec in inputs)
    results = tuple(state[i].sharding for i in cut.made)
    return part_digest(cut.apply), cut.made, cut.donated, tuple(cut.forwarded.items()), types, results
