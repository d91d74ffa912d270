"""Where the time went: self times of spans, by phase, in one pass over the events."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.reader import read_events

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class Row:
    """One phase.

    Attributes:
        phase: Category of the spans.
        self_us: Time in them and in no span inside them, µs.
        calls: How many there were.
        longest_us: The longest of them, with all inside it, µs.
    """

    phase: str
    self_us: float = 0.0
    calls: int = 0
    longest_us: float = 0.0


@dataclass
class Summary:
    """Where the time of a trace went.

    Attributes:
        rows: By self time, the largest first.
        total_us: Sum of the self times, µs: the time covered by spans, added over tracks.
    """

    rows: list[Row] = field(default_factory=list)
    total_us: float = 0.0

    def __str__(self) -> str:
        lines = [f"{'phase':<14}{'share':>8}{'self time':>12}{'calls':>10}{'longest':>12}"]
        for row in self.rows:
            share = f"{100 * row.self_us / self.total_us:.1f} %" if self.total_us else "n/a"
            lines.append(
                f"{row.phase[:13]:<14}{share:>8}{row.self_us / 1e6:>10.3f} s{row.calls:>10,}{row.longest_us / 1e3:>9.1f} ms"
            )
        return "\n".join(lines)


def summarize(source: str | os.PathLike[str] | Iterable[dict[str, Any]]) -> Summary:
    """Sum up a trace that is written in begin order per track, as ours are.

    Args:
        source: A path, or events.

    Raises:
        OSError: Where the file cannot be read.
    """
    events = read_events(source) if isinstance(source, (str, os.PathLike)) else source
    rows: dict[str, Row] = {}
    stacks: dict[tuple[str, str], list[_Frame]] = defaultdict(list)
    latest: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        kind = event.get("ph")
        if kind not in ("X", "B", "E"):
            continue
        ts, duration = _number(event.get("ts")), _number(event.get("dur", 0.0))
        if ts is None or duration is None:
            continue
        key = (str(event.get("pid")), str(event.get("tid")))
        stack = stacks[key]
        if kind == "E":
            _leave(rows, stack, ts, inclusive=True)
            if stack:
                _close(rows, stack, ts)
        else:
            _leave(rows, stack, ts, inclusive=False)
            end = ts + duration if kind == "X" else None
            stack.append(_Frame(str(event.get("cat") or event.get("name")), ts, end))
            ts = end or ts
        latest[key] = max(latest[key], ts)
    for key, stack in stacks.items():
        while stack:
            end = stack[-1].end_us
            _close(rows, stack, latest[key] if end is None else end)
    ordered = sorted(rows.values(), key=lambda row: -row.self_us)
    return Summary(ordered, sum(row.self_us for row in ordered))


def _number(value: Any) -> float | None:
    """A time as foreign traces write them: a number, or one in a text; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@dataclass(slots=True)
class _Frame:
    phase: str
    start_us: float
    end_us: float | None
    inside_us: float = 0.0


def _leave(rows: dict[str, Row], stack: list[_Frame], ts: float, *, inclusive: bool) -> None:
    """Close what ended before ``ts``."""
    while stack and stack[-1].end_us is not None and (stack[-1].end_us < ts or inclusive or stack[-1].end_us == ts):
        _close(rows, stack, stack[-1].end_us)


def _close(rows: dict[str, Row], stack: list[_Frame], end_us: float) -> None:
    frame = stack.pop()
    length_us = max(0.0, end_us - frame.start_us)
    row = rows.setdefault(frame.phase, Row(frame.phase))
    row.self_us += max(0.0, length_us - frame.inside_us)
    row.calls += 1
    row.longest_us = max(row.longest_us, length_us)
    if stack:
        stack[-1].inside_us += length_us
