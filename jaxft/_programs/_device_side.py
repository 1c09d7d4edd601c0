"""What an accelerator adds, and what is brought to it ahead of `apply`, as far as its memory goes."""

import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxft._arrays._device_sums import DeviceSums, device_sums, free_bytes
from jaxft._programs._compile import Executables
from jaxft._programs._stages import Stages

_log = logging.getLogger("jaxft")


@dataclass(frozen=True, eq=False)
class DeviceSide:
    """The devices' side of the exchanges of a step."""

    stages: Stages
    executables: Executables
    _sums: dict[int, DeviceSums | None] = field(default_factory=dict, init=False)

    def compile_sums(self) -> None:
        """Compile what adds contributions on an accelerator, before a step needs it."""
        for stage in range(self.stages.count):
            self.sums(stage)

    def sums(self, stage: int) -> DeviceSums | None:
        """What adds this process's contributions to an exchange on an accelerator. The first call compiles."""
        if stage not in self._sums and self.stages.stage_pieces[stage].whole:
            self._compile_sums(stage, self.stages.shardings(stage))
        return self._sums.get(stage)

    def made(self, stage: int, contribution: Sequence[Any]) -> None:
        """Note where the parts of a first contribution are, in a group of several processes, and compile its sums."""
        if stage not in self._sums:
            self._compile_sums(stage, [part.sharding for part in contribution])

    def _compile_sums(self, stage: int, shardings: Sequence[Any]) -> None:
        programs = {self.stages.buckets[each].program for each in self.stages.run_of(stage)}
        self._sums[stage] = (
            device_sums(self.stages.layouts[stage], tuple(shardings), self._compute_bytes)
            if len(programs) == 1
            else None  # sums would wait for all programs of the run, which are started before
        )

    def has_room_ahead(self) -> bool:
        """Whether an accelerator has memory for one more `compute` while the results of the last are there."""
        return self.stages.on_accelerator and self._have_room(self._compute_bytes)

    def _have_room(self, size_bytes: int) -> bool:
        """Whether each device has so much memory left."""
        shardings = jax.tree.leaves(self.executables.computes[0].output_shardings)
        return all(free_bytes(device) >= size_bytes for device in shardings[0].addressable_devices)

    @functools.cached_property
    def _compute_bytes(self) -> int:
        """The memory that `compute` takes of each device, temporaries and results."""
        found = [program.memory_analysis() for program in self.executables.computes]
        if None in found:
            return sys.maxsize  # not known: there is no room to be sure of
        return sum(one.temp_size_in_bytes + one.output_size_in_bytes for one in found)

    def to_devices(self, stage: int, means: Sequence[np.ndarray]) -> Sequence[Any]:
        """Start to bring the means of an exchange to the devices of an accelerator, ahead of `apply`.

        Returns them as `joined` takes them: as they are on CPU, in a group of several processes, and where the
        devices have no room for them beside one more `compute`.
        """
        if not self.stages.on_accelerator or not self.stages.stage_pieces[stage].whole:
            return means
        start = sum(len(specs) for specs in self.stages.specs[:stage])
        shardings = [spec.sharding for spec in self.executables.means[start : start + len(means)]]
        if self.stages.devices and None in shardings:
            return means  # `apply` decides where they go
        if not self._have_room(self._compute_bytes + sum(mean.nbytes for mean in means)):
            return means
        try:
            return jax.device_put(list(means), shardings)
        except jax.errors.JaxRuntimeError as error:
            _log.warning("The means are brought to the devices later, by apply: %s", error)
            return means
