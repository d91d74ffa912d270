"""From what the threads stored to spans: whatever is recorded is read back exactly, and nests on every track."""

from __future__ import annotations

import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Clock, check_spans, make_tracer, parse, read, slices

from lightning_timekeeper.trace.pairing import Pairing, take
from lightning_timekeeper.trace.tracer import END, PAYLOAD, POINT

NAMES = ["a", "b", "c"]


class Program:
    """Runs operations in several threads, one at a time, and knows what has to be in the trace."""

    def __init__(self, tracer, clock, threads):
        self.tracer, self.clock, self.threads = tracer, clock, threads
        self.open = [[] for _ in threads]
        self.expected = []
        self.points = []

    def run(self, operation):
        kind, thread, name, number = operation
        if kind == "go":
            self.clock.go(number)
        elif kind == "drain":
            assert self.tracer.flush()
        else:
            self.threads[thread].submit(getattr(self, kind), self.open[thread], name, number).result()

    def begin(self, opened, name, number):
        at = self.clock.ts_ns
        if number % 3 == 0:
            ident = self.tracer.track.begin(name, "loop", {"n": number})
            opened.append((name, at, lambda: self.tracer.track.end(ident, {"m": 1} if number % 2 else None)))
        else:
            span = self.tracer.span(name, **({"n": number} if number % 3 == 1 else {}))
            span.__enter__()
            error = OSError if number % 4 == 0 else None
            opened.append((name, at, lambda: span.__exit__(error, None, None)))

    def end(self, opened, name, number):
        if opened:
            # mostly the latest; also any other, as interleaved tasks do
            at = -1 if number % 4 else number % len(opened)
            name, begin_ns, leave = opened.pop(at)
            leave()
            self.expected.append((name, begin_ns, self.clock.ts_ns))

    def point(self, opened, name, number):
        if number % 2:
            self.tracer.instant(name, number=number)
        else:
            self.tracer.counter(name, number)
        self.points.append((name, self.clock.ts_ns, number))

    def finish(self):
        self.tracer.close()
        for opened in self.open:
            self.expected += [(name, begin_ns, self.clock.ts_ns) for name, begin_ns, _ in opened]


OPERATION = st.tuples(
    st.sampled_from(["begin", "begin", "begin", "end", "end", "point", "go", "go", "drain"]),
    st.integers(0, 1),
    st.sampled_from(NAMES),
    st.integers(0, 2000),
)


@pytest.fixture(scope="module")
def threads():
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.shutdown()


def check(events, program):
    check_spans(slices(events), program.expected)
    points = [(e["name"], e["ts_ns"], *e["args"].values()) for e in events if e["ph"] in "iC"]
    assert sorted(points) == sorted(program.points)


@settings(deadline=None, max_examples=400)
@given(operations=st.lists(OPERATION, max_size=100))
def test_whatever_is_recorded_is_read_back(threads, operations):
    """Spans that nest or cross, of several threads, drained at any moment, are read back to the nanosecond."""
    clock = Clock()
    tracer = make_tracer(None, clock)
    program = Program(tracer, clock, threads)
    for operation in operations:
        program.run(operation)
    program.finish()
    check(parse(b"".join(_unzipped(tracer))), program)


@settings(deadline=None, max_examples=200)
@given(operations=st.lists(OPERATION, max_size=60))
def test_short_spans_are_left_out(threads, operations):
    """A minimum duration leaves out short spans without arguments, and nothing else, whatever is open at a drain."""
    found = []
    for least_us in (0, 0.5):
        clock = Clock()
        tracer = make_tracer(None, clock, min_duration_us={"user": least_us})
        program = Program(tracer, clock, threads)
        for operation in operations:
            program.run(operation)
        program.finish()
        spans = slices(parse(b"".join(_unzipped(tracer))))
        found.append(sorted((*one.key, one.cat, bool(one.args)) for one in spans))
    everything, kept = found
    for span in kept:
        everything.remove(span)
    for _, start_ns, end_ns, category, has_args in everything:
        assert (category, has_args) == ("user", False)
        assert end_ns - start_ns < 500


@pytest.mark.parametrize("ident", ["handle", "serial"])
def test_a_short_span_that_was_open_at_a_drain_gets_its_end(ident):
    """Its begin is in the file, so that its end has to be."""
    clock = Clock()
    tracer = make_tracer(None, clock, min_duration_us={"user": 10})
    span = tracer.span("a")
    track, serial = tracer.track, None
    if ident == "handle":
        span.__enter__()
    else:
        serial = track.begin("a", "user", {})
    tracer.flush()
    clock.go(5)
    if serial is None:
        span.__exit__(None, None, None)
    else:
        track.end(serial)
    tracer.close()
    assert [one.key for one in slices(parse(b"".join(_unzipped(tracer))))] == [("a", clock.ts_ns - 5, clock.ts_ns)]


def _unzipped(tracer):
    import zlib

    unzip = zlib.decompressobj(31)
    yield unzip.decompress(b"".join(tracer._drain.sink._parts))
    assert unzip.eof


@pytest.mark.slow
def test_perfetto_finds_every_slice(threads, tmp_path, perfetto):
    """Perfetto has a slice for each span, and piece of one, on the same track and with the same nanoseconds."""
    paths, programs = [], []
    for seed in range(40):
        choose = random.Random(seed)
        clock = Clock()
        paths.append(tmp_path / f"{seed}.json")
        program = Program(make_tracer(paths[-1], clock), clock, threads)
        kinds = ["begin", "begin", "end", "end", "point", "go", "go", *["drain"] * (seed % 3)]
        for _ in range(400):
            program.run((choose.choice(kinds), choose.randrange(2), choose.choice(NAMES), choose.randrange(2000)))
            clock.go(1)  # in a file out of order Perfetto sorts the end of a B before it where they have the same time
        program.finish()
        programs.append(program)
    sql = """
        select slice.name, ts, dur, tid from slice
        join thread_track on slice.track_id = thread_track.id join thread using (utid)
    """
    reports = perfetto.open_traces(paths, [sql])
    for path, program, report in zip(paths, programs, reports, strict=True):
        events = read(path)
        check(events, program)
        assert report.ok, (path, report)
        ours = [(one.name, one.start_ns, one.end_ns - one.start_ns, one.tid) for one in slices(events)]
        instants = [(e["name"], e["ts_ns"], 0, e["tid"]) for e in events if e["ph"] == "i"]
        assert sorted(map(tuple, report.rows[0])) == sorted(ours + instants)


def test_a_span_beside_an_open_one_at_the_same_time(tmp_path, perfetto):
    """Of two spans that begin at the same time, the first open at a drain, Perfetto keeps both."""
    clock, path = Clock(), tmp_path / "trace.json"
    tracer = make_tracer(path, clock)
    with tracer.span("open"):
        for drains in (False, True):
            with tracer.span("inner"), tracer.span("innermost", x=drains):
                clock.go(5)
            if drains:
                tracer.flush()
        clock.go(5)
    tracer.close()
    report = perfetto.open_trace(path, ["select name, dur, depth from slice order by ts, depth"])
    assert report.ok
    inside = [["inner", 5, 1], ["innermost", 5, 2]]
    assert report.rows == [[["open", 15, 0], *inside, *inside]]
    slices(read(path))


def test_nested_rows_are_columns():
    """Complete spans without arguments come as columns in begin order, all else as single events between them."""
    side = deque([(9 << 3 | PAYLOAD, ("x", "", {}))])
    halves = [(0, 10), (8, 11), (8 | END, 12), (9 << 3 | PAYLOAD, 13), (9 << 3 | END, 14), (END, 20), (16, 21)]
    pairing = Pairing()
    batch = pairing.feed([number for half in halves for number in half], side)
    assert batch.position.tolist() == [0, 1]
    assert batch.ident.tolist() == [0, 1]
    assert batch.start_ns.tolist() == [10, 11]
    assert batch.duration_ns.tolist() == [10, 1]
    assert [(one.phase, one.start_ns, one.duration_ns, one.position) for one in batch.singles] == [
        ("X", 13, 1, 3),
        ("B", 21, 0, 6),
    ]
    assert [span.ident for span in pairing.open] == [2]


def test_end_without_begin():
    """An end whose begin was not recorded is left out, and disturbs nothing."""
    batch = Pairing().feed([8 | END, 1, 0, 2, 8 | END, 3, END, 4], deque())
    assert [(one.phase, one.start_ns, one.duration_ns) for one in batch.singles] == [("X", 2, 2)]


def test_time_never_falls():
    """Half events that were stored out of order, by an interruption, are put in order: no length is negative."""
    pairing = Pairing()
    pairing.feed([0, 100], deque())
    batch = pairing.feed([8, 90, 8 | END, 120, 16, 110, 16 | END, 130, END, 125], deque())
    assert [(one.phase, one.start_ns) for one in batch.singles] == [("E", 130)]
    assert (batch.start_ns.tolist(), batch.duration_ns.tolist()) == ([100, 120], [20, 10])
    assert pairing.finish(5, {}).singles == []
    assert pairing.last_ns == 130


def test_payloads_keep_to_their_code():
    """A payload that an interruption put before its time waits for its own half event."""
    side = deque([(POINT | PAYLOAD, "first"), (8 | POINT | PAYLOAD, "second")])
    assert take(side, 8 | POINT | PAYLOAD) == "second"
    assert take(side, POINT | PAYLOAD) == "first"
    assert not side


def test_crossing_is_forgotten():
    """After spans that crossed, nested spans are columns again: one coroutine does not slow the whole run."""
    pairing = Pairing()
    crossing = [0, 1, 8, 2, END, 3, 8 | END, 4]
    assert len(pairing.feed(crossing, deque()).singles) == 2
    assert pairing.crossing
    for at in range(100):
        batch = pairing.feed([0, 10 + at, 8, 10 + at], deque())
        pairing.feed([8 | END, 10 + at, END, 10 + at], deque())
    assert not pairing.crossing
    assert {one.lane for one in batch.singles} == {0}


@pytest.mark.parametrize("tasks", [1_000, 8_000])
def test_many_tasks_in_linear_time(tasks):
    """Thousands of tasks at once get a lane each, without a search among all of them for each."""
    begins = [number for task in range(tasks) for number in (task << 3, task)]
    ends = [number for task in range(tasks) for number in (task << 3 | END, tasks + task)]
    pairing = Pairing()
    looks = 0

    class Counted(list):
        def __getitem__(self, at):
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

    import lightning_timekeeper.trace.pairing as module

    make = module._Lanes.__init__

    def counted(self, forever):
        make(self, forever)
        self._ends = Counted()

    module._Lanes.__init__ = counted
    try:
        batch = pairing.feed(begins + ends, deque(), crossing=True)
    finally:
        module._Lanes.__init__ = make
    assert len({one.lane for one in batch.singles}) == tasks
    assert looks < 20 * tasks


def test_deep_recursion():
    """Fifty thousand levels are a matter of sorting, not of searching."""
    depth = 50_000
    flat = [number for level in range(depth) for number in (level << 3, level)]
    flat += [number for level in reversed(range(depth)) for number in (level << 3 | END, 2 * depth)]
    start_s = time.perf_counter()
    batch = Pairing().feed(flat, deque())
    assert len(batch.ident) == depth
    assert batch.start_ns.tolist() == list(range(depth))
    assert time.perf_counter() - start_s < 60
