"""Whatever fails ends the recording with one warning and nothing else; memory is bounded; drops are counted."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import warnings

import pytest
from traces import Clock, make_tracer, parse, read, slices

from lightning_timekeeper.trace import drain as drain_module
from lightning_timekeeper.trace.tracer import counter, instant, iterate, span


class Failing:
    """A file that fails at its k-th call, or from then on does as it is told."""

    def __init__(self, at=10**9, error=None, method="write"):
        self.at, self.error, self.method = at, error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), method
        self.calls = 0
        self.data = bytearray()
        self.closed = False

    def _count(self, method):
        if method == self.method:
            self.calls += 1
            if self.calls >= self.at:
                raise self.error

    def write(self, data):
        self._count("write")
        self.data.extend(data)
        return len(data)

    def flush(self):
        self._count("flush")

    def close(self):
        self.closed = True
        self._count("close")


def train(tracer, steps=5):
    """What a training does with a tracer; nothing of it may raise."""
    with tracer:
        for step in iterate(range(steps), "load"):
            with span("step", step=step), span("forward"):
                instant("mark")
                counter("loss", 1.0)
            tracer.flush(10)


@pytest.mark.parametrize("method", ["write", "flush", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_file_that_fails(method, code):
    """A full disk or a broken one, at any call of any method: one warning, the training goes on, the file opens."""
    healthy = Failing(method=method)
    train(make_tracer("trace.json", opener=lambda path: healthy))
    assert healthy.calls >= (1 if method == "close" else 7)
    for at in range(1, healthy.calls + 1):
        file = Failing(at, OSError(code, os.strerror(code)), method)
        with pytest.warns(RuntimeWarning) as warned:  # noqa: PT031
            tracer = make_tracer("trace.json", opener=lambda path, file=file: file)
            train(tracer)
        assert [str(warning.message) for warning in warned] == [
            f"trace.json could not be written (OSError: [Errno {code}] {os.strerror(code)}). The recording ended here."
        ]
        assert not tracer.enabled
        assert not tracer.close()
        assert not tracer.flush()
        assert file.closed
        if file.data and not file.data.endswith(b"]\n"):
            slices_of_cut(bytes(file.data))


def slices_of_cut(data):
    events = parse(data + b"\n]")
    assert events[0]["name"] == "process_name"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_device():
    """A device that is full from the start: one warning."""
    with pytest.warns(RuntimeWarning, match="No space left on device") as warned:
        train(make_tracer("/dev/full", opener=lambda path: open(path, "wb", buffering=0)))  # noqa: SIM115
    assert len(warned) == 1


def test_file_closed_under_us(tmp_path):
    """A file that somebody closed: one warning."""
    files = []

    def opener(path):
        files.append(open(path, "wb", buffering=0))  # noqa: SIM115
        return files[0]

    with (  # noqa: PT031
        pytest.warns(RuntimeWarning, match="closed file") as warned,
        make_tracer(tmp_path / "trace.json", opener=opener) as tracer,
    ):
        with span("a"):
            pass
        tracer.flush()
        files[0].close()
        with span("b"):
            pass
        tracer.flush()
    assert len(warned) == 1
    assert [one.name for one in slices(parse((tmp_path / "trace.json").read_bytes() + b"]"))] == ["a"]


def test_file_that_takes_nothing():
    """A file whose write takes no byte, ever, is an error and no endless loop."""
    file = Failing()
    file.write = lambda data: 0
    with pytest.warns(RuntimeWarning, match="the file takes nothing"):
        train(make_tracer("trace.json", opener=lambda path: file))


class Hanging(Failing):
    """A file whose write blocks until it is released; only its head is taken at once."""

    def __init__(self):
        super().__init__()
        self.release = threading.Event()

    def write(self, data):
        if self.data:
            self.release.wait(60)
        return super().write(data)


def test_file_that_hangs():
    """A hanging file: flush and close return in time, one warning, and nothing that waits is kept."""
    file = Hanging()
    tracer = make_tracer("trace.json", opener=lambda path: file)
    with (  # noqa: PT031
        pytest.warns(RuntimeWarning, match=r"could not be written \(TimeoutError: not done within 0.05 s\)") as warned,
        tracer,
    ):
        with span("a"):
            pass
        start_s = time.monotonic()
        assert not tracer.flush(0.05)
        assert not tracer.close(0.05)
        assert not tracer.close(30)
        assert not tracer.flush(30)
        assert time.monotonic() - start_s < 20
    assert len(warned) == 1
    assert tracer._drain.sink._jobs.qsize() <= 1
    file.release.set()


def test_file_that_hangs_while_much_is_recorded(monkeypatch):
    """What may wait for a hanging file is bounded: then the recording ends, with one warning."""
    monkeypatch.setattr(drain_module, "MOST_PENDING", 10_000)
    file = Hanging()
    tracer = make_tracer("trace.json", opener=lambda path: file)
    with pytest.warns(RuntimeWarning, match=r"TimeoutError: \d+ bytes wait for the file") as warned, tracer:  # noqa: PT031
        for _ in range(100):
            for _ in range(100):
                with span("a"):
                    pass
            tracer.flush(0)
        tracer.flush(0.2)
        assert not tracer.enabled
    assert len(warned) == 1
    assert tracer._drain.sink._jobs.qsize() <= 1
    file.release.set()


@pytest.mark.parametrize("where", ["_collect", "_write", "_head", "_finish"])
def test_bug_of_ours(tmp_path, where):
    """A bug in the background thread: one warning, the training goes on, no waiter waits, the file has its end."""
    path = tmp_path / "trace.json"
    tracer = make_tracer(path)
    tracer.flush()

    def bug(*arguments):
        raise KeyError("bug")

    setattr(tracer._drain, where, bug)
    start_s = time.monotonic()
    if where == "_head":
        with pytest.warns(RuntimeWarning, match="bug"):
            tracer.switch(tmp_path / "other.json")
        assert tracer._drain._former[0].wait(10)
        assert slices(read(path)) == []
        return
    with pytest.warns(RuntimeWarning, match=r"could not be written \(KeyError: 'bug'\)") as warned:
        train(tracer)
    assert len(warned) == 1
    assert not tracer.close()
    assert time.monotonic() - start_s < 20
    assert tracer._drain._tracks
    assert isinstance(read(path), list)
    for _ in range(100):
        with tracer.span("later", x=1):
            pass
    tracer.flush()
    assert not tracer.track.buffer
    assert not tracer.track.side


def test_failed_file_that_was_left(tmp_path):
    """A file that fails after the recording went on in another: one warning, and the recording ends there too."""
    old = Failing(1, method="close")
    tracer = make_tracer("old.json", opener=lambda path: old)
    with pytest.warns(RuntimeWarning, match="No space left on device") as warned, tracer:  # noqa: PT031
        tracer.switch(tmp_path / "new.json")
        until_s = time.monotonic() + 10
        while tracer.enabled and time.monotonic() < until_s:
            tracer.flush()
            time.sleep(0.001)
        assert not tracer.enabled
    assert len(warned) == 1
    assert isinstance(read(tmp_path / "new.json"), list)


def test_most_events(tmp_path, perfetto):
    """At max_events the recording ends, with a marker and one warning; open spans are closed, the file is whole."""
    for most in range(1, 27):
        path = tmp_path / f"{most}.json"
        tracer = make_tracer(path, max_events=most)
        with pytest.warns(RuntimeWarning, match=f"ended after max_events={most} events. Record windows") as warned:
            train(tracer)
        assert len(warned) == 1
        assert not tracer.enabled
        events = read(path)
        recorded = [event for event in events if event["ph"] in "XBiC" and event.get("cat") != "timekeeper"]
        assert len(recorded) <= most
        slices(events)
        marks = [event["name"] for event in events if event.get("cat") == "timekeeper"]
        assert marks[0] == f"recording ended: max_events={most}"
    assert all(report.ok for report in perfetto.open_traces(sorted(tmp_path.iterdir())))


def test_most_events_in_one_batch(tmp_path):
    """The first max_events events are kept, and the rest is counted, per track."""
    path = tmp_path / "trace.json"
    clock = Clock()
    tracer = make_tracer(path, clock, max_events=10)
    with pytest.warns(RuntimeWarning), tracer:  # noqa: PT031
        for _ in range(25):
            with span("a"):
                clock.go(1)

        def work():
            for _ in range(7):
                with span("b", x=1):
                    instant("c")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    events = read(path)
    assert [one.start_ns for one in slices(events)] == list(
        range(slices(events)[0].start_ns, slices(events)[0].start_ns + 10)
    )
    dropped = {event["tid"]: event["args"]["dropped"] for event in events if event.get("name") == "spans dropped"}
    assert sorted(dropped.values()) == [14, 15]


def test_no_drop_no_warning(tmp_path):
    """Exactly max_events events are all kept, without a warning."""
    path = tmp_path / "trace.json"
    with make_tracer(path, max_events=10):
        for _ in range(10):
            with span("a"):
                pass
    assert len(slices(read(path))) == 10


def test_recorded_too_fast(tmp_path, monkeypatch):
    """What waits in memory is bounded: beyond it all that waits is dropped, counted, and warned of once."""
    monkeypatch.setattr(drain_module, "MOST_WAITING", 1000)
    path = tmp_path / "trace.json"
    tracer = make_tracer(path)
    with (  # noqa: PT031
        pytest.warns(RuntimeWarning, match="spans are dropped .* the trace says how many") as warned,
        tracer,
        span("whole"),
    ):
        for _ in range(3):
            tracer.flush()
            with span("before", x=1):
                pass
            for _ in range(500):
                with span("a"):
                    pass
                instant("i")
        tracer.flush()
        with span("after"):
            pass
    assert len(warned) == 1
    events = read(path)
    assert [one.name for one in slices(events)] == ["whole", "after"]
    (mark,) = [event for event in events if event.get("name") == "spans dropped"]
    assert mark["args"] == {"dropped": 3 * 1001}
    assert not tracer.track.side


def test_one_failure_one_warning(tmp_path):
    """However many things fail at once, a recording warns once, from whatever thread."""
    file = Failing(2)
    tracer = make_tracer("trace.json", opener=lambda path: file, drain_interval_s=0.001)
    threads = [threading.Thread(target=train, args=(tracer, 50)) for _ in range(4)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tracer.close()
    assert len(warned) == 1


def test_threads_come_and_go_in_linear_time(tmp_path):
    """Ten thousand threads that have ended are taken off without a search for each."""
    from lightning_timekeeper.trace.pairing import Pairing
    from lightning_timekeeper.trace.tracer import Track, _Life

    tracer = make_tracer(tmp_path / "trace.json")
    tracer._drain._interval_s = 3600
    for _ in range(10_000):
        track = Track(tracer._clock, _Life())
        track.pairing = Pairing()
        track.buffer += [1 << 35 | 1, 0]
        tracer._tracks[track] = None
    start_s = time.perf_counter()
    assert tracer.flush(60)
    assert len(tracer._tracks) == 1
    assert time.perf_counter() - start_s < 60
    gc.collect()
    assert len(tracer._drain._tables) <= 1
    tracer.close()


def test_flush_is_in_time(tmp_path):
    """flush(0) returns at once and says that it is not done."""
    tracer = make_tracer(tmp_path / "trace.json", opener=lambda path: Hanging())
    tracer.instant("a")
    assert not tracer.flush(0)
    tracer._drain.sink.abandon()


def test_rows_for_months(tmp_path, perfetto):
    """A recording that lasts for months, beyond the digits of the fast rows, has its numbers right."""
    clock, path = Clock(), tmp_path / "trace.json"
    tracer = make_tracer(path, clock)
    for _ in range(2):
        with tracer.span("a"):
            clock.go(1234)
        clock.go(10**16)
    tracer.close()
    first, second = slices(read(path))
    assert second.start_ns - first.start_ns == 10**16 + 1234
    assert second.end_ns - second.start_ns == 1234
    assert perfetto.open_trace(path).ok
