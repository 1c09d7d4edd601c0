"""A call of the step: what all calls of a run must have in common, and whether the means of one are finite.

The decision depends on the means and sums over all shards, never on one group's contribution: a value that is not
finite makes every sum that includes it not finite, and all groups hold the same bits of the sums, as does a joiner
that replays the step. So all groups decide alike without communication. Only a halt needs some: see `Vote.nonfinite`.

The check is one pass over memory: the product of a block with zeros is NaN if and only if a value in the block is not
finite. Measured on one core: 0.1 ms for 4 MB of float32 and 12 ms for 256 MB, while an exchange of two groups over
loopback takes 4.5 and 166 ms. That is 2 to 7 %, so it is opt-in: by default only the beginning of each leaf is
checked, for a warning (1.3 us per leaf). A backward pass spreads its first NaN over nearly everything that it
computes.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np

from jaxft._arrays._device_sums import DeviceSums
from jaxft._arrays._layout import LeafSpec
from jaxft._errors import ConfigurationError
from jaxft._programs._programs import Programs
from jaxft._programs._quantise import MARK
from jaxft.data._batch_functions import BatchFor

_log = logging.getLogger("jaxft")

Policy = Literal["warn", "allow", "raise", "skip"]

# Blocks that stay in the cache of a core.
_BLOCK_ELEMENTS = 1 << 17
# How much of each leaf is checked for a warning.
_GLANCE_ELEMENTS = 1 << 10


class Call(NamedTuple):
    """One call of a step, without its state."""

    programs: Programs
    batch_for: BatchFor
    shards: int | None  # None: one per member of the quorum
    nonfinite: Policy

    def sums(self, stage: int) -> DeviceSums | None:
        """What adds a group's shards on an accelerator; None: it has one, or the host adds them."""
        return self.programs.device.sums(stage) if self._adds else None

    def made(self, stage: int, contribution: Sequence[Any]) -> None:
        """Note where the parts of a contribution are, which decides what adds them."""
        if self._adds:
            self.programs.device.made(stage, contribution)

    @property
    def _adds(self) -> bool:
        """Whether a group may have several shards to add."""
        return (self.shards or 1) > 1


@dataclass(frozen=True)
class OneStep:
    """What all calls of a step have in common: a group that joins replays a run with the only step that it knows.

    The shape of a batch may change from call to call, and `compute` with it. The exchanged
    values, and the use of the means, may not.
    """

    settings: Mapping[str, str]
    apply_key: Hashable

    @staticmethod
    def of(call: Call) -> "OneStep":
        fingerprint = call.programs.fingerprint
        settings = {
            "state": fingerprint["state"],
            "contribution": fingerprint["contribution"],
            "shards": shards_setting(call),
            "nonfinite": compared_policy(call.nonfinite),
        }
        return OneStep(settings, call.programs.executables.apply_key)

    def check(self, now: "OneStep", *, run: str, instead: str) -> None:
        """Raise ConfigurationError if `now` is of another step."""
        if now == self:
            return
        differing = [name for name in self.settings if now.settings[name] != self.settings[name]]
        what = "its use of the means"
        if differing:
            what = f"{differing[0]}: {self.settings[differing[0]]!r} then, {now.settings[differing[0]]!r} now"
        raise ConfigurationError(
            f"this step differs from the step that {run}, in {what}. A run has one training step, with which groups "
            f"that join replay all of it; a step may have several exchanges. {instead}"
        )


def shards_setting(call: Call) -> str:
    return "members" if call.shards is None else str(call.shards)


class FiniteCheck:
    def __init__(self, group: str) -> None:
        self._group = group
        self._warned = False

    def look(self, call: Call, means: Sequence[Any], step: int) -> str:
        """Which of the means is not finite, if the policy checks it: the same text in every group."""
        found = find(call.programs.stages.piece_specs, means, call.nonfinite)
        if found and call.nonfinite == "skip":
            _log.warning("[jaxft %s] step %d changes nothing: %s", self._group, step, found)
        elif found and not self._warned:
            self._warned = True
            _log.warning(
                '[jaxft %s] the means of step %d are not finite: %s (nonfinite="%s"; logged once)',
                *(self._group, step, found, call.nonfinite),
            )
        return found


def checked_policy(policy: str) -> Policy:
    """Check that the policy exists. Raises ConfigurationError."""
    if policy not in get_args(Policy):
        raise ConfigurationError(
            f"nonfinite must be one of {', '.join(map(repr, get_args(Policy)))}, not {policy!r}: the job's policy "
            "for a step whose means are not finite."
        )
    return cast(Policy, policy)


def compared_policy(policy: Policy) -> str:
    """The setting that all groups must share: whether a step counts, not whether a group warns."""
    return "allow" if policy == "warn" else policy


def find(contribution: Sequence[LeafSpec], means: Sequence[Any], policy: Policy) -> str:
    """Name the first leaf of the means that is not finite, with a value; "" if there is none, or no check."""
    if policy == "allow":
        return ""
    most = _GLANCE_ELEMENTS if policy == "warn" else None
    with np.errstate(invalid="ignore"):
        for spec, mean in zip(contribution, means, strict=True):
            look = _holds_mark if spec.operation == "max" else _LOOKS.get(spec.dtype)
            if look is None:
                continue
            flat = np.asarray(mean).reshape(-1)[:most]
            for start in range(0, flat.size, _BLOCK_ELEMENTS):
                block = flat[start : start + _BLOCK_ELEMENTS]
                if look(block):
                    return _text(spec, block, start)
    return ""


def _holds_mark(block: np.ndarray) -> bool:
    """Whether an exponent says that a block of a quantised mean is not finite."""
    return bool((block == MARK).any())


def _text(spec: LeafSpec, block: np.ndarray, start: int) -> str:
    wide = np.where(block == MARK, np.nan, 0.0) if spec.operation == "max" else block.astype(np.float64)
    index = int(np.flatnonzero(~np.isfinite(wide))[0])
    where = [int(position) for position in np.unravel_index(start + index, spec.shape)]
    return f"{spec.path or 'the contribution'} is {wide[index]}" + (f" at {where}" if where else "")


def _by_product(block: np.ndarray) -> np.bool:
    return np.dot(block, _ZEROS[: block.size]) != 0


def _by_exponent(bits: type[np.unsignedinteger[Any]], exponent: int) -> Callable[[np.ndarray], np.bool]:
    """For floats that numpy multiplies slowly: whether any exponent is all ones, as in infinity and NaN."""
    ones = bits(exponent)
    return lambda block: np.any((block.view(bits) & ones) == ones)


_ZEROS = np.zeros(_BLOCK_ELEMENTS, np.float32)
_LOOKS: dict[str, Callable[[np.ndarray], np.bool]] = {
    "float32": _by_product,
    "float64": _by_exponent(np.uint64, 0x7FF << 52),
    "bfloat16": _by_exponent(np.uint16, 0x7F80),
    "float16": _by_exponent(np.uint16, 0x7C00),
}
