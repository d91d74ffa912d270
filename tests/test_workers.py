"""What child processes record: in the trace of the process they belong to, once, whatever becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
from traces import make_tracer, parse, read, slices
from worker_datasets import Batched, Stored, Streamed, done_in

from lightning_timekeeper import TracedDataset, Tracer, get_tracer, iterate, merge
from lightning_timekeeper.trace import tracer as tracer_module
from lightning_timekeeper.trace import workers
from lightning_timekeeper.trace.tracer import BOARD, counter, instant, span

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
pytestmark = needs_fork
# six processes that import torch
long = pytest.mark.skipif("TIMEKEEPER_LONG" not in os.environ, reason="20 to 40 s each: only with TIMEKEEPER_LONG set")


class Child:
    """A forked child that does the steps it is told to, one after the other."""

    def __init__(self, *steps):
        here, there = os.pipe()
        back, done = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later, of fork beside threads
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(there)
                for step in steps:
                    if not os.read(here, 1):
                        break
                    step()
                    os.write(done, b".")
                status = 0
            except BaseException as error:  # noqa: BLE001 - the child must never return into pytest
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(status)
        os.close(here)
        os.close(done)
        self._go, self._done = there, back

    def step(self):
        """Let it do the next step, and wait until it has."""
        os.write(self._go, b".")
        assert os.read(self._done, 1) == b".", "the child died"

    def begin(self):
        """Let it do the next step."""
        os.write(self._go, b".")

    def end(self):
        """Let it end; its exit status."""
        os.close(self._go)
        os.close(self._done)
        return os.waitpid(self.pid, 0)[1]


def hang():
    span("hangs").__enter__()
    time.sleep(600)


def run(*steps):
    child = Child(*steps)
    for _ in steps:
        child.step()
    assert child.end() == 0


def spans(path):
    return sorted(slices(read(path)), key=lambda one: (one.start_ns, -one.end_ns))


def tracks(events):
    return {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}


def left_in(directory):
    return sorted(path.name for path in directory.iterdir())


# ---- what lands where ------------------------------------------------------------------------------------------------
def test_everything_lands_on_the_childs_own_track(tmp_path, perfetto):
    """Spans with their arguments and errors, decorated calls, waits, instants and counters; the viewers take them all."""

    @span("decorated")
    def decorated():
        return 7

    def work():
        assert get_tracer() is None
        with span("outer", number=3, text='a "quoted" \\'), contextlib.suppress(KeyError), span("inner"):
            raise KeyError
        assert decorated() == 7
        assert list(iterate([1, 2], "wait")) == [1, 2]
        instant("mark", loss=1.5)
        counter("rows", 3)
        counter("several", a=1, b=float("nan"))

    path = tmp_path / "t.json"
    with Tracer(path), span("parent"):
        run(work)
    assert left_in(tmp_path) == ["t.json"]
    events = read(path)
    found = spans(path)
    assert [one.name for one in found] == ["parent", "outer", "inner", "decorated", *["wait"] * 4]
    by_name = {one.name: one for one in found}
    assert by_name["outer"].args == {"number": 3, "text": 'a "quoted" /'}
    assert by_name["inner"].args == {"error": "KeyError"}
    assert {one.tid for one in found if one.name != "parent"} == {by_name["outer"].tid} != {by_name["parent"].tid}
    # on one clock
    assert by_name["parent"].start_ns < by_name["outer"].start_ns < found[-1].end_ns < by_name["parent"].end_ns
    name = tracks(events)[by_name["outer"].tid]
    assert f"(pid {next(e['args']['pid'] for e in events if e['ph'] == 'i' and 'pid' in e['args'])})" in name
    points = [
        (e["ph"], e["name"], e["args"])
        for e in events
        if e["ph"] in "iC" and e["cat" if "cat" in e else "ph"] != "timekeeper"
    ]
    assert points == [
        ("i", "mark", {"loss": 1.5}),
        ("C", f"rows ({name})", {"value": 3}),
        ("C", f"several ({name})", {"a": 1}),
    ]
    report = perfetto.open_trace(path, ["select count(*) from slice where dur >= 0"])
    assert report.ok, report
    assert report.rows == [[[len(found) + 2]]]


def test_a_child_that_records_nothing_leaves_nothing(tmp_path):
    """No file, no track: neither where it records nothing, nor where nothing is being recorded."""
    with Tracer(tmp_path / "t.json") as tracer:
        child = Child(lambda: None, lambda: span("off").__enter__())
        child.step()
        tracer.disable()
        child.step()
        assert left_in(tmp_path) == ["t.json"]
        assert child.end() == 0
    assert len(tracks(read(tmp_path / "t.json"))) == 1


def test_a_window(tmp_path):
    """A child records while the tracer does; a span that is open when it ceases gets its end; one file for all windows."""
    open_span = span("unused")

    def begin():
        nonlocal open_span
        open_span = span("across")
        open_span.__enter__()

    def named(name):
        def step():
            with span(name):
                pass

        return step

    tracer = Tracer(tmp_path / "t.json")
    child = Child(
        named("before"),
        named("first"),
        begin,
        named("between"),
        lambda: open_span.__exit__(None, None, None),
        named("second"),
        named("after"),
    )
    child.step()
    tracer.enable()
    child.step()
    child.step()
    tracer.disable()
    child.step()
    child.step()
    tracer.enable()
    child.step()
    assert len(list(tmp_path.glob("t.worker-*.json"))) == 1
    tracer.close()
    child.step()
    assert child.end() == 0
    assert [one.name for one in spans(tmp_path / "t.json")] == ["first", "across", "second"]
    assert left_in(tmp_path) == ["t.json"]


def test_a_worker_that_outlives_a_trace_records_into_the_next(tmp_path):
    """As persistent workers do, over fits of one process; between them it records nothing."""

    def work():
        with span("work"):
            pass

    with Tracer(tmp_path / "first.json"):
        child = Child(work, work, work)
        child.step()
    assert left_in(tmp_path) == ["first.json"]
    child.step()
    with Tracer(tmp_path / "second.json"):
        child.step()
    assert child.end() == 0
    for name in ("first.json", "second.json"):
        assert [one.name for one in spans(tmp_path / name)] == ["work"]
    assert left_in(tmp_path) == ["first.json", "second.json"]


@pytest.mark.parametrize("filename", [None, "t.json.gz", "writer"])
def test_where_there_is_no_file_beside_which_to_write(tmp_path, monkeypatch, filename):
    """In memory, or with a writer, the children's files are in a temporary directory, which goes too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    before = left_in(tmp_path / "tmp")
    opener = (lambda path: Path(path).open("wb")) if filename == "writer" else None  # noqa: SIM115 - the tracer closes it
    with Tracer(filename and str(tmp_path / filename), opener=opener) as tracer:
        run(lambda: span("work").__enter__())
        if filename is None:
            assert [e["name"] for e in tracer.events() if e["ph"] == "B"] == ["work"]
    assert [name for name in left_in(tmp_path / "tmp") if name != Path(tracer_module._board.path).name] == before
    assert not list(tmp_path.glob("*.worker-*"))


def test_spans_that_cross(tmp_path, perfetto):
    """Interleaved tasks get tracks of their own, and what generators leave crossed is cut: the viewers take every slice."""

    @span("task")
    async def task(number):
        with span("inner", number=number):
            await asyncio.sleep(0.001 * (number % 3))
        await asyncio.sleep(0)

    async def tasks():
        with span("all"):
            await asyncio.gather(*(task(number) for number in range(5)))

    @span("generator")
    def generator():
        yield 1
        yield 2

    def work():
        with span("whole"):
            asyncio.run(tasks())
            asyncio.run(tasks())
        first, second = generator(), generator()
        next(first), next(second)
        with span("between"):
            first.close()
        second.close()

    path = tmp_path / "t.json"
    with Tracer(path):
        run(work)
    found = [one.name for one in slices(read(path)) if not one.args.get("continued")]
    assert Counter(found) == {"whole": 1, "all": 2, "task": 10, "inner": 10, "generator": 2, "between": 1}
    assert len(tracks(read(path))) <= 1 + 6  # given back by tasks that ended
    assert perfetto.open_trace(path).ok


def test_threads_of_a_child(tmp_path):
    """Each has a track of its own, which serves another when it has ended."""

    def work():
        def thread():
            for _ in range(20):
                with span("thread"):
                    time.sleep(0.0002)

        for _ in range(2):
            threads = [threading.Thread(target=thread) for _ in range(3)]
            for each in threads:
                each.start()
            with span("main"):
                for each in threads:
                    each.join()
            del threads, each

    path = tmp_path / "t.json"
    with Tracer(path):
        run(work)
    found = slices(read(path))
    assert Counter(one.name for one in found) == {"thread": 120, "main": 2}
    assert 3 <= len({one.tid for one in found if one.name == "thread"}) <= 4
    assert not {one.tid for one in found if one.name == "thread"} & {one.tid for one in found if one.name == "main"}


def test_children_of_children(tmp_path):
    """A child that forks while it records, from a thread too, shares nothing with its own child."""

    def grandchild():
        with span("child"):

            def fork():
                child = os.fork()
                if child == 0:
                    with span("grandchild"):
                        pass
                    os._exit(0)
                os.waitpid(child, 0)

            warnings.simplefilter("ignore", DeprecationWarning)
            fork()
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()

    path = tmp_path / "t.json"
    with Tracer(path):
        run(grandchild)
    found = slices(read(path))
    assert Counter(one.name for one in found) == {"child": 1, "grandchild": 2}
    assert len({one.tid for one in found}) == 3


def test_a_childs_own_tracer_takes_precedence(tmp_path):
    """A rank that another rank started writes into its own trace only; without a tracer it is a child again."""

    def work():
        with span("before"):
            pass
        with Tracer(tmp_path / "own.json"), span("own"):
            with span("inside"):
                pass
            run(lambda: span("grandchild").__enter__())
        with span("after"):
            pass

    with Tracer(tmp_path / "t.json"):
        run(work)
    assert [one.name for one in spans(tmp_path / "t.json")] == ["before", "after"]
    assert [one.name for one in spans(tmp_path / "own.json")] == ["own", "inside", "grandchild"]


def test_another_rank_is_no_child(tmp_path, monkeypatch):
    """Lightning starts rank 1 as a child of rank 0: its spans are not rank 0's."""

    def rank_1():
        os.environ["LOCAL_RANK"] = "1"
        with span("rank 1"):
            pass

    def worker():
        with span("worker"):
            pass

    with Tracer(tmp_path / "t.json"):
        monkeypatch.setenv("LOCAL_RANK", "0")
        run(rank_1)
        run(worker)
    assert [one.name for one in spans(tmp_path / "t.json")] == ["worker"]


def test_tracks_are_used_again(tmp_path, monkeypatch):
    """Children of one name in turn, as each epoch's workers are, share a track; at the same time they have two."""
    monkeypatch.setattr(workers, "_who", lambda: ("train worker 0", 7))

    def work():
        with span("work"):
            pass

    path = tmp_path / "t.json"
    with Tracer(path) as tracer:
        for at_once in (1, 2, 2):
            children = [Child(work) for _ in range(at_once)]
            for child in children:
                child.step()
            for child in children:
                child.end()
        tracer.flush()
        assert left_in(tmp_path) == ["t.json"]  # the files of children that are gone are, too
    events = read(path)
    assert sorted(Counter(one.tid for one in slices(events)).values()) == [2, 3]
    assert set(tracks(events).values()) == {"MainThread", "train worker 0"}


def test_a_killed_child_whose_track_is_used_again(tmp_path, monkeypatch):
    """What it left open ends before the next one's work, also while nobody has asked for its exit status."""
    monkeypatch.setattr(workers, "_who", lambda: ("train worker 0", 7))

    def work():
        with span("work"):
            pass

    with Tracer(tmp_path / "t.json", drain_interval_s=3600):
        child = Child(lambda: span("open").__enter__(), hang)
        child.step()
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        run(work)
    child.end()
    first, second = spans(tmp_path / "t.json")
    assert (first.name, second.name) == ("open", "work")
    assert first.tid == second.tid
    assert first.args == {"unfinished": True}
    assert first.end_ns < second.start_ns


def test_a_process_number_that_comes_again(tmp_path, monkeypatch):
    """A file of that name stays as it is, whoever's it is."""
    unused = workers._unused
    monkeypatch.setattr(workers, "_unused", lambda stem: unused(f"{tmp_path / 't'}.worker-1"))
    (tmp_path / "t.worker-1.json").write_text("somebody's")
    with Tracer(tmp_path / "t.json"):
        run(lambda: span("work").__enter__())
    assert [one.name for one in spans(tmp_path / "t.json")] == ["work"]
    assert left_in(tmp_path) == ["t.json", "t.worker-1.json"]


# ---- ends ------------------------------------------------------------------------------------------------------------
def test_a_child_that_hangs_or_was_killed(tmp_path, perfetto):
    """The trace closes in time, with what they had recorded, and what they were doing when they ceased."""

    def work():
        with span("done"):
            pass

    path = tmp_path / "t.json"
    tracer = Tracer(path)
    tracer.enable()
    killed, hanging = Child(work, hang), Child(work, hang)
    for child in (killed, hanging):
        child.step()
        child.begin()
    until_s = time.monotonic() + 10
    while sum(b"hangs" in file.read_bytes() for file in tmp_path.glob("t.worker-*.json")) < 2:
        assert time.monotonic() < until_s
    os.kill(killed.pid, signal.SIGKILL)
    killed.end()
    assert tracer.close(10)
    os.kill(hanging.pid, signal.SIGKILL)
    hanging.end()
    found = slices(read(path))
    assert Counter(one.name for one in found) == {"done": 2, "hangs": 2}
    assert all(one.args == ({"unfinished": True} if one.name == "hangs" else {}) for one in found)
    assert left_in(tmp_path) == ["t.json"]
    assert perfetto.open_trace(path).ok


def test_a_child_killed_in_the_middle_of_a_line(tmp_path):
    """The rest of the line is left out, and nothing else."""

    def torn():
        with span("whole"):
            pass
        file = tracer_module._worker.opened
        os.write(file._handle, file._lane().end.encode()[:20])

    with Tracer(tmp_path / "t.json") as tracer:
        child = Child(torn)
        child.step()
        tracer.flush()
        tracer.flush()
    child.end()
    assert [one.name for one in spans(tmp_path / "t.json")] == ["whole"]


def test_a_full_disk_in_a_child(tmp_path, capfd):
    """One warning, and its work goes on; what it had recorded is there."""

    def work():
        with span("written"):
            pass
        write = os.write

        def full(handle, data):
            if handle == tracer_module._worker.opened._handle:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(handle, data)

        os.write = full
        warnings.simplefilter("error")
        for _ in range(3):
            with span("lost"):
                pass

    with Tracer(tmp_path / "t.json"):
        run(work)
    assert [one.name for one in spans(tmp_path / "t.json")] == ["written"]
    assert capfd.readouterr().err.count("No space left") == 1


def test_max_events(tmp_path):
    """Counts for children too; they stop recording when the trace has ended."""

    def many():
        for _ in range(100):
            with span("many"):
                pass

    def late():
        with span("late"):
            pass
        assert tracer_module._worker.file() is None

    path = tmp_path / "t.json"
    tracer = make_tracer(path, max_events=20)
    tracer.enable()
    child = Child(many, late)
    child.step()
    with pytest.warns(RuntimeWarning, match="max_events=20"):
        tracer.flush()
    assert not tracer.enabled
    child.step()
    assert child.end() == 0
    tracer.close()
    events = read(path)
    assert sum(event["ph"] != "M" for event in events) <= 22
    assert {one.name for one in slices(events)} == {"many"}
    assert left_in(tmp_path) == ["t.json"]


def test_rotation(tmp_path, perfetto):
    """A span that is open in a child at a switch is in both files; nothing is lost or in both that is not."""
    inner = []

    def begin():
        span("open", x=1).__enter__()
        with span("first"):
            pass

    def go_on():
        with span("second"):
            pass

    paths = [tmp_path / "0.json", tmp_path / "1.json", tmp_path / "2.json"]
    tracer = Tracer(paths[0])
    tracer.enable()
    child = Child(begin, go_on, lambda: inner)
    child.step()
    tracer.switch(str(paths[1]))
    child.step()
    tracer.switch(str(paths[2]))
    tracer.close()
    child.end()
    names = [[(one.name, one.args) for one in spans(path)] for path in paths]
    assert names == [
        [("open", {"x": 1, "continued": True}), ("first", {})],
        [("open", {"x": 1, "continued": True}), ("second", {})],
        [("open", {"x": 1, "unfinished": True})],
    ]
    for before, after in itertools.pairwise(paths):
        assert spans(before)[0].end_ns == spans(after)[0].start_ns
    assert len({one.tid for path in paths for one in slices(read(path))}) == 1
    assert all(report.ok for report in perfetto.open_traces(paths))
    assert left_in(tmp_path) == ["0.json", "1.json", "2.json"]


def test_an_event_from_before_a_switch_that_comes_after_it(tmp_path):
    """A span that was cut at the switch does not end before it."""
    path = tmp_path / "1.json"
    tracer = Tracer(tmp_path / "0.json", drain_interval_s=3600)
    tracer.enable()

    def work():
        with span("open"):
            yield
        yield

    steps = work()
    child = Child(*[lambda: next(steps)] * 2)
    child.step()
    children, cut = tracer._drain.children, tracer._drain.children.cut

    def late(now_ns):
        child.step()  # ends the span, behind what was taken and before what follows
        return cut(now_ns + 10**9)

    children.cut = late
    tracer.switch(str(path))
    tracer.close()
    child.end()
    (one,) = spans(path)
    assert one.start_ns == one.end_ns == spans(tmp_path / "0.json")[0].end_ns


def test_an_orderly_exit_without_a_close(tmp_path):
    """No worker's file stays behind, nor the board; a killed process' stay, as traces that merge takes."""
    code = """
    import os, signal, sys, time
    from lightning_timekeeper import Tracer, span

    tracer = Tracer(sys.argv[1])
    tracer.enable()
    print(os.environ["TIMEKEEPER_BOARD"])
    for number in range(3):
        with span("parent"):
            pass
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        for number in range(3):
            with span("child", number=number):
                pass
        span("open").__enter__()
        os._exit(0) if sys.argv[2] == "exit" else time.sleep(0.6)
        os._exit(0)
    if sys.argv[2] == "exit":
        os.waitpid(child, 0)
    else:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    from test_tracer import run as run_program

    board = run_program(code, tmp_path / "exit.json", "exit").stdout.strip()
    assert left_in(tmp_path) == ["exit.json"]
    assert not os.path.exists(board)
    board = run_program(code, tmp_path / "killed.json", "kill", status=-signal.SIGKILL).stdout.strip()
    if os.path.exists(board):  # only where it is a file
        os.unlink(board)
    (worker,) = tmp_path.glob("killed.worker-*.json")
    events = parse(worker.read_bytes() + b"]")
    assert Counter(event["name"] for event in events if event["ph"] == "B") == {"child": 3, "open": 1}
    merged = merge([worker, tmp_path / "killed.json"], tmp_path / "merged.json")
    found = slices(read(merged.output))
    assert Counter(one.name for one in found) == {"parent": 3, "child": 3, "open": 1}
    assert len({event["pid"] for event in read(merged.output)}) == 1


def test_the_environment_is_as_before(tmp_path):
    """The variable by which children find the process is there while a tracer lives."""
    assert BOARD not in os.environ
    with Tracer(tmp_path / "a.json"):
        with Tracer(tmp_path / "b.json"):
            pass
        assert os.path.exists(os.environ[BOARD])
    assert BOARD not in os.environ


# ---- DataLoaders -----------------------------------------------------------------------------------------------------
@pytest.fixture
def loaders():
    """Makes DataLoaders, whose workers are gone when the test is over."""
    from torch.utils.data import DataLoader

    made = []

    def make(dataset, method, **arguments):
        made.append(DataLoader(dataset, batch_size=3, multiprocessing_context=method, **arguments))
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield make
        for loader in made:
            if loader._iterator is not None:
                loader._iterator._shutdown_workers()


def recorded_in(events):
    """(name, number) -> how often; fails for a span that has no end."""
    numbered = [one for one in slices(events) if "number" in one.args]
    return Counter((one.name, one.args["number"]) for one in numbered)


def test_several_loaders(tmp_path, loaders):
    """Map-style and iterable ones at once, with workers that persist and ones that do not: each its own tracks."""
    traced = TracedDataset(Stored(12, tmp_path), "train")
    train = loaders(traced, "fork", num_workers=2, persistent_workers=True)
    other = loaders(Stored(12, tmp_path), "fork", num_workers=1)
    streamed = loaders(TracedDataset(Streamed(12, tmp_path)), "fork", num_workers=2)
    for epoch in range(2):  # the persistent workers outlive the first trace
        with Tracer(tmp_path / f"{epoch}.json"):
            for _ in range(2):
                for batches in zip(train, other, streamed, strict=True):
                    assert all(len(batch) == 3 for batch in batches)
    found = Counter()
    for epoch in range(2):
        events = read(tmp_path / f"{epoch}.json")
        found += recorded_in(events)
        assert Counter(one.name for one in slices(events) if "." in one.name) == {
            "train.__getitem__": 24,
            "Streamed.__next__": 2 * (12 + 2),  # and where each worker finds the end
        }
        assert set(tracks(events).values()) == {
            "MainThread",
            "train worker 0",
            "train worker 1",
            "Stored worker 0",
            "Streamed worker 0",
            "Streamed worker 1",
        }
    assert found == done_in(tmp_path)
    assert found.total() == 2 * 2 * 3 * 12
    assert not list(tmp_path.glob("*worker*"))


@pytest.mark.slow
@pytest.mark.usefixtures("_own_forkserver")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_fit_with_workers(tmp_path, method, perfetto):
    """Every span exactly once, the loop and each worker on tracks of their own, none of them a fault to Perfetto."""
    import multiprocessing

    from runs import Model, quiet, trainer
    from torch.utils.data import DataLoader

    if method == "forkserver":
        multiprocessing.get_context(method).set_forkserver_preload(["torch", "worker_datasets"])
    kind = {"batch_size": 2, "multiprocessing_context": method}
    train = TracedDataset(Batched(16, tmp_path), "train")
    streamed = TracedDataset(Streamed(8, tmp_path), "val")
    trace = quiet(dirpath=tmp_path)
    trainer(tmp_path, trace, max_epochs=2).fit(
        Model(),
        DataLoader(train, num_workers=2, persistent_workers=True, **kind),
        DataLoader(streamed, num_workers=1, persistent_workers=True, **kind),
    )
    path = tmp_path / "fit-rank0.json"
    events = read(path)
    assert recorded_in(events) == done_in(tmp_path)
    assert done_in(tmp_path).total() == 2 * (16 + 8)
    assert Counter(one.name for one in slices(events) if one.name.startswith("train.")) == {"train.__getitems__": 16}
    assert not list(tmp_path.glob("*worker*"))
    slices_by_track = (
        "select t.name, count(*), sum(s.dur < 0) from slice s join thread_track tt on s.track_id = tt.id "
        "join thread t using (utid) where s.name in ('step', 'read', 'stream') group by 1 order by 1"
    )
    report = perfetto.open_trace(path, [slices_by_track])
    assert report.ok, report
    names, counts, open_ones = zip(*report.rows[0], strict=True)
    assert names == ("MainThread", "train worker 0", "train worker 1", "val worker 0")
    assert (sum(counts[1:3]), counts[3]) == (32, 16)
    assert not any(open_ones)


@pytest.mark.slow
@long
@pytest.mark.parametrize(("strategy", "method"), [("ddp", "forkserver"), ("ddp", "spawn"), ("ddp_spawn", "spawn")])
def test_ranks_with_workers(tmp_path, strategy, method, perfetto):
    """Two ranks with two workers each, merged: every span once, each worker under its own rank."""
    command = [sys.executable, str(Path(__file__).with_name("worker_ranks.py")), str(tmp_path), strategy, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr, done.stderr
    paths = [tmp_path / f"fit-rank{rank}.json" for rank in range(2)]
    assert not list(tmp_path.glob("*worker*"))
    each = [recorded_in(read(path)) for path in paths]
    assert [one.total() for one in each] == [8, 8]
    assert each[0] + each[1] == done_in(tmp_path)
    merged = merge(paths, tmp_path / "merged.json").output
    tracks_by_rank = (
        "select p.name, t.name, sum(s.name = 'read') from slice s join thread_track tt on s.track_id = tt.id "
        "join thread t using (utid) join process p using (upid) where s.name in ('step', 'read') group by 1, 2 order by 1, 2"
    )
    report = perfetto.open_trace(merged, [tracks_by_rank])
    assert report.ok, report
    rows = [(process[:6], track) for process, track, _ in report.rows[0]]
    tracks = ("MainThread", "train worker 0", "train worker 1")
    assert rows == [(f"rank {rank}", track) for rank in range(2) for track in tracks]
    assert sum(count for *_, count in report.rows[0]) == 16


def test_workers_from_before_a_window(tmp_path):
    """A window that opens in mid-epoch holds what workers do in it that were started before."""
    from runs import Model, quiet, trainer
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(
            TracedDataset(Stored(64, tmp_path), "train"), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        trainer(tmp_path, quiet(dirpath=tmp_path, enable=8, disable=16), limit_val_batches=0, max_epochs=1).fit(
            Model(), loader
        )
    events = read(tmp_path / "fit-rank0.json")
    count = recorded_in(events).total()
    assert 0 < count < 40
    assert not list(tmp_path.glob("*worker*"))
