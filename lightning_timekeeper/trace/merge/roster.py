"""Who is who in a merged trace: the numbers and names of its processes, and the numbers of its tracks.

Traces of ours keep their numbers, as far as no two claim one; all others give way to them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace import encode
from lightning_timekeeper.trace.source import identity, integer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_timekeeper.trace.clocks import Alignment
    from lightning_timekeeper.trace.source import Process, Source

MOST_NUMBER = (1 << 32) - 1
"""Processes and tracks beyond it collapse onto one in Perfetto."""

_SPARE_PROCESS = 20_000_000
_SPARE_TRACK = 1_000_000
_FOREIGN_SORT_INDEX = 1_000_000


class Numbers:
    """Which numbers of processes and tracks are taken in the merged trace, and what is said of them already."""

    def __init__(self) -> None:
        self._said: set[tuple[str, int, int]] = set()
        self._processes: dict[Any, int] = {}
        self._taken: set[int] = set()
        self._spare = count(_SPARE_PROCESS)
        self._tracks: dict[tuple[int, Any], int] = {}
        self._taken_tracks: set[tuple[int, int]] = set()
        self._spare_tracks: dict[int, Iterator[int]] = {}

    def process(self, key: Any, wanted: Any, rank: int | None = None) -> int:
        """The number of a process; the one that it wants, if nobody has it.

        Args:
            key: Equal for what is the same process, in whatever file.
            wanted: Its number in its own trace.
            rank: That of it, or None.
        """
        if key not in self._processes:
            choices = [wanted, *([] if rank is None else [10_000_000 + rank])]
            number = next((choice for choice in choices if fits(choice) and choice not in self._taken), None)
            if number is None:
                number = next(number for number in self._spare if number not in self._taken)
            self._processes[key] = number
            self._taken.add(number)
        return self._processes[key]

    def said_before(self, metadata: str, pid: int, tid: int = 0) -> bool:
        """Whether a metadata event was written of a process or track; from now on it is."""
        said = (metadata, pid, tid) in self._said
        self._said.add((metadata, pid, tid))
        return said

    def track(self, pid: int, wanted: Any, owner: Any) -> int:
        """The number of a track; shared by equal owners."""
        if (pid, owner) not in self._tracks:
            number = wanted
            if not fits(number) or (pid, number) in self._taken_tracks:
                spare = self._spare_tracks.setdefault(pid, count(_SPARE_TRACK))
                number = next(number for number in spare if (pid, number) not in self._taken_tracks)
            self._tracks[pid, owner] = number
            self._taken_tracks.add((pid, number))
        return self._tracks[pid, owner]


class Roster(Numbers):
    """The processes of all traces that are merged.

    Args:
        sources: The traces, those of ours before all others.
        alignments: Of their clocks.

    Attributes:
        base_ns: Zero of the merged trace, ns since 1970.
        processes: For each trace, its number of a process -> that in the merged trace, as far as it is known.
        flow_blocks: For each trace, what keeps the numbers of its flows apart; 0 for ours, whose are unique.
    """

    def __init__(self, sources: Sequence[Source], alignments: Sequence[Alignment]) -> None:
        super().__init__()
        self._sources, self._alignments = sources, alignments
        starts_ns = [
            alignment.shift(source.base_ns + source.start_ns)
            for source, alignment in zip(sources, alignments, strict=True)
            if source.base_ns is not None
        ]
        self.base_ns = min((encode.base_ns(max(0, start_ns)) for start_ns in starts_ns), default=0)
        self._about: Process = {"base_unix_s": self.base_ns // 10**9} if starts_ns else {}
        ours = [source for source in sources if source.ours]
        self.processes: list[dict[Any, int]] = [
            {
                pid: self.process(_key(source, pid), pid, integer(args.get("rank")))
                for pid, args in source.processes.items()
            }
            for source in ours
        ]
        self._names = self._named(ours)
        for source in sources[len(ours) :]:
            pids: dict[Any, int] = {}
            for pid in source.processes:
                same = process_of_ours(source, pid, ours)
                if same is not None:
                    pids[pid] = self.processes[ours.index(same[0])][same[1]]
                else:
                    pids[pid] = self.process((len(self.processes), pid), pid)
            self.processes.append(pids)
        block = max((source.flow_block for source in sources), default=0)
        self.flow_blocks = [0] * len(ours) + [block + 1 + at for at in range(len(sources) - len(ours))]

    def head(self, index: int) -> bytes:
        """The lines that name a trace's processes, each with its separator, as far as none did before."""
        source, pids = self._sources[index], self.processes[index]
        if source.merged:
            return b""  # it has them, and keeps them
        lines = b""
        for at, (pid, args) in enumerate(source.processes.items()):
            number = pids[pid]
            if self.said_before("process_name", number):
                continue
            about = {**self._about, "merged": True, "source": source.name}
            unix_ns = integer(args.get("unix_ns"))
            if unix_ns is not None and source.ours:
                about["unix_ns"] = str(self._alignments[index].shift(unix_ns))
            if source.ours:
                about = {**args, **self._names[number], **about}
            else:
                name = args.get("name") or (pid if isinstance(pid, str) and pid not in ("", "null") else f"pid {pid}")
                about = {"name": f"{name} ({source.name})", **about, "flow_block": self.flow_blocks[index]}
            lines += b",\n" + encode.event("M", "process_name", number, 0, args=about)
            if not source.ours and pid not in source.sorted:
                self.said_before("process_sort_index", number)
                place = {"sort_index": _FOREIGN_SORT_INDEX + 1000 * index + at}
                lines += b",\n" + encode.event("M", "process_sort_index", number, 0, args=place)
        return lines

    def _named(self, ours: list[Source]) -> dict[int, Process]:
        """Process -> its name, where it is one of several attempts of a rank with the attempt's number."""
        about: dict[int, Process] = {}
        starts_ns: dict[int, int] = {}
        ranks: dict[int, list[int]] = defaultdict(list)
        for source, pids, alignment in zip(ours, self.processes, self._alignments, strict=False):
            for pid, args in source.processes.items():
                number, rank = pids[pid], integer(args.get("rank"))
                if number not in about:
                    about[number] = {"name": str(args.get("name") or f"pid {pid}")}
                    if isinstance(args.get("attempt"), int):
                        about[number]["attempt"] = args["attempt"]
                    starts_ns[number] = alignment.shift(integer(args.get("unix_ns")) or 0)
                    if rank is not None:
                        ranks[rank].append(number)
        for rank, several in ranks.items():
            several.sort(key=lambda number: starts_ns[number])
            counted = list(dict.fromkeys(about[number].get("attempt") for number in several))
            if len(counted) < len(several) or None in counted:  # no scheduler that counts
                counted = list(range(len(several)))
            for number, attempt in zip(several, counted, strict=True):
                if len(several) > 1:
                    rest = about[number]["name"].removeprefix(f"rank {rank}")
                    about[number] = {"name": f"rank {rank}, attempt {attempt}{rest}", "attempt": attempt}
        return about


def process_of_ours(source: Source, pid: Any, ours: Sequence[Source]) -> tuple[Source, Any] | None:
    """The trace of ours that is of the same process as a foreign one, and its number there; None if there is none."""
    one_host = len({other.host for other in ours}) == 1
    for other in ours:
        if source.base_ns is not None and (source.host == other.host or (not source.host and one_host)):
            for number, args in other.processes.items():
                began_ns = integer(args.get("unix_ns"))
                if args.get("pid") == pid and began_ns is not None and began_ns <= source.base_ns + source.end_ns:
                    return other, number
    return None


def _key(source: Source, pid: int) -> tuple[Any, ...]:
    """What tells one process from another, also of another machine or another attempt."""
    args = source.processes[pid]
    if "pid" not in args:
        return (source.path, pid)
    return (*(identity(args.get(key)) for key in ("host", "boot", "pid", "rank")), pid)


def fits(number: Any) -> bool:
    """Whether both viewers take it as the number of a process or track."""
    return isinstance(number, int) and 1 <= number <= MOST_NUMBER
