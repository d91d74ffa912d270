"""How runs end with TimelineTrace: as they would without it, with a file that is whole or at least opens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.tuner import Tuner
from runs import Model, named, quiet, spans_in, spans_of, steps_of, trainer

from lightning_timekeeper import TimelineTrace, Tracer, get_tracer, read_events
from lightning_timekeeper.recording import Recording
from lightning_timekeeper.steps import OptimizerTime, Steps


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_closes_the_file(tmp_path, error):
    """The file is whole, the open spans are marked, the exception is in it, and the run ends as without us."""

    class Fails(Model):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 5:
                raise error
            return super().training_step(batch, batch_idx)

    runner = trainer(tmp_path, quiet())
    before = runner.profiler
    expected = SystemExit if isinstance(error, KeyboardInterrupt) else type(error)
    with pytest.raises(expected):
        runner.fit(Fails())
    assert runner.profiler is before
    assert get_tracer() is None
    events = json.loads((tmp_path / "fit-rank0.json").read_bytes())
    spans = spans_in(events)
    marked = {each["name"] for each in spans if each["args"].get("error") == type(error).__name__}
    assert marked >= {"fit", "epoch", "step"}
    (mark,) = [event for event in events if event.get("name") == "exception"]
    assert mark["args"] == {"type": type(error).__name__}


@pytest.mark.parametrize("where", ["setup", "on_fit_start", "on_train_start", "on_validation_start", "on_train_end"])
@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
def test_an_exception_in_a_hook_of_another_callback(tmp_path, where, first):
    """Whichever comes first: the exception reaches the caller, the profiler is back, every file is whole."""

    class Fails(Callback):
        pass

    def fail(*_, **__):
        raise ValueError("broken")

    setattr(Fails, where, fail)
    callbacks = [quiet(), Fails()] if first else [Fails(), quiet()]
    runner = trainer(tmp_path, *callbacks)
    before = runner.profiler
    with pytest.raises(ValueError, match="broken"):
        runner.fit(Model())
    assert runner.profiler is before
    assert get_tracer() is None
    for path in tmp_path.glob("*.json"):
        assert spans_of(path)


class Broken(Model):
    def training_step(self, batch, batch_idx):
        raise ValueError("broken")


class FailsToo(Callback):
    """Keeps the ``on_exception`` of the callbacks after it from being called."""

    def on_exception(self, *_):
        raise KeyError("in on_exception")


def test_an_exception_in_on_exception_of_another(tmp_path):
    """Then ours is not called: the profiler's actions tell, the file is whole and the profiler back all the same."""
    runner = trainer(tmp_path, FailsToo(), quiet())
    before = runner.profiler
    with pytest.raises(KeyError):
        runner.fit(Broken())
    assert runner.profiler is before
    assert get_tracer() is None
    (fit,) = named(spans_of(tmp_path / "fit-rank0.json"), "fit")
    assert fit["args"] == {"error": "KeyError"}


@pytest.mark.parametrize("other", [True, False], ids=["another Trainer", "the same Trainer"])
def test_a_run_that_ended_without_a_word(tmp_path, monkeypatch, other):
    """Where nothing at all told of the end, the next setup ends it."""
    monkeypatch.setattr(TimelineTrace, "on_exception", lambda *_: None)
    trace = quiet()
    first = trainer(tmp_path, trace)
    before = first.profiler
    with pytest.raises(ValueError, match="broken"):
        first.fit(Broken())
    second = trainer(tmp_path, trace) if other else first
    second.fit(Model())
    assert first.profiler is before
    assert type(second.profiler) is PassThroughProfiler
    assert get_tracer() is None
    assert steps_of(tmp_path / "fit-rank0-v1.json") == list(range(16))
    (fit,) = named(spans_of(tmp_path / "fit-rank0.json"), "fit")
    assert fit["args"] == {"unfinished": True}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("finder", ["lr_find", "scale_batch_size"])
def test_an_exception_in_the_tuner(tmp_path, monkeypatch, finder):
    """It takes all callbacks out and leaves them out when it fails: no hook of ours is called any more."""
    monkeypatch.chdir(tmp_path)  # where the tuner puts its checkpoint

    class Tuned(Broken):
        lr = batch_size = 1

    trace = quiet()
    runner = trainer(tmp_path, trace)
    before = runner.profiler
    with pytest.raises(ValueError, match="broken"):
        getattr(Tuner(runner), finder)(Tuned())
    assert runner.profiler is before
    assert get_tracer() is None
    (fit,) = named(spans_of(trace.path), "fit")
    assert fit["args"] == {"error": "ValueError"}


def test_no_thread_is_left(tmp_path):
    """A run that has ended, well or badly, leaves no thread of ours."""
    trainer(tmp_path, quiet(filename="{epoch}.json.gz")).fit(Model())
    with pytest.raises(ValueError, match="broken"):
        trainer(tmp_path, quiet()).fit(Broken())
    assert [each.name for each in threading.enumerate() if "timekeeper" in each.name] == []


def test_the_directory_is_not_in_the_state_key():
    """A resumed run, which may have a directory of its own, finds its state."""
    assert quiet(enable=1, dirpath="a").state_key == quiet(enable=1, dirpath="b").state_key


def test_stop_iteration_in_a_training_step(tmp_path):
    """Lightning takes it for the end of the epoch, with us as without."""

    class Stops(Model):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise StopIteration
            return super().training_step(batch, batch_idx)

    with_us, without = trainer(tmp_path, quiet()), trainer(tmp_path)
    with_us.fit(Stops())
    without.fit(Stops())
    assert with_us.global_step == without.global_step
    assert [each["args"]["batch"] for each in named(spans_of(tmp_path / "fit-rank0.json"), "step")] == [0, 1, 2, 3] * 2


def test_should_stop(tmp_path):
    """The training ends where somebody wants it, and the file is whole."""

    class Stops(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 4

    trainer(tmp_path, Stops(), quiet()).fit(Model())
    assert steps_of(tmp_path / "fit-rank0.json") == [0, 1, 2, 3]


# ---- failures of ours ------------------------------------------------------------------------------------------------
METHODS = [
    (owner, name)
    for owner in (Recording, Steps, OptimizerTime)
    for name, value in vars(owner).items()
    # not the two that are there to catch failures
    if callable(value) and not name.startswith("__") and name not in ("abandon", "stepped")
]


@pytest.mark.parametrize("call", [1, 2], ids=["first call", "second call"])
@pytest.mark.parametrize(("owner", "method"), METHODS)
def test_a_failure_of_ours_ends_the_recording_only(tmp_path, monkeypatch, owner, method, call):
    """Whatever of the recording is broken: one warning, the training goes to its end, the profiler is back."""
    calls = []
    original = getattr(owner, method)

    def broken(self, *args, **kwargs):
        calls.append(method)
        if len(calls) >= call:
            raise RuntimeError("a bug of ours")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, broken)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=4)
    trace = quiet(enable=1, disable=14, filename="{epoch}.json")
    runner = trainer(tmp_path, trace, checkpoint, enable_checkpointing=True, num_sanity_val_steps=1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runner.fit(Model())
    told = [str(each.message) for each in warned if each.category is RuntimeWarning]
    expected = len(calls) >= call
    assert told == ["TimelineTrace stopped recording: RuntimeError: a bug of ours"] * expected
    assert runner.global_step == 16
    if method != "_restore_profiler":
        assert type(runner.profiler) is PassThroughProfiler
    if method != "_close_tracer":
        assert get_tracer() is None
        for path in tmp_path.glob("*.json"):
            assert spans_of(path) or not expected or call == 1


def test_a_failure_in_an_optimizer_hook(tmp_path, monkeypatch):
    """Torch calls it in the middle of the user's step: it does not get there."""

    def broken(self, error=None):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(OptimizerTime, "ends", broken)
    runner = trainer(tmp_path, quiet())
    with pytest.warns(RuntimeWarning, match="a bug of ours"):
        runner.fit(Model())
    assert runner.global_step == 16


def test_a_callable_trigger_that_fails(tmp_path):
    """The user's own error in a trigger is one warning too: it is there to look, not to train."""
    runner = trainer(tmp_path, quiet(enable=lambda trainer: trainer.nonsense))
    with pytest.warns(RuntimeWarning, match="nonsense") as warned:
        runner.fit(Model())
    assert len([each for each in warned if each.category is RuntimeWarning]) == 1
    assert runner.global_step == 16


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_file_that_cannot_be_written_ends_the_recording_only(tmp_path, fails_at):
    """A full disk: one warning, and the training goes to its end."""

    class Full:
        writes = 0

        def write(self, data):
            self.writes += 1
            if self.writes >= fails_at:
                raise OSError(28, "No space left on device")
            return len(data)

        def close(self):
            pass

    runner = trainer(tmp_path, quiet(writer=lambda path: Full()))
    with pytest.warns(RuntimeWarning, match="No space left") as warned:
        runner.fit(Model())
    assert len([each for each in warned if each.category is RuntimeWarning]) == 1
    assert runner.global_step == 16
    assert type(runner.profiler) is PassThroughProfiler


def test_after_max_events_the_users_profiler_goes_on_alone(tmp_path):
    """The recording has ended, with one warning; from the next step on it costs nothing and takes no memory."""
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 5:
                get_tracer().flush()
            seen.append(type(trainer.profiler))

    with pytest.warns(RuntimeWarning, match="max_events=50"):
        trainer(tmp_path, Look(), quiet(max_events=50), max_epochs=1).fit(Model())
    assert seen[7] is PassThroughProfiler
    assert spans_of(tmp_path / "fit-rank0.json")


def test_a_tracer_of_the_users_that_has_ended(tmp_path):
    """One warning; the training is as without us."""
    tracer = Tracer()
    tracer.close()
    runner = trainer(tmp_path, quiet(tracer=tracer))
    with pytest.warns(RuntimeWarning, match="the tracer has ended"):
        runner.fit(Model())
    assert runner.global_step == 16
    assert type(runner.profiler) is PassThroughProfiler


def test_a_tracer_with_open_spans_of_the_users(tmp_path):
    """They stay open over the run, and over one that fails; ours are closed."""

    class Fails(Model):
        def training_step(self, batch, batch_idx):
            raise ValueError("broken")

    tracer = Tracer()
    with tracer.span("experiment"):
        trainer(tmp_path, quiet(tracer=tracer), max_epochs=1).fit(Model())
        with pytest.raises(ValueError, match="broken"):
            trainer(tmp_path, quiet(tracer=tracer), max_epochs=1).fit(Fails())
        with tracer.span("report"):
            pass
    tracer.close()
    spans = spans_in(tracer.events())
    (experiment,) = named(spans, "experiment")
    (report,) = named(spans, "report")
    first, second = named(spans, "fit")
    assert "error" not in experiment["args"]
    assert experiment["start"] <= first["start"] < first["end"] <= second["start"] < second["end"] <= report["start"]
    assert report["end"] <= experiment["end"]
    assert second["args"]["error"] == "ValueError"


# ---- real signals to real processes ----------------------------------------------------------------------------------
class Process:
    """``timeline_process.py`` up to its fifth step."""

    def __init__(self, directory, mode):
        script = Path(__file__).with_name("timeline_process.py")
        self.directory, self.mode = directory, mode
        self.child = subprocess.Popen([sys.executable, script, directory, mode], stderr=subprocess.PIPE, text=True)

    def end(self, signum=None):
        """Send a signal when it trains; returns the exit status."""
        ready = self.directory / "ready"
        until_s = time.monotonic() + 60
        while not ready.exists() and self.child.poll() is None and time.monotonic() < until_s:
            time.sleep(0.02)
        if signum is not None:
            time.sleep(0.6)  # what a SIGKILL leaves is at most half a second old
            os.kill(self.child.pid, signum)
        _, self.errors = self.child.communicate(timeout=60)
        return self.child.returncode


@pytest.mark.slow
def test_signals(tmp_path, perfetto):
    """Ctrl-C, SIGTERM with and without Lightning's handler, SIGKILL and sys.exit: the exit status is Lightning's own.

    The file is whole where Python gets to end, and opens in Perfetto with the open spans where it does not. It starts
    five real processes at once: Lightning takes seconds to import.
    """
    kinds = {
        "ctrl-c": (signal.SIGINT, 1),
        "sigterm": (signal.SIGTERM, 0),  # as Lightning ends it
        "sigterm-default": (signal.SIGTERM, -signal.SIGTERM),
        "sigkill": (signal.SIGKILL, -signal.SIGKILL),
        "sys-exit": (None, 7),
    }
    processes = {}
    for kind in kinds:
        (tmp_path / kind).mkdir()
        processes[kind] = Process(tmp_path / kind, kind)
    for kind, (signum, status) in kinds.items():
        found = processes[kind].end(signum)
        assert found == status, (kind, processes[kind].errors)
    paths = {kind: tmp_path / kind / "fit-rank0.json" for kind in kinds}
    for kind in ("ctrl-c", "sigterm", "sys-exit"):
        events = json.loads(paths[kind].read_bytes())
        (mark,) = [event for event in events if event.get("name") == "exception"]
        (fit,) = named(spans_in(events), "fit")
        assert fit["args"] == {"error": mark["args"]["type"]}
    reports = perfetto.open_traces(list(paths.values()), ["select count() from slice where name = 'fit'"])
    assert [(report.ok, report.rows) for report in reports] == [(True, [[[1]]])] * 5
    for kind in ("sigkill", "sigterm-default"):
        open_ones = [event["name"] for event in read_events(paths[kind]) if event["ph"] == "B"]
        assert {"fit", "epoch", "step", "training_step"} <= set(open_ones)
