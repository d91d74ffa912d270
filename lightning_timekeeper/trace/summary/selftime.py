"""Spans of a track -> the time each one spends in itself, as they pass by.

One stack per track and a few integers per kind of span: 0.8 µs a span, whatever the length of the trace. The spans must
come in begin order per track, as they stand in a file of ours and come from the drain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.summary.quantiles import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

PHASES = (
    *("data", "transfer", "forward", "backward", "optimizer", "clip", "zero_grad", "callback", "module", "sync"),
    *("logger", "validation", "checkpoint", "user", "setup", "loop", "timekeeper"),
)
"""The categories of our spans; any other is the user's own."""

INDEX = {phase: index for index, phase in enumerate(PHASES)}
MOST_KINDS = 2048
"""Names that are kept apart on a track; the rest, as where each span has a number in its name, are one."""

_STILL_OPEN = 1 << 62
_USER, _DATA = INDEX["user"], INDEX["data"]
_ROLES = {
    ("loop", "step"): "step",
    ("loop", "batch"): "batch",
    ("loop", "epoch"): "epoch",
    **{("loop", stage): "stage" for stage in ("fit", "validate", "test", "predict")},
    ("validation", "validate"): "validation",
    ("validation", "sanity check"): "sanity check",
}

Args = dict[str, Any]


class Kind:
    """All spans of one name and category.

    Attributes:
        name: Theirs.
        category: Theirs, "" where there is none.
        phase: Index into :data:`PHASES`.
        role: What a :class:`Track` tells its observer of; None for most.
        marks: Whether there is a role.
        calls: How many have ended.
        total_ns: Their time, with what is inside them.
        longest_ns: The longest of them.
        times: Their distribution, for the user's own.
    """

    __slots__ = ("calls", "category", "longest_ns", "marks", "name", "phase", "role", "times", "total_ns")

    def __init__(self, name: str, category: str, *, timed: bool = False) -> None:
        self.name, self.category = name, category
        self.phase = INDEX.get(category, _USER)
        self.role = _ROLES.get((category, name), "checkpoint" if category == "checkpoint" else None)
        self.marks = self.role is not None
        self.calls = self.total_ns = self.longest_ns = 0
        self.times = Histogram() if timed or self.phase == _USER else None

    def add(self, duration_ns: int) -> None:
        """Count one."""
        self.calls += 1
        self.total_ns += duration_ns
        self.longest_ns = max(self.longest_ns, duration_ns)
        if self.times is not None:
            self.times.add(duration_ns)

    def merge(self, other: Kind) -> None:
        """Take in all of another's."""
        self.calls += other.calls
        self.total_ns += other.total_ns
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        if self.times is not None and other.times is not None:
            self.times.merge(other.times)


class Kinds(dict[tuple[str, str], Kind]):
    """``(category, name)`` -> its kind, made at the first use.

    Args:
        timed: Whether all of them have their distribution.
    """

    def __init__(self, *, timed: bool = False) -> None:
        super().__init__()
        self._timed = timed

    def __missing__(self, key: tuple[str, str]) -> Kind:
        category, name = key
        if len(self) >= MOST_KINDS and key != (category, "(more names)"):
            return self[category if category in INDEX else "", "(more names)"]
        self[key] = kind = Kind(name, category, timed=self._timed)
        return kind

    def merge(self, other: Kinds) -> None:
        """Take in all of another's."""
        for key, kind in other.items():
            self[key].merge(kind)


class Marked:
    """A span that the observer of a track is told of.

    Attributes:
        kind: Its kind.
        start_ns: Its begin.
        end_ns: Its end, once it is closed.
        args: Its arguments, empty where there are none.
        apart: What was counted before a step, while it is open.
    """

    __slots__ = ("apart", "args", "end_ns", "kind", "start_ns")

    def __init__(self, kind: Kind, start_ns: int, args: Args) -> None:
        self.kind, self.start_ns, self.end_ns, self.args = kind, start_ns, start_ns, args
        self.apart: Counts | None = None


Counts = tuple[list[int], list[int], int]


class Track:
    """The spans of one thread, nested.

    Args:
        opened: Is told of a span with a role that begins.
        closed: Is told of one that has ended, with its duration, and whether the trace has its end.

    Attributes:
        own_ns: Self times by phase, since the latest :meth:`begin_apart`.
        calls: Spans by phase, without those that stand directly in another of the same phase.
        input_ns: Time in ``data`` spans, with what is inside them.
        last_ns: The latest begin or end seen.
        unordered: Spans that began before the span around them.
    """

    __slots__ = ("_closed", "_opened", "_stack", "calls", "input_ns", "last_ns", "own_ns", "unordered")

    def __init__(self, opened: Callable[[Marked], None], closed: Callable[[Marked, int, bool], None]) -> None:
        self._opened, self._closed = opened, closed
        # of the open spans: end, time of the spans directly inside, kind, begin, Marked or None. A list is made in a
        # fifth of the time that an object takes, and there is one for each span.
        self._stack: list[list[Any]] = []
        self.own_ns, self.calls, self.input_ns = [0] * len(PHASES), [0] * len(PHASES), 0
        self.last_ns = 0
        self.unordered = 0

    def begin_apart(self) -> Counts:
        """Count from zero; returns what was counted until here."""
        before = self.own_ns, self.calls, self.input_ns
        self.own_ns, self.calls, self.input_ns = [0] * len(PHASES), [0] * len(PHASES), 0
        return before

    def end_apart(self, before: Counts) -> None:
        """Count on from there, with what was counted since."""
        own_ns, calls, input_ns = before
        self.own_ns = list(map(int.__add__, self.own_ns, own_ns))
        self.calls = list(map(int.__add__, self.calls, calls))
        self.input_ns += input_ns

    def span(self, kind: Kind, start_ns: int, duration_ns: int, args: Args | None) -> None:
        """A complete span."""
        stack = self._stack
        if stack:
            if stack[-1][0] <= start_ns:
                self._close(start_ns)
            if stack and stack[-1][3] > start_ns:
                self.unordered += 1
        self.last_ns = start_ns
        if kind.marks:
            marked = Marked(kind, start_ns, args or {})
            self._opened(marked)
            stack.append([start_ns + duration_ns, 0, kind, start_ns, marked])
        else:
            stack.append([start_ns + duration_ns, 0, kind, start_ns, None])

    def begin(self, kind: Kind, start_ns: int, args: Args | None) -> None:
        """A span whose end comes later."""
        self.span(kind, start_ns, _STILL_OPEN - start_ns, args)

    def end(self, time_ns: int, args: Args | None) -> None:
        """The end of the innermost span that waits for one; of none, it is passed over."""
        stack = self._stack
        at = next((at for at in reversed(range(len(stack))) if stack[at][0] == _STILL_OPEN), None)
        if at is None:
            return
        stack[at][0] = self.last_ns = time_ns
        marked = stack[at][4]
        if marked is not None and args:
            marked.args = {**marked.args, **args}
        for inner in stack[at + 1 :]:  # none ends later, in a trace of ours
            inner[0] = min(inner[0], time_ns)
        self._close(time_ns, depth=at)

    def reach(self, time_ns: int) -> None:
        """Close what ended until a moment."""
        self.last_ns = time_ns
        self._close(time_ns)

    def finish(self) -> None:
        """The trace ends, and what is open with it, at the latest time that is known."""
        latest_ns = max([self.last_ns, *(frame[0] for frame in self._stack if frame[0] != _STILL_OPEN)])
        self._close(latest_ns)
        while self._stack:
            self._stack[-1][0] = latest_ns
            self._close(latest_ns, depth=len(self._stack) - 1, whole=False)

    def _close(self, time_ns: int, *, depth: int = 0, whole: bool = True) -> None:
        """Close what is deeper, as far as it has ended until then."""
        stack, own_ns, calls = self._stack, self.own_ns, self.calls
        while len(stack) > depth:
            end_ns, inside_ns, kind, start_ns, marked = stack[-1]
            if end_ns > time_ns:
                return
            del stack[-1]
            phase = kind.phase
            duration_ns = end_ns - start_ns if end_ns > start_ns else 0
            if duration_ns > inside_ns:
                own_ns[phase] += duration_ns - inside_ns
            enters = True
            if stack:
                outer = stack[-1]
                outer[1] += duration_ns
                enters = outer[2].phase != phase
            if enters:
                calls[phase] += 1
                if phase == _DATA:
                    self.input_ns += duration_ns
            kind.calls += 1
            kind.total_ns += duration_ns
            if duration_ns > kind.longest_ns:  # noqa: PLR1730 - a call of max is 0.1 µs of 0.8
                kind.longest_ns = duration_ns
            if kind.times is not None:
                kind.times.add(duration_ns)
            if marked is not None:
                marked.end_ns = end_ns
                self._closed(marked, duration_ns, whole)
                own_ns, calls = self.own_ns, self.calls  # a step was counted apart
