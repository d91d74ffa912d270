"""A recording's life: what is in the file, its ends, forks, threads without end, two files in turn."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest
from traces import ZERO_NS, Clock, make_tracer, parse, read, slices

from lightning_timekeeper.trace import tracer as tracer_module
from lightning_timekeeper.trace.tracer import Tracer, counter, get_tracer, instant, span


def run(code, *arguments, status=0):
    """Run a program in a child; its output. Warnings are errors there, except ours, which go to stderr."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    return done


def test_whole_file(tmp_path, monkeypatch):
    """A small recording, to the byte."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    clock = Clock()
    path = tmp_path / "trace.json"
    tracer = make_tracer(path, clock, process_name="rank 3", sort_index=3, metadata={"rank": 3})
    with tracer:
        clock.go(1)
        with span("step"):
            clock.go(1_000)
            with span("load", rows=2):
                clock.go(2_000_000)
            instant("spike", loss=3.5)
            counter("queue", 4)
            assert tracer.flush()
            clock.go(999)
        clock.go(1)
    head = f'"schema_version":1,"host":"node7","pid":{os.getpid()},"base_unix_s":1696186170,'
    head += f'"unix_ns":"1700000000123456789","clock_ns":"{clock.origin_ns}"'
    assert path.read_text().splitlines() == [
        "[",
        f'{{"ph":"M","name":"process_name","pid":4711,"tid":0,"args":{{"name":"rank 3",{head},"rank":3}}}},',
        '{"ph":"M","name":"process_sort_index","pid":4711,"tid":0,"args":{"sort_index":3}},',
        '{"ph":"M","name":"thread_name","pid":4711,"tid":1,"args":{"name":"MainThread"}},',
        '{"ph":"M","name":"thread_sort_index","pid":4711,"tid":1,"args":{"sort_index":1}},',
        '{"ph":"B","cat":"user","name":"step","pid":4711,"tid":1,"ts":3813830123456.790},',
        '{"ph":"X","cat":"user","name":"load","pid":4711,"tid":1,"ts":3813830123457.790,"dur":2000.000,"args":{"rows":2}},',
        '{"ph":"i","cat":"user","name":"spike","pid":4711,"tid":1,"ts":3813830125457.790,"s":"t","args":{"loss":3.5}},',
        '{"ph":"C","name":"queue","pid":4711,"tid":1,"ts":3813830125457.790,"args":{"value":4}},',
        '{"ph":"E","pid":4711,"tid":1,"ts":3813830125458.789}',
        "]",
    ]
    assert ZERO_NS == 3813830123456_789


def test_empty_recording(tmp_path, perfetto):
    """A tracer that recorded nothing leaves a whole file with its head."""
    path = tmp_path / "trace.json"
    with make_tracer(path):
        pass
    assert {event["ph"] for event in read(path)} == {"M"}
    assert perfetto.open_trace(path).ok


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"max_events": 0}, r"`Tracer\(max_events=0\)`: expected a whole number from 1"),
        ({"max_events": 1.5}, "max_events=1.5"),
        ({"max_events": True}, "max_events=True"),
        ({"drain_interval_s": 0}, "drain_interval_s=0"),
        ({"drain_interval_s": float("nan")}, "drain_interval_s=nan"),
        ({"drain_interval_s": 1e300}, r"drain_interval_s=1e\+300"),
        ({"pid": 0}, "pid=0"),
        ({"pid": 1 << 32}, "pid=4294967296"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, shown):
    """A wrong argument is refused at construction, by name and value, and leaves no file."""
    with pytest.raises(ValueError, match=shown):
        Tracer(tmp_path / "trace.json", **arguments)
    assert not list(tmp_path.iterdir())


def test_handle(tmp_path):
    """A kept begin and end record what a span does, in a category of its own; the same name is the same pair."""
    clock, path = Clock(), tmp_path / "trace.json"
    tracer = make_tracer(path, clock)
    begin, end = tracer.handle("forward", "forward")
    assert tracer.handle("forward", "forward") == (begin, end)
    begin()
    clock.go(3)
    end()
    tracer.close()
    (one,) = slices(read(path))
    assert (one.name, one.cat, one.end_ns - one.start_ns) == ("forward", "forward", 3)


def test_begin_and_end(tmp_path):
    """A span opened by hand takes arguments at its end too, in one piece or cut by a drain."""
    clock, path = Clock(), tmp_path / "trace.json"
    tracer = make_tracer(path, clock)
    for drains in (False, True):
        ident = tracer.track.begin("step", "loop", {"batch": 1})
        clock.go(1)
        if drains:
            tracer.flush()
        tracer.track.end(ident, {"loss": 2})
    tracer.close()
    assert [one.args for one in slices(read(path))] == [{"batch": 1, "loss": 2}] * 2


def test_since_last(tmp_path, perfetto):
    """since_last records the time since the thread's latest begin or end, whether the drain has been there or not."""
    clock, path = Clock(), tmp_path / "trace.json"
    tracer = make_tracer(path, clock)
    with tracer.span("step"):
        for drains in (False, True):
            clock.go(3)
            with tracer.span("work"):
                clock.go(2)
            if drains:
                tracer.flush()
            clock.go(7)
            tracer.track.since_last("sync", "sync")
    tracer.close()
    start_ns = clock.ts_ns - 24
    found = [(one.name, one.start_ns - start_ns, one.end_ns - one.start_ns) for one in slices(read(path))]
    assert found == [("step", 0, 24), ("work", 3, 2), ("sync", 5, 7), ("work", 15, 2), ("sync", 17, 7)]
    assert perfetto.open_trace(path).ok


def test_close_open(tmp_path):
    """close_open ends a thread's open spans then, those since a given time only; their own ends are dropped."""
    clock, path = Clock(), tmp_path / "trace.json"
    with make_tracer(path, clock) as tracer:
        with span("outer"):
            clock.go(10)
            since_ns = clock()
            with span("inner"), span("innermost", x=1):
                clock.go(1)
                assert tracer.close_open({"stopped": True}, since_ns=since_ns)
                clock.go(100)
                with span("later"):
                    clock.go(1)
        assert tracer.close_open({})
    found = {one.name: (one.end_ns - one.start_ns, one.args) for one in slices(read(path))}
    assert found == {
        "outer": (112, {}),
        "inner": (1, {"stopped": True}),
        "innermost": (1, {"x": 1, "stopped": True}),
        "later": (1, {}),
    }


def test_memory():
    """Without a path the events are kept in memory, readable at any time."""
    clock = Clock()
    tracer = make_tracer(None, clock)
    with tracer, span("a"):
        clock.go(1)
        with span("b"):
            clock.go(5)
        assert [event["name"] for event in tracer.events() if event["ph"] in "XB"] == ["a", "b"]
    assert tracer.path is None
    assert [event["ph"] for event in tracer.events()] == ["M"] * 4 + ["B", "X", "E"]


def test_events_are_of_memory(tmp_path):
    """events() of a tracer that writes a file says where they are."""
    with make_tracer(tmp_path / "trace.json") as tracer, pytest.raises(ValueError, match="this tracer writes a file"):
        tracer.events()


def test_open_spans_at_close(tmp_path):
    """What is open when the recording is closed gets an end and a mark, in every thread."""
    clock, path = Clock(), tmp_path / "trace.json"
    tracer = make_tracer(path, clock)
    tracer.enable()
    entered, leave = threading.Event(), threading.Event()

    def work():
        with span("other", x=1):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(10)
    with span("mine"):
        clock.go(3)
        assert tracer.close()
    leave.set()
    thread.join()
    found = {one.name: (one.end_ns - one.start_ns, one.args) for one in slices(read(path))}
    assert found == {"mine": (3, {"unfinished": True}), "other": (3, {"x": 1, "unfinished": True})}


def test_exception_marks_open_spans(tmp_path):
    """A tracer left by an exception marks the spans that are open with it."""
    path = tmp_path / "trace.json"
    with pytest.raises(OSError), make_tracer(path) as tracer:  # noqa: PT011, PT012
        tracer.track.begin("step", "loop", {})
        raise OSError
    (one,) = slices(read(path))
    assert one.args == {"error": "OSError"}


def test_close_twice(tmp_path):
    """A second close changes nothing and says the same; nothing is recorded any more."""
    path = tmp_path / "trace.json"
    tracer = make_tracer(path)
    tracer.enable()
    with span("a"):
        pass
    assert tracer.close()
    before = path.read_bytes()
    tracer.enable()
    assert not tracer.enabled
    with tracer.span("b"):
        instant("c")
    assert tracer.close()
    assert tracer.flush()
    assert path.read_bytes() == before


def test_recorded_after_the_end_is_thrown_away(tmp_path):
    """Handles that are still used after the end take no memory."""
    tracer = make_tracer(tmp_path / "trace.json")
    kept = tracer.span("a")
    tracer.close()
    for _ in range(1000):
        with kept, tracer.span("b", x=1):
            pass
    tracer.flush()
    assert not tracer.track.buffer
    assert not tracer.track.side


def test_no_thread_is_left(tmp_path):
    """Both threads have ended when close returns."""
    before = set(threading.enumerate())
    tracer = make_tracer(tmp_path / "trace.json")
    assert len(set(threading.enumerate()) - before) == 2
    assert tracer.close()
    assert set(threading.enumerate()) == before


def test_forgotten_tracer(tmp_path):
    """A tracer that nobody holds any more ends its file and its thread."""
    path = tmp_path / "trace.json"
    tracer = make_tracer(path, drain_interval_s=0.01)
    with tracer.span("a"):
        pass
    reference = weakref.ref(tracer)
    drain = tracer._drain
    del tracer
    gc.collect()
    assert reference() is None
    until_s = time.monotonic() + 10
    while not (drain._over and drain.sink.done) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert [one.name for one in slices(read(path))] == ["a"]


def test_at_exit(tmp_path):
    """A program that ends with its spans open and its tracer not closed leaves a whole file, compressed if wanted."""
    for name in ("plain.json", "trace.json.gz"):
        run(
            """
            import sys
            from lightning_timekeeper.trace.tracer import Tracer, span
            Tracer(sys.argv[1]).enable()
            with span("done"):
                pass
            span("open").__enter__()
            """,
            tmp_path / name,
        )
    for data in ((tmp_path / "plain.json").read_bytes(), gzip.decompress((tmp_path / "trace.json.gz").read_bytes())):
        assert {one.name: one.args for one in slices(parse(data))} == {"done": {}, "open": {"unfinished": True}}
    assert len(list(tmp_path.iterdir())) == 2


def test_import_is_light():
    """The recorder's module loads no numpy, no torch and no Lightning before a tracer is made."""
    code = "import sys, lightning_timekeeper.trace.tracer; print({'numpy', 'torch', 'lightning', 'asyncio'} & {*sys.modules})"
    assert run(code).stdout.strip() == "set()"


# ---- signals ---------------------------------------------------------------------------------------------------------
needs_signals = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timer here")


@needs_signals
@pytest.mark.parametrize("inside", ["span", "flush", "close"])
def test_close_in_a_signal_handler(tmp_path, inside):
    """close() from a signal handler ends the file, whatever it interrupts: our own flush and close too."""
    done = run(
        """
        import os, signal, sys, threading, time
        from lightning_timekeeper.trace.tracer import Tracer, span

        path, inside = sys.argv[1:]
        tracer = Tracer(path)

        def handler(number, frame):
            print(tracer.close())
            sys.exit(3)

        signal.signal(signal.SIGTERM, handler)
        tracer.enable()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if inside == "close":  # hold the file's thread, so that the signal comes while close() waits
            tracer._drain.sink._final_gzip = lambda: time.sleep(1)
        while True:
            with span("a", x=1):
                if inside == "flush":
                    tracer.flush()
                elif inside == "close":
                    tracer.close()
        """,
        tmp_path / ("trace.json.gz" if inside == "close" else "trace.json"),
        inside,
        status=3,
    )
    assert done.stdout == "True\n"
    assert not done.stderr
    assert slices(read(tmp_path / "trace.json"))


@needs_signals
def test_signal_handlers_that_record(tmp_path):
    """A handler that records in the middle of a record call mixes nothing up: each payload stays with its event."""
    path = tmp_path / "trace.json"
    numbers = itertools.count(1)
    order = 0

    def handler(number, frame):
        mine = next(numbers)  # a handler may interrupt a handler
        with span("signal", signal=mine):
            instant("in signal", instant=mine)

    with make_tracer(path, time.perf_counter_ns):
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
        try:
            until_s = time.monotonic() + 10
            while order < 20_000 and time.monotonic() < until_s:
                order += 1
                with span("main", main=order):
                    instant("in main", mark=order)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    count = next(numbers) - 1
    assert count > 50
    keys = {"main": "main", "signal": "signal", "in main": "mark", "in signal": "instant"}
    seen = {name: [] for name in keys}
    events = read(path)
    for event in events:
        if event["ph"] in "XBi":
            assert list(event["args"]) == [keys[event["name"]]]
            seen[event["name"]].append(event["args"][keys[event["name"]]])
    for name, found in seen.items():
        total = order if "main" in name else count
        assert sorted(found) == list(range(1, total + 1)), name
    slices(events)


# ---- threads ---------------------------------------------------------------------------------------------------------
def test_short_threads(tmp_path):
    """A thread that has ended leaves nothing behind in memory, and its spans in the file."""
    path = tmp_path / "trace.json"
    tracer = make_tracer(path)
    tracer.enable()

    def work(number):
        with span(f"work {number}"):
            pass
        span("open").__enter__()

    for number in range(500):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
        if number % 100 == 0:
            tracer.flush()
    tracer.flush()
    assert len(tracer._tracks) == 1
    tracer.close()
    found = slices(read(path))
    assert len({one.tid for one in found}) == 500
    assert {one.name for one in found} == {"open", *(f"work {number}" for number in range(500))}


def test_foreign_threads(tmp_path):
    """A thread that Python's threading did not start has a track too, and its end is noticed."""
    import _thread

    path = tmp_path / "trace.json"
    tracer = make_tracer(path)
    tracer.enable()
    for _ in range(3):
        done = threading.Event()

        def work(done=done):
            with span("foreign"):
                pass
            done.set()

        _thread.start_new_thread(work, ())
        done.wait(10)
    until_s = time.monotonic() + 10
    while len(tracer._tracks) > 1 and time.monotonic() < until_s:
        tracer.flush()
    assert len(tracer._tracks) == 1
    tracer.close()
    assert len({one.tid for one in slices(read(path))}) == 3


def test_many_threads_at_once(tmp_path):
    """Threads that record without pause, while others drain, enable and disable, lose and mix up nothing."""
    path = tmp_path / "trace.json"
    with make_tracer(path, time.perf_counter_ns, drain_interval_s=0.001) as tracer:

        def work(number):
            for step in range(2000):
                with span("a"), span("b", number=number, step=step):
                    pass

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            tracer.flush()
        for thread in threads:
            thread.join()
    found = slices(read(path))
    assert len(found) == 16_000
    by_track = {}
    for one in found:
        if one.name == "b":
            by_track.setdefault(one.tid, []).append((one.args["number"], one.args["step"]))
    assert sorted(by_track.values()) == [[(number, step) for step in range(2000)] for number in range(4)]


# ---- forks -----------------------------------------------------------------------------------------------------------
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@needs_fork
def test_fork(tmp_path):
    """In a forked child a tracer of its parent's keeps and writes nothing, and what it records comes to it all the same."""
    run(
        """
        import os, sys
        from lightning_timekeeper.trace.tracer import Tracer, get_tracer, instant, span

        path = sys.argv[1]
        buffered = Tracer(path + ".buffered", opener=lambda path: open(path, "wb"))
        tracer = Tracer(path)
        tracer.enable()
        buffered.enable()
        kept = buffered.span("kept")
        with span("before"):
            child = os.fork()
            if child == 0:
                assert get_tracer() is None and not tracer.enabled and tracer.path is None
                with kept, span("child"), tracer.span("child"), tracer.span("child", x=1):
                    tracer.instant("child")
                    tracer.track.since_last("child", "")
                tracer.enable()
                assert not tracer.enabled
                assert not tracer.flush() and not tracer.close() and not tracer.close_open({})
                tracer.switch(path + ".2")
                assert not tracer.track.buffer and not tracer.track.side
                with Tracer(path + ".child"), span("own"):
                    pass
                sys.exit(0)  # an orderly end, atexit included
            assert os.waitpid(child, 0)[1] == 0
        with span("after"):
            pass
        assert tracer.close() and buffered.close()
        """,
        tmp_path / "t",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t.buffered", "t.child"]
    assert [one.name for one in slices(read(tmp_path / "t"))] == ["before", "after"]
    spans = sorted(slices(read(tmp_path / "t.buffered")), key=lambda one: one.start_ns)
    assert [one.name for one in spans] == ["before", "kept", "child", "after"]
    assert [one.name for one in slices(read(tmp_path / "t.child"))] == ["own"]


def _in_worker(path):
    with span("worker"):
        instant("worker")
    return get_tracer() is None


@pytest.mark.slow
@pytest.mark.usefixtures("_own_forkserver")
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_worker_processes(tmp_path, method):
    """A worker process, however it is started, records into its parent's trace, on a track of its own."""
    path = tmp_path / "trace.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later, of fork beside threads
        with make_tracer(path), span("parent"), multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(_in_worker, [path] * 4) == [True] * 4
    events = read(path)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert sorted(one.name for one in slices(events)) == ["parent", *["worker"] * 4]
    assert all(("PoolWorker" in tracks[one.tid]) == (one.name == "worker") for one in slices(events))
    assert len(list(tmp_path.iterdir())) == 1


# ---- one file after the other ----------------------------------------------------------------------------------------
def test_switch(tmp_path, perfetto):
    """A switch goes on in a new file, whole like the old one; a span that is open is in both."""
    clock = Clock()
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    tracer = make_tracer(paths[0], clock)
    with tracer, span("run", seed=1):
        for path in paths:
            if path != paths[0]:
                tracer.switch(path)
                assert tracer.path == str(path)
            clock.go(5)
            with span(path.stem):
                clock.go(1)
    for number, path in enumerate(paths):
        run_, inner = slices(read(path))
        assert (inner.name, inner.end_ns - inner.start_ns) == (str(number), 1)
        assert (run_.name, run_.end_ns - run_.start_ns) == ("run", 6)
        assert run_.args == {"seed": 1, **({"continued": True} if number < 2 else {})}
    assert all(report.ok for report in perfetto.open_traces(paths))


def test_switch_to_a_file_that_cannot_be_made(tmp_path):
    """A switch to a path that is taken raises, and all goes on in the old file."""
    path, taken = tmp_path / "trace.json", tmp_path / "taken.json"
    taken.write_text("mine")
    with make_tracer(path) as tracer:
        with pytest.raises(FileExistsError):
            tracer.switch(taken)
        with span("after"):
            pass
    assert [one.name for one in slices(read(path))] == ["after"]
    assert taken.read_text() == "mine"


def test_switch_after_the_end(tmp_path):
    """A switch of a recording that has ended makes no file."""
    tracer = make_tracer(tmp_path / "trace.json")
    tracer.close()
    tracer.switch(tmp_path / "more.json")
    assert not (tmp_path / "more.json").exists()


def test_max_events_counts_per_file(tmp_path):
    """max_events is the most of one file: a new file begins a new count."""
    with make_tracer(tmp_path / "0.json", max_events=10) as tracer:
        for number in range(1, 5):
            for _ in range(8):
                with span("a"):
                    pass
            tracer.switch(tmp_path / f"{number}.json")
    assert [len(slices(read(tmp_path / f"{number}.json"))) for number in range(5)] == [8, 8, 8, 8, 0]


def test_get_tracer_is_the_latest(tmp_path):
    """get_tracer is the tracer enabled last, of those that record."""
    first, second = make_tracer(), make_tracer()
    with first:
        with second:
            assert get_tracer() is second
        assert get_tracer() is first
    assert get_tracer() is None
    assert tracer_module._recording == []


def test_metadata_is_json(tmp_path):
    """Metadata is shown in the first event as arguments are."""
    with make_tracer(tmp_path / "t.json", metadata={"rank": 0, "nan": float("nan")}):
        pass
    args = json.loads((tmp_path / "t.json").read_text())[0]["args"]
    assert (args["rank"], args["nan"]) == (0, "nan")
