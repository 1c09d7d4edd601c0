"""What `jaxft launch --health` checks."""

from dataclasses import dataclass
from pathlib import Path

from jaxft_launch.check._rules import Rule
from jaxft_launch.check._sources import Place, Source, source_of
from jaxft_launch.processes._ranks import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The rules of a launch.

    Attributes:
        rules: applied to each group.
        folder: of the launch.
        http: the URL of the coordinator's HTTP port; empty if it is not known.
    """

    rules: tuple[Rule, ...]
    folder: Path
    http: str

    def source_of(self, rule: Rule, member: Member) -> Source:
        """Return what takes the readings of a rule for a new life of a group."""
        place = Place(
            group=member.name,
            devices=member.devices,
            environment=member.environment(),
            folder=self.folder,
            http=self.http,
        )
        return source_of(rule, place)
