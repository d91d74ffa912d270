"""Where a trace's bytes go: a file that opens at any moment, or memory.

A sink is given whole events and never blocks its caller: a thread of its own does the file's work, so that a hanging
file system stops nobody. What fails is kept in :attr:`FileSink.error` and ends the writing.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gzip
import io
import os
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_PENDING = 64 * 2**20
"""Bytes that may wait for a file before it is given up as hanging."""

TAIL = b"\n]\n"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class Sink(Protocol):
    """Takes the bytes of a trace.

    Attributes:
        path: Of the file, None for memory.
        error: What ended the writing.
        pending: Bytes that were given and are not written.
        done: The file is closed, whole or not.
        stem: The path of a local file without ``.json`` or ``.json.gz``, else None.
    """

    path: str | None
    stem: str | None
    error: BaseException | None

    done: bool

    @property
    def pending(self) -> int:
        """See above."""

    def write(self, data: bytes) -> None:
        """Take whole events."""

    def end(self) -> None:
        """End the array and the file; nothing is taken any more. A second call does nothing."""

    def abandon(self) -> None:
        """Forget what waits for the file."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was given, the end too, is written; False where it is not."""


def is_url(path: str) -> bool:
    """Whether fsspec is to open it."""
    return _URL.match(path) is not None


def open_sink(path: str | os.PathLike[str] | None, opener: Callable[[str], Any] | None = None) -> Sink:
    """The sink for a path.

    Args:
        path: ``.json`` or ``.json.gz``, local or a URL; None for memory.
        opener: ``path -> writable binary file``.

    Raises:
        FileExistsError: Where there is a file of that name.
        OSError: Where it cannot be made.
    """
    if path is None:
        return Memory()
    sink = None
    try:
        sink = FileSink(os.fspath(path), opener)
        sink.opened()
        return sink  # noqa: TRY300 - Ctrl-C may come at any line
    except BaseException:
        if sink is not None:
            sink.abandon()
        raise


def trouble(message: str) -> None:
    """One warning, which ends nothing, also where the user made warnings errors."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:  # noqa: BLE001 - the warning itself, or whatever shows warnings here
        with contextlib.suppress(Exception):
            print(f"RuntimeWarning: {message}", file=sys.stderr)  # noqa: T201


class FileSink:
    """A file, written by a thread of its own.

    A local ``.json.gz`` grows as plain ``.json`` and is compressed when it is closed: a gzip file that was cut is
    refused whole by Perfetto. Elsewhere it is compressed as it goes.

    Args:
        path: Of the finished file.
        opener: As for :func:`open_sink`.
    """

    def __init__(self, path: str, opener: Callable[[str], Any] | None = None) -> None:
        self.path: str | None = path
        self.error: BaseException | None = None
        self.done = False
        self._final = path
        self._opener = opener
        self._local = opener is None and not is_url(path)
        self._compress = path.endswith(".gz")
        self.stem = os.path.abspath(path).removesuffix(".gz").removesuffix(".json") if self._local else None
        # what to write, who waits until what came before is written, or the end; see Drain for why no Event
        self._jobs: queue.SimpleQueue[bytes | queue.SimpleQueue[bool] | None] = queue.SimpleQueue()
        self._given = 0
        self._written = 0
        self._ending = False
        self._abandoned = False
        self._opened: queue.SimpleQueue[bool] = queue.SimpleQueue()
        _open_files.add(self)
        threading.Thread(target=self._run, name="timekeeper-file", daemon=True).start()

    def opened(self, timeout_s: float = 60.0) -> None:
        """Wait until the file is open.

        Raises:
            OSError: Where it cannot be opened, or not in time.
        """
        try:
            self._opened.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self._final}: not open after {timeout_s:g} s") from None
        if self.error is not None:
            raise self.error

    @property
    def pending(self) -> int:
        """Bytes that were given and are not written."""
        return self._given - self._written

    def write(self, data: bytes) -> None:
        """Take whole events."""
        if not self._ending and not self.done:
            self._given += len(data)
            self._jobs.put(data)

    def end(self) -> None:
        """End the array and the file."""
        if not self._ending:
            self._ending = True
            self._jobs.put(TAIL)
            self._jobs.put(None)

    def abandon(self) -> None:
        """Forget what waits for the file."""
        self._ending = self._abandoned = True
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if isinstance(job, queue.SimpleQueue):
                    job.put(False)
        self._jobs.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was given, the end too, is written."""
        if self._abandoned:
            return False
        reply: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._jobs.put(reply)
        if not self.done:  # looked at after the put: then the thread answers what it finds when it ends
            with contextlib.suppress(queue.Empty):
                return reply.get(timeout=min(max(timeout_s, 0.0), 1e6))
        return self.done and self.error is None

    # ---- the thread ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        file = None
        try:
            file = self._open()
            self._opened.put(True)
            self._work(file)
            file.close()
            if self._local and self._abandoned and not self._written:
                os.unlink(file.name)  # nobody got to write its head
            elif self._compress and self._local:
                self._final_gzip()
        except BaseException as error:  # noqa: BLE001 - the thread's end of the line: its caller looks at `error`
            self.error = error
            if file is not None:
                with contextlib.suppress(Exception):
                    file.close()
        self.done = True
        self._opened.put(True)
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if isinstance(job, queue.SimpleQueue):
                    job.put(self.error is None)

    def _open(self) -> Any:
        path = self._final
        if self._opener is not None:
            file = self._opener(path)
            if not callable(getattr(file, "write", None)):
                raise TypeError(f"the writer returned {file!r} for {path!r}; expected a writable binary file")
        elif self._local:
            directory = os.path.dirname(path)
            if directory:
                os.makedirs(directory, exist_ok=True)
            if self._compress:
                if os.path.lexists(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                path = path[: -len(".gz")]
            # unbuffered: what is written survives a SIGKILL, and a forked child has no buffer to write again
            return open(path, "xb", buffering=0)
        else:
            import fsspec  # noqa: PLC0415 - only where a URL is given

            filesystem, inner = fsspec.core.url_to_fs(path)
            if filesystem.exists(inner):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            filesystem.makedirs(filesystem._parent(inner), exist_ok=True)
            file = filesystem.open(inner, "wb")
        return _Gzipped(file) if self._compress else file

    def _work(self, file: Any) -> None:
        flush = getattr(file, "flush", None)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, queue.SimpleQueue):
                job.put(True)
                continue
            left = memoryview(job)
            while left:
                count = file.write(left)
                if count == 0:
                    raise OSError(errno.EIO, "the file takes nothing", self._final)
                # a raw file may take a part; one that returns no count took all
                left = left[count if isinstance(count, int) and 0 < count < len(left) else len(left) :]
            if flush is not None:  # what an opener's file keeps back is lost in a SIGKILL, and written twice by a fork
                flush()
            self._written += len(job)

    def _final_gzip(self) -> None:
        plain = self._final[: -len(".gz")]
        directory = os.path.dirname(self._final) or "."
        handle, temporary = tempfile.mkstemp(prefix=os.path.basename(self._final) + ".", suffix=".part", dir=directory)
        try:
            with os.fdopen(handle, "wb") as raw, gzip.GzipFile("", "wb", 1, raw, 0) as out, open(plain, "rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
            os.chmod(temporary, os.stat(plain).st_mode & 0o777)
            _rename(temporary, self._final)
        except OSError as error:
            self.path = plain
            trouble(f"{self._final} could not be compressed ({error}); the trace is {plain}.")
        else:
            os.unlink(plain)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


class _Gzipped:
    """Compresses into a file that it owns."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._gzip = gzip.GzipFile("", "wb", 1, file, 0)
        self.write = self._gzip.write

    def close(self) -> None:
        self._gzip.close()
        self._file.close()


class Memory:
    """Keeps a trace compressed in memory: ~15 bytes an event."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.stem: str | None = None
        self.error: BaseException | None = None
        self.pending = 0
        self.done = False
        self._parts: list[bytes] = []
        self._zip = zlib.compressobj(1, zlib.DEFLATED, 31)

    def write(self, data: bytes) -> None:
        """Take whole events, readable at once: flushing the compressor costs 5 bytes."""
        if not self.done:
            self._parts.append(self._zip.compress(data) + self._zip.flush(zlib.Z_SYNC_FLUSH))

    def end(self) -> None:
        """End the array."""
        if not self.done:
            self.write(TAIL)
            self.done = True
            self._parts.append(self._zip.flush())

    def abandon(self) -> None:
        """Nothing waits."""

    def wait(self, timeout_s: float = 0.0) -> bool:
        """There is nothing to wait for."""
        del timeout_s
        return True

    def events(self) -> Iterator[dict[str, Any]]:
        """The events so far."""
        from lightning_timekeeper.trace.reader import read_events  # noqa: PLC0415 - who only writes does not need it

        return iter(read_events(io.BytesIO(b"".join(self._parts))))


def _rename(source: str, target: str) -> None:
    """Give a file another name, but never one that there is."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)


_open_files: weakref.WeakSet[FileSink] = weakref.WeakSet()


def _finish_files() -> None:
    """At exit: what is being ended, a compression say, gets the time to finish."""
    until_s = time.monotonic() + 60.0
    for sink in list(_open_files):
        if sink._ending:
            sink.wait(until_s - time.monotonic())
    # what was given up may hang; else it is taken away
    until_s = min(until_s, time.monotonic() + 1.0)
    while any(sink._abandoned and not sink.done for sink in list(_open_files)) and time.monotonic() < until_s:
        time.sleep(0.001)


atexit.register(_finish_files)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open_files.clear)
