"""The notice board: how a process that records and its children know of each other.

It is one small file, on Linux only in memory, that all have mapped. The process that has tracers writes on it which
recording is on, and where its children are to write; a child looks at the number each time that it might record: 30 ns.
A child that begins to record signs at the file's end with one append. So nobody waits for anybody, whoever dies and when.

A child finds the board because it was forked with it, or by an environment variable. It lasts as long as its process:
workers that outlive one trace record into the next.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import mmap
import os
import tempfile
from typing import Any

_NOTICE = 16  # the notice's offset; before it the number of the recording, and the notice's length
_SIZE = 1 << 16  # of the part that is mapped; the signatures come after it
_NAMES = ("timekeeper-", "memfd:timekeeper-")
_LOCKS = 1 << 40  # offsets that are locked, far behind all content

_FIRST_TRACK = 1 << 16  # below are those of the process that has the tracer

TRACKS = 1 << 12
"""Track numbers of one child, for its threads and lanes; below 2**32 there is room for a million children."""

MOST_CHILDREN = ((1 << 32) - _FIRST_TRACK) // TRACKS


class Board:
    """See above.

    Args:
        path: Of a board that there is; None makes one.

    Attributes:
        path: The file.
        view: Its first item is the number of the recording that is on, 0 for none.

    Raises:
        OSError: Where the file cannot be made or opened.
        ValueError: Where it is no board.
    """

    def __init__(self, path: str | None = None) -> None:
        made = path is None
        if path is None:
            path = _make()
        elif not os.path.basename(os.path.realpath(path)).startswith(_NAMES):  # a number of another process by now
            raise ValueError(f"{path!r} is no board")
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
        self._map = mmap.mmap(self._handle, _SIZE)
        self.view = memoryview(self._map).cast("Q")
        self._numbers = itertools.count(1)
        if made:
            _made.append((os.getpid(), self))

    # ---- the process that has tracers ------------------------------------------------------------------------------
    def number(self) -> int:
        """A new recording's number."""
        return next(self._numbers)

    def show(self, number: int, notice: dict[str, Any]) -> None:
        """A recording is on; the notice, of plain JSON, says what children need to know."""
        if self.view[0] == number:
            return
        text = json.dumps({**notice, "number": number}).encode()
        if len(text) > _SIZE - _NOTICE:
            raise ValueError(f"{len(text)} bytes of metadata are too much for child processes to be told.")
        self.view[0] = 0
        self._map[_NOTICE : _NOTICE + len(text)] = text
        self.view[1] = len(text)
        self.view[0] = number

    def hide(self) -> None:
        """None is."""
        self.view[0] = 0

    def end(self) -> int:
        """Where the next signature will be."""
        return os.fstat(self._handle).st_size

    def signatures(self, start: int) -> tuple[list[dict[str, Any]], int]:
        """What children signed from there on, and where to go on."""
        if self.end() == start:
            return [], start
        data = self._from(start)
        return _lines(data), start + len(data)

    # ---- a child ---------------------------------------------------------------------------------------------------
    def notice(self, number: int) -> dict[str, Any] | None:
        """The notice of a recording, None where it is not on any more."""
        try:
            notice: dict[str, Any] = json.loads(self._map[_NOTICE : _NOTICE + self.view[1]])
        except ValueError:  # being changed
            return None
        return notice if notice.get("number") == number == self.view[0] else None

    def sign(self, signature: dict[str, Any]) -> int:
        """Sign, and get the first of the track numbers that are this child's.

        They are those of an earlier child with the same ``name`` where that one is gone, so that the workers of a
        hundred epochs have one track each and not a hundred.

        Args:
            signature: With ``name``, and unique.
        """
        os.write(self._handle, json.dumps(signature).encode() + b"\n")
        # a child that nobody can tell from others has a track of its own; so has one where there are no locks
        named = [(at, s) for at, s in enumerate(_lines(self._from(_SIZE))) if s.get("name") == signature["name"]]
        for at, each in named:
            if each == signature or self._lock(at):
                return _FIRST_TRACK + at % MOST_CHILDREN * TRACKS
        raise OSError("the signature is not on the board")

    def _lock(self, at: int) -> bool:
        """Take one byte, if it is free; the kernel frees it when the process is gone."""
        try:
            import fcntl  # noqa: PLC0415 - not on Windows

            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS + at)
        except (ImportError, OSError):
            return False
        return True

    def _from(self, start: int) -> bytes:
        """The whole lines from an offset on."""
        if hasattr(os, "pread"):
            data = os.pread(self._handle, self.end() - start, start)
        else:  # nothing is forked there, that would share the place in the file
            os.lseek(self._handle, start, os.SEEK_SET)
            data = os.read(self._handle, self.end() - start)
        return data[: data.rfind(b"\n") + 1]


def _make() -> str:
    """A new board's path: on Linux one without a file, which is gone with its process, however that ends."""
    try:
        handle = os.memfd_create("timekeeper-board")  # kept: the path is of this handle
        os.fchmod(handle, 0o600)  # for this user's processes alone
        path = f"/proc/{os.getpid()}/fd/{handle}"
        os.truncate(path, _SIZE)
    except (AttributeError, OSError):
        handle, path = tempfile.mkstemp(prefix="timekeeper-")
        os.ftruncate(handle, _SIZE)
        os.close(handle)
    return path


_made: list[tuple[int, Board]] = []


@atexit.register  # here, before those that import this are there: so it comes after them, who still read it
def _remove() -> None:
    for pid, board in _made:
        if pid == os.getpid():  # and not in a forked child
            board.hide()
            with contextlib.suppress(OSError):
                os.unlink(board.path)


def _lines(data: bytes) -> list[dict[str, Any]]:
    signatures = []
    for line in data.splitlines():
        try:
            signatures.append(json.loads(line))
        except ValueError:  # of a child that a full disk let write a part
            signatures.append({})
    return signatures
