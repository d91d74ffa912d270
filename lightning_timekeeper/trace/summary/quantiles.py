"""Quantiles of any number of durations in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RELATIVE_ERROR = 0.01
"""The most that a quantile here is off, relative to the true one."""

_LOG_RATIO = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))  # of a bucket's upper bound to its lower one
_BUCKETS_PER_LOG = 1 / _LOG_RATIO
_AT_ONCE = 128
_MIDDLE = 1 - RELATIVE_ERROR  # of a bucket's upper bound: as far, relatively, from either end


@dataclass(frozen=True)
class Bar:
    """One bar of a distribution.

    Attributes:
        from_ns: Where it begins, ns.
        to_ns: Where it ends, ns.
        count: How many are in it, from 1.
    """

    from_ns: int
    to_ns: int
    count: int


class Histogram:
    """Counts durations in buckets whose bounds grow by 2 %: 1,800 of them reach from 1 ns to a month.

    Source: DDSketch (Masson, Rim, Lee: "A fast and fully-mergeable quantile sketch with relative-error guarantees").

    Attributes:
        count: How many durations there are.
        total_ns: Their sum.
        longest_ns: The longest, exact.
        longest_at: What was given with it, such as the number of its step.
    """

    __slots__ = ("_buckets", "_waiting", "count", "longest_at", "longest_ns", "total_ns")

    def __init__(self) -> None:
        self.count = self.total_ns = 0
        self.longest_ns = -1
        self.longest_at: int | None = None
        self._buckets: dict[int, int] = {}  # number -> count; the durations of 0 have number -1
        self._waiting: list[int] = []

    def add(self, duration_ns: int) -> None:
        """Count one, ns from 0. It waits for others: a hundred at once cost a fifth of what they do one by one."""
        self._waiting.append(duration_ns)
        if len(self._waiting) == _AT_ONCE:
            self._take()

    def _take(self) -> None:
        if self._waiting:
            durations_ns = np.array(self._waiting, dtype=np.int64)
            self._waiting.clear()
            self.add_all(durations_ns, np.full(len(durations_ns), -1))

    def add_all(self, durations_ns: NDArray[np.int64], at: NDArray[np.int64]) -> None:
        """Count many, from one on, each with what :attr:`longest_at` is to be; a negative number stands for None."""
        buckets = np.ceil(np.log(np.maximum(durations_ns, 1)) * _BUCKETS_PER_LOG).astype(np.int64)
        buckets[durations_ns <= 0] = -1
        numbers, counts = np.unique(buckets, return_counts=True)
        for bucket, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += len(durations_ns)
        self.total_ns += int(durations_ns.sum())
        longest = int(durations_ns.argmax())
        if durations_ns[longest] > self.longest_ns:
            self.longest_ns, self.longest_at = int(durations_ns[longest]), int(at[longest])
            self.longest_at = self.longest_at if self.longest_at >= 0 else None

    def merge(self, other: Histogram) -> None:
        """Count all that another has counted."""
        self._take()
        other._take()
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += other.count
        self.total_ns += other.total_ns
        if other.longest_ns > self.longest_ns:
            self.longest_ns, self.longest_at = other.longest_ns, other.longest_at

    def copy(self) -> Histogram:
        """One that can be added to."""
        made = Histogram()
        made.merge(self)
        return made

    def quantile(self, share: float) -> float | None:
        """The duration, in ns, that a share of 0 to 1 of them do not exceed, within 1 %; None where there are none."""
        self._take()
        rank = max(1, math.ceil(share * self.count))
        for bucket, count in sorted(self._buckets.items()):
            rank -= count
            if rank <= 0:
                return min(_bound(bucket) * _MIDDLE, self.longest_ns) if bucket >= 0 else 0.0
        return None

    def bars(self, most: int = 60) -> tuple[Bar, ...]:
        """The distribution, in at most so many bars of the same ratio; empty ones are left out."""
        self._take()
        numbers = [number for number in self._buckets if number >= 0]
        if not numbers:
            return ()
        first, width = min(numbers), (max(numbers) - min(numbers)) // most + 1
        counts: dict[int, int] = {}
        for number in numbers:
            at = (number - first) // width
            counts[at] = counts.get(at, 0) + self._buckets[number]
        edges = {at: first - 1 + at * width for at in counts}
        return tuple(
            Bar(round(_bound(edges[at])), round(_bound(edges[at] + width)), count)
            for at, count in sorted(counts.items())
        )


def _bound(bucket: int) -> float:
    """The upper bound of a bucket, ns."""
    return math.exp(bucket * _LOG_RATIO)
