"""Takes what children recorded, each in a file of its own (workers.py), into the trace of the process they belong to.

The drain's thread reads what has come since it looked last, whole lines, and hands them on as they are: ~0.5 µs a line.
It waits for nobody. A child's file goes when the child is gone, or when the trace ends.

Times are ns since the trace's zero, as in the lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from typing import IO, TYPE_CHECKING, Any

from lightning_timekeeper.trace import encode
from lightning_timekeeper.trace.workers import local_rank
from lightning_timekeeper.trace.writer import trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_timekeeper.trace.board import Board

PIECE = 1 << 18
"""Bytes of a file that are worked on at a time: ~1 ms."""

_TID = b',"tid":'


class Children:
    """The children of a process, as far as one of its recordings goes.

    Args:
        board: Of the process.
        stem: Of the children's files; None puts them into a temporary directory.
        notice: What children need to know beside it.
    """

    def __init__(self, board: Board, stem: str | None, notice: dict[str, Any]) -> None:
        self._board = board
        self._number = board.number()
        self._stem = stem
        self._notice = notice
        self._directory: str | None = None
        self._read = board.end()
        self._files: list[_File] = []

    def show(self) -> bool:
        """The recording is on; False, with a warning, where children cannot be told."""
        try:
            if self._stem is None:
                self._directory = tempfile.mkdtemp(prefix="timekeeper-")
                self._stem = os.path.join(self._directory, "trace")
            self._board.show(self._number, {**self._notice, "local_rank": local_rank(), "stem": self._stem})
        except (OSError, ValueError) as error:
            trouble(f"What child processes do is not recorded ({type(error).__name__}: {error}).")
            return False
        return True

    def take(self, room: int, now_ns: int) -> Iterator[tuple[list[bytes], int]]:
        """What the children recorded since the last time.

        Args:
            room: The most events to take, not counting ends.
            now_ns: The end of what a child that is gone left open.

        Yields:
            Some lines, and how many of them are events, the rest being metadata.
        """
        signatures, self._read = self._board.signatures(self._read)
        self._files += [_File(signature) for signature in signatures if signature.get("number") == self._number]
        for file in list(self._files):
            gone = not _lives(file.pid)  # asked first: what it recorded before is read below
            if file.open():
                # the child whose tracks it took over is gone, also where nobody has asked for its exit status yet
                for earlier in [each for each in self._files if each is not file and each.first == file.first]:
                    if self._files.index(earlier) < self._files.index(file):
                        yield self._remove(earlier, file.begun_ns - 1), 0
                for _ in range(file.pieces()):  # what comes meanwhile is taken the next time
                    if room > 0 and (lines := file.read()):
                        taken, events = file.take(lines, room)
                        room -= events
                        yield taken, events
            if gone and room > 0:
                yield self._remove(file, now_ns), 0

    def _remove(self, file: _File, end_ns: int) -> list[bytes]:
        self._files.remove(file)
        return file.remove(end_ns)

    def finish(self, now_ns: int) -> list[bytes]:
        """End what is open; remove all files. Returns the ends."""
        lines = [line for file in self._files for line in file.remove(now_ns)]
        self._files.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        return lines

    # ---- from one file of the trace to the next --------------------------------------------------------------------
    def cut(self, now_ns: int) -> list[bytes]:
        """The ends of what is open, to be continued."""
        return [line for file in self._files for line in file.cut(now_ns)]

    def heads(self) -> list[bytes]:
        """The names of the tracks."""
        return [line for file in self._files for line in file.head]

    def resume(self) -> list[bytes]:
        """The begins of what was cut."""
        return [line for file in self._files for line in file.resume()]


class _File:
    """One child's file, and how far it was taken.

    Args:
        signature: The child's.

    Attributes:
        pid: Of the child.
        begun_ns: When it began to record.
        first: Of its tracks; 0 while that is not known.
        head: The lines that name its tracks.
    """

    def __init__(self, signature: dict[str, Any]) -> None:
        self.pid: int = signature["worker_pid"]
        self.begun_ns = int(signature["worker_ts_ns"])
        self.first = 0
        self.head: list[bytes] = []
        self._path: str = signature["path"]
        self._file: IO[bytes] | None = None
        self._rest = b""  # the begin of a line
        self._open: dict[bytes, list[bytes]] = {}  # track -> the lines of begins without their ends
        self._last: dict[bytes, bytes] = {}  # track -> its last line
        self._cut_ns: dict[bytes, int] = {}  # track -> when its spans were cut: nothing on it may be before that

    def open(self) -> bool:
        """Whether there is something to read, and whose it is is known."""
        if self._file is None:
            with contextlib.suppress(OSError):  # it may be a moment away from being made
                self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - kept
        if not self.first:
            lines = self.read()
            if lines:
                self.first = _event(lines[0]).get("args", {}).get("worker_tid", 0)
                self._rest = b",\n".join([*lines[2:], self._rest])
        return bool(self.first)

    def pieces(self) -> int:
        """How often to read, to have read what is there now."""
        return 1 if self._file is None else 1 + (os.fstat(self._file.fileno()).st_size - self._file.tell()) // PIECE

    def read(self) -> list[bytes]:
        """The next whole lines; none at the end."""
        if self._file is None:
            return []
        data = self._file.read(PIECE)
        lines = (self._rest + data).removeprefix(b"[\n").split(b",\n")
        self._rest = lines.pop()
        if len(data) < PIECE and self._rest and _event(self._rest):
            lines.append(self._rest)
            self._rest = b""
        return [line for line in lines if line]

    def take(self, lines: list[bytes], room: int) -> tuple[list[bytes], int]:
        """Follow what is open; up to so many events, ends not counted."""
        taken: list[bytes] = []
        events = 0
        for line in lines:
            phase = line[7:8]  # {"ph":"B"
            at = line.find(_TID) + len(_TID)
            tid = line[at : line.find(b",", at)]
            if phase == b"M":
                if line not in self.head:
                    self.head.append(line)
                    taken.append(line)
                continue
            if tid in self._cut_ns:
                line = self._not_before_the_cut(line, tid)  # noqa: PLW2901
            if phase == b"E":
                opened = self._open.get(tid)
                if not opened:
                    continue
                opened.pop()
            elif events >= room:
                continue
            elif phase == b"B":
                self._open.setdefault(tid, []).append(line)
            events += 1
            self._last[tid] = line
            taken.append(line)
        return taken, events

    def _not_before_the_cut(self, line: bytes, tid: bytes) -> bytes:
        cut_ns = self._cut_ns[tid]
        if _time_ns(line) >= cut_ns:
            del self._cut_ns[tid]
            return line
        before, _, after = line.partition(b',"ts":')
        end = min(at for at in (after.find(b","), after.find(b"}")) if at >= 0)
        return b'%b,"ts":%d.%03d%b' % (before, cut_ns // 1000, cut_ns % 1000, after[end:])

    def cut(self, now_ns: int) -> list[bytes]:
        """The ends of what is open, to be continued."""
        for tid, opened in self._open.items():
            if opened:
                self._cut_ns[tid] = self._end_ns(tid, now_ns)
        return self._ends(now_ns, {"continued": True})

    def resume(self) -> list[bytes]:
        """The begins of what was cut."""
        lines = []
        for tid, opened in self._open.items():
            for at, line in enumerate(opened):
                event = _event(line)
                about = {"category": event.get("cat", ""), "args": event.get("args")}
                opened[at] = encode.event("B", event["name"], event["pid"], int(tid), self._cut_ns[tid], **about)
            lines += opened
        return lines

    def remove(self, end_ns: int) -> list[bytes]:
        """The ends of what is open; the file is removed."""
        if self._file is not None:
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        return self._ends(end_ns, {"unfinished": True})

    def _ends(self, end_ns: int, mark: dict[str, Any]) -> list[bytes]:
        return [
            encode.event("E", "", _event(line)["pid"], int(tid), self._end_ns(tid, end_ns), args=mark)
            for tid, opened in self._open.items()
            for line in reversed(opened)
        ]

    def _end_ns(self, tid: bytes, end_ns: int) -> int:
        return max(end_ns, _time_ns(self._last[tid]))


def _event(line: bytes) -> dict[str, Any]:
    """The event of a line, nothing where it is not whole."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _time_ns(line: bytes) -> int:
    micros, _, nanos = str(json.loads(line, parse_float=str)["ts"]).partition(".")
    return int(micros) * 1000 + int(nanos)


def _lives(pid: int) -> bool:
    """Whether there is such a process; where that cannot be asked, yes."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
