"""Half events (a begin or an end, and its time) of one thread -> spans, points, and the spans still open.

The recording thread appends two integers per half event to a flat list, ``code`` and ``time_ns``, and does no more
(see tracer.py). This module makes sense of them afterwards, in the background thread.

A code is ``ident << 3 | kind``. Idents are unique among the spans that are open at the same time on one thread, so
that an end names its begin exactly, also where two asyncio tasks interleave.

Where every end closes the latest begin, as it does in all synchronous code, matching is vectorised: ~60 ns an event.
Where one does not, the spans are matched one by one and those that would cross are put on *lanes*, tracks of their
own: both viewers drop a slice that overlaps its neighbour by a single nanosecond.
"""

from __future__ import annotations

import heapq
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_timekeeper.trace.tracer import END, PAYLOAD, POINT

if TYPE_CHECKING:
    from collections import deque

EXPECTED = 16
"""Batches after the latest crossing in which more are expected."""

NESTED_LANES = 8
"""Lanes that are looked at for one in which a span nests: a thousand tasks get a thousand lanes in linear time."""

Int64s = NDArray[np.int64]


class Single(NamedTuple):
    """One event that is written by itself: a B, an E, a span with arguments, an instant, a counter.

    Attributes:
        position: Where in the batch it stands; batches are written in this order.
        phase: ``X``, ``B``, ``E`` or ``P`` (a point; its payload says which).
        ident: Of the span's name.
        start_ns: Time of the event on the recorder's clock.
        duration_ns: Of an ``X``, else 0.
        payload: Arguments, or what was put in the side queue.
        lane: Which of the track's lanes, 0 being the thread's own.
    """

    position: float
    phase: str
    ident: int
    start_ns: int
    duration_ns: int
    payload: Any
    lane: int


class Batch(NamedTuple):
    """What one drain of one thread brought, in begin order.

    Attributes:
        position, ident, start_ns, duration_ns: Columns, shape (n,), int64: the complete spans without arguments.
        singles: All other events, by position.
    """

    position: Int64s
    ident: Int64s
    start_ns: Int64s
    duration_ns: Int64s
    singles: list[Single]


NO_ROWS = (np.empty(0, dtype=np.int64),) * 4


@dataclass(slots=True)
class Open:
    """A span that had not ended when it was last looked at."""

    ident: int
    start_ns: int
    payload: Any
    lane: int
    position: int
    written: bool = False  # its B is in the file


@dataclass(slots=True)
class Pairing:
    """The state of one thread between drains.

    Attributes:
        open: The open spans, the outermost first.
        crossing: For how many batches more spans that do not nest are expected (they were seen, or announced by a
            coroutine): then each span that is open at a drain gets a lane of its own, because nobody knows yet which
            of them will end first.
        last_ns: The latest time seen.
    """

    open: list[Open] = field(default_factory=list)
    crossing: int = 0
    last_ns: int = -(1 << 63)

    def feed(
        self,
        flat: list[int],
        side: deque[tuple[int, Any]],
        *,
        crossing: bool = False,
        least_ns: Int64s | None = None,
    ) -> Batch:
        """Match one batch of half events.

        Args:
            flat: ``code, time_ns`` alternating.
            side: The thread's side queue; one payload is taken from it for each code with ``PAYLOAD``.
            crossing: Spans that do not nest are announced.
            least_ns: Ident -> the least duration of its spans; shorter ones that hold nothing may be left out here,
                before most of the work.

        Returns:
            What can be written now. A span without a partner is in it as a ``B`` and stays in :attr:`open`.
        """
        # 13 ns an integer; np.array, which asks each for its type, takes 20
        halves = np.frombuffer(struct.pack(f"{len(flat)}q", *flat), dtype=np.int64)
        code, time_ns = halves[0::2], halves[1::2]
        if len(time_ns):
            if time_ns[0] < self.last_ns or bool((time_ns[1:] < time_ns[:-1]).any()):
                # a signal handler or a finaliser recorded between another's look at the clock and its store
                time_ns = np.maximum.accumulate(np.maximum(time_ns, self.last_ns))
            self.last_ns = int(time_ns[-1])
        payloads = {at: take(side, int(code[at])) for at in np.flatnonzero(code & PAYLOAD).tolist()}
        if crossing:
            self.crossing = EXPECTED
        batch = None
        if not any(span.lane for span in self.open):
            batch = self._nested(code, time_ns, payloads, least_ns)
        return batch if batch is not None else self._crossed(code.tolist(), time_ns.tolist(), payloads)

    def finish(self, now_ns: int, mark: dict[str, Any], since_ns: int | None = None) -> Batch:
        """Close open spans, the innermost first.

        Args:
            now_ns: The end that they get, at least the latest time seen.
            mark: Arguments added to them.
            since_ns: Close only what began then or later; by default all.
        """
        self.last_ns = now_ns = max(now_ns, self.last_ns)
        closed = [span for span in reversed(self.open) if since_ns is None or span.start_ns >= since_ns]
        self.open = [span for span in self.open if since_ns is not None and span.start_ns < since_ns]
        ends = [Single(at, "E", span.ident, now_ns, 0, mark, span.lane) for at, span in enumerate(closed)]
        return Batch(*NO_ROWS, ends)

    def _nested(self, code: Int64s, time_ns: Int64s, payloads: dict[int, Any], least_ns: Int64s | None) -> Batch | None:
        """Match by depth.

        Returns:
            None where an end does not close the latest begin, or where spans stay open that may not nest.
        """
        carried = len(self.open)
        position = np.arange(-carried, len(code), dtype=np.int64)
        if carried:
            code = np.concatenate((np.array([span.ident << 3 for span in self.open], dtype=np.int64), code))
            time_ns = np.concatenate((np.array([span.start_ns for span in self.open], dtype=np.int64), time_ns))
        singles: list[Single] = []
        if least_ns is not None:  # of a training step's half events two thirds go here
            leaf = _leaves(code)
            leaf = leaf[leaf >= carried]  # what is open has its B in the file
            short = leaf[time_ns[leaf + 1] - time_ns[leaf] < least_ns[code[leaf] >> 3]]
            keep = np.ones(len(code), dtype=bool)
            keep[short] = keep[short + 1] = False
            code, time_ns, position = code[keep], time_ns[keep], position[keep]
        point = (code & POINT) != 0
        if point.any():
            for at in np.flatnonzero(point).tolist():
                here = int(position[at])
                singles.append(Single(here, "P", int(code[at]) >> 3, int(time_ns[at]), 0, payloads.get(here), 0))
            keep = ~point
            code, time_ns, position = code[keep], time_ns[keep], position[keep]
        leaf = _leaves(code)
        is_end = (code & END).astype(np.int8)
        partner = np.full(len(code), -1, dtype=np.int64)
        partner[leaf] = leaf + 1
        outer = np.ones(len(code), dtype=bool)
        outer[leaf] = outer[leaf + 1] = False
        at_outer = np.flatnonzero(outer)
        outer_end = is_end[at_outer]
        depth = np.cumsum(1 - 2 * outer_end.astype(np.int64))
        if len(depth) and depth.min() < 0:
            return None
        level = depth + outer_end  # a begin and its end have the same level, and alternate on it
        deepest = int(level.max(initial=0))
        # numpy sorts 16-bit integers by radix, in linear time
        order = np.argsort(level.astype(np.int16) if deepest < 1 << 15 else level, kind="stable")
        sorted_end = outer_end[order]
        closes = np.flatnonzero((sorted_end[1:] == 1) & (sorted_end[:-1] == 0))
        begin_at, end_at = at_outer[order[closes]], at_outer[order[closes + 1]]
        ident = code >> 3
        if bool((ident[begin_at] != ident[end_at]).any()):
            return None
        partner[begin_at] = end_at

        begins = np.flatnonzero(is_end == 0)
        ends = partner[begins]
        if self.crossing and np.count_nonzero(ends < 0) > 1:
            return None
        self.crossing = max(0, self.crossing - 1)
        plain = ends >= 0
        # what is not simply a complete span without arguments: carried over, still open, or with a payload
        plain[:carried] = False
        plain &= (code[begins] & PAYLOAD) == 0
        plain &= (code[ends] & PAYLOAD) == 0
        still: list[Open] = []
        rest = np.flatnonzero(~plain)
        begin, end = begins[rest], ends[rest]
        # as lists: a number taken out of an array costs 100 ns
        columns = (rest, position[begin], ident[begin], time_ns[begin], end, position[end], time_ns[end])
        for at, here, name, start_ns, ended, there, end_ns in zip(*(each.tolist() for each in columns), strict=True):
            span = self.open[at] if at < carried else Open(name, start_ns, payloads.get(here), 0, here)
            if ended >= 0:
                singles.append(_closed(span, there, end_ns, payloads))
                continue
            still.append(span)
            if not span.written:
                singles.append(Single(here, "B", span.ident, span.start_ns, 0, span.payload, 0))
                span.written = True
        self.open = still
        singles.sort(key=lambda single: single.position)
        begins, ends = begins[plain], ends[plain]
        return Batch(position[begins], ident[begins], time_ns[begins], time_ns[ends] - time_ns[begins], singles)

    def _crossed(self, codes: list[int], times_ns: list[int], payloads: dict[int, Any]) -> Batch:
        """Match ends by ident, one by one, and deal the spans onto lanes."""
        spans = self.open
        for at, span in enumerate(spans):
            span.position = at - len(spans)
        latest: dict[int, list[Open]] = {}
        for span in spans:
            latest.setdefault(span.ident, []).append(span)
        begun = {span.position: None for span in spans}  # and not ended, in order
        crossed = False
        end_of: dict[int, int] = {}  # position of a span -> position of its end
        singles: list[Single] = []
        for at, code in enumerate(codes):
            ident = code >> 3
            if code & POINT:
                singles.append(Single(at, "P", ident, times_ns[at], 0, payloads.get(at), 0))
            elif not code & END:
                span = Open(ident, times_ns[at], payloads.get(at), -1, at)
                spans.append(span)
                latest.setdefault(ident, []).append(span)
                begun[at] = None
            elif latest.get(ident):  # an end without its begin is dropped: it was recorded before the recording began
                begin = latest[ident].pop().position
                end_of[begin] = at
                crossed = crossed or next(reversed(begun)) != begin
                del begun[begin]

        forever = len(codes)
        lanes = _Lanes(forever)
        self.open = []
        # sorted, so a heap
        waiting = [(s.position, at, end_of.get(s.position, forever), s) for at, s in enumerate(spans)]
        while waiting:
            begin, at, end, span = heapq.heappop(waiting)
            if span.written:
                # spans share a lane though both were open at a drain only where no crossing had been seen lately;
                # where they do cross, the upper one is continued on another lane
                below = lanes.top(span.lane)
                if below < end:
                    mark = {"continued": True}
                    singles.append(Single(below - 0.5, "E", span.ident, times_ns[below], 0, mark, span.lane))
                    rest = Open(span.ident, times_ns[below], span.payload, -1, below)
                    heapq.heappush(waiting, (below, at, end, rest))
                    continue
                lanes.put(span.lane, end)
            else:
                span.lane = lanes.free(begin, end)
            if end < forever:
                singles.append(_closed(span, end, times_ns[end], payloads))
                continue
            self.open.append(span)
            if not span.written:
                singles.append(Single(begin, "B", span.ident, span.start_ns, 0, span.payload, span.lane))
                span.written = True
        self.crossing = EXPECTED if crossed else max(0, self.crossing - 1)
        singles.sort(key=lambda single: single.position)
        return Batch(*NO_ROWS, singles)


def _leaves(code: Int64s) -> Int64s:
    """Where a span begins whose end comes next, both without a payload: it needs no matching, and most are such."""
    return np.flatnonzero(((code[:-1] & (END | PAYLOAD | POINT)) == 0) & (code[1:] == code[:-1] + END))


class _Lanes:
    """Which of a track's lanes are taken, while spans are dealt onto them in begin order.

    Args:
        forever: The end of the spans that are still open.
    """

    def __init__(self, forever: int) -> None:
        self._forever = forever
        self._ends: list[list[int]] = []  # of the spans that lie on a lane, the outermost first
        self._taken: list[tuple[int, int]] = []  # heap of (end, lane)
        self._empty: list[int] = []  # heap; may name lanes that were taken since

    def top(self, lane: int) -> int:
        """The end of the innermost span on a lane."""
        return self._ends[lane][-1] if lane < len(self._ends) and self._ends[lane] else self._forever

    def put(self, lane: int, end: int) -> None:
        """Take a lane until ``end``."""
        while len(self._ends) <= lane:
            heapq.heappush(self._empty, len(self._ends))
            self._ends.append([])
        self._ends[lane].append(end)
        heapq.heappush(self._taken, (end, lane))

    def free(self, begin: int, end: int) -> int:
        """Take the first lane on which a span nests in, or lies apart from, what is there."""
        while self._taken and self._taken[0][0] < begin:
            lane = heapq.heappop(self._taken)[1]
            self._ends[lane].pop()
            if not self._ends[lane]:
                heapq.heappush(self._empty, lane)
        while self._empty and self._ends[self._empty[0]]:
            heapq.heappop(self._empty)
        lane = self._empty[0] if self._empty else len(self._ends)
        # two spans that are both open may still cross
        if end < self._forever:
            for each in range(min(lane, NESTED_LANES)):
                if end < self._ends[each][-1]:
                    lane = each
                    break
        self.put(lane, end)
        return lane


def _closed(span: Open, end: int, end_ns: int, payloads: dict[int, Any]) -> Single:
    """The event of a span that ended: an E where its B is written, else an X."""
    mark = payloads.get(end)
    if span.written:
        return Single(end, "E", span.ident, end_ns, 0, mark, span.lane)
    payload = span.payload
    if mark is not None:
        payload = (*payload[:-1], {**payload[-1], **mark}) if isinstance(payload, tuple) else mark
    return Single(span.position, "X", span.ident, span.start_ns, end_ns - span.start_ns, payload, span.lane)


def take(side: deque[tuple[int, Any]], code: int) -> Any:
    """Remove a half event's payload from the side queue: nearly always the first."""
    for at in range(len(side)):
        if side[at][0] == code:
            payload = side[at][1]
            del side[at]
            return payload
    return None  # a deque that an exception in the recording thread left without it
