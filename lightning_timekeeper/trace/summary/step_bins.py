"""Steps as they are measured, and the run of them in a few hundred bins, for a chart of any length of run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_timekeeper.trace.summary.selftime import INDEX, PHASES

if TYPE_CHECKING:
    from lightning_timekeeper.trace.encode import Int64s

OTHER = frozenset(INDEX[phase] for phase in ("setup", "loop", "timekeeper"))
"""Phases that are shown as ``other``: what Lightning's loops and we ourselves take."""

ROWS = tuple(phase for phase in PHASES if INDEX[phase] not in OTHER)

MOST_BINS = 500


class Step(NamedTuple):
    """One step.

    Attributes:
        number: Its optimizer step or batch; None where the trace does not say.
        epoch: Its epoch, likewise.
        start_ns: Its begin, in the trace's time.
        duration_ns: How long it took.
        own_ns: Self times by phase.
        calls: Spans by phase.
        input_ns: Time in which it waited for data.
    """

    number: int | None
    epoch: int | None
    start_ns: int
    duration_ns: int
    own_ns: list[int]
    calls: list[int]
    input_ns: int


class Block(NamedTuple):
    """Many steps as columns, each of shape (n,) or, for what is by phase, (n, phases)."""

    number: Int64s
    start_ns: Int64s
    duration_ns: Int64s
    input_ns: Int64s
    own_ns: Int64s
    calls: Int64s

    @classmethod
    def of(cls, steps: list[Step]) -> Block:
        """Steps from one on; where one has no number, that is -1."""
        rows = [(-1 if step.number is None else step.number, *step[2:4], step.input_ns) for step in steps]
        columns = np.array(rows, dtype=np.int64).T
        by_phase = np.array([(step.own_ns, step.calls) for step in steps], dtype=np.int64)
        number, start_ns, duration_ns, input_ns = columns
        return cls(number, start_ns, duration_ns, input_ns, by_phase[:, 0], by_phase[:, 1])


@dataclass(frozen=True)
class Bin:
    """Some steps in a row, for a chart of the run.

    Attributes:
        first_step: Number of the first, None where it has none.
        last_step: Number of the last.
        start_ns: Begin of the first, since the begin of the trace.
        end_ns: End of the last.
        steps: How many, from 1.
        duration_ns: Time of all of them.
        longest_ns: The longest.
        phases_ns: Phase -> self time of all of them; with ``other`` they add up to the time.
    """

    first_step: int | None
    last_step: int | None
    start_ns: int
    end_ns: int
    steps: int
    duration_ns: int
    longest_ns: int
    phases_ns: dict[str, int]


class Bins:
    """Any number of steps in at most 500 bins: when they are full, each two become one."""

    def __init__(self) -> None:
        self._bins: list[Bin] = []  # with times as the trace has them
        self._own_ns: list[Int64s] = []
        self._width = 1

    def add(self, block: Block) -> None:
        """The next steps."""
        ends_ns = block.start_ns + block.duration_ns
        at, count = 0, len(ends_ns)
        while at < count:
            room = self._width - self._bins[-1].steps if self._bins else 0
            if room <= 0 and len(self._bins) == MOST_BINS:
                self._halve()
                continue
            upto = min(at + (room if room > 0 else self._width), count)
            made = Bin(
                _number(int(block.number[at])),
                _number(int(block.number[upto - 1])),
                int(block.start_ns[at]),
                int(ends_ns[upto - 1]),
                upto - at,
                int(block.duration_ns[at:upto].sum()),
                int(block.duration_ns[at:upto].max()),
                {},
            )
            own_ns = block.own_ns[at:upto].sum(axis=0)
            if room > 0:
                made, own_ns = _joined(self._bins.pop(), made), self._own_ns.pop() + own_ns
            self._bins.append(made)
            self._own_ns.append(own_ns)
            at = upto

    def _halve(self) -> None:
        pairs = range(0, len(self._bins), 2)
        self._bins = [_joined(self._bins[at], self._bins[at + 1]) for at in pairs]
        self._own_ns = [self._own_ns[at] + self._own_ns[at + 1] for at in pairs]
        self._width *= 2

    def result(self, origin_ns: int) -> tuple[Bin, ...]:
        """The bins, with times since an origin."""
        return tuple(
            replace(
                each,
                start_ns=each.start_ns - origin_ns,
                end_ns=each.end_ns - origin_ns,
                phases_ns=_shown(own_ns.tolist(), each.duration_ns),
            )
            for each, own_ns in zip(self._bins, self._own_ns, strict=True)
        )


def _joined(first: Bin, second: Bin) -> Bin:
    return Bin(
        first.first_step,
        second.last_step,
        first.start_ns,
        second.end_ns,
        first.steps + second.steps,
        first.duration_ns + second.duration_ns,
        max(first.longest_ns, second.longest_ns),
        {},
    )


def _number(number: int) -> int | None:
    return number if number >= 0 else None


def _shown(own_ns: list[int], duration_ns: int) -> dict[str, int]:
    phases_ns = {phase: own_ns[INDEX[phase]] for phase in ROWS if own_ns[INDEX[phase]]}
    return {**phases_ns, "other": duration_ns - sum(phases_ns.values())}
