"""No thread and no memory to be had: the training ends as without us."""

from __future__ import annotations

import threading
import time

import pytest
from runs import Model, quiet, spans_of, trainer

from lightning_timekeeper import Tracer, span
from lightning_timekeeper.trace import drain as module


def threads_of_ours():
    return [each for each in threading.enumerate() if each.name.startswith("timekeeper")]


@pytest.mark.parametrize(("name", "epoch"), [("timekeeper-file", 0), ("timekeeper-drain", 0), ("timekeeper-file", 1)])
def test_no_thread_can_be_started(tmp_path, monkeypatch, name, epoch):
    """As under a limit of processes: one warning, at the beginning or at a new file, and nothing waits for the thread."""
    start = threading.Thread.start

    def limited(thread):
        if thread.name == name and (epoch == 0 or list(tmp_path.glob("0.json"))):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    runner = trainer(tmp_path, quiet(filename="{epoch}.json"), max_epochs=3)
    begin_s = time.monotonic()
    with pytest.warns(RuntimeWarning, match="can't start new thread") as warned:
        runner.fit(Model())
    assert len([each for each in warned if each.category is RuntimeWarning]) == 1
    assert runner.global_step == 24
    assert time.monotonic() - begin_s < 20
    assert [path.name for path in tmp_path.glob("*.json")] == (["0.json"] if epoch else [])
    assert not [drain for drain in module._drains if not drain._finished]  # or the end of the process waits for it


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["_collect", "_give_up", "_ask for a job", "_look_at_sinks"])
def test_no_memory_in_the_background(tmp_path, monkeypatch, where):
    """Wherever its thread ends: nobody waits for it, there is one warning, and what records takes no memory any more."""
    failing = []

    def failing_now(method):
        def call(*args):
            if failing:
                raise MemoryError
            return method(*args)

        return call

    tracer = Tracer(tmp_path / "t.json", drain_interval_s=0.01)
    drain = tracer._drain
    if where == "_ask for a job":

        class Requests:
            def __init__(self, real):
                self.put, self.get_nowait, self._get = real.put, real.get_nowait, real.get

            def get(self, timeout=None):
                if failing:
                    raise MemoryError
                return self._get(timeout=timeout)

        drain._requests = Requests(drain._requests)
    else:
        for name in {where, "_collect"}:
            monkeypatch.setattr(drain, name, failing_now(getattr(drain, name)))
    tracer.enable()
    with span("before"):
        pass
    tracer.flush()

    def end():
        failing.append(1)
        drain._thread.join(10) if where in ("_give_up", "_ask for a job") else tracer.flush()
        failing.clear()
        for _ in range(100_000):
            with span("after"):
                pass
        return tracer.flush(20.0) or tracer.close(20.0)

    begin_s = time.monotonic()
    with pytest.warns(RuntimeWarning, match="could not be written") as warned:
        assert not end()
    assert time.monotonic() - begin_s < 15
    assert len(warned) == 1
    assert len(tracer.track.buffer) < 100_000
    assert b'"before"' in (tmp_path / "t.json").read_bytes()


def test_a_tracer_that_could_not_be_made_is_gone(tmp_path, monkeypatch):
    """It leaves no file, and its path may be used again."""
    start = threading.Thread.start

    def limited(thread):
        if thread.name == "timekeeper-drain":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            Tracer(tmp_path / "t.json")
    until_s = time.monotonic() + 20
    while threads_of_ours() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not threads_of_ours()
    assert not list(tmp_path.iterdir())
    with Tracer(tmp_path / "t.json"), span("work"):
        pass
    assert [one["name"] for one in spans_of(tmp_path / "t.json")] == ["work"]
