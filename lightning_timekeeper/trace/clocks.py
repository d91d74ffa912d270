"""How far the clocks of several traces are apart, and how far off that may be.

Traces of one boot of one machine share a clock, and agree to the ns. Between machines anchors tell: the times at which
two ranks entered and left the same barrier. None leaves it before the last has entered, so with the times of clocks a
and b, ``entered_b - left_a <= b - a <= left_b - entered_a``: a gate, as wide as both waits together, that holds whatever
the network does. All gates of a run make a corridor, in which the difference of the clocks lies at any time.

The estimate is the middle of the corridor at the least rate of drift for which it has no gap: constant, if the gates
allow that. The error that is stated takes a drift of 50 ppm into account, or twice the rate that was needed.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ANCHOR = "clock anchor"
"""Name of the instants that carry an anchor."""

USUAL_DRIFT = 50e-6
"""Quartz is specified to within 20 to 50 ppm, and NTP takes most of that away."""

MOST_DRIFT = 1e-3
"""Twice what the kernel slews a clock by (500 ppm): gates that need more contradict each other."""


@functools.cache
def boot_id() -> str:
    """What names this boot of this machine, within which all processes share ``perf_counter_ns``; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"  # a container may have a monotonic clock of its own
    except (OSError, ValueError):
        return ""


class Anchor(NamedTuple):
    """One joint call of all ranks of a run, as one of them saw it; times in ns of its trace."""

    run: str
    number: int
    entered_ns: int
    left_ns: int


class Gate(NamedTuple):
    """The least and the most that a clock can be ahead of another at a time, ns."""

    time_ns: int
    least_ns: int
    most_ns: int


@dataclass
class Clock:
    """The clock of one trace.

    Attributes:
        boots: Boot -> the time in the trace at which that machine's monotonic clock was 0, ns. A merged trace may have
            several.
        anchors: As the trace has them.
    """

    boots: dict[str, int] = field(default_factory=dict)
    anchors: list[Anchor] = field(default_factory=list)


class Shift:
    """Takes the times of one clock to another's: by a constant, or by what changes linearly between knots.

    It never takes a later time before an earlier one, so that spans stay nested.

    Args:
        knots: Time and what to add to it, ns; at least one, in order of time.
    """

    def __init__(self, knots: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
        self._times = [time_ns for time_ns, _ in knots]
        self._added = [added_ns for _, added_ns in knots]
        self.constant_ns = self._added[0] if len(set(self._added)) == 1 else None

    def __call__(self, time_ns: int) -> int:
        """The time on the other clock, ns."""
        return time_ns + self.at(time_ns)

    def at(self, time_ns: int) -> int:
        """What is added at a time, ns."""
        if self.constant_ns is not None:
            return self.constant_ns
        after = bisect_right(self._times, time_ns)
        if after in (0, len(self._times)):
            return self._added[min(after, len(self._added) - 1)]
        begin_ns, end_ns = self._times[after - 1 : after + 1]
        before_ns, after_ns = self._added[after - 1 : after + 1]
        return before_ns + (after_ns - before_ns) * (time_ns - begin_ns) // (end_ns - begin_ns)

    def plus(self, added_ns: int) -> Shift:
        """The same for a trace that is behind by a constant."""
        moved = [(at - added_ns, added + added_ns) for at, added in zip(self._times, self._added, strict=True)]
        return Shift(moved)


class Alignment:
    """How one trace's times become those of the merged one.

    Args:
        by: What tells: ``reference``, ``same machine``, ``anchors`` or ``wall clock``.
        shift: From the trace's times.
        corridor: In the trace's times; empty where the error is 0, or unknown.
        drift: The rate that the stated error allows for.
    """

    def __init__(self, by: str, shift: Shift, corridor: Sequence[Gate] = (), drift: float = 0.0) -> None:
        self.by = by
        self.shift = shift
        self._corridor = corridor
        self._drift = drift

    def error_ns(self, time_ns: int) -> int | None:
        """The most that times near this one can be off, against the reference; None where nothing is known."""
        if self.by == "wall clock":
            return None
        if not self._corridor:
            return 0
        behind_ns = -self.shift.at(time_ns)
        after = bisect_right(self._corridor, time_ns, key=lambda gate: gate.time_ns)
        near = self._corridor[max(0, after - 1) : after + 1]
        slack = [round(self._drift * abs(time_ns - gate.time_ns)) for gate in near]
        least_ns = max(gate.least_ns - extra for gate, extra in zip(near, slack, strict=True))
        most_ns = min(gate.most_ns + extra for gate, extra in zip(near, slack, strict=True))
        return max(most_ns - behind_ns, behind_ns - least_ns)

    def errors_ns(self, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """The least and the largest error between two times."""
        times = {start_ns, end_ns, *(gate.time_ns for gate in self._corridor)}
        for before, after in pairwise(self._corridor):  # where what comes from one meets what comes from the other
            middle_ns = (before.time_ns + after.time_ns) / 2
            for further_ns in (after.most_ns - before.most_ns, before.least_ns - after.least_ns):
                times.add(round(middle_ns + further_ns / (2 * self._drift)))
        times = {time_ns for time_ns in times if start_ns <= time_ns <= end_ns}
        errors = [error for time_ns in times if (error := self.error_ns(time_ns)) is not None]
        return (min(errors), max(errors)) if errors else None

    def plus(self, added_ns: int) -> Alignment:
        """The same for a trace that is behind by a constant."""
        gates = [Gate(at - added_ns, least - added_ns, most - added_ns) for at, least, most in self._corridor]
        return Alignment(self.by, self.shift.plus(added_ns), gates, self._drift)

    def as_companion(self) -> Alignment:
        """For another trace with the same wall clock."""
        return Alignment("same machine" if self.by == "reference" else self.by, self.shift, self._corridor, self._drift)


def by_wall_clock() -> Alignment:
    """Where nothing but the machine's own idea of the time is known."""
    return Alignment("wall clock", Shift())


def align(clocks: Sequence[Clock]) -> list[Alignment]:
    """How the traces become one, whose time is that of the first.

    Args:
        clocks: Of the traces; their times are Unix times, as far as their machines know them.

    Returns:
        One for each.
    """
    groups = _same_machine(clocks)
    aligned: dict[int, Alignment] = {}  # group -> from its time
    if groups:
        aligned[0] = Alignment("reference", Shift())
    anchors = [_joined(clocks, group) for group in groups]
    found = True
    while found:
        found = False
        for number in range(len(groups)):
            if number not in aligned:
                gates = [gate for done, to in aligned.items() for gate in _gates(anchors[number], anchors[done], to)]
                one = _alignment(sorted(gates)) if gates else None
                if one is not None:
                    aligned[number], found = one, True
    result: list[Alignment] = [by_wall_clock() for _ in clocks]
    for number, group in enumerate(groups):
        to = aligned.get(number, by_wall_clock())
        for index, added_ns in group.items():
            result[index] = to.plus(added_ns)
            if to.by == "reference" and index != next(iter(group)):
                result[index].by = "same machine"
    return result


def _same_machine(clocks: Sequence[Clock]) -> list[dict[int, int]]:
    """Traces whose times are known to the ns against each other: index -> what to add to come to the first one's."""
    groups: list[dict[int, int]] = []
    left = dict.fromkeys(range(len(clocks)))
    while left:
        first = next(iter(left))
        del left[first]
        group, boots = {first: 0}, dict(clocks[first].boots)
        found = True
        while found:
            found = False
            for index in list(left):
                own = clocks[index].boots
                shared = next((boot for boot in own if boot in boots), None)
                if shared is not None:
                    group[index] = boots[shared] - own[shared]
                    boots = {**{boot: at_ns + group[index] for boot, at_ns in own.items()}, **boots}
                    del left[index]
                    found = True
        groups.append(group)
    return groups


def _joined(clocks: Sequence[Clock], group: dict[int, int]) -> dict[tuple[str, int], tuple[int, int]]:
    """Joint call -> when the last trace of a group entered it, and the first left it."""
    calls: dict[tuple[str, int], tuple[int, int]] = {}
    for index, added_ns in group.items():
        for run, number, entered_ns, left_ns in clocks[index].anchors:
            last_ns, first_ns = calls.get((run, number), (entered_ns + added_ns, left_ns + added_ns))
            calls[run, number] = max(last_ns, entered_ns + added_ns), min(first_ns, left_ns + added_ns)
    return calls


def _gates(
    own: dict[tuple[str, int], tuple[int, int]], others: dict[tuple[str, int], tuple[int, int]], to: Alignment
) -> Iterable[Gate]:
    """How far a clock is ahead of the reference, at each joint call that it shares with one that is aligned."""
    for call in own.keys() & others.keys():
        entered_ns, left_ns = own[call]
        other_entered_ns, other_left_ns = others[call]
        error_ns = to.error_ns(other_left_ns)
        if error_ns is not None:
            least_ns = entered_ns - to.shift(other_left_ns) - error_ns
            most_ns = left_ns - to.shift(other_entered_ns) + error_ns
            yield Gate(left_ns, least_ns, most_ns)


def _alignment(gates: list[Gate]) -> Alignment | None:
    """From the gates in order of time; None where they contradict each other."""
    drift = _least_drift(gates)
    if drift is None:
        return None
    middle = [(gate.time_ns, -((gate.least_ns + gate.most_ns) // 2)) for gate in _corridor(gates, drift)]
    usual = max(USUAL_DRIFT, 2 * drift)
    return Alignment("anchors", Shift(middle), _corridor(gates, usual), usual)


def _corridor(gates: list[Gate], drift: float) -> list[Gate]:
    """Each gate narrowed by the others, from which the difference can have come no faster than it drifts."""
    least, most = [gate.least_ns for gate in gates], [gate.most_ns for gate in gates]
    forward = range(1, len(gates))
    for here, there in [*((at, at - 1) for at in forward), *((at - 1, at) for at in reversed(forward))]:
        slack_ns = int(drift * abs(gates[here].time_ns - gates[there].time_ns))
        least[here] = max(least[here], least[there] - slack_ns)
        most[here] = min(most[here], most[there] + slack_ns)
    return [Gate(gate.time_ns, low, high) for gate, low, high in zip(gates, least, most, strict=True)]


def _least_drift(gates: list[Gate]) -> float | None:
    def open_at(drift: float) -> bool:
        return all(gate.least_ns <= gate.most_ns for gate in _corridor(gates, drift))

    if open_at(0.0):
        return 0.0
    too_little, enough = 0.0, MOST_DRIFT
    if not open_at(enough):
        return None
    for _ in range(30):
        middle = (too_little + enough) / 2
        too_little, enough = (too_little, middle) if open_at(middle) else (middle, enough)
    return enough
