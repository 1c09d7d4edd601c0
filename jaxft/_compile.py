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
    """
    compute = _compile(
        cut.compute, [state[i] for i in cut.compute.state] + [batch[i] for i in cut.compute.batch], pins
    )
    placed = any(spec.sharding is not None for spec in (*state, *batch))
    made_by_compute = list(compute.output_shardings) if placed else None
    count = len(cut.contributions)
    means = _output_specs([one.aval for one in cut.contributions], made_by_compute, 0)
    apply_specs = [state[i] for i in cut.apply.state] + [means[i] for i in cut.apply.means]
    apply_key = _key(cut, apply_specs, state)
    if apply_key not in applies:
        donated = [place for place, i in enumerate(cut.apply.state) if i in set(cut.donated)]
        applies[apply_key] = _compile(cut.apply, apply_specs, [state[i].sharding for i in cut.made], donated)
    report = None
    if cut.report is not None:
        rest = _output_specs(list(_rest_avals(cut)), made_by_compute, count + len(cut.direct))
        specs = [state[i] for i in cut.report.state] + [means[i] for i in cut.report.means] + rest
        report = _compile(cut.report, specs, ())
    return Executables(compute=compute, apply=applies[apply_key], report=report, apply_key=apply_key)


def _compile(
    part: Part, specs: Sequence[Spec], out_shardings: Sequence[Sharding | None], donated: Sequence[int] = ()
) -> jax.stages.Compiled:
    outputs = part.output_avals
    shardings = [*out_shardings, *[None] * (len(outputs) - len(out_shardings))]
    # Unused leaves are among the inputs only to be donated: their memory serves the new ones.
    program = jax.jit(
        part.function(), donate_argnums=tuple(donated), out_shardings=shardings, keep_unused=True
    )
    return program.trace(*specs).lower().compile()


def _output_specs(avals: Sequence[Any], shardings: Sequence[Sharding] | None, first: int) -> list[Spec]:
    return [
        Spec(
            aval.shape,
            aval.dtype,
            sharding=None if shardings is None else shardings[first + index],
            weak_type=getattr(aval, "weak_type", False),
        )
        for index, aval in enumerate(avals)
    ]


def _rest_avals(cut: Cut) -> Sequence[Any]:
    return cut.compute.output_avals[len(cut.contributions) + len(cut.direct) :]


def _key(cut: Cut, specs: Sequence[Spec], state: Sequence[Spec]) -> Hashable:
    types = tuple((str(spec.dtype), spec.shape, spec.weak_type, spec.sharding) for spec in specs)
    results = tuple(state[i].sharding for i in cut.made)
    return part_digest(cut.apply), cut.made, cut.donated, tuple(cut.forwarded.items()), types, results
