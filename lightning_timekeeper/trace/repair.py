"""Makes a strictly valid trace of whatever can be read of a broken one, in bounded memory."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lightning_timekeeper.trace.reader import read_events
from lightning_timekeeper.trace.terminal import printable
from lightning_timekeeper.trace.whole import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_timekeeper.trace.reader import Events

# raw UTF-8: Perfetto shows an escape as it is written
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Repaired:
    """What :func:`repair` made; as a string, the sentence that says it.

    Attributes:
        output: The new file.
        events: Events taken over from the input.
        closed: Spans that had begun and not ended; they end at the latest time in the file, marked ``unfinished``.
        dropped: Events left out because a viewer would stumble over them: ends without a begin, times that are no
            finite numbers, counters without a finite value.
        lost_bytes: Bytes at the end of the input that could not be read.
        skipped_bytes: Bytes before that that could not be read.
    """

    output: Path
    events: int
    closed: int
    dropped: int
    lost_bytes: int
    skipped_bytes: int

    def __str__(self) -> str:
        parts = [f"{printable(str(self.output))}: {_count(self.events, 'event')}"]
        if self.closed:
            parts.append(f"{_count(self.closed, 'unfinished span')} closed at the latest time")
        lost = [
            *([f"{_count(self.lost_bytes, 'byte')} at the end"] if self.lost_bytes else []),
            *([f"{_count(self.skipped_bytes, 'byte')} before"] if self.skipped_bytes else []),
            *([_count(self.dropped, "event") + " that no viewer takes"] if self.dropped else []),
        ]
        return f"{', '.join(parts)}; {'lost: ' + ', '.join(lost) if lost else 'nothing was lost'}."


def repair(path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Repaired:
    """Write what can be read of a trace to a new file that is strictly valid JSON, and that the viewers open.

    Its array, or object with its other keys, is closed; every begun span ends; there is no NaN, and no string that
    ends in a backslash (with which Perfetto v52 loses the file). Begins and ends are matched per track in the file's
    order. The input is never changed, and the output appears under its name only when it is finished.

    Args:
        path: Any trace that :func:`read_events` reads.
        output: The new file; with a name in ``.gz`` it is compressed. ``None``: beside the input (for a URL, in the
            working directory), under its name with ``-repaired``.

    Returns:
        What was written and what was lost.

    Raises:
        FileExistsError: The output exists.
        OSError: A file cannot be opened, read or written.
        TraceError: The input is no Chrome trace.

    Example::

        print(repair("train-rank0.json"))  # train-rank0-repaired.json: 1,204 events; lost: 61 bytes at the end.
    """
    output = _name_beside(os.fspath(path)) if output is None else Path(output)
    lines = _Lines()
    with whole_file(output, f"`repair({os.fspath(path)!r})`") as file, read_events(path) as events:
        _write(file, events, lines)
    return Repaired(output, lines.events, lines.closed, lines.dropped, events.lost_bytes, events.skipped_bytes)


def _write(file: IO[bytes], events: Events, lines: _Lines) -> None:
    separator = b""
    for line in lines.of(events):
        # whether it is an object is known from the first event on
        file.write((separator or (b'{"traceEvents":[\n' if events.is_object else b"[\n")) + line)
        separator = b",\n"
    file.write(b"\n]" if separator else b'{"traceEvents":[]' if events.is_object else b"[]")
    if events.is_object:
        for key, value in events.metadata.items():
            file.write(b",\n" + _encode({key: _clean(value)})[1:-1].encode())
        file.write(b"}")
    file.write(b"\n")


class _Lines:
    """Events -> valid lines, with the ends that are missing; counts what it does."""

    def __init__(self) -> None:
        self.events = self.closed = self.dropped = 0

    def of(self, events: Events) -> Iterator[bytes]:
        open_spans: Counter[str] = Counter()  # by track; their number is enough, so it takes no memory for each
        tracks: dict[str, dict[str, Any]] = {}
        latest_us = -math.inf
        for event in events:
            phase = event["ph"]
            start_us = _number(event.get("ts", 0))
            end_us = start_us + _number(event.get("dur", 0))
            fits = math.isfinite(end_us)
            if fits and phase in ("B", "E"):
                track: dict[str, Any] = {key: event[key] for key in ("pid", "tid") if key in event}
                name = repr(track)
                fits = "ts" in event and (phase == "B" or open_spans[name] > 0)
                if fits:
                    tracks[name] = track
                    open_spans[name] += 1 if phase == "B" else -1
            line = _line(event) if fits else None
            if line is None:
                self.dropped += 1
                continue
            if "ts" in event:
                latest_us = max(latest_us, end_us)
            self.events += 1
            yield line
        for name, count in open_spans.items():
            end = {"ph": "E", **_clean(tracks[name]), "ts": latest_us, "args": {"unfinished": True}}
            for _ in range(count):
                self.closed += 1
                yield _encode(end).encode()


def _line(event: dict[str, Any]) -> bytes | None:
    try:
        line = _encode(event).encode()
        if b'\\\\"' not in line:
            return line
    except ValueError:  # a NaN, or a surrogate without its other half
        pass
    if event["ph"] == "C" and isinstance(values := event.get("args"), dict):
        values = {key: value for key, value in values.items() if math.isfinite(_number(value))}
        if not values:
            return None
        event = {**event, "args": values}
    return _encode(_clean(event)).encode()


def _clean(value: Any) -> Any:
    """The value without what JSON or Perfetto does not take."""
    if isinstance(value, str):
        value = value.encode(errors="surrogatepass").decode(errors="replace")
        return value[:-1] + "/" if value.endswith("\\") else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def _number(value: Any) -> float:
    try:
        return float(value)  # both viewers take a time in quotes, too
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _name_beside(name: str) -> Path:
    path = Path(name.rpartition("/")[2] if "://" in name else name)
    suffix = ".json.gz" if path.name.endswith(".json.gz") else path.suffix or ".json"
    return path.with_name(f"{path.name.removesuffix(suffix)}-repaired{suffix}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
