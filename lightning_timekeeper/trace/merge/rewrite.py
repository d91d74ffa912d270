"""The events of one trace as lines of a merged one: shifted in time, under numbers that are nobody else's.

A line of ours is taken apart only at its time. What stands before it, the kind of the event, its name and its track, is
looked up; the times are shifted as integers. That is ~2 µs a line, where parsing and encoding takes 12. A line that does
not look as expected, and every event of another writer, goes the long way round.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_timekeeper.trace import encode
from lightning_timekeeper.trace.reader import read_events
from lightning_timekeeper.trace.source import identity, nanoseconds, texts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_timekeeper.trace.clocks import Shift
    from lightning_timekeeper.trace.merge.roster import Roster
    from lightning_timekeeper.trace.source import Source

MOST_PLANS = 1 << 16
"""Different beginnings of lines that are remembered, ~500 bytes each; names that are built per step make many."""

FLOW_BITS = 40
"""Of a flow's number within its file; above them stands the file's, and both stay exact in a double."""

_NEVER_NS = 1 << 62
_EVENTS_AT_ONCE = 2048
_TS = b',"ts":'
_NUMBER = rb"(0|[1-9]\d{0,14})\.(\d{3})"
_TIMES = re.compile(_NUMBER + rb'(?:,"dur":' + _NUMBER + rb")?(\}|,.+\})", re.DOTALL)
_TRACK = re.compile(rb',"pid":(\d+),"tid":(\d+)')
_METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}
_FLOWS = frozenset("stfbneSTpF")
_FIRST = ("ph", "cat", "name", "pid", "tid")  # as our own lines begin
_TIMED = {*_FIRST, "ts", "dur"}
_SUSPECT = re.compile(r'\\u|\\\\"|null')  # a control character, a backslash at a string's end, maybe a null
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _refuse(token: str) -> None:
    raise ValueError(f"{token} is no JSON")


_strict = json.JSONDecoder(parse_constant=_refuse).decode


class _Plan(NamedTuple):
    """What becomes of lines that begin alike."""

    begin: bytes
    complete: bool
    depth: int  # 1 for a begin, -1 for an end
    track: tuple[int, int]
    until_ns: int  # lines of this time and later are left out


class Rewriter:
    """Makes lines of the merged trace of one source's events.

    Args:
        source: The trace.
        index: Of the source in the roster.
        roster: Of the merged trace.
        shift: From the source's times to those of the merged trace, ns; both count from 1970.

    Attributes:
        events: Written so far, metadata not counted.
        closed: Spans that had begun and not ended; their ends are at the latest time of the source.
        dropped: Events that no viewer takes.
        lost_bytes: That could not be read at the end.
        skipped_bytes: That could not be read before that.
        latest_ns: The latest time so far, since the merged trace's zero.
    """

    def __init__(self, source: Source, index: int, roster: Roster, shift: Shift) -> None:
        self.events = self.closed = self.dropped = self.lost_bytes = self.skipped_bytes = self.latest_ns = 0
        self._source, self._index, self._roster, self._shift = source, index, roster, shift
        self._pids, self._flow_block = roster.processes[index], roster.flow_blocks[index]
        self._from_ns, self._base_ns = source.base_ns or 0, roster.base_ns
        self._tids: dict[tuple[int, Any], int] = {}
        self._plans: dict[bytes, _Plan | None] = {}
        self._open: Counter[tuple[int, int]] = Counter()  # by track; their number is enough, and takes no memory
        self._new_metadata: list[bytes] = []

    def blocks(self) -> Iterator[bytes]:
        """The lines, in blocks that each begin with a separator."""
        with read_events(self._source.path) as events:
            yield from self._of_ours(texts(events)) if self._source.ours else self._of_any(events)
            if not self._source.ours:
                self.lost_bytes, self.skipped_bytes = events.lost_bytes, events.skipped_bytes
            elif events._cut:
                self.lost_bytes += events.lost_bytes
        for (pid, tid), count in self._open.items():
            end = encode.event("E", "", pid, tid, self.latest_ns, args={"unfinished": True})
            self.closed += count
            for at in range(0, count, _EVENTS_AT_ONCE):
                yield (b",\n" + end) * min(_EVENTS_AT_ONCE, count - at)

    # ---- the fast way ----------------------------------------------------------------------------------------------
    def _of_ours(self, texts: Iterator[bytes]) -> Iterator[bytes]:
        last = b""
        for text in texts:
            if last:
                yield self._lines(last.removeprefix(b"[\n").split(b",\n"))
            last = text
        text = last.removeprefix(b"[\n").rstrip()
        whole = text.endswith(b"\n]") or text == b"]"
        text = text[:-1].rstrip() if whole else text
        lines = text.split(b",\n") if text else []
        before = self.skipped_bytes
        if lines and not whole:  # what is torn at the end is lost, and not skipped
            yield self._lines(lines[:-1])
            before, lines = self.skipped_bytes, lines[-1:]
        yield self._lines(lines)
        if not whole:
            self.lost_bytes, self.skipped_bytes = self.lost_bytes + self.skipped_bytes - before, before

    def _lines(self, lines: list[bytes]) -> bytes:
        out: list[bytes] = []
        add, plans, times, opened = out.append, self._plans, _TIMES.fullmatch, self._open
        shift, latest_ns, events = self._shift, self.latest_ns, 0
        added_ns = self._from_ns - self._base_ns
        constant = shift.constant_ns is not None
        if shift.constant_ns is not None:
            added_ns += shift.constant_ns
        for line in lines:
            begin, _, rest = line.partition(_TS)
            try:
                plan = plans[begin]
            except KeyError:
                plan = self._plan(begin)
            match = times(rest)
            if plan is None or match is None:
                out += self._slowly(line)
                continue
            micros, nanos, long, fraction, tail = match.groups()
            if plan.complete != (long is not None) or (tail != b"}" and not _is_plain(tail)):
                out += self._slowly(line)
                continue
            start_ns = int(micros + nanos)
            if start_ns >= plan.until_ns:
                continue
            if constant:
                start_ns += added_ns
                if start_ns < 0:  # noqa: PLR1730 - `max` is 60 ns a line
                    start_ns = 0
                end_ns = start_ns
                if long is not None:
                    end_ns += int(long + fraction)
                    tail = b',"dur":%b.%b%b' % (long, fraction, tail)
            else:
                end_ns = start_ns
                if long is not None:
                    end_ns += int(long + fraction)
                start_ns, end_ns = self._time(start_ns), self._time(end_ns)
                if long is not None:
                    tail = b',"dur":%d.%03d%b' % (*divmod(end_ns - start_ns, 1000), tail)
            if plan.depth:
                if opened[plan.track] + plan.depth < 0:
                    self.dropped += 1
                    continue
                opened[plan.track] += plan.depth
            if end_ns > latest_ns:  # noqa: PLR1730
                latest_ns = end_ns
            events += 1
            add(b'%b,"ts":%d.%03d%b' % (plan.begin, start_ns // 1000, start_ns % 1000, tail))
        self.events += events
        self.latest_ns = max(latest_ns, self.latest_ns)
        return b"".join([b",\n" + line for line in out])

    def _plan(self, begin: bytes) -> _Plan | None:
        plan = None
        track = _TRACK.search(begin)
        if track is not None and track.end() == len(begin) and b"\\" not in begin:
            try:
                event = _strict(begin.decode() + "}")
            except (ValueError, RecursionError):
                event = {}
            kind = event.get("ph")
            if kind in ("X", "B", "E", "i", "C") and set(event) <= set(_FIRST):
                pid, tid = self._place(event)
                head = b'%b,"pid":%d,"tid":%d' % (begin[: track.start()], pid, tid)
                plan = _Plan(head, kind == "X", {"B": 1, "E": -1}.get(kind, 0), (pid, tid), self._until_ns(event))
        if self._new_metadata:
            return None  # the track's name goes first
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[begin] = plan
        return plan

    def _slowly(self, line: bytes) -> list[bytes]:
        try:
            event = _strict(line.decode())
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and "ph" in event:
            return self._event(event)
        lines: list[bytes] = []
        with read_events(io.BytesIO(b"[" + line)) as events:
            for each in events:
                lines += self._event(each)
        self.skipped_bytes += events.lost_bytes + events.skipped_bytes
        return lines

    # ---- any event -------------------------------------------------------------------------------------------------
    def _of_any(self, events: Iterator[dict[str, Any]]) -> Iterator[bytes]:
        block: list[bytes] = []
        for event in events:
            block += self._event(event)
            if len(block) >= _EVENTS_AT_ONCE:
                yield b"".join([b",\n" + line for line in block])
                block = []
        yield b"".join([b",\n" + line for line in block])

    def _event(self, event: dict[str, Any]) -> list[bytes]:
        """The line of an event, and of its track's name where that is new; none where no viewer takes it."""
        kind = event["ph"]
        if kind == "M":
            return self._metadata(event)
        start_ns, length_ns = nanoseconds(event.get("ts")), nanoseconds(event.get("dur", 0))
        if not isinstance(kind, str) or start_ns is None or length_ns is None or length_ns < 0:
            self.dropped += 1
            return []
        if start_ns >= self._until_ns(event):
            return []
        pid, tid = place = self._place(event)
        if kind in ("B", "E"):
            if kind == "E" and not self._open[place]:
                self.dropped += 1
                return []
            self._open[place] += 1 if kind == "B" else -1
        rest = {key: value for key, value in event.items() if key not in _TIMED}
        if kind == "C":
            rest["args"] = values = _finite(event.get("args"))
            if not values:
                self.dropped += 1
                return []
        if self._flow_block:
            self._number_flows(kind, rest)
        begin: dict[str, Any] = {"ph": kind}
        begin.update({key: _name(event[key]) for key in ("cat", "name") if key in event})
        end_ns = self._time(start_ns + length_ns)
        start_ns = self._time(start_ns)
        self.latest_ns = max(self.latest_ns, end_ns)
        self.events += 1
        text = f'{_text(begin)[:-1]},"pid":{pid},"tid":{tid},"ts":{_micros(start_ns)}'
        if "dur" in event or kind == "X":  # without it an X is a fault to Perfetto
            text += f',"dur":{_micros(end_ns - start_ns)}'
        text += f",{_text(rest)[1:]}" if rest else "}"
        names, self._new_metadata = self._new_metadata, []
        return [*names, text.encode()]

    def _metadata(self, event: dict[str, Any]) -> list[bytes]:
        name, args = event.get("name"), event.get("args")
        if not isinstance(name, str) or name not in _METADATA or not isinstance(args, dict):
            self.dropped += 1  # others are faults to Perfetto
            return []
        pid = self._pid(event.get("pid"))
        tid = 0
        if name.startswith("thread"):
            raw = identity(event.get("tid"))
            tid = self._tid(pid, raw, str(args.get("name", "")) if self._source.ours else "", named=True)
        if self._roster.said_before(name, pid, tid):
            return []
        line = f'{{"ph":"M","name":"{name}","pid":{pid},"tid":{tid},"args":{_text(args)}}}'
        return [line.encode()]

    def _time(self, time_ns: int) -> int:
        return max(0, self._shift(time_ns + self._from_ns) - self._base_ns)

    def _until_ns(self, event: dict[str, Any]) -> int:
        tid = event.get("tid")
        return min((since_ns for tids, since_ns in self._source.left_out if tid in tids), default=_NEVER_NS)

    def _place(self, event: dict[str, Any]) -> tuple[int, int]:
        pid = self._pid(event.get("pid"))
        return pid, self._tid(pid, identity(event.get("tid")))

    def _pid(self, raw: Any) -> int:
        raw = identity(raw)
        if raw not in self._pids:
            self._pids[raw] = self._roster.process((self._index, raw), raw)
        return self._pids[raw]

    def _tid(self, pid: int, raw: Any, name: str = "", *, named: bool = False) -> int:
        tid = self._tids.get((pid, raw))
        if tid is None:
            # parts of one process' trace, in several files, share the tracks that are called alike
            owner = (raw, name) if self._source.ours else (self._index, raw)
            tid = self._tids[pid, raw] = self._roster.track(pid, raw, owner)
            if isinstance(raw, str) and not named:
                args = {"name": encode.clean_name(raw)}
                self._new_metadata.append(encode.event("M", "thread_name", pid, tid, args=args))
        return tid

    def _number_flows(self, kind: str, rest: dict[str, Any]) -> None:
        if "id" in rest and kind in _FLOWS:
            rest["id"] = self._flow(rest["id"])
        if "bind_id" in rest:
            rest["bind_id"] = self._flow(rest["bind_id"])

    def _flow(self, raw: Any) -> int:
        number = raw
        if isinstance(raw, str):
            try:
                number = int(raw, 0)
            except ValueError:
                number = -1
        if not isinstance(number, int) or not 0 <= number < 1 << FLOW_BITS:
            number = zlib.crc32(json.dumps(raw).encode())
        return self._flow_block << FLOW_BITS | number


def _micros(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _is_plain(tail: bytes) -> bool:
    """Whether the rest of a line is what JSON and both viewers take as it is."""
    if b"\\" in tail or b"null" in tail:
        return False
    try:
        _strict('{"ts":0' + tail.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _name(value: Any) -> str:
    return value if isinstance(value, str) and value else encode.clean_name(value)


def _finite(args: Any) -> dict[str, Any]:
    if not isinstance(args, dict):
        return {}
    return {key: value for key, value in args.items() if nanoseconds(value) is not None}


def _text(value: dict[str, Any]) -> str:
    """JSON that both viewers take."""
    try:
        text = _encode(value)
        text.encode()
        if not _SUSPECT.search(text):
            return text
    except ValueError:  # a NaN, or a surrogate without its other half
        pass
    return _encode(_plain(value))


def _plain(value: Any) -> Any:
    """The value as the dialect has it, at full length."""
    if isinstance(value, str):
        value = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)
        return f"{value[:-1]}/" if value.endswith("\\") else value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int)) else encode.plain_value(value)
