"""What records in a DataLoader worker, or any other child of a process that has a tracer: into a file of its own.

There is no thread in the child, and nothing is kept back: each half event is one line, and one append to the file that
no other process writes. So a child that is killed, or hangs, or forks has lost nothing, and its file shows what it was
doing: a trace as any other, cut behind its last event. The process that has the tracer takes the lines up (children.py).

A half event costs ~2.4 µs, of which the append is 1.2. While nothing records, a look at the board is all: 30 ns.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import zlib
from collections import deque
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.board import TRACKS
from lightning_timekeeper.trace.tracer import MOST_HANDLES, USER, Span, _error
from lightning_timekeeper.trace.writer import trouble

if TYPE_CHECKING:
    from types import TracebackType

    from lightning_timekeeper.trace.board import Board


class WorkerSpan(Span):
    """A span in a child. It keeps nothing of what it is entered for, and may be entered by all threads at once."""

    __slots__ = ("_worker", "text")

    text: str | None  # the end of its begin's line, once that was written

    def __init__(self, worker: Worker, name: str, args: dict[str, Any]) -> None:
        self._worker, self.name, self.args, self.home = worker, name, args, None
        self.text = None if args else "}"

    def pop(self) -> WorkerSpan:
        """Itself: it stands where a :class:`Tracer` has a set of those that are not open."""
        return self

    def __enter__(self) -> None:
        # asked here too, to save a call while nothing records
        if self._worker.view[0] and (file := self._worker.file()) is not None:
            file.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        file = self._worker.opened
        if file is not None:
            file.end(self, None if kind is None else _error(kind))


class _Spans(dict[str, WorkerSpan]):
    """Name -> span, made when it is asked for."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def __missing__(self, name: str) -> WorkerSpan:
        made = WorkerSpan(self._worker, name, {})
        if isinstance(name, str) and len(self) < MOST_HANDLES:
            self[name] = made
        return made


class Worker:
    """Stands in a child where its parent has a :class:`Tracer`; what user code calls finds here what it looks for.

    Args:
        board: Of the process that has the tracer.

    Attributes:
        view: The board's.
        opened: The file that was written last.
        crossing: As of a :class:`Track`; spans that cross are seen here when they do.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self.view = board.view
        self.free = _Spans(self)
        self.track = self._local = self
        self.crossing = False
        self.forked()

    def forked(self) -> None:
        """Begin anew, in another process than before."""
        self.opened: WorkerFile | None = None
        self._number = 0  # of the recording that `opened` belongs to
        self._opening = threading.RLock()
        self._busy = False

    def span(self, name: str) -> Span:
        """As :meth:`Tracer.span`."""
        return self.free[name] if isinstance(name, str) else self.with_args(name, {})

    def with_args(self, name: str, args: dict[str, Any]) -> Span:
        """As :meth:`Track.with_args`."""
        return WorkerSpan(self, name, args)

    def point(self, payload: tuple[str, str, str, dict[str, Any]]) -> None:
        """As :meth:`Track.point`."""
        file = self.file()
        if file is not None:
            file.point(*payload)

    def file(self) -> WorkerFile | None:
        """The file to write to now, if there is one."""
        number = self.view[0]
        if number == self._number:
            return self.opened
        return self._turn(number) if number else None

    def _turn(self, number: int) -> WorkerFile | None:
        """Another recording is on."""
        with self._opening:
            if self._busy:  # a signal handler
                return None
            self._busy = True
            try:
                if number != self._number:
                    notice = self._board.notice(number)
                    if notice is None:
                        return None
                    self.leave()
                    if notice["local_rank"] == local_rank():  # another rank's work is not this rank's worker's
                        self.opened = WorkerFile(self._board, notice)
                    self._number = number
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the child's work
                self._number = number
                if self.view[0] == number:
                    trouble(f"This process' spans are not recorded ({type(error).__name__}: {error}).")
            finally:
                self._busy = False
        return self.opened

    def leave(self) -> None:
        """Let the file go."""
        if self.opened is not None:
            self.opened.close()
        self.opened = None


def local_rank() -> str:
    """The rank on its machine that this process is, or works for."""
    return os.environ.get("LOCAL_RANK") or "0"


class _Lane:
    """One track: spans that nest.

    Attributes:
        tid: Its number.
        end: The begin of an end's line.
        prefixes: Name -> the begin of a begin's line.
        open: The open spans, the outermost first.
        task: The asyncio task that has it now.
        floor: How many spans were open when the task came.
    """

    __slots__ = ("end", "floor", "open", "prefixes", "task", "tid")

    def __init__(self, tid: int, end: str) -> None:
        self.tid, self.end = tid, end
        self.prefixes: dict[str, str] = {}
        self.open: list[WorkerSpan] = []
        self.task: Any = None
        self.floor = 0


class _Lanes(list[_Lane]):
    """A thread's; they wait for another thread when it has ended."""

    spare: deque[_Lane]

    def __del__(self) -> None:
        for lane in self:
            lane.open.clear()
            lane.task = None
        self.spare.extend(self)


class _Thread(threading.local):
    lanes: _Lanes | None = None
    by_task: dict[Any, _Lane]


class WorkerFile:
    """One child's part of a recording.

    Args:
        board: To sign on.
        notice: From there.

    Attributes:
        path: Of the file.
        name: Of the child's first track.

    Raises:
        OSError: Where the file cannot be made.
    """

    def __init__(self, board: Board, notice: dict[str, Any]) -> None:
        from lightning_timekeeper.trace import encode  # noqa: PLC0415 - numpy, only where one records

        self._encode = encode
        self._pid = notice["pid"]
        self._left = notice["max_events"]  # the rank stops its children long before; but it may be dead
        now_ns = time.perf_counter_ns()
        self._shift_ns = notice["shift_ns"] if notice["same_clock"] else time.time_ns() - notice["base_ns"] - now_ns
        self._thread = _Thread()
        self._spare: deque[_Lane] = deque()
        self._lanes = count()
        self.name, self._place = _who()
        self.path = path = _unused(f"{notice['stem']}.worker-{os.getpid()}")
        about = {"worker_pid": os.getpid(), "worker_ts_ns": str(now_ns + self._shift_ns)}
        # signed before it is made: there is no file that nobody knows of
        self._first = board.sign({"number": notice["number"], "path": path, "name": self.name, **about})
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0))
        if board.view[0] != notice["number"]:  # who closed the trace may have looked for it too early
            self.close()
            os.unlink(path)
            raise FileNotFoundError(path)
        args = {**notice["process"], **about, "worker_tid": self._first}
        head = encode.event("M", "process_name", self._pid, 0, args=args)
        place = encode.event("M", "process_sort_index", self._pid, 0, args={"sort_index": notice["sort_index"]})
        self._write(f"[\n{head.decode()},\n{place.decode()}")
        self.point("i", "worker began to record", "timekeeper", {"pid": os.getpid()})

    def close(self) -> None:
        """Let the file go."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            with contextlib.suppress(OSError):
                os.close(handle)

    # ---- events ----------------------------------------------------------------------------------------------------
    def begin(self, span: WorkerSpan) -> None:
        """A span begins."""
        self._left -= 1
        if self._left < 0:
            return
        lane = self._lane(claim=True)
        prefix = lane.prefixes.get(span.name) or self._prefix(lane, span.name)
        text = span.text
        if text is None:
            text = span.text = self._members(span.args)
        lane.open.append(span)
        time_ns = time.perf_counter_ns() + self._shift_ns
        self._write(f"{prefix}{time_ns // 1000}.{time_ns % 1000:03d}{text}")

    def end(self, span: WorkerSpan, mark: dict[str, Any] | None) -> None:
        """It ends."""
        time_ns = time.perf_counter_ns() + self._shift_ns
        lane = self._lane()
        if lane.open and lane.open[-1] is span:
            lane.open.pop()
            self._write(f"{lane.end}{time_ns // 1000}.{time_ns % 1000:03d}{self._members(mark) if mark else '}'}")
        else:
            found = self._cross(span, mark, time_ns)
            if found is None:  # it began before the recording, or beyond `max_events`
                return
            lane = found
        if lane.task is not None and len(lane.open) <= lane.floor:
            self._thread.by_task.pop(lane.task, None)
            lane.task = None

    def _cross(self, span: WorkerSpan, mark: dict[str, Any] | None, time_ns: int) -> _Lane | None:
        """End a span that is not the innermost; those above it are cut, and continue."""
        lane = next((lane for lane in self._thread.lanes or () if any(each is span for each in lane.open)), None)
        if lane is None:
            return None
        at = max(at for at, each in enumerate(lane.open) if each is span)
        above = lane.open[at + 1 :]
        del lane.open[at]
        time = f"{time_ns // 1000}.{time_ns % 1000:03d}"
        lines = [f"{lane.end}{time}{self._members({'continued': True})}"] * len(above)
        lines.append(f"{lane.end}{time}{self._members(mark)}")
        lines += [f"{self._prefix(lane, each.name)}{time}{each.text}" for each in above]
        self._write("".join(lines))
        return lane

    def point(self, kind: str, name: str, category: str, args: dict[str, Any]) -> None:
        """An instant or a counter."""
        self._left -= 1
        if self._left < 0:
            return
        lane = self._lane()
        time_ns = time.perf_counter_ns() + self._shift_ns
        if kind == "C":
            name = f"{name} ({self.name})"  # those of one name in one process are one graph
        extra = '"s":"t"' if kind == "i" else ""
        line = self._encode.event(kind, name, self._pid, lane.tid, time_ns, category=category, args=args, extra=extra)
        self._write(f",\n{line.decode()}")

    def _members(self, args: dict[str, Any] | None) -> str:
        """The end of a line."""
        text = self._encode.arguments(args) if args else ""
        return f',"args":{text}}}' if text else "}"

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            if self._handle >= 0:
                self.close()
                trouble(f"{self.path} could not be written ({error}). This process' recording ended here.")
            self._left = 0

    # ---- tracks ----------------------------------------------------------------------------------------------------
    def _prefix(self, lane: _Lane, name: str) -> str:
        line = self._encode.event("B", name, self._pid, lane.tid, 0, category=USER).decode()
        prefix = ",\n" + line[: -len("0.000}")]
        if len(lane.prefixes) < MOST_HANDLES:
            lane.prefixes[name] = prefix
        return prefix

    def _lane(self, *, claim: bool = False) -> _Lane:
        """The track on which the calling thread's next span nests: the first, or that of the running asyncio task.

        Args:
            claim: A task that has none gets one.
        """
        lanes = self._thread.lanes
        if lanes is None:
            lanes = self._thread.lanes = _Lanes()
            lanes.spare, self._thread.by_task = self._spare, {}
            self._add(lanes)
        asyncio = sys.modules.get("asyncio")
        if asyncio is None or asyncio._get_running_loop() is None:
            return lanes[0]
        task = asyncio.current_task()
        by_task = self._thread.by_task
        lane = by_task.get(task)
        if lane is None and (task is None or not claim):
            return lanes[0]
        if lane is None:
            lane = next((lane for lane in lanes if lane.task is None), None) or self._add(lanes)
            by_task[task] = lane
            lane.task, lane.floor = task, len(lane.open)
        return lane

    def _add(self, lanes: _Lanes) -> _Lane:
        """One more track."""
        try:
            lane = self._spare.pop()
        except IndexError:
            number = min(next(self._lanes), TRACKS - 1)
            lane = _Lane(self._first + number, f',\n{{"ph":"E","pid":{self._pid},"tid":{self._first + number},"ts":')
            name, thread = self.name, threading.current_thread()
            if thread is not threading.main_thread():
                name += f", {thread.name}"
            if lanes:
                name += f" ({len(lanes) + 1})"
            event, place = self._encode.event, self._place + min(number, 9)
            label = event("M", "thread_name", self._pid, lane.tid, args={"name": self._encode.clean_name(name)})
            sort = event("M", "thread_sort_index", self._pid, lane.tid, args={"sort_index": place})
            self._write(f",\n{label.decode()},\n{sort.decode()}")
        lanes.append(lane)
        return lane


def _unused(stem: str) -> str:
    """A file name: also where there is one of an earlier process with the same number."""
    names = chain([f"{stem}.json"], (f"{stem}-{number}.json" for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _who() -> tuple[str, int]:
    """What to call this process' track, and where to put it: the workers of a loader side by side, in order."""
    data = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data is not None else None
    if worker is not None:
        label = getattr(worker.dataset, "_traced_name", None)
        if not isinstance(label, str):
            label = type(worker.dataset).__name__
        return f"{label} worker {worker.id}", 100_000 + zlib.crc32(label.encode()) % 10_000 * 10_000 + worker.id * 10
    process = sys.modules.get("multiprocessing.process")
    name = process.current_process().name if process is not None else "MainProcess"
    if name == "MainProcess":  # a program of its own
        name = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
    return f"{name} (pid {os.getpid()})", 200_000_000
