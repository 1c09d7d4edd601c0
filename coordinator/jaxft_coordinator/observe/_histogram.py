"""A histogram with fixed bounds."""

from bisect import bisect_left

# From a step over loopback to a heal of many gigabytes.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts values, in seconds, by upper bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, as often as said."""
        self.counts[bisect_left(SECONDS, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return how many values are at most each bound, as Prometheus writes it."""
        total, found = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found
