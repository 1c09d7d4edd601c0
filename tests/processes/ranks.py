"""A group of several processes."""

from dataclasses import dataclass

from tests.clusters import Worker


@dataclass
class Group:
    """The processes of one life of a group."""

    name: str
    ranks: list[Worker]

    @property
    def leader(self) -> Worker:
        return self.ranks[0]
