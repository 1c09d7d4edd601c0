"""How what a program contributes is divided among several exchanges.

On an accelerator contributions have to be copied to the host, and means to the devices. In buckets that takes place
beside the exchange: while one is exchanged, the next is copied to the host, and the means of the last to the devices.
On CPU there is nothing to copy, and each exchange more is one more time that all members wait for each other.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

# The most buckets of one program.
MOST_BUCKETS = 8
# The fewest bytes of a bucket, if there are several.
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one exchange takes: contributions of one program, from `first` up to but not including `stop`."""

    program: int
    first: int
    stop: int


def divided(program: int, sizes: Sequence[int], on_accelerator: bool) -> list[Bucket]:
    """Divide what a program contributes into buckets, none of which is small.

    Args:
        program: its number.
        sizes: of its contributions, in bytes.
        on_accelerator: where they are made; otherwise there is one bucket.
    """
    if not on_accelerator:
        return [Bucket(program, 0, len(sizes))]
    least = max(BUCKET_BYTES, math.ceil(sum(sizes) / MOST_BUCKETS))
    ends: list[int] = []
    bucket, rest = 0, sum(sizes)
    for number, size in enumerate(sizes, 1):
        bucket, rest = bucket + size, rest - size
        if bucket >= least and rest >= least:
            ends.append(number)
            bucket = 0
    return [Bucket(program, *pair) for pair in itertools.pairwise([0, *ends, len(sizes)])]
