"""Reads the events of any Chrome trace, whole or not, in bounded memory.

A trace is most needed when its run was killed, and then it is cut: in a number, an escape, a character. Other
writers leave arrays that are never closed, trailing commas, NaN, or one half event with whole ones after it. So the
text is taken apart here, and only what stands between an event's own braces is left to :mod:`json`.

There are two paths with one meaning. The fast one finds the last place in the buffer where an event begins as this
one does, and parses all between at once: 1.8 µs an event, where looking for the end of each one costs 14. What it
cannot parse, the second path goes through bracket by bracket, and no byte twice, however long the event is.

Source of the format: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from types import TracebackType

_CHUNK = 1 << 18  # bytes; parsed at once they become some 3 MB of dicts, and larger ones are no faster
_LONGEST = 1 << 24  # bytes of one event, and of all metadata together: what is longer is skipped
_DEEPEST = 200  # brackets in one event; json would end in a RecursionError near 1000
_MARGIN = 1 << 12  # bytes to have in the buffer where one regular expression is to see a whole key
_SLOW_STRETCH = 1 << 14  # bytes until the fast path is tried again

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_SEPARATORS = re.compile(rb"[\s,]*")
_GARBAGE = re.compile(rb'.[^{}\[\]"]*', re.DOTALL)
_OPENINGS = re.compile(rb"\[+")
_FIRST_KEY = re.compile(rb'\{\s*"[^"\\\n]*"')
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
# Outside of strings: a string without escapes, the start of any other, brackets. A bracket is matched together with
# the key before it: within an object no other can open, so one that does is the next event after a torn one.
_PIECE = r'"[^"\\\n]*"(?:\s*:\s*[{\[]?)?|:\s*[{\[]?|["{}\[\]%s]'
_IN_EVENT = re.compile((_PIECE % "").encode())
_IN_MEMBER = re.compile((_PIECE % ",").encode())
_IN_STRING = re.compile(rb'["\n]|\\[^\n]?')  # no writer leaves a newline in a string: there the text was torn
_NEWLINE, _QUOTE = b'\n"'
_CLOSED_BY = dict(zip(b"{[", b"}]", strict=True))

_strict = json.JSONDecoder().decode
_lenient = json.JSONDecoder(strict=False).decode  # takes raw tabs in strings, too


class TraceError(ValueError):
    """The file is no Chrome trace: neither an array, nor an object with ``traceEvents``, nor lines of events."""


class Events:
    """The events of one trace, in the file's order; :func:`read_events` makes it.

    An iterator, to be used once. It closes the file at the end, and as a context manager before that.

    Attributes:
        is_object: Whether it is the object form, known from the first event on.
        metadata: The other keys of an object form, as far as they have been met.
        complete: True at the end, where every bracket was closed and no byte was lost.
        lost_bytes: Bytes at the end that could not be read, known at the end. They are bytes of the text; after a
            fault within gzip data, which hides what came after it, bytes of the file.
        skipped_bytes: Bytes before the end that could not be read, so far: torn and malformed events, what is no
            event, and what is too long (16 MiB for an event, as much for all metadata).
    """

    def __init__(self, file: IO[bytes], *, close: bool) -> None:
        self.is_object = False
        self.metadata: dict[str, Any] = {}
        self.complete = False
        self.lost_bytes = 0
        self.skipped_bytes = 0
        self._file = file
        self._close = close
        self._chunks = self._read()
        self._ended = False  # the chunks
        self._cut = False  # the gzip data
        self._buf = b""
        self._at = 0  # what lies before it in the buffer is done with
        self._start = 0  # of the buffer in the text
        self._faulty = 0  # bytes passed over since the last good ones: skipped once others follow, lost if none do
        self._slow_until = 0  # in the text
        self._metadata_bytes = 0
        self._events = self._scan()

    def __iter__(self) -> Events:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._events)

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading. A file that was passed in open stays open."""
        self._events.close()
        if self._close:
            self._file.close()

    # ---- the text ----

    def _read(self) -> Iterator[bytes]:
        chunk = self._file.read(_CHUNK)
        if not isinstance(chunk, bytes):
            raise TypeError(
                f"`read_events({self._file!r})`: the file must be opened in binary mode, as open(path, 'rb')"
            )
        if chunk and _GZIP.startswith(chunk[:2]):
            yield from self._inflate(chunk)
            return
        while chunk:
            yield chunk
            chunk = self._file.read(_CHUNK)

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        inflater = zlib.decompressobj(31)
        while data:
            if inflater.eof:  # another member, or zeros, with which the last one may be padded
                data = data.lstrip(b"\0")
                if not data:
                    data = self._file.read(_CHUNK)
                    continue
                inflater = zlib.decompressobj(31)
            before = inflater.copy()
            try:
                yield inflater.decompress(data, _CHUNK)
            except zlib.error:
                yield from self._inflate_to_the_fault(before, data)
                return
            data = inflater.unconsumed_tail or inflater.unused_data or self._file.read(_CHUNK)
        yield inflater.flush()
        self._cut = not inflater.eof

    def _inflate_to_the_fault(self, inflater: Any, data: bytes) -> Iterator[bytes]:
        # with its error zlib keeps back what it had until then: once more, byte by byte
        self._cut = True
        for done in range(len(data)):
            try:
                yield inflater.decompress(data[done : done + 1])
            except zlib.error:
                self.lost_bytes = len(data) - done
                break
        while rest := self._file.read(_CHUNK):
            self.lost_bytes += len(rest)

    def _more(self) -> bool:
        """Drop what is done with and read on, at least as much as is left: so a long event is not copied often."""
        rest = self._buf[self._at :]
        parts, size = [rest], 0
        for chunk in self._chunks:
            parts.append(chunk)
            size += len(chunk)
            if size >= max(_CHUNK, len(rest)):
                break
        self._start += self._at
        self._buf, self._at, self._ended = b"".join(parts), 0, not size
        return size > 0

    def _next(self) -> bytes:
        """The next byte that is no separator, not consumed; nothing at the end."""
        while True:
            self._at = self._after(_SEPARATORS)
            if self._ended or len(self._buf) - self._at >= _MARGIN:
                return self._buf[self._at : self._at + 1]
            self._more()

    def _after(self, pattern: re.Pattern[bytes]) -> int:
        match = pattern.match(self._buf, self._at)
        return match.end() if match else self._at

    # ---- what it says ----

    def _scan(self) -> Generator[dict[str, Any]]:
        try:
            yield from self._values()
        finally:
            if self._close:
                self._file.close()

    def _values(self) -> Iterator[dict[str, Any]]:
        depth = 0  # of the brackets that hold the events
        in_object = found = False
        self._more()
        if self._buf.startswith(_BOM) or _BOM.startswith(self._buf):
            self._at = min(len(_BOM), len(self._buf))
        if self._next() not in b"[{":
            raise TraceError(
                f"no Chrome trace: it begins with {self._buf[self._at : self._at + 20]!r}, not with [ or {{"
            )
        while byte := self._next():
            if byte == b"{" and (depth or (found and not self._at_an_object())):
                events = self._block() or self._event()
                found = found or bool(events)
                yield from events
            elif byte == b'"' and in_object and depth == 1:
                if opening := _EVENTS_KEY.match(self._buf, self._at):
                    self._good(opening.end())
                    depth, found, self.is_object = 2, True, True
                else:
                    self._member()
            elif byte == b"[":
                end = self._after(_OPENINGS)
                depth, found = depth + end - self._at, True
                self._good(end)
            elif byte == b"]" and depth > in_object:
                self._good(self._at + 1)
                depth -= 1
            elif byte == b"{":
                self._good(self._at + 1)
                depth, in_object = 1, True
            elif byte == b"}" and in_object and depth == 1:
                self._good(self._at + 1)
                depth, in_object = 0, False
                if not found and "ph" not in self.metadata:
                    raise TraceError(
                        f'no Chrome trace: an object without "traceEvents", its keys are {[*self.metadata]}'
                    )
                if not found:  # the first of several lines, each an event
                    event, self.metadata, found = self.metadata, {}, True
                    yield event
            else:
                self._bad(self._after(_GARBAGE))
        if not found and "ph" in self.metadata:  # lines, cut in the first
            self.metadata, self._faulty = {}, self._start + len(self._buf)
        self.lost_bytes += self._faulty
        self.complete = found and not depth and not self.lost_bytes and not self._cut

    def _good(self, end: int) -> None:
        self._at = end
        self.skipped_bytes += self._faulty
        self._faulty = 0

    def _bad(self, end: int) -> None:
        self._faulty += end - self._at
        self._at = end

    def _at_an_object(self) -> bool:
        """Whether it is another object form that begins here, and no event: one a line, or after a stray bracket."""
        return _EVENTS_KEY.search(self._buf, self._at, self._at + _MARGIN) is not None

    def _block(self) -> list[dict[str, Any]]:
        """The fast path: all events from here to where the last one in the buffer, or a faulty one, begins."""
        buf, at = self._buf, self._at
        if self._start + at < self._slow_until:
            return []
        self._slow_until = self._start + at + _SLOW_STRETCH
        first_key = _FIRST_KEY.match(buf, at)
        end = len(buf)
        for _ in range(2):
            end = buf.rfind(first_key[0], at + 1, end) if first_key else -1
            if end < 0:
                break
            block = buf[at:end].rstrip()
            # between lines there are no commas: put them in, and should it be within a string, that has a newline
            block = block[:-1] if block.endswith(b",") else block.replace(b"}\n{", b"},\n{")
            try:
                values = _strict(f"[{block.decode()}]")
            except json.JSONDecodeError as error:
                end = at + len(error.doc[: error.pos].encode())
            except UnicodeDecodeError as error:
                end = at + error.start
            except (ValueError, RecursionError):
                break
            else:
                events = [value for value in values if type(value) is dict and "ph" in value]
                if len(events) < len(values):
                    break
                self._good(end)
                self._slow_until = 0
                return events
        return []

    def _event(self) -> list[dict[str, Any]]:
        """The event that begins here, unless it is faulty."""
        end, whole = self._end(_IN_EVENT, bytearray())
        event = _parse(self._buf[self._at : end]) if whole else {}
        if "ph" not in event:
            self._bad(end)
            return []
        self._good(end)
        return [event]

    def _member(self) -> None:
        """The key and value of an object form that begin here."""
        end, whole = self._end(_IN_MEMBER, bytearray(b"}"))
        size = end - self._at
        member = {}
        if whole and self._metadata_bytes + size <= _LONGEST:
            member = _parse(b"{%b}" % self._buf[self._at : end])
        if not member:
            self._bad(end)
            return
        self._good(end)
        self._metadata_bytes += size
        self.metadata.update(member)

    def _end(self, tokens: re.Pattern[bytes], open_brackets: bytearray) -> tuple[int, bool]:
        """Where what begins here ends, and whether it is whole; else where it was torn."""
        pos, in_string, whole = self._at, False, True
        while True:
            match = (_IN_STRING if in_string else tokens).search(self._buf, pos)
            if match is None or (match.end() == len(self._buf) and match[0][:1] in b'\\:"'):  # what follows it counts
                pos = match.start() if match else len(self._buf)
                if pos - self._at > _LONGEST:
                    self._bad(pos)
                    whole = False
                pos -= self._at
                if not self._more():
                    return len(self._buf), False
                continue
            token, pos = match[0], match.end()
            last = token[-1]
            if in_string:
                if last == _NEWLINE:
                    return match.start(), False
                in_string = token != b'"'
            elif last == _QUOTE:
                in_string = len(token) == 1
            elif last in _CLOSED_BY:
                if len(open_brackets) == _DEEPEST or (len(token) == 1 and open_brackets[-1:] == b"}"):
                    return match.start(), False
                open_brackets.append(_CLOSED_BY[last])
            elif token in b"}]":
                if open_brackets[-1] != last:
                    return match.start(), False
                del open_brackets[-1]
                if not open_brackets:
                    return (pos if tokens is _IN_EVENT else match.start()), whole
            elif token == b"," and len(open_brackets) == 1:
                return match.start(), whole


def _parse(text: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = _lenient(text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value


def read_events(path: str | os.PathLike[str] | IO[bytes]) -> Events:
    """Read the events of a Chrome trace, one after the other, in bounded memory.

    The array and the object form, and events one a line; gzipped or not, in one member or several; by any writer,
    and cut anywhere. An event counts when its closing brace was read: half a number is never taken for a whole one.
    What cannot be read is passed over and counted.

    Args:
        path: A path, a URL that fsspec understands, or a file opened in binary mode.

    Returns:
        An iterator over the events, each as :mod:`json` makes it: a dict that has at least ``ph``. Times are in µs,
        as the file has them. NaN and infinities, which some writers leave, are floats.

    Raises:
        OSError: The file cannot be opened, or a read fails (while iterating).
        TraceError: It is no Chrome trace (while iterating). An empty file is one without events.
        TypeError: The file is opened in text mode (while iterating).

    Example::

        events = read_events("train-rank0.json")
        longest = max(events, key=lambda event: event.get("dur", 0))
        print(longest["name"], events.lost_bytes, "bytes lost")
    """
    if not isinstance(path, (str, os.PathLike)):
        return Events(path, close=False)
    path = os.fspath(path)
    if "://" not in path:
        return Events(open(path, "rb"), close=True)  # Events closes it
    import fsspec  # noqa: PLC0415  # 0.2 s, and only for URLs

    return Events(fsspec.open(path, "rb").open(), close=True)
