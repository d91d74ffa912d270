"""Tracer: what user code and the callbacks record with. The hot path is here, all else is done in the background.

A thread records into a flat list of its own, two integers per half event: ``code, time_ns`` (see pairing.py). Each
trick below has its measured reason (ns on one core, CPython 3.11, where two clock reads take 100):

- A handle's ``__enter__`` is a slot that holds the ``__next__`` of ``map(list.extend, zip(repeat(code), clock reads))``:
  it reads the clock and stores both integers in one C call, 110; a Python method that does the same takes 190.
- ``__exit__`` has to be a Python function, since it is passed the exception: 45 for the call.
- Handles are made once per thread and name and wait in a set: a new object with a closure takes 900. While a handle
  is open it is not in the set, so that two tasks inside spans of one name hold different handles, and each end names
  its begin: 60 for both ways. A set and not a list, since a handle that its user kept may be there already.
- ``threading.local`` is read once a span, 45, and :func:`span` takes keyword arguments, 50 for the call.

The list needs no lock: only its thread extends it, and the drain takes a slice and deletes it, each atomic.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    from lightning_timekeeper.trace.board import Board
    from lightning_timekeeper.trace.drain import Drain
    from lightning_timekeeper.trace.pairing import Pairing
    from lightning_timekeeper.trace.workers import Worker

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")

# kinds of a half event; the rest of its code is the ident, which names the span among those open on its thread
END = 1
PAYLOAD = 2  # an object for this half event waits in the track's side queue
POINT = 4  # an instant or a counter: no partner

BOARD = "TIMEKEEPER_BOARD"
"""Environment variable with the path of the board (board.py); there while a tracer lives."""

USER = "user"
"""Category of the spans that user code records."""

MOST_HANDLES = 1024
"""Of a thread, ~1 kB each. Beyond, as where names are built per step, a span's name is stored with it instead."""

# an exception that ends a span in the ordinary course of things
_ORDERLY = (GeneratorExit, StopIteration, StopAsyncIteration)


class Span:
    """A context manager that records its body, and a decorator that records each call.

    It belongs to the thread that made it and to the tracer that was recording then. It may be kept and entered again,
    also inside itself, which saves the look-up; interleaved asyncio tasks each need one of their own. A decorated
    function asks anew at each call which tracers record.
    """

    name: str
    args: dict[str, Any]
    home: set[Span] | None  # where it waits while it is not open

    if TYPE_CHECKING:

        def __enter__(self) -> None: ...
        def __exit__(
            self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

    else:
        __slots__ = ("__enter__", "__exit__", "args", "home", "name")

    def __call__(self, function: F) -> F:
        """Record each call of a plain, async, generator or async generator function under this span's name."""
        if self.home is not None:
            self.home.add(self)
        decorated: F = _decorated(function, self.name, self.args)
        return decorated


class _Carrying(Span):
    """A span whose name and arguments are stored with it: 1.9 µs, of which making the object is 0.4."""

    __slots__ = ("_ident", "_track")

    def __init__(self, track: Track, ident: int, name: str, args: dict[str, Any]) -> None:
        self._track, self._ident, self.name, self.args, self.home = track, ident, name, args, None

    def __enter__(self) -> None:
        self._track.store(self._ident << 3 | PAYLOAD, (self.name, USER, self.args))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._track.end(self._ident, None if kind is None else _error(kind))


class Track:
    """One thread's recorder.

    Attributes:
        name: Of the thread.
        life: Dies with the thread, also where that is one that Python did not start.
        buffer: ``code, time_ns`` alternating, oldest first.
        side: ``(code, payload)``, appended before their half event; the code says whose it is, because a signal
            handler or a finaliser may record between the two.
        names: Ident -> ``(name, category)`` of the handles.
        free: Name -> handles that are not open.
        pairing: The drain's; its module loads numpy, and user code that is never recorded shall not.
        crossing: A span that may be suspended began: the drain is to expect spans that do not nest.
        tids: The track's number in the trace, one for each lane.
        begun: Lane -> time of the latest begin in the file that was written without its end.
        dropped: Spans and points that were recorded and not kept.
    """

    pairing: Pairing

    def __init__(self, clock: Callable[[], int], life: object, *, keeps: bool = True) -> None:
        self.name = threading.current_thread().name
        self.life = weakref.ref(life)
        self._ticks = iter(clock, None)
        self._keep(nothing=not keeps)  # nothing in a forked child, where nobody takes it
        self.names: list[tuple[str, str]] = []
        self.free: dict[str, set[Span]] = {}
        self.tids: list[int] = []
        self.begun: dict[int, int] = {}
        self.dropped = 0
        self.crossing = False
        self._clock = clock
        self._serial = count(1 << 32)  # idents of what carries its own name
        self._pairs: dict[tuple[str, str], tuple[int, Callable[[], None], Callable[[], None]]] = {}
        self._handles: list[Span] = []
        self._task: Callable[[], Any] = _nothing  # weak

    def retire(self) -> None:
        """Keep nothing of what is recorded from here on, also through handles that somebody still holds."""
        for span in self._handles:
            span.__enter__, span.__exit__ = _nothing, _ignore  # type: ignore[method-assign]
        self._handles, self._pairs, self.free = [], {}, {}
        self.buffer.clear()
        self.side.clear()
        self._keep(nothing=True)

    def _keep(self, *, nothing: bool) -> None:
        # a deque of no length takes what a list takes, and keeps nothing
        self.buffer: list[int] = deque(maxlen=0) if nothing else []  # type: ignore[assignment]
        self.side: deque[tuple[int, Any]] = deque(maxlen=0 if nothing else None)
        # shared by all that `reads` makes: a training step has touched each of them, and finds none in its cache
        self._extend = self.buffer.extend

    def reads(self, code: int) -> Callable[[], None]:
        """A call without arguments that appends ``code`` and the time, in C."""
        return map(self._extend, zip(repeat(code), self._ticks)).__next__

    def pair(self, name: str, category: str) -> tuple[int, Callable[[], None], Callable[[], None]]:
        """The ident of a name, and the begin and the end that :meth:`Tracer.handle` returns."""
        pair = self._pairs.get((name, category))
        if pair is None:
            ident = len(self.names)
            self.names.append((name, category))
            pair = self._pairs[name, category] = ident, self.reads(ident << 3), self.reads(ident << 3 | END)
        return pair

    def failing(self, name: str, category: str) -> Callable[[type[BaseException]], None]:
        """The end of a :meth:`pair` that an exception brings, whose class marks the span."""
        ident = self.pair(name, category)[0]
        return lambda kind: self.end(ident, _error(kind))

    def since_last(self, name: str, category: str) -> None:
        """Record the time since this thread's latest half event as a span, after the fact."""
        ident, now_ns = self.pair(name, category)[0], self._clock()
        try:
            start_ns = self.buffer[-1]
        except IndexError:  # the drain has just been here
            if not isinstance(self.buffer, list):  # or it is a forked child's
                return
            start_ns = self.pairing.last_ns
        if start_ns <= now_ns:
            self.buffer.extend((ident << 3, start_ns, ident << 3 | END, now_ns))

    def new(self, name: str) -> Span:
        """One more handle for spans of user code under this name."""
        # a long name would make the encoder's rows wide, all of them
        if len(self.names) >= MOST_HANDLES or not isinstance(name, str) or len(name) > 100:
            return self.with_args(name, {})
        self.note_task()
        free = self.free.setdefault(name, set())
        ident = len(self.names)
        self.names.append((name, USER))
        end = self.reads(ident << 3 | END)
        give_back = free.add
        span = Span()

        def leave(
            kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
        ) -> None:
            if kind is None:
                end()
            else:
                self.end(ident, _error(kind))
            give_back(span)

        span.name, span.args, span.home = name, {}, free
        span.__enter__, span.__exit__ = self.reads(ident << 3), leave  # type: ignore[method-assign]
        self._handles.append(span)
        return span

    def with_args(self, name: str, args: dict[str, Any]) -> Span:
        """A handle for a span whose name and arguments are stored with it."""
        self.note_task()
        return _Carrying(self, next(self._serial), name, args)

    def begin(self, name: str, category: str, args: dict[str, Any]) -> int:
        """Open a span that carries its own name and arguments; returns what :meth:`end` needs."""
        ident = next(self._serial)
        self.store(ident << 3 | PAYLOAD, (name, category, args))
        return ident

    def end(self, ident: int, args: dict[str, Any] | None = None) -> None:
        """Close a span that :meth:`begin` opened; ``args`` are added to those of its begin."""
        if args:
            self.store(ident << 3 | END | PAYLOAD, args)
        else:
            self.buffer.extend((ident << 3 | END, self._clock()))

    def point(self, payload: tuple[str, str, str, dict[str, Any]], time_ns: int | None = None) -> None:
        """Store an instant (``"i", name, category, args``) or a counter (``"C", name, "", values``).

        ``time_ns`` is for a caller that has just read the clock, and tells of it in the arguments.
        """
        code = next(self._serial) << 3 | POINT | PAYLOAD
        if time_ns is None:
            self.store(code, payload)
        else:
            self.side.append((code, payload))
            self.buffer.extend((code, time_ns))

    def note_task(self) -> None:
        """Announce spans that may interleave, where another asyncio task than the last one seen here records.

        A single task's spans nest; a notebook's cell is one.
        """
        asyncio = sys.modules.get("asyncio")
        if asyncio is not None and asyncio._get_running_loop() is not None:
            task, before = asyncio.current_task(), self._task()
            if task is not None and task is not before:
                self.crossing |= before is not None and not before.done()
                self._task = weakref.ref(task)

    def store(self, code: int, payload: Any) -> None:
        """Store a half event with a payload."""
        self.side.append((code, payload))
        self.buffer.extend((code, self._clock()))


def _nothing() -> None:
    return


def _ignore(kind: object, value: object, traceback: object) -> None:
    return


def _error(kind: type[BaseException]) -> dict[str, Any] | None:
    return None if issubclass(kind, _ORDERLY) else {"error": kind.__name__}


class _Local(threading.local):
    """A thread's own: its track and, first in the way of every span, that track's free handles."""

    track: Track | None = None
    free: dict[str, set[Span]] = {}  # noqa: RUF012 - stays empty: of a thread that has not recorded yet
    life: object = None


class _Life:
    """A token that dies with a thread's locals."""

    __slots__ = ("__weakref__",)


class Tracer:
    """Records spans, instants and counters of any number of threads, and hands them to a sink in the background.

    Args:
        path: The file to write, ``.json`` or ``.json.gz``, also a URL that fsspec knows; None keeps the events in
            memory, compressed. An existing file is never touched: :class:`FileExistsError`.
        opener: ``path -> writable binary file``, in place of fsspec's open.
        max_events: The most events that are kept, from 1; then the recording ends with a marker and one warning.
        min_duration_us: Category -> the least duration, µs from 0; spans of it that are shorter, have no arguments and
            end within a drain are left out.
        process_name: The name of the process' track group.
        metadata: Further arguments of the first event, for programs that read the file.
        drain_interval_s: Seconds between two drains, above 0: what a SIGKILL can lose.
        clock: A monotonic clock in ns.
        wall_clock: Unix time in ns; read once, at construction.
        pid: The process' number in the trace, 1 to 2**32 - 1.
        sort_index: Where the process stands among others.

    Raises:
        ValueError: For an argument out of its range.
        OSError: Where the file cannot be opened.

    Example::

        with Tracer("trace.json") as tracer:
            with span("load"):
                rows = read()
            tracer.counter("rows", len(rows))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        opener: Callable[[str], Any] | None = None,
        max_events: int = 2_000_000,
        min_duration_us: Mapping[str, float] | None = None,
        process_name: str | None = None,
        metadata: dict[str, Any] | None = None,
        drain_interval_s: float = 0.25,
        clock: Callable[[], int] = time.perf_counter_ns,
        wall_clock: Callable[[], int] = time.time_ns,
        pid: int | None = None,
        sort_index: int = 0,
    ) -> None:
        from lightning_timekeeper.trace.drain import Drain, Process  # noqa: PLC0415 - numpy, only where one records
        from lightning_timekeeper.trace.writer import open_sink  # noqa: PLC0415

        if not isinstance(max_events, int) or isinstance(max_events, bool) or max_events < 1:
            raise ValueError(f"`Tracer(max_events={max_events!r})`: expected a whole number from 1.")
        if not (isinstance(drain_interval_s, (int, float)) and 0 < drain_interval_s <= 3600):
            raise ValueError(f"`Tracer(drain_interval_s={drain_interval_s!r})`: expected seconds, above 0 to 3600.")
        pid = os.getpid() if pid is None else pid
        if not 1 <= pid < 1 << 32:
            raise ValueError(f"`Tracer(pid={pid!r})`: expected 1 to 2**32 - 1.")
        self._clock = clock
        self._local = _Local()
        self._tracks: dict[Track, None] = {}  # in order; a set has none, and removal from a list takes a search
        process = Process(
            pid=pid,
            name=process_name or f"pid {os.getpid()}",
            sort_index=sort_index,
            metadata=dict(metadata or {}),
            unix_ns=wall_clock(),
            clock_ns=clock(),
        )
        least = {category: round(minimum_us * 1000) for category, minimum_us in (min_duration_us or {}).items()}
        board = tell_children()
        self._drain: Drain | None = None
        sink = None
        try:
            sink = open_sink(path, opener)
            self._drain = Drain(
                self._tracks, process, sink, max_events, least, drain_interval_s, clock, weakref.ref(self), board
            )
            self._new_track()  # the constructing thread's is the first: the training loop's
            self._drain.start()
        except BaseException:  # Ctrl-C, or no thread to be had
            if sink is not None and (self._drain is None or not self._drain.runs):
                sink.abandon()
            raise
        self._drain.flush(1.0)  # the file has its head, and opens from here on whatever happens
        _live.add(self)

    # ---- recording -------------------------------------------------------------------------------------------------
    @property
    def enabled(self) -> bool:
        """Whether it records."""
        return self in _recording

    def enable(self) -> None:
        """Begin to record, in all threads; nothing happens where it records already, or has ended."""
        with _switching:
            if self._drain is not None and not self._drain.ended and self not in _recording:
                _set_recording([*_own(), self])

    def disable(self) -> None:
        """Record no new span; those that are open still get their ends."""
        with _switching:
            if self in _recording:
                _set_recording([tracer for tracer in _own() if tracer is not self])

    def span(self, name: str, /, **args: Any) -> Span:
        """As the module's :func:`span`, for this tracer alone, enabled or not."""
        if args:
            return self.track.with_args(name, args)
        try:
            return self._local.free[name].pop()
        except (KeyError, TypeError):
            return self.track.new(name)

    def handle(self, name: str, category: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin and end of a name on the calling thread, to be called in turn, nested if at all.

        For callers that keep the pair: there is no look-up at all on the way. What they record after the tracer itself
        is gone is never taken.
        """
        return self.track.pair(name, category)[1:]

    def now_ns(self) -> int:
        """The recorder's clock, ns."""
        return self._clock()

    @property
    def track(self) -> Track:
        """The calling thread's recorder."""
        return self._local.track or self._new_track()

    def instant(self, name: str, /, category: str = USER, **args: Any) -> None:
        """A mark without duration on the calling thread's track."""
        self.track.point(("i", name, category, args))

    def counter(self, name: str, value: float | None = None, /, **series: float) -> None:
        """A sample of one number, or of several that are stacked in one graph.

        A NaN or infinity is left out: the viewers cannot take them.
        """
        values = _numbers(name, value, series)
        if values:
            self.track.point(("C", name, "", values))

    def _new_track(self) -> Track:
        local, life = self._local, _Life()
        track = Track(self._clock, life, keeps=self._drain is not None)
        if self._drain is not None:
            from lightning_timekeeper.trace.pairing import Pairing  # noqa: PLC0415 - see Track.pairing

            track.pairing = Pairing()
            self._tracks[track] = None
        local.life, local.track, local.free = life, track, track.free
        return track

    # ---- the file --------------------------------------------------------------------------------------------------
    @property
    def path(self) -> str | None:
        """The file, as it will be named after :meth:`close`; None for memory."""
        return self._drain.sink.path if self._drain is not None else None

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Hand all that was recorded to the file.

        Args:
            timeout_s: The longest to wait, from 0.

        Returns:
            Whether it is there.
        """
        return self._drain is not None and self._drain.flush(timeout_s)

    def close(self, timeout_s: float = 30.0, *, mark: dict[str, Any] | None = None) -> bool:
        """End the recording: close the open spans, write what is left, end the file. A second call does nothing.

        Args:
            timeout_s: The longest to wait for the file, from 0; then it is left as it is, with a warning.
            mark: Arguments for the spans that are open, by default ``unfinished=True``.

        Returns:
            Whether the file is whole.
        """
        self.disable()
        if self._drain is None:
            return False
        whole = self._drain.close(timeout_s, mark or {"unfinished": True})
        if all(tracer._drain is None or tracer._drain.ended for tracer in _live):
            os.environ.pop(BOARD, None)
        return whole

    def close_open(self, mark: dict[str, Any], timeout_s: float = 10.0, *, since_ns: int | None = None) -> bool:
        """End the calling thread's open spans; the ends that their blocks record later are dropped.

        Args:
            mark: Arguments added to those spans.
            timeout_s: The longest to wait, from 0.
            since_ns: End only what began at this time of the recorder's clock or later; by default all.
        """
        return self._drain is not None and self._drain.close_open(self.track, mark, since_ns, timeout_s)

    def events(self) -> Iterator[dict[str, Any]]:
        """The events recorded so far, of a tracer that keeps them in memory.

        Raises:
            ValueError: For a tracer that writes a file: use :func:`read_events` on it.
        """
        from lightning_timekeeper.trace.writer import Memory  # noqa: PLC0415

        if self._drain is None or not isinstance(self._drain.sink, Memory):
            raise ValueError("`Tracer.events()` reads what is kept in memory; this tracer writes a file.")
        self.flush()
        return self._drain.sink.events()

    def switch(self, path: str, opener: Callable[[str], Any] | None = None) -> None:
        """Go on in a new file; the old one is ended in the background.

        Raises:
            OSError: Where the new file cannot be opened; then all goes on in the old one.
        """
        from lightning_timekeeper.trace.writer import open_sink  # noqa: PLC0415

        if self._drain is not None and not self._drain.ended:
            sink = None
            try:
                sink = open_sink(path, opener)
                self._drain.switch(sink)
            except BaseException:  # Ctrl-C: the drain has been told of the file, or not
                if sink is not None:
                    self._drain.leave(sink)
                raise

    def __enter__(self) -> Tracer:
        self.enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(mark=None if kind is None else {"error": kind.__name__})

    def _forget(self) -> None:
        """After a fork, in the child: its parent's file and thread are not its own."""
        _leaked.append(self._drain)  # never finalised: a buffered file would write its buffer twice
        self._drain = None
        self._tracks = {}
        self._local = _Local()


# ---- the tracers that record, and what user code calls ---------------------------------------------------------------
_live: weakref.WeakSet[Tracer] = weakref.WeakSet()
_leaked: list[Any] = []
_recording: list[Tracer | Worker] = []
_only: _Local | Worker | None = None  # of the tracer that records, where it is one
_switching = threading.RLock()  # a signal handler may close a tracer while another is being enabled

_board: Board | None = None  # where children of this process look what is being recorded
_worker: Worker | None = None  # what records here, in a child of a process with a board, while no tracer of ours does


def _own() -> list[Tracer]:
    return [tracer for tracer in _recording if isinstance(tracer, Tracer)]


def _set_recording(tracers: list[Tracer]) -> None:
    global _recording, _only  # noqa: PLW0603 - what user code calls has to find it in one look-up
    _recording = [*tracers] or ([_worker] if _worker is not None else [])
    _only = _recording[0]._local if len(_recording) == 1 else None
    if _board is not None:
        drain = tracers[-1]._drain if tracers else None
        if drain is None or drain.children is None or not drain.children.show():
            _board.hide()


def tell_children() -> Board | None:
    """Have child processes that are started from here on look what is being recorded; None where they cannot."""
    global _board  # noqa: PLW0603
    from lightning_timekeeper.trace.board import Board  # noqa: PLC0415 - only where one records
    from lightning_timekeeper.trace.writer import trouble  # noqa: PLC0415

    try:
        _board = _board or Board()
    except (OSError, ValueError) as error:
        trouble(f"What child processes do is not recorded ({type(error).__name__}: {error}).")
        return None
    os.environ[BOARD] = _board.path
    return _board


def _become_child(board: Board) -> Worker:
    """What is recorded in this process goes to the one that the board is of."""
    global _worker  # noqa: PLW0603
    from lightning_timekeeper.trace.workers import Worker  # noqa: PLC0415

    _worker = Worker(board)
    _set_recording([])
    return _worker


def _after_fork_in_child() -> None:
    global _switching, _board  # noqa: PLW0603 - another thread of the parent may have held it
    _switching = threading.RLock()
    board, _board, recorded = _board, None, _own()
    _set_recording([])
    kept = [span for track in recorded[-1]._tracks for span in track._handles] if recorded else []
    for tracer in list(_live):
        tracer._forget()
    if board is not None:
        worker = _become_child(board)
        for span in kept:  # a dataset may hold it
            ours = worker.span(span.name)
            span.__enter__, span.__exit__ = ours.__enter__, ours.__exit__  # type: ignore[method-assign]
    elif _worker is not None:
        _worker.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class _Idle(Span):
    """What :func:`span` returns while nothing records: does nothing, and can still decorate."""

    __slots__ = ()

    # the cheapest C calls that return something false and take no argument, and any: a Python function takes 20 more
    __enter__ = staticmethod([].clear)
    __exit__ = staticmethod("".format)  # type: ignore[assignment]


class _Several(Span):
    """One span in each of several tracers."""

    __slots__ = ("_spans",)

    def __init__(self, name: str, args: dict[str, Any], spans: list[Span]) -> None:
        self.name, self.args, self.home, self._spans = name, args, None, spans

    def __enter__(self) -> None:
        for each in self._spans:
            each.__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        for each in reversed(self._spans):
            each.__exit__(kind, value, traceback)


_idle: dict[str, _Idle] = {}


def _new_idle(name: str, args: dict[str, Any]) -> _Idle:
    idle = _Idle()
    idle.name, idle.args, idle.home = name, args, None
    if not args and len(_idle) < MOST_HANDLES:
        with contextlib.suppress(TypeError):  # no text, and not hashable either
            _idle[name] = idle
    return idle


def get_tracer() -> Tracer | None:
    """The tracer that records: the one enabled last, or None."""
    tracer = _recording[-1] if _recording else None
    return tracer if isinstance(tracer, Tracer) else None


def span(name: str, /, **args: Any) -> Span:
    """Record a block, or each call of a function.

    It costs about five reads of the clock while a tracer records, two while none does. In the innermost loop, keep it
    (``step = span("step")``, then ``with step:``): three reads.

    Args:
        name: The span's name in the trace. Few different names are best: put what varies into ``args``.
        args: Shown by the viewers beside the span: numbers, texts and containers of them. They are read a moment
            later, in the background.

    Example::

        with span("tokenize"):
            tokens = tokenizer(text)


        @span("collate")
        def collate(rows): ...
    """
    local = _only
    if local is None:
        if not _recording:
            if args:
                return _new_idle(name, args)
            try:
                return _idle[name]
            except (KeyError, TypeError):
                return _new_idle(name, args)
    elif not args:
        try:
            return local.free[name].pop()
        except (KeyError, TypeError):
            pass
    elif local.track is not None:
        return local.track.with_args(name, args)
    return _new_span(name, args)


def _new_span(name: str, args: dict[str, Any]) -> Span:
    # not in `span`: its comprehension makes cells of the arguments, 45 ns a call
    spans = [tracer.track.with_args(name, args) if args else tracer.span(name) for tracer in _recording]
    return spans[0] if len(spans) == 1 else _Several(name, args, spans)


def iterate(iterable: Iterable[T], name: str = "next") -> Iterable[T]:
    """Iterate, and record each wait for the next item.

    Args:
        iterable: A DataLoader, say; its length is passed on.
        name: The spans' name. The making of the iterator, which starts a DataLoader's workers, is one more span of it.

    Example::

        for batch in iterate(loader, "load"):
            ...
    """
    return _Iterate(iterable, name)


def instant(name: str, /, **args: Any) -> None:
    """Record a mark without duration, such as ``instant("spike", loss=3.2)``."""
    for tracer in _recording:
        tracer.track.point(("i", name, USER, args))


def counter(name: str, value: float | None = None, /, **series: float) -> None:
    """Record a number that the viewers draw as a graph over time.

    Args:
        name: Of the graph.
        value: The number, finite. A tensor is taken only where reading it needs no wait for a device.
        series: Several numbers instead, stacked in one graph; pass the same ones each time.

    Example::

        counter("queue", 4)
        counter("memory", used=3.5e9, cached=1e9)
    """
    if _recording:
        values = _numbers(name, value, series)
        if values:
            for tracer in _recording:
                tracer.track.point(("C", name, "", values))


def _numbers(name: str, value: Any, series: dict[str, Any]) -> dict[str, float]:
    if value is not None:
        series = {"value": value, **series}
    numbers = {}
    for key, given in series.items():
        number = _number(given)
        if number is None:
            warnings.warn(
                f"`counter({name!r}, ...)`: {key} is a {type(given).__name__}"
                f"{' on ' + str(given.device) if hasattr(given, 'device') else ''}; expected a number that can be read "
                "without waiting for a device. It is left out.",
                stacklevel=3,
            )
        elif math.isfinite(number):
            numbers[key] = number
    return numbers


def _number(value: Any) -> float | None:
    """The value as a number, or None where it is none or only a device knows it."""
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    device = getattr(value, "device", None)
    if isinstance(value, (str, bytes)) or (device is not None and str(getattr(device, "type", device)) != "cpu"):
        return None
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - no number, more than one, or an object with a mind of its own
        return None


class _Iterate(Generic[T]):
    """Each ``iter`` of it is a new pass, as of the iterable itself."""

    def __init__(self, iterable: Iterable[T], name: str) -> None:
        self._iterable, self._name = iterable, name

    def __iter__(self) -> Iterator[T]:
        with span(self._name):
            iterator = iter(self._iterable)
        return _Waits(iterator, self._name)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


class _Waits(Generic[T]):
    def __init__(self, iterator: Iterator[T], name: str) -> None:
        self._next, self._name = iterator.__next__, name

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with span(self._name):
            return self._next()


def _decorated(function: Any, name: str, args: dict[str, Any]) -> Any:
    """The function, recorded at each call; of the same kind, so that whoever inspects it sees what it is."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_decorated(function.__func__, name, args))
    if inspect.isclass(function) or not callable(function):
        raise TypeError(f"`@span({name!r})` decorates a function, not {function!r}.")
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def async_generator(*a: Any, **k: Any) -> AsyncGenerator[Any, Any]:
            with _crossing(name, args):
                inner = function(*a, **k)
                try:
                    item = await inner.__anext__()
                    while True:
                        try:
                            sent = yield item
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001 - athrow: it is the inner one's to handle
                            item = await inner.athrow(error)
                        else:
                            item = await inner.asend(sent)
                except StopAsyncIteration:
                    return
                finally:
                    await inner.aclose()

        return async_generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*a: Any, **k: Any) -> Any:
            with _crossing(name, args):
                return await function(*a, **k)

        return coroutine
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*a: Any, **k: Any) -> Any:
            with _crossing(name, args):
                return (yield from function(*a, **k))

        return generator

    @functools.wraps(function)
    def plain(*a: Any, **k: Any) -> Any:
        with span(name, **args):
            return function(*a, **k)

    return plain


def _crossing(name: str, args: dict[str, Any]) -> Span:
    """A span that may be suspended, and others end meanwhile."""
    for tracer in _recording:
        tracer.track.crossing = True
    return span(name, **args)


# ---- a child that was not forked -------------------------------------------------------------------------------------
if BOARD in os.environ:
    from lightning_timekeeper.trace.board import Board

    with contextlib.suppress(OSError, ValueError):  # the process that it was of is gone
        _become_child(Board(os.environ[BOARD]))
