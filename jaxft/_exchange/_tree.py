"""The order in which shards are summed: one binary tree over shard numbers, the same for the life of a job.

Theory of operation. Floating-point addition is not associative, so the bits of a sum depend on its brackets.
jaxft fixes the brackets by *shard number*: a node is a half-open range of shards; a range of more than one
splits at the largest power of two below its size; the sum of a node is (sum of its left child) + (sum of its
right child). The root is the sum over all shards. Which group computed a shard, how many members there are, and what
arrived first make no difference, which is why a run with failures ends in the same bits as a run without.

For seven shards:           [0,7)
                       [0,4)     [4,7)
                    [0,2) [2,4) [4,6) [6,7)

A member that holds all shards of a node sums that node alone, and sends one partial sum instead of several
contributions. Its shards are described by its *cover*: the maximal nodes inside its set of shards, in order.
Members' covers together are always the leaves of a tree with the same root, so combining them needs only
`children`. A left child is never smaller than its sibling: a single shard on the left has a single shard on the
right.
"""

import bisect
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """The shards from `start` up to but not including `stop`. Ordered by start."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def children(self) -> "tuple[Node, Node]":
        """The two halves whose sums make this node's sum, left first. Only for nodes of several shards."""
        assert self.size > 1
        middle = self.start + (1 << ((self.size - 1).bit_length() - 1))
        return Node(self.start, middle), Node(middle, self.stop)

    def is_within(self, other: "Node") -> bool:
        return other.start <= self.start and self.stop <= other.stop

    def __repr__(self) -> str:
        return f"[{self.start},{self.stop})"


def root(total: int) -> Node:
    """The node of all shards of a job."""
    assert total > 0
    return Node(0, total)


def cover(shards: Iterable[int], total: int) -> tuple[Node, ...]:
    """The maximal nodes of the tree over `total` shards that lie entirely inside `shards`, in order."""
    return _known_cover(tuple(shards), total)


# A deal of shards stays for many steps, and a large job has thousands of members.
@functools.lru_cache(maxsize=8192)
def _known_cover(shards: tuple[int, ...], total: int) -> tuple[Node, ...]:
    held = sorted(set(shards))
    assert all(0 <= shard < total for shard in held)
    return tuple(_cover(root(total), held))


def parent(node: Node, total: int) -> Node:
    """The parent of a node. Not for the root."""
    assert node != root(total)
    above = root(total)
    while node not in above.children:
        left, right = above.children
        above = left if node.start < left.stop else right
    return above


def _cover(node: Node, held: Sequence[int]) -> list[Node]:
    inside = bisect.bisect_left(held, node.stop) - bisect.bisect_left(held, node.start)
    if inside == 0:
        return []
    if inside == node.size:
        return [node]
    left, right = node.children
    return _cover(left, held) + _cover(right, held)
