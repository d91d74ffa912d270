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
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

END = 1
PAYLOAD = 2  # an object for this half event waits in the track's side queue
POINT = 4  # an instant or a counter: no partner
KINDS = 7

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


@dataclass(slots=True)
class Open:
    """A span that had not ended when it was last looked at."""

    ident: int
    start_ns: int
    payload: Any
    lane: int = 0
    position: int = -1
    written: bool = True  # its B is in the file


@dataclass(slots=True)
class Pairing:
    """The state of one thread between drains.

    Attributes:
        open: The open spans, the outermost first.
        crossing: Spans of this thread do not nest (seen lately, or announced by a coroutine): each span that is open
            at a drain gets a lane of its own, because nobody knows yet which of them will end first.
        last_ns: The latest time seen.
    """

    open: list[Open] = field(default_factory=list)
    crossing: bool = False
    last_ns: int = -(1 << 63)

    def feed(self, flat: list[int], side: deque[Any]) -> Batch:
        """Match one batch of half events.

        Args:
            flat: ``code, time_ns`` alternating.
            side: The thread's side queue; one object is taken from it for each code with ``PAYLOAD``.

        Returns:
            What can be written now. A span without a partner is in it as a ``B`` and stays in :attr:`open`.
        """
        halves = np.array(flat, dtype=np.int64)
        code, time_ns = halves[0::2], halves[1::2]
        if len(time_ns) and (time_ns[0] < self.last_ns or bool((time_ns[1:] < time_ns[:-1]).any())):
            # a generator closed by another thread's garbage collection wrote here: keep the track in order
            time_ns = np.maximum.accumulate(np.maximum(time_ns, self.last_ns))
        if len(time_ns):
            self.last_ns = int(time_ns[-1])
        payloads = {int(at): side.popleft() for at in np.flatnonzero(code & PAYLOAD)}
        if not any(span.lane for span in self.open):
            batch = self._nested(code, time_ns, payloads)
            if batch is not None:
                return batch
        return self._crossing(code.tolist(), time_ns.tolist(), payloads)

    def finish(self, now_ns: int, payload: Any) -> list[Single]:
        """Close every open span, the innermost first.

        Args:
            now_ns: The end that they get, at least the latest time seen.
            payload: Arguments that mark them.
        """
        now_ns = max(now_ns, self.last_ns)
        singles = [
            Single(at, "E", span.ident, now_ns, 0, payload, span.lane) for at, span in enumerate(reversed(self.open))
        ]
        self.open.clear()
        return singles

    def _nested(self, code: Int64s, time_ns: Int64s, payloads: dict[int, Any]) -> Batch | None:
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
        point = (code & POINT) != 0
        if point.any():
            for at in np.flatnonzero(point).tolist():
                here = int(position[at])
                singles.append(Single(here, "P", int(code[at]) >> 3, int(time_ns[at]), 0, payloads.get(here), 0))
            keep = ~point
            code, time_ns, position = code[keep], time_ns[keep], position[keep]
        is_end = (code & END).astype(np.int8)
        depth = np.cumsum(1 - 2 * is_end.astype(np.int64))
        if len(depth) and depth.min() < 0:
            return None
        level = depth + is_end  # a begin and its end have the same level, and alternate on it
        deepest = int(level.max(initial=0))
        # numpy sorts 16-bit integers by radix, in linear time
        order = np.argsort(level.astype(np.int16) if deepest < 1 << 15 else level, kind="stable")
        sorted_end = is_end[order]
        closes = np.flatnonzero((sorted_end[1:] == 1) & (sorted_end[:-1] == 0))
        begin_at, end_at = order[closes], order[closes + 1]
        ident = code >> 3
        if bool((ident[begin_at] != ident[end_at]).any()):
            return None
        partner = np.full(len(code), -1, dtype=np.int64)
        partner[begin_at] = end_at

        begins = np.flatnonzero(is_end == 0)
        ends = partner[begins]
        if self.crossing and np.count_nonzero(ends < 0) > 1:
            return None
        self.crossing = False
        plain = ends >= 0
        # what is not simply a complete span without arguments: carried over, still open, or with a payload
        plain[:carried] = False
        plain &= (code[begins] & PAYLOAD) == 0
        plain &= (code[ends] & PAYLOAD) == 0
        still: list[Open] = []
        for at in np.flatnonzero(~plain).tolist():
            begin, end = int(begins[at]), int(ends[at])
            here = int(position[begin])
            if at < carried:
                span = self.open[at]
            else:
                span = Open(int(ident[begin]), int(time_ns[begin]), payloads.get(here), 0, here, written=False)
            if end < 0:
                still.append(span)
                if not span.written:
                    singles.append(Single(here, "B", span.ident, span.start_ns, 0, span.payload, 0))
                    span.written = True
            else:
                singles.append(_closed(span, int(position[end]), int(time_ns[end]), payloads))
        self.open = still
        singles.sort(key=lambda single: single.position)
        begins, ends = begins[plain], ends[plain]
        return Batch(position[begins], ident[begins], time_ns[begins], time_ns[ends] - time_ns[begins], singles)

    def _crossing(self, codes: list[int], times_ns: list[int], payloads: dict[int, Any]) -> Batch:
        """Match ends by ident, one by one, and deal the spans onto lanes."""
        spans = self.open
        for at, span in enumerate(spans):
            span.position = at - len(spans)
        latest: dict[int, list[Open]] = {}
        for span in spans:
            latest.setdefault(span.ident, []).append(span)
        end_of: dict[int, int] = {}  # position of a span -> position of its end
        singles: list[Single] = []
        for at, code in enumerate(codes):
            ident = code >> 3
            if code & POINT:
                singles.append(Single(at, "P", ident, times_ns[at], 0, payloads.get(at), 0))
            elif not code & END:
                span = Open(ident, times_ns[at], payloads.get(at), -1, at, written=False)
                spans.append(span)
                latest.setdefault(ident, []).append(span)
            elif latest.get(ident):  # an end without its begin is dropped: it was recorded before the recording began
                end_of[latest[ident].pop().position] = at

        forever = len(codes)
        lanes: dict[int, list[int]] = {}  # lane -> positions of the ends of the spans open on it, the outermost first
        crossed = False
        self.open = []
        waiting = [(span.position, at, span) for at, span in enumerate(spans)]  # sorted, so a heap
        while waiting:
            begin, at, span = heapq.heappop(waiting)
            end = end_of.get(begin, forever)
            if span.written:
                # spans share a lane though both were open at a drain only where no crossing had been seen lately;
                # where they do cross, the upper one is continued on another lane
                below = lanes[span.lane][-1] if lanes.get(span.lane) else forever
                if below < end:
                    crossed = True
                    singles.append(Single(below - 0.5, "E", span.ident, times_ns[below], 0, None, span.lane))
                    end_of[below] = end  # no span begins where another ends
                    rest = Open(span.ident, times_ns[below], span.payload, -1, below, written=False)
                    heapq.heappush(waiting, (below, at, rest))
                    continue
            else:
                span.lane = _free_lane(lanes, begin, end, forever)
                crossed = crossed or span.lane > 0
            lanes.setdefault(span.lane, []).append(end)
            if end < forever:
                singles.append(_closed(span, end, times_ns[end], payloads))
                continue
            self.open.append(span)
            if not span.written:
                singles.append(Single(begin, "B", span.ident, span.start_ns, 0, span.payload, span.lane))
                span.written = True
        self.crossing = crossed or any(span.lane for span in self.open)
        singles.sort(key=lambda single: single.position)
        empty = np.empty(0, dtype=np.int64)
        return Batch(empty, empty, empty, empty, singles)


def _closed(span: Open, end: int, end_ns: int, payloads: dict[int, Any]) -> Single:
    """The event of a span that ended: an E where its B is written, else an X."""
    mark = payloads.get(end)
    if span.written:
        return Single(end, "E", span.ident, end_ns, 0, mark, span.lane)
    payload = span.payload
    if mark is not None:
        payload = (*payload[:-1], {**payload[-1], **mark}) if isinstance(payload, tuple) else mark
    return Single(span.position, "X", span.ident, span.start_ns, end_ns - span.start_ns, payload, span.lane)


def _free_lane(lanes: dict[int, list[int]], begin: int, end: int, forever: int) -> int:
    """The first lane on which a span from ``begin`` to ``end`` nests in, or lies apart from, what is there."""
    lane = 0
    while True:
        ends = lanes.setdefault(lane, [])
        while ends and ends[-1] < begin:
            ends.pop()
        # two spans that are both open may still cross
        if not ends or (end < ends[-1] and end < forever):
            return lane
        lane += 1
