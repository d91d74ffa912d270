"""Several traces -> one, on one clock, in memory that does not grow with the number of events."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_timekeeper.trace.clocks import Alignment, Shift, align, by_wall_clock
from lightning_timekeeper.trace.merge.rewrite import Rewriter
from lightning_timekeeper.trace.merge.roster import Roster, process_of_ours
from lightning_timekeeper.trace.source import Source, leave_to_workers
from lightning_timekeeper.trace.terminal import printable
from lightning_timekeeper.trace.whole import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable

_LATE = 1 << 40
_SAID_EVERY_S = 0.2


@dataclass(frozen=True)
class MergedFile:
    """What became of one of the traces.

    Attributes:
        path: As given.
        events: Taken over, metadata not counted.
        aligned_by: What told how its clock stands to the first trace's: ``reference``, ``same machine``, ``anchors``,
            ``wall clock``, or ``none`` where its times are of a clock that nothing is known of.
        error_us: The least and the largest amount, µs, by which its times may be off against the first trace's, between
            its first event and its last; None where that is not known.
        closed: Spans that had begun and not ended; they end at the latest time of the trace, marked ``unfinished``.
        dropped: Events left out because a viewer would stumble over them.
        lost_bytes: Bytes at the end that could not be read.
        skipped_bytes: Bytes before that that could not be read.
    """

    path: str
    events: int
    aligned_by: str
    error_us: tuple[float, float] | None
    closed: int
    dropped: int
    lost_bytes: int
    skipped_bytes: int

    def __str__(self) -> str:
        parts = [f"{self.events:,} events", self._clock()]
        if self.closed:
            parts.append(f"{self.closed:,} unfinished spans closed")
        if self.dropped:
            parts.append(f"{self.dropped:,} events dropped that no viewer takes")
        if self.lost_bytes or self.skipped_bytes:
            parts.append(f"{self.lost_bytes + self.skipped_bytes:,} bytes unreadable")
        return f"{printable(self.path)}: {', '.join(parts)}"

    def _clock(self) -> str:
        if self.aligned_by == "none":
            return "clock unknown, placed at the beginning"
        if self.error_us is None:
            return "by wall clock, error unknown"
        if self.aligned_by in ("reference", "same machine"):
            return "the reference clock" if self.aligned_by == "reference" else "same clock as the reference"
        least_us, most_us = self.error_us
        return f"by {self.aligned_by}, within ±{_duration(least_us)} at best and ±{_duration(most_us)} at worst"


@dataclass(frozen=True)
class Merged:
    """What :func:`~lightning_timekeeper.merge` made; as a string, a line that says it and one for each trace.

    Attributes:
        output: The new file.
        files: One for each trace, the reference first.
    """

    output: Path
    files: tuple[MergedFile, ...]

    @property
    def events(self) -> int:
        """Taken over from all traces."""
        return sum(file.events for file in self.files)

    def __str__(self) -> str:
        head = f"{printable(str(self.output))}: {self.events:,} events of {len(self.files)} traces"
        return "\n".join([head, *(f"  {file}" for file in self.files)])


def merge(paths: Iterable[str | os.PathLike[str]], output: str | os.PathLike[str], *, progress: bool = False) -> Merged:
    """Put several traces on one timeline.

    The clocks are aligned: exactly within a machine, between machines by the anchors that
    :class:`~lightning_timekeeper.TimelineTrace` records when all ranks leave a barrier, else by wall clock. Ranks come in
    their order, each attempt of a restarted run as a process of its own; foreign traces, of torch.profiler for one, come
    after them, and under the same process where it is one of the ranks'. Spans that a killed process left open end at its
    latest time. A merged trace may be merged again, and keeps its names and numbers.

    Args:
        paths: Any traces that :func:`read_events` reads, also cut ones.
        output: The new file; with a name in ``.gz`` it is compressed. It appears when it is finished.
        progress: Say on stderr how far it is.

    Returns:
        What was written, and how exact the times are.

    Raises:
        ValueError: No trace is given, or one twice.
        FileExistsError: The output exists.
        OSError: A file cannot be opened, read or written.
        TraceError: One is no Chrome trace.

    Example::

        print(merge(["fit-rank0.json", "fit-rank1.json"], "fit.json.gz"))
    """
    given = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    output = Path(output)
    call = f"`merge({given if len(given) < 4 else [*given[:3], ...]!r}, {str(output)!r})`"
    if not given:
        raise ValueError(f"{call}: expected at least one trace")
    known = [os.path.realpath(path) if "://" not in path else path for path in given]
    if len(set(known)) < len(known):
        twice = next(path for path, real in zip(given, known, strict=True) if known.count(real) > 1)
        raise ValueError(f"{call}: {twice!r} is given twice")
    if os.path.realpath(output) in known:
        raise FileExistsError(f"{call}: the output is one of the traces")
    with whole_file(output, call, level=1) as file:
        sources = sorted((Source(path) for path in given), key=_order)
        leave_to_workers(sources)
        alignments = _align(sources)
        roster = Roster(sources, alignments)
        say = _Progress(len(sources), shown=progress)
        files: list[MergedFile] = []
        empty, before = True, 0
        for index, (source, alignment) in enumerate(zip(sources, alignments, strict=True)):
            rewriter = Rewriter(source, index, roster, alignment.shift)
            for block in chain([roster.head(index)], rewriter.blocks()):
                if block:
                    file.write(b"[\n" + block[2:] if empty else block)
                    empty = False
                say.now(len(files), before + rewriter.events)
            before += rewriter.events
            files.append(_merged_file(source, alignment, rewriter, roster.base_ns))
        file.write(b"[\n]\n" if empty else b"\n]\n")
        say.done()
    return Merged(output, tuple(files))


def _order(source: Source) -> tuple[bool, bool, int, int]:
    """The reference first: what was merged before, else the lowest rank, else ours; a process' files in their order."""
    rank = _LATE if source.rank is None else source.rank
    return not source.merged, not source.ours, rank, (source.base_ns or 0) + source.start_ns if source.ours else 0


# ---- clocks ----------------------------------------------------------------------------------------------------------
def _align(sources: list[Source]) -> list[Alignment]:
    ours = [source for source in sources if source.ours and source.base_ns is not None]
    if len({boot for source in ours for boot in source.clock.boots} | {None for s in ours if not s.clock.boots}) > 1:
        for source in ours:
            source.read_anchors()
    known = dict(zip(map(id, ours), align([source.clock for source in ours]), strict=True))
    for source in sources:
        if source.base_ns is not None and not source.ours:
            same = [found[0] for pid in source.processes if (found := process_of_ours(source, pid, ours))]
            same += [other for other in ours if source.host and source.host == other.host]
            known[id(source)] = known[id(same[0])].as_companion() if same else by_wall_clock()
    starts_ns = [known[id(s)].shift(s.base_ns + s.start_ns) for s in sources if s.base_ns is not None]
    undated = [source.start_ns for source in sources if source.base_ns is None]
    # nothing is known of such a clock, but several processes of one machine may share it
    placed = Alignment("none", Shift([(0, min(starts_ns) - min(undated))] if starts_ns and undated else [(0, 0)]))
    return [known.get(id(source), placed) for source in sources]


# ---- what is said ----------------------------------------------------------------------------------------------------
def _merged_file(source: Source, alignment: Alignment, rewriter: Rewriter, base_ns: int) -> MergedFile:
    error_us = None
    if source.base_ns is not None:
        start_ns = source.base_ns + source.start_ns
        end_ns = max(start_ns, base_ns + rewriter.latest_ns - alignment.shift.at(start_ns))
        errors_ns = alignment.errors_ns(start_ns, end_ns)
        error_us = None if errors_ns is None else (errors_ns[0] / 1000, errors_ns[1] / 1000)
    return MergedFile(
        path=source.path,
        events=rewriter.events,
        aligned_by=alignment.by,
        error_us=error_us,
        closed=rewriter.closed,
        dropped=rewriter.dropped,
        lost_bytes=rewriter.lost_bytes,
        skipped_bytes=rewriter.skipped_bytes,
    )


def _duration(time_us: float) -> str:
    for unit, size_us in (("s", 1e6), ("ms", 1e3)):
        if time_us >= size_us:
            return f"{time_us / size_us:.3g} {unit}"
    return f"{time_us:.3g} µs"


class _Progress:
    """A line on stderr that is written over."""

    def __init__(self, files: int, *, shown: bool) -> None:
        self._files, self._shown = files, shown
        self._started_s = self._said_s = time.monotonic()

    def now(self, files: int, events: int) -> None:
        """So many files are done, so many events."""
        now_s = time.monotonic()
        if self._shown and now_s - self._said_s >= _SAID_EVERY_S:
            self._said_s = now_s
            rate = events / (now_s - self._started_s)
            sys.stderr.write(f"\r{files} of {self._files} traces, {events:,} events, {rate:,.0f}/s\x1b[K")
            sys.stderr.flush()

    def done(self) -> None:
        """Take the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
