"""Traces in tests: a clock that stands still, tracers with exact numbers, and files read back as strictly as can be."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator

WALL_NS = 1_700_000_000_123_456_789
PERIOD_NS = 7_889_238 * 10**9
ZERO_NS = WALL_NS % PERIOD_NS
"""``ts`` of a recording's first moment."""


class Clock:
    """Stands still until it is told to go on; its origin means nothing, as that of a monotonic clock."""

    def __init__(self) -> None:
        self.origin_ns = self.now_ns = random.randrange(10**15)

    def __call__(self) -> int:
        return self.now_ns

    def go(self, ns: int) -> None:
        self.now_ns += ns

    @property
    def ts_ns(self) -> int:
        return ZERO_NS + self.now_ns - self.origin_ns


def make_tracer(path: Any = None, clock: Any = None, **arguments: Any) -> Tracer:
    """A tracer that drains only when it is asked to."""
    defaults = {"wall_clock": lambda: WALL_NS, "pid": 4711, "process_name": "test", "drain_interval_s": 3600}
    return Tracer(path, clock=clock or Clock(), **{**defaults, **arguments})


def read(path: Any) -> list[dict[str, Any]]:
    """The events of a file that is valid JSON, to the letter; times are exact ns in ``ts_ns`` and ``dur_ns``."""
    return parse(Path(path).read_bytes())


def parse(data: bytes) -> list[dict[str, Any]]:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    events = json.loads(data.decode(), parse_float=Decimal, parse_constant=refuse)
    assert isinstance(events, list)
    for event in events:
        for key in ("ts", "dur"):
            if key in event:
                assert event[key] >= 0
                event[f"{key}_ns"] = int(event[key] * 1000)
    return events


@dataclass
class Slice:
    name: str
    start_ns: int
    end_ns: int
    tid: int
    args: dict[str, Any] = field(default_factory=dict)
    cat: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.start_ns, self.end_ns


def slices(events: list[dict[str, Any]]) -> list[Slice]:
    """Every span, by track and begin; fails where two on one track cross, or an end or a begin is alone."""
    found: list[Slice] = []
    begun: dict[int, list[Slice]] = {}
    for event in events:
        tid = event["tid"]
        if event["ph"] in "XB":
            end_ns = event["ts_ns"] + event.get("dur_ns", 0)
            one = Slice(event["name"], event["ts_ns"], end_ns, tid, event.get("args", {}), event.get("cat", ""))
            found.append(one)
            if event["ph"] == "B":
                begun.setdefault(tid, []).append(one)
        elif event["ph"] == "E":
            one = begun[tid].pop()
            one.end_ns = event["ts_ns"]
            one.args = {**one.args, **event.get("args", {})}
    assert not any(begun.values()), "a begin without its end"
    for tid in {one.tid for one in found}:
        above: list[int] = []
        for one in sorted((one for one in found if one.tid == tid), key=lambda one: (one.start_ns, -one.end_ns)):
            while above and above[-1] <= one.start_ns:
                above.pop()
            assert not above or one.end_ns <= above[-1], f"{one} crosses its neighbour"
            above.append(one.end_ns)
    return found


def check_spans(found: list[Slice], expected: list[tuple[str, int, int]]) -> None:
    """Fail unless these are the spans (name, begin, end), where pieces that are continued make one span."""
    rest = sorted(found, key=lambda one: one.start_ns)
    missing = sorted(expected)

    def ways(way: list[Slice]) -> Iterator[list[Slice]]:
        last = way[-1]
        if not last.args.get("continued"):
            yield way
            return
        for piece in rest:
            # two of one name may have been cut at the same time
            if piece.name == last.name and piece.start_ns == last.end_ns and all(piece is not used for used in way):
                yield from ways([*way, piece])

    while rest:
        one = rest[0]
        for way in ways([one]):
            span = (one.name, one.start_ns, way[-1].end_ns)
            if span in missing:
                missing.remove(span)
                rest = [piece for piece in rest if all(piece is not used for used in way)]
                break
        else:
            raise AssertionError(f"{one} is too much; missing: {missing}")
    assert not missing
