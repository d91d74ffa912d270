"""A trace that is to be merged: what it is, whose it is, and where its times stand.

A trace of ours is known by its head, and only that is read; any other, once through, because its base time, its names
and its processes may stand anywhere.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.board import TRACKS
from lightning_timekeeper.trace.clocks import ANCHOR, Anchor, Clock
from lightning_timekeeper.trace.reader import TraceError, read_events

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning_timekeeper.trace.reader import Events

_HEAD = b'[\n{"ph":"M","name":"process_name",'
_PROCESS = b'{"ph":"M","name":"process_name",'
_ANCHOR = b'"cat":"timekeeper","name":"%b"' % ANCHOR.encode()
_LONGEST_PIECE = 1 << 24
_UNIX_US = 10**15
"""Times of this and more are µs since 1970 (from 2001 on); less is what some clock counted since its machine began."""

Process = dict[str, Any]


class Source:
    """A trace to be merged.

    Args:
        path: As for :func:`read_events`.

    Attributes:
        path: As given.
        ours: Whether a Tracer wrote it, or :func:`merge`.
        merged: Whether :func:`merge` did.
        processes: Number in the trace -> the arguments of its ``process_name``, as far as there is one.
        base_ns: Unix time of its zero, ns; None where its clock is unknown.
        clock: What tells how its clock stands to others.
        start_ns: Of its first event, since its zero.
        end_ns: Of its last one; of a trace of ours it is not known.
        host: The machine that it names, or "".
        left_out: Tracks, and a time since the trace's zero, ns: what they have from then on is in another source.

    Raises:
        OSError: It cannot be opened or read.
        TraceError: It is no Chrome trace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.name = os.path.basename(self.path) or self.path
        self.ours = self.merged = False
        self.processes: dict[Any, Process] = {}
        self.sorted: set[Any] = set()  # processes that say where they stand
        self.base_ns: int | None = None
        self.clock = Clock()
        self.start_ns = self.end_ns = 0
        self.host = ""
        self.left_out: list[tuple[range, int]] = []
        self.flow_block = 0
        try:
            if not self._read_head():
                self._read_all()
        except TraceError as error:
            raise TraceError(f"{self.path}: {error}") from None

    @property
    def rank(self) -> int | None:
        """The one that it names."""
        rank = next(iter(self.processes.values()), {}).get("rank") if self.ours else None
        return rank if isinstance(rank, int) else None

    # ---- ours ------------------------------------------------------------------------------------------------------
    def _read_head(self) -> bool:
        with read_events(self.path) as events:
            text = next(events._chunks, b"")
            if not text.startswith(_HEAD):
                return False
            lines = text.split(b",\n")
            head = _whole(lines[0][2:])
            args = head.get("args")
            if not isinstance(args, dict) or not isinstance(head.get("pid"), int):
                return False
            base_s = integer(args.get("base_unix_s", -1))
            base_s = base_s if base_s is not None and 0 <= base_s < 1 << 32 else None
            self.merged = "merged" in args
            self.ours = self.merged or base_s is not None
            if not self.ours:
                return False
            self.base_ns = None if base_s is None else base_s * 10**9
            self._process(head)
            timed = (nanoseconds(_whole(line.removesuffix(b"\n]\n")).get("ts")) for line in lines[1:64])
            began_ns = (integer(args.get("unix_ns")) or 0) - (self.base_ns or 0)
            self.start_ns = max(0, next((time_ns for time_ns in timed if time_ns is not None), began_ns))
        if self.merged:
            for line in self._lines_with(_PROCESS):
                self._process(_whole(line))
        return True

    def _process(self, event: dict[str, Any]) -> None:
        args = event.get("args")
        if isinstance(args, dict) and event.get("name") == "process_name":
            self.processes.setdefault(identity(event.get("pid")), args)
            self.host = self.host or str(args.get("host", ""))
            unix_ns, clock_ns = (integer(args.get(key)) for key in ("unix_ns", "clock_ns"))
            boot = args.get("boot")
            if isinstance(boot, str) and boot and unix_ns is not None and clock_ns is not None:
                self.clock.boots.setdefault(boot, unix_ns - clock_ns)
            self.flow_block = max(self.flow_block, integer(args.get("flow_block")) or 0)

    def read_anchors(self) -> None:
        """Find the clock anchors; a pass over the whole file, of ours."""
        for line in self._lines_with(_ANCHOR):
            event = _whole(line)
            args, time_ns = event.get("args"), nanoseconds(event.get("ts"))
            if isinstance(args, dict) and time_ns is not None and self.base_ns is not None:
                number, waited_ns, ago_ns = (integer(args.get(key)) for key in ("number", "waited_ns", "ago_ns"))
                if number is not None and waited_ns is not None and ago_ns is not None and waited_ns >= 0:
                    left_ns = self.base_ns + time_ns - ago_ns
                    self.clock.anchors.append(Anchor(str(args.get("run")), number, left_ns - waited_ns, left_ns))

    def _lines_with(self, needle: bytes) -> Iterator[bytes]:
        with read_events(self.path) as events:
            for text in texts(events):
                at = text.find(needle)
                while at >= 0:
                    begin, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
                    end = len(text) if end < 0 else end
                    yield text[begin:end].rstrip(b",")
                    at = text.find(needle, end)

    # ---- any other -------------------------------------------------------------------------------------------------
    def _read_all(self) -> None:
        least_us, most_us = math.inf, -math.inf
        with read_events(self.path) as events:
            for event in events:
                pid = identity(event.get("pid"))
                process = self.processes.setdefault(pid, {})
                args = event.get("args")
                if event["ph"] == "M":
                    if event.get("name") == "process_name" and isinstance(args, dict) and "name" in args:
                        process["name"] = str(args["name"])
                    elif event.get("name") == "process_sort_index":
                        self.sorted.add(pid)
                elif (time_ns := nanoseconds(event.get("ts"))) is not None:
                    least_us, most_us = min(least_us, time_ns), max(most_us, time_ns)
            self.start_ns, self.end_ns = (int(ns) if math.isfinite(ns) else 0 for ns in (least_us, most_us))
            about = events.metadata
        inner = about.get("viztracer_metadata")
        base = about.get("baseTimeNanoseconds", inner.get("baseTimeNanoseconds") if isinstance(inner, dict) else None)
        base_ns = integer(base)
        if base_ns is not None and base_ns >= 0:
            self.base_ns = base_ns
        elif self.start_ns >= _UNIX_US * 1000:
            self.base_ns = 0
        self.host = str(about.get("host_name", ""))


def leave_to_workers(sources: Iterable[Source]) -> None:
    """Leave to a worker's file what the trace of its rank has a copy of: all up to the moment when the rank was killed."""
    ours = [
        (each, pid, args) for each in sources if each.ours and not each.merged for pid, args in each.processes.items()
    ]
    for worker, pid, args in ours:
        first, since_ns = integer(args.get("worker_tid")), integer(args.get("worker_ts_ns"))
        if first is not None and since_ns is not None:
            for source, other_pid, other in ours:
                alike = all(other.get(key) == args.get(key) for key in ("host", "boot", "pid", "rank", "unix_ns"))
                if source is not worker and other_pid == pid and alike:
                    source.left_out.append((range(first, first + TRACKS), since_ns))


def texts(events: Events) -> Iterator[bytes]:
    """The text of a trace of ours in pieces that end where a line does; the last one as it is."""
    rest = b""
    for chunk in events._chunks:
        text = rest + chunk
        cut = text.rfind(b",\n")
        if cut < 0 and len(text) < _LONGEST_PIECE:
            rest = text
            continue
        yield text[:cut] if cut >= 0 else text
        rest = text[cut + 2 :] if cut >= 0 else b""
    yield rest


def identity(value: Any) -> Any:
    """A process or track as a trace names it, to be looked up: a number in quotes is the number."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    return value if isinstance(value, (str, int)) and not isinstance(value, bool) else json.dumps(value)


def nanoseconds(time_us: Any) -> int | None:
    """A time as a trace has it, µs, in ns; None where it is none."""
    try:
        time_ns = round(float(time_us) * 1000)
    except (TypeError, ValueError, OverflowError):
        return None
    return time_ns if abs(time_ns) < 1 << 62 else None


def integer(value: Any) -> int | None:
    """A number of 63 bits at most, as it is or in quotes; None for anything else."""
    if isinstance(value, str) and value.isascii() and len(value) < 20:
        try:
            value = int(value)
        except ValueError:
            return None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1 << 62 else None


def _whole(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}
