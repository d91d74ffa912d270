"""The background thread: takes what the threads recorded, makes events of it, hands them to a sink.

It wakes four times a second. The recording threads are never waited for and never wait: they share with it only
lists, which each side changes by one atomic operation.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
import weakref
from dataclasses import dataclass

# by name: where a test replaces `time.monotonic` by one that counts its calls, ours are not among them
from time import monotonic, perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_timekeeper.trace import encode
from lightning_timekeeper.trace.children import Children
from lightning_timekeeper.trace.clocks import boot_id
from lightning_timekeeper.trace.pairing import NO_ROWS, Batch, Single, take
from lightning_timekeeper.trace.tracer import END, PAYLOAD
from lightning_timekeeper.trace.writer import MOST_PENDING, Sink, trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper.trace.board import Board
    from lightning_timekeeper.trace.tracer import Tracer, Track

SCHEMA_VERSION = 1

PIECE = 16_384
"""Integers of a buffer that are worked on at a time: ~2 ms, in which the training thread gets the GIL several times."""

LUMP = 16 * PIECE
"""Integers that are freed at a time, ~3 ms."""

MOST_WAITING = 8_000_000
"""Integers of a thread's buffer, ~190 MB, beyond which what waits is dropped: only a loop that does nothing but
record, at over a million spans a second, comes here."""

_END_OF_ROWS_NS = 10**16
_UNFINISHED: dict[str, Any] = {"unfinished": True}


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
        tracks: Of the tracer, which adds to it.
        process: What the head of the file says.
        sink: Where the bytes go.
        max_events: Where the recording ends.
        min_ns: Category -> the least duration, ns, of its complete spans without arguments; shorter ones are left out.
        interval_s: Between two drains.
        clock: The recorder's.
        tracer: To be disabled when the recording ends.
        board: That children look at; None where there can be none.
    """

    def __init__(
        self,
        tracks: dict[Track, None],
        process: Process,
        sink: Sink,
        max_events: int,
        min_ns: dict[str, int],
        interval_s: float,
        clock: Callable[[], int],
        tracer: weakref.ref[Tracer],
        board: Board | None,
    ) -> None:
        self.sink = sink
        self.ended = False  # nothing more is recorded
        self.listener: Callable[[Track, Batch], None] | None = None  # is given what is written, and must not raise
        self._finished = False  # the file has its end, or is given up
        self._closed = False  # and nobody will record any more
        self._over = False  # the thread is
        self._failures = ["one warning"]
        self._drop_warnings = ["one warning"]
        self._former: list[Sink] = []
        self._tracks = tracks
        self._process = process
        self._max_events = max_events
        self._min_ns = min_ns
        self._interval_s = interval_s
        self._clock = clock
        self._tracer = tracer
        self._base_ns = encode.base_ns(process.unix_ns)
        self._shift_ns = process.unix_ns - self._base_ns - process.clock_ns
        self._events = 0
        self._next_tid = 1
        self._tables: weakref.WeakKeyDictionary[Track, _Table] = weakref.WeakKeyDictionary()
        self.children = None if board is None else Children(board, sink.stem, self._notice())
        # a SimpleQueue may be used by a signal handler that interrupts its own use; a Lock or an Event may not
        self._thread = threading.Thread(target=self._run, name="timekeeper-drain", daemon=True)
        self._requests: queue.SimpleQueue[tuple[Callable[[], None], queue.SimpleQueue[bool]]] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread, once.

        Raises:
            RuntimeError: Where there is none to be had, as under a limit of processes; nothing is left of the file then.
        """
        _drains.add(self)
        try:
            self._thread.start()
        except BaseException:
            if not self.runs:
                self.ended = self._finished = self._over = True
            raise

    @property
    def runs(self) -> bool:
        """Whether the thread does; it ends the file by itself when the tracer is closed or forgotten."""
        return self._thread.is_alive()

    def flush(self, timeout_s: float) -> bool:
        """As :meth:`Tracer.flush`."""
        until_s = monotonic() + timeout_s
        if self._over:
            return bool(self._failures) and self.sink.done
        return self._ask(lambda: None, timeout_s) and self.sink.wait(until_s - monotonic())

    def close_open(self, track: Track, mark: dict[str, Any], since_ns: int | None, timeout_s: float) -> bool:
        """As :meth:`Tracer.close_open`."""
        return self._ask(lambda: self._close_open(track, mark, since_ns), timeout_s)

    def switch(self, sink: Sink) -> None:
        """Go on in another sink; the old one is ended in the background."""
        # waited for: what its thread records next belongs to the new file
        self._ask(lambda: self._switch(sink), 10.0)

    def leave(self, sink: Sink) -> None:
        """Forget a sink, unless the drain has gone on in it; not waited for, as a second Ctrl-C may be on its way."""
        self._requests.put((lambda: self._leave(sink), queue.SimpleQueue()))
        if self._over:
            self._leave(sink)

    def close(self, timeout_s: float, mark: dict[str, Any]) -> bool:
        """As :meth:`Tracer.close`."""
        started_s = monotonic()
        until_s = started_s + timeout_s
        if not self._over:
            self._closed = self._closed or self._finished  # after a failure no job is done any more
            self._ask(lambda: self._close(mark), timeout_s)
            # it ends at once then; `join` takes a lock that a signal handler's close may find taken
            while self._thread.is_alive() and monotonic() < min(until_s, started_s + 1.0):
                sleep(0.0002)
        sinks = [*self._former, self.sink]  # a file before the last switch may not have its end yet
        if all(sink.wait(until_s - monotonic()) for sink in sinks) and self._finished:
            return bool(self._failures)
        errors = [sink.error for sink in sinks if sink.error is not None]
        self._give_up(errors[0] if errors else TimeoutError(f"not done within {timeout_s:g} s"))
        return False

    def _ask(self, job: Callable[[], None], timeout_s: float) -> bool:
        """Have the thread drain and then do a job; False where it failed, or did not answer in time."""
        reply: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._requests.put((job, reply))
        if not self._over:  # looked at after the put: then it answers what it finds when it ends
            with contextlib.suppress(queue.Empty):
                return reply.get(timeout=min(max(timeout_s, 0.0), 1e6))
        return False

    # ---- the thread ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - no memory even to give up, say: whoever waits must not wait on
            with contextlib.suppress(BaseException):
                self._give_up(error)
        finally:
            self._over = True
            self.ended = True
            for track in list(self._tracks):
                track.retire()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._requests.get_nowait()[1].put(False)

    def _work(self) -> None:
        self._do(self._head)
        next_s = monotonic() + self._interval_s
        # it goes on after a failure, until the tracer is closed: what records goes on recording into the lists
        while not self._closed and (tracer := self._tracer()) is not None:
            del tracer
            job = reply = None
            wait_s = min(max(next_s - monotonic(), 0.01), self._interval_s) if not self._finished else 1.0
            with contextlib.suppress(queue.Empty):
                job, reply = self._requests.get(timeout=wait_s)
            next_s = monotonic() + self._interval_s  # from its beginning: a slow drain does not delay the next
            done = (
                self._do(self._sweep if self._finished else self._collect)
                and (job is None or self._do(job))
                and self._do(self._look_at_sinks)
            )
            if reply is not None:
                reply.put(done)
        if not self._finished:
            self._do(self._collect)
            self._do(lambda: self._finish(_UNFINISHED))

    def _do(self, job: Callable[[], None]) -> bool:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - a bug of ours must not reach the training
            self._give_up(error)
        return bool(self._failures)

    def _sweep(self) -> None:
        for track in list(self._tracks):
            del track.buffer[:]
            track.side.clear()

    def _collect(self) -> None:
        for track in list(self._tracks):
            gone = track.life() is None  # asked first: what it recorded before is taken below
            size = len(track.buffer)
            late = size > MOST_WAITING
            if late and not self.ended:
                self._write(track, track.pairing.finish(self._clock(), _UNFINISHED))
                self._warn_of_drops(f"{size // 4} spans waited at once")
            # each pass over integers that lie in memory since long costs 15 ns a span: one to read, one to free them
            for start in range(0, size, LUMP):
                lump = min(LUMP, size - start)
                for at in range(0, lump, PIECE):
                    piece = track.buffer[at : min(at + PIECE, lump)]
                    if late or self.ended:
                        self._drop(track, piece)
                        continue
                    crossing, track.crossing = track.crossing, False
                    least_ns = self._table(track).min_ns if self._min_ns else None
                    self._write(track, track.pairing.feed(piece, track.side, crossing=crossing, least_ns=least_ns))
                    if size > PIECE:
                        sleep(0)  # lets a waiting thread have the GIL
                del track.buffer[:lump]
            if gone:
                self._finish_track(track, _UNFINISHED)
                del self._tracks[track]
        if self.children is not None and not self.ended:
            self._take_from_children(self.children)

    def _take_from_children(self, children: Children) -> None:
        for lines, events in children.take(self._max_events - self._events, self._ts(self._clock())):
            self._put(*lines)
            self._events += events
            sleep(0)
            if events and self._events >= self._max_events:
                self._end_at_most(next(iter(self._tracks), None))
                return

    def _leave_children(self) -> None:
        if self.children is not None:
            self._put(*self.children.finish(self._ts(self._clock())))

    def _drop(self, track: Track, flat: list[int]) -> None:
        codes = np.array(flat[0::2], dtype=np.int64)
        track.dropped += int(np.count_nonzero((codes & END) == 0))
        for code in codes[(codes & PAYLOAD) != 0].tolist():
            take(track.side, code)

    def _warn_of_drops(self, why: str) -> None:
        if self._drop_warnings:
            self._drop_warnings.pop()
            trouble(f"{self.sink.path or 'the trace'}: spans are dropped ({why}); the trace says how many.")

    def _finish_track(self, track: Track, mark: dict[str, Any]) -> None:
        self._write(track, track.pairing.finish(self._clock(), mark))
        if track.dropped:
            args = {"dropped": track.dropped}
            self._put(self._instant(track, 0, "spans dropped", "timekeeper", self._clock(), args))
            track.dropped = 0

    def _close_open(self, track: Track, mark: dict[str, Any], since_ns: int | None) -> None:
        if not self.ended:
            self._write(track, track.pairing.finish(self._clock(), mark, since_ns))

    def _close(self, mark: dict[str, Any]) -> None:
        self._closed = True
        self._finish(mark)

    def _finish(self, mark: dict[str, Any]) -> None:
        if not self._finished:
            for track in list(self._tracks):
                self._finish_track(track, mark)
            ended = self.ended
            self._end()
            if self.children is not None and not ended:
                self._take_from_children(self.children)  # now that no more comes
            self._leave_children()
            self._finished = True
            self.sink.end()

    def _end(self) -> None:
        """No recording from here on."""
        self.ended = True
        tracer = self._tracer()
        if tracer is not None:
            tracer.disable()

    def _look_at_sinks(self) -> None:
        for sink in (*self._former, self.sink):
            if sink.error is not None:
                raise sink.error
            if sink.pending > MOST_PENDING:
                raise TimeoutError(f"{sink.pending} bytes wait for the file")
        self._former = [sink for sink in self._former if not sink.done]

    def _give_up(self, error: BaseException) -> None:
        """End the recording, with one warning; the file gets its end where it takes one."""
        try:
            self._failures.pop()
        except IndexError:
            return
        self._finished = True
        self._end()
        with contextlib.suppress(Exception):
            self._leave_children()
        for sink in (*self._former, self.sink):
            sink.end()
            if isinstance(error, TimeoutError):
                sink.abandon()
        trouble(
            f"{self.sink.path or 'the trace'} could not be written ({type(error).__name__}: {error}). "
            "The recording ended here."
        )

    def _switch(self, sink: Sink) -> None:
        if self.ended:
            sink.write(b"[\n" + b",\n".join(self._head_lines()))
            sink.end()
            return
        now_ns = self._clock()
        opened = {track: track.pairing.open for track in list(self._tracks)}
        for track in opened:
            self._write(track, track.pairing.finish(now_ns, {"continued": True}))
        if self.children is not None:
            self._put(*self.children.cut(self._ts(now_ns)))
        self.sink.end()
        self._former.append(self.sink)
        self.sink = sink
        self._events = 0
        self._head()
        for track, spans in opened.items():
            track.pairing.open = spans
            begins = [Single(at, "B", s.ident, now_ns, 0, s.payload, s.lane) for at, s in enumerate(spans)]
            self._write(track, Batch(*NO_ROWS, begins))
        if self.children is not None:
            self._put(*self.children.heads(), *self.children.resume())

    def _leave(self, sink: Sink) -> None:
        if sink is not self.sink and sink not in self._former:
            sink.abandon()

    # ---- events ----------------------------------------------------------------------------------------------------
    def _put(self, *lines: bytes) -> None:
        if lines:
            self.sink.write(b",\n" + b",\n".join(lines))

    def _head(self) -> None:
        # one write: an opening bracket alone is refused by Perfetto
        self.sink.write(b"[\n" + b",\n".join(self._head_lines()))

    def _about(self) -> dict[str, Any]:
        process = self._process
        args = {
            "name": process.name,
            "schema_version": SCHEMA_VERSION,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "base_unix_s": self._base_ns // 1_000_000_000,
            "unix_ns": str(process.unix_ns),
            "clock_ns": str(process.clock_ns),
            **process.metadata,
        }
        if self._clock is perf_counter_ns and (boot := boot_id()):  # in which all traces have this clock
            args["boot"] = boot
        return args

    def _notice(self) -> dict[str, Any]:
        """What children are told."""
        about = encode.plain_value(self._about())
        return {
            "pid": self._process.pid,
            "process": about,
            "sort_index": self._process.sort_index,
            "max_events": self._max_events,
            "base_ns": self._base_ns,
            "shift_ns": self._shift_ns,
            "same_clock": "boot" in about,
        }

    def _head_lines(self) -> list[bytes]:
        process = self._process
        lines = [
            encode.event("M", "process_name", process.pid, 0, args=self._about()),
            encode.event("M", "process_sort_index", process.pid, 0, args={"sort_index": process.sort_index}),
        ]
        for track in list(self._tracks):
            if not track.tids:
                track.tids.append(self._tid())
            for lane in range(len(track.tids)):
                lines += self._track_lines(track, lane)
        return lines

    def _tid(self) -> int:
        self._next_tid += 1
        return self._next_tid - 1

    def _lane(self, track: Track, lane: int) -> int:
        while len(track.tids) <= lane:
            track.tids.append(self._tid())
            self._put(*self._track_lines(track, len(track.tids) - 1))
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
        if self._min_ns and len(batch.ident):
            long = batch.duration_ns >= self._table(track).min_ns[batch.ident]
            columns = batch.position[long], batch.ident[long], batch.start_ns[long], batch.duration_ns[long]
            batch = Batch(*columns, batch.singles)
        if self.listener is not None:
            self.listener(track, batch)
        singles, positions = batch.singles, batch.position
        count = len(positions) + len(singles)
        if count == 0:
            return
        self._lane(track, 0)
        if self._events + count > self._max_events and not self.ended:
            self._write_last(track, batch)
            return
        self._events += count
        lines = b""
        if len(positions):
            start_ns = np.maximum(batch.start_ns + self._shift_ns, 0)
            begun = {track.begun.get(0), *(single.start_ns for single in singles if single.phase == "B")}
            # a run of months, or a begin at the very time of another: see _single
            if int(start_ns[-1]) >= _END_OF_ROWS_NS or any(bool((batch.start_ns == at).any()) for at in begun):
                singles, positions = _as_singles(batch), positions[:0]
            else:
                lines = self._table(track).rows.encode(batch.ident, start_ns, batch.duration_ns)
        if not singles:
            self.sink.write(lines)
            return
        ends = encode.row_ends(lines)
        before = np.searchsorted(positions, [single.position for single in singles])
        parts: list[bytes] = []
        prefixes = self._table(track).prefixes
        done = 0
        for single, rows_before in zip(singles, before.tolist(), strict=True):
            end = int(ends[rows_before - 1]) if rows_before else 0
            parts += (lines[done:end], b",\n", self._single(track, single, prefixes))
            done = end
        parts.append(lines[done:])
        self.sink.write(b"".join(parts))

    def _write_last(self, track: Track, batch: Batch) -> None:
        """Write what there is room for, close what is open, and end the recording."""
        room = self._max_events - self._events
        kept: list[Single] = []
        lost: set[tuple[int, int]] = set()  # spans that stay open, without their begin in the file
        for single in _as_singles(batch):
            # an end is written whatever the room is: its begin is in the file
            if single.phase == "E" or len(kept) < room:
                kept.append(single)
            else:
                track.dropped += 1
                if single.phase == "B":
                    lost.add((single.ident, single.lane))
        track.pairing.open = [span for span in track.pairing.open if (span.ident, span.lane) not in lost]
        self._put(*(self._single(track, single, self._table(track).prefixes) for single in kept))
        self._events += len(kept)
        self._end_at_most(track)

    def _end_at_most(self, track: Track | None) -> None:
        """End the recording because of ``max_events``, with a mark on a track."""
        self._end()
        now_ns = self._clock()
        for each in list(self._tracks):
            self._write(each, each.pairing.finish(now_ns, _UNFINISHED))
        self._leave_children()
        name = f"recording ended: max_events={self._max_events}"
        if track is not None:
            self._put(self._instant(track, 0, name, "timekeeper", now_ns, {"max_events": self._max_events}))
        trouble(
            f"{self.sink.path or 'the trace'}: the recording ended after max_events={self._max_events} events. Record "
            "windows (enable=, disable=, schedule=) or begin a new file now and then ({epoch} or {step} in filename)."
        )

    def _table(self, track: Track) -> _Table:
        table = self._tables.setdefault(track, _Table())
        new = track.names[len(table.prefixes) :]
        if new:
            pid, tid = self._process.pid, self._lane(track, 0)
            table.min_ns = np.append(table.min_ns, [self._min_ns.get(category, 0) for _, category in new])
            table.prefixes += [encode.complete_prefix(*name, pid, tid) for name in new]
            table.rows = encode.Rows(table.prefixes)
        return table

    def _single(self, track: Track, single: Single, prefixes: list[bytes]) -> bytes:
        phase, length, payload = single.phase, single.duration_ns, single.payload
        pid, time_ns = self._process.pid, self._ts(single.start_ns)
        alone = phase == "X" and (length == 0 or track.begun.get(single.lane) != single.start_ns)
        if alone and single.lane == 0 and single.ident < len(prefixes):  # one of each step
            return encode.complete(prefixes[single.ident], time_ns, length, payload)
        if phase == "E":  # the viewers take it for the innermost open span's
            return encode.event("E", "", pid, self._lane(track, single.lane), time_ns, args=payload)
        if phase == "P":
            kind, name, category, args = payload
            if kind == "C":
                return encode.event("C", name, pid, track.tids[0], time_ns, args=args)
            return self._instant(track, 0, name, category, single.start_ns, args)
        if single.ident < len(track.names):
            payload = (*track.names[single.ident], payload)
        name, category, args = payload
        tid = self._lane(track, single.lane)
        if alone:
            return encode.event("X", name, pid, tid, time_ns, category=category, duration_ns=length, args=args)
        track.begun[single.lane] = single.start_ns
        begin = encode.event("B", name, pid, tid, time_ns, category=category, args=args)
        if phase == "B":
            return begin
        # Perfetto sorts an X before a B of the same time, and then misses the B's end: write it as a pair too
        return begin + b",\n" + encode.event("E", "", pid, tid, time_ns + length)

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


class _Table:
    """What a track's names are encoded to, as far as they are known."""

    def __init__(self) -> None:
        self.prefixes: list[bytes] = []
        self.min_ns = np.empty(0, dtype=np.int64)
        self.rows: encode.Rows


_drains: weakref.WeakSet[Drain] = weakref.WeakSet()


def _close_all() -> None:
    until_s = monotonic() + 30.0
    for drain in list(_drains):
        if not drain._finished:
            drain.close(until_s - monotonic(), _UNFINISHED)


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drains.clear)
