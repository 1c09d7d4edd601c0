"""Checks that a run has one training step: a group that joins replays all of it with the only step that it knows.

The shape of a batch may change from call to call, and `compute` with it. What the groups exchange, and what they do
with the means, may not.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from jaxft._errors import ConfigurationError
from jaxft._programs._nonfinite import compared_policy
from jaxft._replica._engine import Call


@dataclass(frozen=True)
class OneStep:
    """What all calls of a step have in common."""

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
