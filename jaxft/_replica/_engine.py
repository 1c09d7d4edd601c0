"""The interface that runs the steps of a group, in a job or alone, and what both check of each call."""

import contextlib
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from jaxft._arrays._device_sums import DeviceSums
from jaxft._errors import ConfigurationError
from jaxft._programs._nonfinite import Policy, compared_policy, find
from jaxft._programs._programs import Programs
from jaxft._replica._steps import Steps
from jaxft.data._batch_functions import BatchFor

_log = logging.getLogger("jaxft")


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


class Engine(Steps, Protocol):
    """Runs the steps of a group."""

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, the group does not count as hung."""
        ...

    def join(self, call: Call, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Join the job without taking a step; return the leaves of its newest state.

        Args:
            call: the step to take later.
            state: as in `run`; not consumed unless this group heals.
        """
        ...

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        """Replace leaves of the state before the next step, as part of that step."""
        ...

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        """Commit at least one more step; return the leaves of the state after it, and its metrics.

        Args:
            call: the step to take.
            state: the leaves of the state before it, from `Programs.state_leaves`; consumed.

        Raises:
            OtherTypes: the call's programs do not match this state. It has not been consumed.
            NonFinite: the means are not finite, and the policy is "raise".
        """
        ...


class AnyManager(Protocol):
    """A group's membership of a job, as its step sees it: `jaxft.Manager`."""

    @property
    def step(self) -> int: ...
    def steps(self, total: int | None) -> Iterator[int]: ...
    @property
    def _engine(self) -> Engine: ...
    def _compare_ranks(self, settings: Mapping[str, str]) -> None: ...


@dataclass(frozen=True)
class OneStep:
    """What all calls of a step have in common: a group that joins replays a run with the only step that it knows.

    The shape of a batch may change from call to call, and `compute` with it. What the groups exchange, and what they
    do with the means, may not.
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
        """Raise ConfigurationError if `now` is of another step.

        Args:
            now: of a later call.
            run: what the first step did, to name it.
            instead: what to do for another step.
        """
        if now == self:
            return
        differing = [name for name in self.settings if now.settings[name] != self.settings[name]]
        what = "what it does with the means"
        if differing:
            what = f"{differing[0]}: {self.settings[differing[0]]!r} then, {now.settings[differing[0]]!r} now"
        raise ConfigurationError(
            f"this step differs from the one that {run}, in {what}. A run has one training step, with which groups "
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
