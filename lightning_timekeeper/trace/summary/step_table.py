"""Times of steps -> the step table: where the time of a step goes, the warm-up apart."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_timekeeper.trace.summary.quantiles import Histogram
from lightning_timekeeper.trace.summary.selftime import INDEX, PHASES
from lightning_timekeeper.trace.summary.step_bins import OTHER, ROWS, Bin, Bins, Block, Step

if TYPE_CHECKING:
    from lightning_timekeeper.trace.summary.quantiles import Bar

ALWAYS = ("data", "forward", "backward", "optimizer")
"""Phases that have a row in the table of a training also where they were not measured."""

MOST_WARMUP = 10
WARMUP_RATIO = 2.0
_AT_ONCE = 1024


@dataclass(frozen=True)
class Row:
    """One phase of the step table.

    Times are those of one step in the phase, over the steps in which it occurs; None where nothing was measured.

    Attributes:
        phase: Its name, ``other``, or ``step`` for the whole step.
        share: Of the time of all steps of the table, 0 to 1. Those of the rows, without ``step``, add up to 1.
        total_ns: Self time in all steps of the table, exact.
        mean_ns: Per step.
        p50_ns: Median, within 1 %.
        p95_ns: Within 1 %.
        max_ns: The longest, exact.
        max_step: Number of the step with the longest.
        steps: In how many it occurs.
        calls: Spans of the phase that stand in no other of the same phase.
    """

    phase: str
    share: float | None = None
    total_ns: int | None = None
    mean_ns: float | None = None
    p50_ns: float | None = None
    p95_ns: float | None = None
    max_ns: int | None = None
    max_step: int | None = None
    steps: int = 0
    calls: int = 0


@dataclass(frozen=True)
class StepTable:
    """Where the time of the steps went.

    Attributes:
        unit: ``step`` for training, ``batch`` for a validate, test or predict.
        steps: How many, from 1.
        first_step: Number of the first, None where it has none.
        last_step: Number of the last.
        whole: The row of the step as a whole.
        rows: The phases, the largest first, then ``other``, then those that were not measured.
        input_share: Of the time in which a step waits for its data, with the user's own spans in there; 0 to 1.
        distribution: Of the step times.
        wait_deviation_ns: Standard deviation, over the steps, of the time in which a rank may wait for others.
    """

    unit: str
    steps: int
    first_step: int | None
    last_step: int | None
    whole: Row
    rows: tuple[Row, ...]
    input_share: float | None
    distribution: tuple[Bar, ...]
    wait_deviation_ns: float

    def row(self, phase: str) -> Row:
        """That of a phase; one without figures where there is none."""
        return next((row for row in self.rows if row.phase == phase), Row(phase))

    def per_step_ns(self, *phases: str) -> float:
        """Self time in phases per step, over all steps of the table, ns."""
        return sum(self.row(phase).total_ns or 0 for phase in phases) / self.steps


class Steps:
    """The steps of one rank.

    The first ten are kept as they are, because only the median of the others tells which of them are the warm-up: those
    at the beginning that take more than twice as long, at most a fifth of all.

    Args:
        unit: ``step`` or ``batch``.
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.count = 0
        self._bins = Bins()
        self._first: list[Step] = []
        self._later = _Sums(unit)
        self._waiting: list[Step] = []

    def add(self, step: Step) -> None:
        """The next step."""
        self.count += 1
        if len(self._first) < MOST_WARMUP:
            self._first.append(step)
        self._waiting.append(step)
        if len(self._waiting) == _AT_ONCE:
            self._take()

    def _take(self) -> None:
        """Add up what waits: all columns of a thousand steps at once cost a fifth of what step by step does."""
        if self._waiting:
            known = max(0, len(self._first) - (self.count - len(self._waiting)))  # of those kept as they are
            block = Block.of(self._waiting)
            self._bins.add(block)
            if known < len(self._waiting):
                self._later.add(Block(*(column[known:] for column in block)))
            self._waiting.clear()

    def bins(self, origin_ns: int) -> tuple[Bin, ...]:
        """All steps in at most 500 bins, with times since an origin."""
        self._take()
        return self._bins.result(origin_ns)

    def warmup(self) -> int:
        """How many steps are the warm-up."""
        self._take()
        times_ns = [step.duration_ns for step in self._first]
        median_ns = self._later.whole.quantile(0.5)
        if median_ns is None or self._later.count < len(times_ns):  # of few steps
            median_ns = statistics.median(times_ns) if times_ns else 0.0
        count = 0
        while count < min(len(times_ns), self.count // 5) and times_ns[count] > WARMUP_RATIO * median_ns:
            count += 1
        return count

    def tables(self, warmup: int) -> tuple[StepTable | None, StepTable | None]:
        """The table of the first so many steps, and that of the others; None where there is no step."""
        self._take()
        first, later = _Sums(self.unit), self._later.copy()
        for sums, steps in ((first, self._first[:warmup]), (later, self._first[warmup:])):
            if steps:
                sums.add(Block.of(steps))
        return first.table(), later.table()


class _Sums:
    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.count = 0
        self.whole = Histogram()
        self._other = Histogram()
        self._phases: dict[int, Histogram] = {}
        self._calls = np.zeros(len(PHASES), dtype=np.int64)
        self._input_ns = 0
        self._wait_sum = self._wait_squares = 0.0
        self._numbers: list[int] = []  # the least and the greatest

    def copy(self) -> _Sums:
        """One that can be added to."""
        made = _Sums(self.unit)
        made.count, made._input_ns = self.count, self._input_ns
        made._wait_sum, made._wait_squares = self._wait_sum, self._wait_squares
        made._calls, made._numbers = self._calls.copy(), self._numbers
        made.whole, made._other = self.whole.copy(), self._other.copy()
        made._phases = {phase: times.copy() for phase, times in self._phases.items()}
        return made

    def add(self, block: Block) -> None:
        number, duration_ns, own_ns = block.number, block.duration_ns, block.own_ns
        self.count += len(number)
        self.whole.add_all(duration_ns, number)
        rest_ns = duration_ns
        for index in _SHOWN:
            has = block.calls[:, index] > 0
            if has.any():
                self._phases.setdefault(index, Histogram()).add_all(own_ns[has, index], number[has])
                rest_ns = rest_ns - np.where(has, own_ns[:, index], 0)
        self._other.add_all(np.maximum(rest_ns, 0), number)
        self._calls += block.calls.sum(axis=0)
        self._input_ns += int(block.input_ns.sum())
        waits_ns = own_ns[:, list(WAITS)].sum(axis=1).astype(np.float64)
        self._wait_sum += float(waits_ns.sum())
        self._wait_squares += float((waits_ns**2).sum())
        numbered = number[number >= 0].tolist()
        if numbered:
            self._numbers = [min(numbered + self._numbers[:1]), max(numbered + self._numbers[1:])]

    def table(self) -> StepTable | None:
        if not self.count:
            return None
        all_ns = self.whole.total_ns
        first, last = self._numbers or (None, None)
        rows = [_row(PHASES[index], times, all_ns, int(self._calls[index])) for index, times in self._phases.items()]
        rows.sort(key=lambda row: -(row.total_ns or 0))
        rows.append(_row("other", self._other, all_ns, int(self._calls[list(OTHER)].sum())))
        if self.unit == "step":
            rows += [Row(phase) for phase in ALWAYS if INDEX[phase] not in self._phases]
        return StepTable(
            self.unit,
            self.count,
            first,
            last,
            _row("step", self.whole, all_ns, self.count),
            tuple(rows),
            self._input_ns / all_ns if all_ns and INDEX["data"] in self._phases else None,
            self.whole.bars(),
            math.sqrt(max(0.0, self._wait_squares / self.count - (self._wait_sum / self.count) ** 2)),
        )


WAITS = (INDEX["backward"], INDEX["sync"])
"""Phases in which a rank may wait for others."""
_SHOWN = tuple(INDEX[phase] for phase in ROWS)


def _row(phase: str, times: Histogram, all_ns: int, calls: int) -> Row:
    return Row(
        phase,
        times.total_ns / all_ns if all_ns else None,
        times.total_ns,
        times.total_ns / times.count,
        times.quantile(0.5),
        times.quantile(0.95),
        times.longest_ns,
        times.longest_at,
        times.count,
        calls,
    )
