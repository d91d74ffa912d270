"""Events of any number of traces -> the times of their ranks, and of all other spans by name.

Nine lines of ten in a trace of ours are complete spans without arguments. One regular expression takes a block of them
apart, and the name and the track are looked up as they stand in the file: 2 µs a span all in all, of which parsing it
as JSON would take 2 more. What looks different goes through :mod:`json`, as do all other traces.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.reader import TraceError, read_events
from lightning_timekeeper.trace.source import nanoseconds, texts
from lightning_timekeeper.trace.summary.rank_times import RankTimes
from lightning_timekeeper.trace.summary.selftime import Kind, Kinds, Track

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_timekeeper.trace.summary.selftime import Args

_MOST_SLOTS = 8192
_OURS = b'[\n{"ph":"M"'
_LINES = re.compile(
    rb'\{"ph":"X",("cat":"[^"\\]*","name":"[^"\\]*","pid":\d+,"tid":\d+),"ts":(\d+)\.(\d{3}),"dur":(\d+)\.(\d{3})\}(?:,\n|\Z)'
    rb"|([^\n]+)\n?"
)


class _Apart:
    """A track whose spans are added up by name, in any order: those that run beside a loop, and all of other traces."""

    def __init__(self) -> None:
        self._open: list[tuple[Kind, int]] = []

    def span(self, kind: Kind, start_ns: int, duration_ns: int, args: Args | None) -> None:
        kind.add(max(0, duration_ns))

    def begin(self, kind: Kind, start_ns: int, args: Args | None) -> None:
        self._open.append((kind, start_ns))

    def end(self, time_ns: int, args: Args | None) -> None:
        if self._open:
            kind, start_ns = self._open.pop()
            kind.add(max(0, time_ns - start_ns))


class _Place:
    """One track of one file."""

    __slots__ = ("kinds", "rank", "track")

    def __init__(self, track: Track | _Apart, kinds: Kinds, rank: RankTimes | None) -> None:
        self.track, self.kinds, self.rank = track, kinds, rank


class Collection:
    """The times of all ranks, and of foreign spans.

    Attributes:
        ranks: By number; None for a trace of ours that names none.
        spans: Those of other traces, by name.
        files: Read so far.
        lost_bytes: Could not be read.
    """

    def __init__(self) -> None:
        self.ranks: dict[int | None, RankTimes] = {}
        self.spans = Kinds(timed=True)
        self.files = 0
        self.lost_bytes = 0
        self._processes: dict[Any, RankTimes] = {}
        self._places: dict[tuple[Any, Any], _Place] = {}
        self._slots: dict[bytes, tuple[_Place, Kind]] = {}  # by what stands in the file

    def read(self, source: str | os.PathLike[str] | Iterable[dict[str, Any]]) -> None:
        """Take in one trace."""
        self.files += 1
        self._processes, self._places, self._slots = {}, {}, {}
        if not isinstance(source, (str, os.PathLike)):
            self._take_events(source)
        else:
            self._read_file(source)
        for place in self._places.values():
            if place.rank is not None and isinstance(place.track, Track):
                place.rank.finish(place.track)

    def _read_file(self, path: str | os.PathLike[str]) -> None:
        with read_events(path) as events:
            try:
                if not _is_ours(path):
                    self._take_events(events)
                    self.lost_bytes += events.lost_bytes + events.skipped_bytes
                    return
                for text in texts(events):
                    self._take_text(text)
                self.lost_bytes += events.lost_bytes
            except TraceError as error:
                raise TraceError(f"{os.fspath(path)}: {error}") from None

    # ---- ours ------------------------------------------------------------------------------------------------------
    def _take_text(self, text: bytes) -> None:
        slots = self._slots
        for about, us, ns, long_us, long_ns, other in _LINES.findall(text):
            if other:
                self._take_line(other)
                continue
            slot = slots.get(about)
            if slot is None:
                slot = self._slot(about, int(us + ns))
            place, kind = slot
            place.track.span(kind, int(us + ns), int(long_us + long_ns), None)

    def _slot(self, about: bytes, start_ns: int) -> tuple[_Place, Kind]:
        event = json.loads(b"{%b}" % about)
        place = self._place(event["pid"], event["tid"], start_ns)
        slot = place, self._kind(place, event["cat"], event["name"])
        if len(self._slots) < _MOST_SLOTS:
            self._slots[about] = slot
        return slot

    def _take_line(self, line: bytes) -> None:
        line = line.rstrip(b",\r ")
        if line in (b"[", b"]"):
            return
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            self.lost_bytes += len(line)
            return
        self._take_event(event)

    # ---- any ---------------------------------------------------------------------------------------------------------
    def _take_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._take_event(event)

    def _take_event(self, event: dict[str, Any]) -> None:
        letter = event.get("ph")
        if letter == "X":
            duration_ns = nanoseconds(event.get("dur", 0))
        elif letter in ("B", "E", "i"):
            duration_ns = 0
        else:
            if letter == "M" and event.get("name") == "process_name":
                self._process(event)
            return
        start_ns = nanoseconds(event.get("ts"))
        if start_ns is None or duration_ns is None:
            return
        try:
            place = self._places[event["pid"], event["tid"]]
        except (KeyError, TypeError):
            place = self._place(event.get("pid"), event.get("tid"), start_ns)
        args = event.get("args")
        args = args if isinstance(args, dict) else None
        if letter == "E":
            place.track.end(start_ns, args)
        elif letter == "i":
            if event.get("name") == "checkpoint saved" and place.rank is not None and isinstance(place.track, Track):
                place.rank.saved(place.track, start_ns, (args or {}).get("path"))
        else:
            category, name = event.get("cat"), event.get("name")
            if type(category) is not str or type(name) is not str:
                category, name = str(category or ""), str(name)
            kind = place.kinds.get((category, name)) or self._kind(place, category, name)
            if letter == "X":
                place.track.span(kind, start_ns, duration_ns, args)
            else:
                place.track.begin(kind, start_ns, args)

    def _process(self, event: dict[str, Any]) -> None:
        args = event.get("args")
        if not isinstance(args, dict) or "schema_version" not in args:
            return
        number = args.get("rank")
        number = number if isinstance(number, int) and not isinstance(number, bool) else None
        rank = self.ranks.get(number)
        if rank is None:
            rank = self.ranks[number] = RankTimes(number)
        self._processes[_key(event.get("pid"))] = rank

    def _place(self, pid: Any, tid: Any, start_ns: int) -> _Place:
        key = _key(pid), _key(tid)
        place = self._places.get(key)
        if place is None:
            rank = self._processes.get(key[0])
            if rank is not None and rank.origin_ns is None:
                rank.origin_ns = start_ns
            if rank is None:
                place = _Place(_Apart(), self.spans, None)
            elif key[1] == 1:
                place = _Place(rank.track(), rank.kinds, rank)
            else:
                place = _Place(_Apart(), rank.beside, rank)
            self._places[key] = place
        return place

    def _kind(self, place: _Place, category: str, name: str) -> Kind:
        if category == "loop" and place.rank is not None and isinstance(place.track, _Apart):
            # a loop that does not run in the thread that the tracer was made in
            place.track, place.kinds = place.rank.track(), place.rank.kinds
            self._slots.clear()
        return place.kinds[category, name]


def begin_ns(path: str | os.PathLike[str]) -> int:
    """When a trace of ours begins, ns since 1970; 0 for any other, so that it stays where it is."""
    base_s = 0
    if _is_ours(path):
        with read_events(path) as events:
            for event in events:
                args, time_ns = event.get("args"), nanoseconds(event.get("ts"))
                if event["ph"] != "M":
                    return base_s * 10**9 + (time_ns or 0)
                if event.get("name") == "process_name" and isinstance(args, dict):
                    base_s = value if isinstance(value := args.get("base_unix_s"), int) else 0
    return 0


def _is_ours(path: str | os.PathLike[str]) -> bool:
    with read_events(path) as events:
        return next(events._chunks, b"").startswith(_OURS)


def _key(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else repr(value)
