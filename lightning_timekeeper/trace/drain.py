"""The background thread: takes what the threads recorded, makes events of it, hands them to a sink.

It wakes four times a second. The recording threads are never waited for and never wait: they share with it only
lists, which each side changes by one atomic operation.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_timekeeper.trace import encode
from lightning_timekeeper.trace.pairing import END, Batch, Single
from lightning_timekeeper.trace.writer import MOST_PENDING, Sink, trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper.trace.tracer import Tracer, Track

SCHEMA_VERSION = 1

PIECE = 16_384
"""Integers of a buffer that are worked on at a time: ~2 ms, in which the training thread gets the GIL several times."""

MOST_WAITING = 8_000_000
"""Integers of a thread's buffer, ~190 MB, beyond which what waits is dropped: only a loop that does nothing but
record, at over a million spans a second, comes here."""

_END_OF_ROWS_NS = 10**16
_NO_MARK: dict[str, Any] = {}


@dataclass(frozen=True)
class Process:
    """Whose trace it is.

    Attributes:
        pid: Its number in the trace.
        name: Of its group of tracks.
        sort_index: Where it stands among others.
        metadata: Further arguments of the first event.
        unix_ns: The wall clock when the recording began, ns since 1970.
        clock_ns: The recorder's clock at that moment.
    """

    pid: int
    name: str
    sort_index: int
    metadata: dict[str, Any]
    unix_ns: int
    clock_ns: int


class Drain:
    """Takes the tracks' buffers to a sink, in a thread.

    Args:
        tracks: Of the tracer, which appends to it.
        process: What the head of the file says.
        sink: Where the bytes go.
        max_events: Where the recording ends.
        interval_s: Between two drains.
        clock: The recorder's.
        tracer: To be disabled when the recording ends.
    """

    def __init__(
        self,
        tracks: list[Track],
        process: Process,
        sink: Sink,
        max_events: int,
        interval_s: float,
        clock: Callable[[], int],
        tracer: weakref.ref[Tracer],
    ) -> None:
        self.sink = sink
        self.ended = False
        self._tracks = tracks
        self._process = process
        self._max_events = max_events
        self._interval_s = interval_s
        self._clock = clock
        self._tracer = tracer
        self._base_ns = encode.base_ns(process.unix_ns)
        self._shift_ns = process.unix_ns - self._base_ns - process.clock_ns
        self._events = 0
        self._next_tid = 1
        self._tables: weakref.WeakKeyDictionary[Track, _Table] = weakref.WeakKeyDictionary()
        self._requests: queue.SimpleQueue[tuple[Callable[[], None], queue.SimpleQueue[bool]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._head_written = False

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="timekeeper-drain", daemon=True)
            self._thread.start()
            _drains.add(self)

    def flush(self, timeout_s: float) -> bool:
        """As :meth:`Tracer.flush`."""
        until_s = time.monotonic() + timeout_s
        return self._ask(lambda: None, timeout_s) and self.sink.flush(until_s - time.monotonic())

    def close_open(self, track: Track, mark: dict[str, Any], timeout_s: float) -> bool:
        """As :meth:`Tracer.close_open`."""
        return self._ask(lambda: self._write(track, self._finished(track, mark)), timeout_s)

    def switch(self, sink: Sink) -> None:
        """Go on in another sink; the old one is ended in the background."""
        self.start()
        # waited for: what its thread records next belongs to the new file
        self._ask(lambda: self._switch(sink), 10.0)

    def close(self, timeout_s: float, mark: dict[str, Any]) -> bool:
        """As :meth:`Tracer.close`."""
        until_s = time.monotonic() + timeout_s
        self.start()  # also an empty recording has a head and an end
        if not self._closed and not self._ask(lambda: self._finish(mark), timeout_s) and self.sink.error is None:
            self._closed = True
            trouble(f"{self.sink.path or 'the trace'} was left as it is: it could not be ended within {timeout_s:g} s.")
            return False
        whole = self.sink.close(until_s - time.monotonic())
        if not self._closed:
            self._closed = True
            if not whole and self.sink.error is None:
                trouble(f"{self.sink.path}: not written within {timeout_s:g} s; the file ends where it does.")
            elif not whole:
                self._give_up(self.sink.error)
        return whole

    def _ask(self, job: Callable[[], None], timeout_s: float) -> bool:
        """Have the thread drain and then do a job.

        A SimpleQueue may be used in a signal handler that interrupts its own use; an Event or a Lock may not.
        """
        if self._thread is None or not self._thread.is_alive():
            return False
        reply: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._requests.put((job, reply))
        with contextlib.suppress(queue.Empty):
            return reply.get(timeout=max(timeout_s, 0.0))
        return False

    # ---- the thread ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        reply = None
        try:
            self._head()
            while not self._closed:
                job = reply = None
                with contextlib.suppress(queue.Empty):
                    job, reply = self._requests.get(timeout=self._interval_s)
                self._collect()
                if job is not None and reply is not None:
                    job()
                    reply.put(True)
                if self.sink.error is not None:
                    self._give_up(self.sink.error)
                elif self.sink.pending > MOST_PENDING:
                    self._give_up(TimeoutError(f"{self.sink.pending} bytes wait for the file"))
        except BaseException as error:  # noqa: BLE001 - a bug of ours must not reach the training
            self._give_up(error)
            if reply is not None:
                reply.put(False)

    def _collect(self) -> None:
        for track in list(self._tracks):
            thread = track.thread()
            gone = thread is None or not thread.is_alive()
            count = len(track.buffer)
            flat = track.buffer[:count]
            del track.buffer[:count]
            if self.ended:
                self._drop(track, flat)
            elif count > MOST_WAITING:
                self._write(track, self._finished(track, {"unfinished": True}))
                self._drop(track, flat)
            else:
                for at in range(0, count, PIECE):
                    track.pairing.crossing |= track.crossing
                    track.crossing = False
                    self._write(track, track.pairing.feed(flat[at : at + PIECE], track.side))
                    if self.ended:
                        self._drop(track, flat[at + PIECE :])
                        break
                    time.sleep(0)  # lets a waiting thread have the GIL
            if gone and not track.buffer:
                self._write(track, self._finished(track, {"unfinished": True}))
                self._note_dropped(track)
                self._tracks.remove(track)

    def _drop(self, track: Track, flat: list[int]) -> None:
        codes = np.array(flat[0::2], dtype=np.int64)
        track.dropped += int(np.count_nonzero((codes & END) == 0))
        for _ in range(int(np.count_nonzero(codes & 2))):
            track.side.popleft()

    def _note_dropped(self, track: Track) -> None:
        if track.dropped and self._head_written:
            name = f"{track.dropped} spans dropped"
            self._put(self._instant(track, 0, name, "timekeeper", self._clock(), {"dropped": track.dropped}))
            trouble(f"{self.sink.path or 'the trace'}: {track.dropped} spans of {track.name} were dropped.")
            track.dropped = 0

    def _finished(self, track: Track, mark: dict[str, Any]) -> Batch:
        """The ends, now, of a track's open spans."""
        return Batch(*_EMPTY, track.pairing.finish(self._clock(), mark))

    def _finish(self, mark: dict[str, Any]) -> None:
        for track in self._tracks:
            self._write(track, self._finished(track, mark))
            self._note_dropped(track)
        self._end()

    def _end(self) -> None:
        """No recording from here on."""
        self.ended = True
        tracer = self._tracer()
        if tracer is not None:
            tracer.disable()

    def _give_up(self, error: BaseException | None) -> None:
        if not self.ended or not self._closed:
            self._closed = True
            self._end()
            for track in self._tracks:
                track.buffer.clear()
            what = f"{type(error).__name__}: {error}" if error is not None else "no answer"
            trouble(f"{self.sink.path or 'the trace'} could not be written ({what}). The recording ended here.")

    def _switch(self, sink: Sink) -> None:
        now_ns = self._clock()
        opened = [(track, list(track.pairing.open)) for track in self._tracks]
        for track, _ in opened:
            self._write(track, Batch(*_EMPTY, track.pairing.finish(now_ns, {"continued": True})))
        self.sink.close(0.0)
        self.sink = sink
        self._events = 0
        self._head()
        for track, spans in opened:
            track.pairing.open = spans
            singles = [Single(at, "B", s.ident, now_ns, 0, s.payload, s.lane) for at, s in enumerate(spans)]
            self._write(track, Batch(*_EMPTY, singles))

    # ---- events ----------------------------------------------------------------------------------------------------
    def _put(self, line: bytes) -> None:
        self.sink.write(b",\n" + line)

    def _head(self) -> None:
        process = self._process
        args = {
            "name": process.name,
            "schema_version": SCHEMA_VERSION,
            "host": socket.gethostname(),
            "base_unix_s": self._base_ns // 1_000_000_000,
            "unix_ns": str(process.unix_ns),
            "clock_ns": str(process.clock_ns),
            **process.metadata,
        }
        lines = [
            encode.event("M", "process_name", process.pid, 0, args=args),
            encode.event("M", "process_sort_index", process.pid, 0, args={"sort_index": process.sort_index}),
        ]
        for track in list(self._tracks):
            if not track.tids:
                track.tids.append(self._tid())
            for lane in range(len(track.tids)):
                lines += self._track_lines(track, lane)
        # one write: an opening bracket alone is refused by Perfetto
        self.sink.write(b"[\n" + b",\n".join(lines))
        self._head_written = True

    def _tid(self) -> int:
        self._next_tid += 1
        return self._next_tid - 1

    def _lane(self, track: Track, lane: int) -> int:
        while len(track.tids) <= lane:
            track.tids.append(self._tid())
            for line in self._track_lines(track, len(track.tids) - 1):
                self._put(line)
        return track.tids[lane]

    def _track_lines(self, track: Track, lane: int) -> list[bytes]:
        tid, pid = track.tids[lane], self._process.pid
        name = encode.clean_name(track.name) + (f" ({lane + 1})" if lane else "")
        return [
            encode.event("M", "thread_name", pid, tid, args={"name": name}),
            encode.event("M", "thread_sort_index", pid, tid, args={"sort_index": tid}),
        ]

    def _ts(self, time_ns: int) -> int:
        return max(0, time_ns + self._shift_ns)

    def _write(self, track: Track, batch: Batch) -> None:
        """Encode a batch and give it to the sink, up to ``max_events``."""
        room = self._max_events - self._events
        count = len(batch.ident) + len(batch.singles)
        if count == 0:
            return
        singles = batch.singles
        positions = batch.position
        parts: list[bytes] = []
        lines = b""
        self._lane(track, 0)
        if len(positions):
            start_ns = np.maximum(batch.start_ns + self._shift_ns, 0)
            table = self._table(track)
            if int(start_ns[-1]) < _END_OF_ROWS_NS:
                lines = table.rows.encode(batch.ident, start_ns, batch.duration_ns)
            else:  # a run of months
                singles, positions = _as_singles(batch), positions[:0]
        if count > room:
            self._write_last(track, batch, room)
            return
        self._events += count
        if not singles:
            self.sink.write(lines)
            return
        ends = encode.row_ends(lines) if lines else _EMPTY[0]
        before = np.searchsorted(positions, [single.position for single in singles])
        done = 0
        for single, rows_before in zip(singles, before.tolist(), strict=True):
            end = int(ends[rows_before - 1]) if rows_before else 0
            if end > done:
                parts.append(lines[done:end])
                done = end
            parts.append(b",\n" + self._single(track, single))
        parts.append(lines[done:])
        self.sink.write(b"".join(parts))

    def _write_last(self, track: Track, batch: Batch, room: int) -> None:
        """Write what there is room for, close what is open, and end the recording."""
        events = _as_singles(batch)
        # an end is written whatever the room is: there is one begin before it, in this batch or in the file
        kept: list[Single] = []
        begun = {(span.ident, span.lane) for span in track.pairing.open}
        for single in events:
            if single.phase == "E" or len(kept) < room:
                kept.append(single)
            else:
                track.dropped += 1
                if single.phase == "B":
                    begun.discard((single.ident, single.lane))
        track.pairing.open = [span for span in track.pairing.open if (span.ident, span.lane) in begun]
        for single in kept:
            self._put(self._single(track, single))
        self._events += len(kept)
        now_ns = self._clock()
        self._end()
        for each in self._tracks:
            for single in each.pairing.finish(now_ns, {"unfinished": True}):
                self._put(self._single(each, single))
        name = f"recording ended: max_events={self._max_events}"
        self._put(self._instant(track, 0, name, "timekeeper", now_ns, {"max_events": self._max_events}))
        trouble(
            f"{self.sink.path or 'the trace'}: the recording ended after max_events={self._max_events} events. Record "
            "windows (enable=, disable=, schedule=) or begin a new file now and then ({epoch} or {step} in filename)."
        )

    def _table(self, track: Track) -> _Table:
        table = self._tables.get(track)
        if table is None or table.size < len(track.names):
            names = list(track.names)
            pid, tid = self._process.pid, track.tids[0]
            prefixes = [b"" if name is None else encode.complete_prefix(*name, pid, tid) for name in names]
            table = self._tables[track] = _Table(len(names), encode.Rows(prefixes))
        return table

    def _single(self, track: Track, single: Single) -> bytes:
        payload, args = single.payload, _NO_MARK
        if single.phase == "P":
            kind, name, category, args = payload
            if kind == "C":
                pid, tid = self._process.pid, track.tids[0]
                return encode.event("C", name, pid, tid, self._ts(single.start_ns), args=args)
            return self._instant(track, single.lane, name, category, single.start_ns, args)
        named = track.names[single.ident]
        name, category = named if named is not None else ("", "")
        if isinstance(payload, tuple):
            name, category, args = payload
        elif payload:
            args = payload
        length = single.duration_ns if single.phase == "X" else None
        return encode.event(
            single.phase,
            name,
            self._process.pid,
            self._lane(track, single.lane),
            self._ts(single.start_ns),
            category=category,
            duration_ns=length,
            args=args,
        )

    def _instant(self, track: Track, lane: int, name: str, category: str, time_ns: int, args: dict[str, Any]) -> bytes:
        tid = self._lane(track, lane)
        ts_ns = self._ts(time_ns)
        return encode.event("i", name, self._process.pid, tid, ts_ns, category=category, args=args, extra='"s":"t"')


def _as_singles(batch: Batch) -> list[Single]:
    """All events of a batch, one by one and in order."""
    columns = (batch.position, batch.ident, batch.start_ns, batch.duration_ns)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    singles = [Single(at, "X", ident, start_ns, length_ns, None, 0) for at, ident, start_ns, length_ns in rows]
    return sorted([*singles, *batch.singles], key=lambda single: single.position)


@dataclass(frozen=True)
class _Table:
    size: int
    rows: encode.Rows


_EMPTY = (np.empty(0, dtype=np.int64),) * 4
_drains: weakref.WeakSet[Drain] = weakref.WeakSet()


def _close_all() -> None:
    for drain in list(_drains):
        if not drain._closed:
            drain.close(30.0, {"unfinished": True})


atexit.register(_close_all)
