"""TimelineTrace on real Trainer runs: what is recorded, when, where, and what happens when things end badly."""

from __future__ import annotations

import gc
import gzip
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from runs import Model, inside, named, quiet, spans_in, spans_of, steps_of, trainer

from lightning_timekeeper import At, Every, TimelineTrace, Timer, Tracer, counter, get_tracer, read_events, span


# ---- what is recorded ------------------------------------------------------------------------------------------------
def test_every_batch_has_its_spans_under_short_names_and_phases(tmp_path):
    """Each step holds its fetch, transfer, forward, backward, clipping, zero_grad and optimizer step, by phase."""
    trace = quiet()
    trainer(tmp_path, trace, gradient_clip_val=1.0).fit(Model())
    spans = spans_of(tmp_path / "fit-rank0.json")
    steps = named(spans, "step")
    assert [step["args"] for step in steps] == [
        {"epoch": epoch, "batch": batch, "step": epoch * 8 + batch} for epoch in range(2) for batch in range(8)
    ]
    expected = {
        "train_dataloader_next": "data",
        "batch_to_device": "transfer",
        "run_training_batch": "loop",
        "training_step": "forward",
        "backward": "backward",
        "configure_gradient_clipping": "clip",
        "optimizer_zero_grad": "zero_grad",
        "optimizer_step": "optimizer",
        "optimizer": "optimizer",
    }
    for step in steps:
        phases = {each["name"]: each["cat"] for each in inside(spans, step)}
        assert expected.items() <= phases.items()


def test_spans_of_the_run_stand_around_the_steps(tmp_path):
    """One fit span holds two epochs with their steps, and a validation in each epoch."""
    trainer(tmp_path, quiet(), num_sanity_val_steps=1).fit(Model())
    spans = spans_of(tmp_path / "fit-rank0.json")
    (fit,) = named(spans, "fit")
    epochs = named(inside(spans, fit), "epoch")
    assert [epoch["args"]["epoch"] for epoch in epochs] == [0, 1]
    for epoch in epochs:
        within = inside(spans, epoch)
        assert len(named(within, "step")) == 8
        (validation,) = named(within, "validate")
        assert len(named(inside(spans, validation), "batch")) == 3
    (sanity,) = named(spans, "sanity check")
    assert len(named(inside(spans, sanity), "batch")) == 1


def test_optimizer_time_is_what_forward_and_backward_leave(tmp_path):
    """The ``optimizer`` span lies inside ``optimizer_step``, after the backward pass, once per optimizer step."""
    trainer(tmp_path, quiet(), accumulate_grad_batches=4).fit(Model())
    spans = spans_of(tmp_path / "fit-rank0.json")
    pure, whole = named(spans, "optimizer"), named(spans, "optimizer_step")
    assert len(pure) == len(whole) == 4
    for outer, inner in zip(whole, pure, strict=True):
        assert inner in inside(spans, outer)
        assert named(inside(spans, outer), "backward")[0]["end"] <= inner["start"]


def test_manual_optimization(tmp_path):
    """Several optimizers, stepped by hand, each have their step and their own time."""

    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                loss = self.layer(batch).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=1e-6) for _ in range(2)]

    trainer(tmp_path, quiet(), max_epochs=1).fit(Manual())
    spans = spans_of(tmp_path / "fit-rank0.json")
    assert len(named(spans, "step")) == 8
    assert len(named(spans, "optimizer_step")) == len(named(spans, "optimizer")) == 16


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter`")
def test_a_training_step_that_fetches_its_own_batches(tmp_path):
    """With ``dataloader_iter`` the fetch lies inside the step."""

    class Own(Model):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch).square().mean()

    trainer(tmp_path, quiet(), max_epochs=1, limit_val_batches=0).fit(Own())
    assert len(named(spans_of(tmp_path / "fit-rank0.json"), "step")) == 8


def test_skipped_batches_and_an_epoch_cut_short(tmp_path):
    """``on_train_batch_start`` returning -1 ends the epoch; its spans are closed and nested."""

    class Skips(Model):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    trainer(tmp_path, quiet()).fit(Skips())
    assert [step["args"]["batch"] for step in named(spans_of(tmp_path / "fit-rank0.json"), "step")] == [0, 1, 2, 3] * 2


def test_checkpoints_are_marked_with_their_path(tmp_path):
    """Each checkpoint leaves a span and an instant that tells where it went."""
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=4, save_top_k=-1)
    trainer(tmp_path, quiet(), checkpoint, enable_checkpointing=True).fit(Model())
    events = list(read_events(tmp_path / "fit-rank0.json"))
    marks = [event["args"]["path"] for event in events if event["ph"] == "i" and event["name"] == "checkpoint saved"]
    assert sorted(marks) == sorted(str(path) for path in (tmp_path / "ckpt").iterdir())
    assert len(named(spans_in(events), "save_checkpoint")) == len(marks) == 4


def test_user_spans_land_among_the_others(tmp_path):
    """``span`` and ``counter`` in the module are recorded on the training loop's track, inside their step."""

    class Mine(Model):
        def training_step(self, batch, batch_idx):
            with span("mine", batch=batch_idx):
                counter("queue", batch_idx)
                return super().training_step(batch, batch_idx)

    trainer(tmp_path, quiet(), max_epochs=1).fit(Mine())
    events = list(read_events(tmp_path / "fit-rank0.json"))
    spans = spans_in(events)
    for step, mine in zip(named(spans, "step"), named(spans, "mine"), strict=True):
        assert mine in inside(spans, step)
        assert mine["cat"] == "user"
        assert mine["args"] == {"batch": step["args"]["batch"]}
    assert [event["args"]["value"] for event in events if event["ph"] == "C"] == list(range(8))


def test_short_hooks_are_left_out(tmp_path):
    """Hooks of callbacks and the module under ``min_duration_us`` are not written; all other spans are."""

    class Busy(Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.002)  # really waits: the spans are measured by the real clock

        def on_train_batch_start(self, *_):
            pass

    def names(least_us):
        directory = tmp_path / str(least_us)
        trainer(directory, quiet(min_duration_us=least_us), Busy(), max_epochs=1).fit(Model())
        return [each["name"] for each in spans_of(directory / "fit-rank0.json")]

    every, long = names(0), names(1000)
    assert every.count("Busy.on_train_batch_start") == 8
    assert long.count("Busy.on_train_batch_start") == 0
    assert long.count("Busy.on_train_batch_end") == every.count("Busy.on_train_batch_end") == 8
    assert long.count("batch_to_device") == every.count("batch_to_device")


def test_a_stop_is_marked_with_its_reason(tmp_path):
    """The Timer's limit, or whoever set ``should_stop``; once."""

    class Stops(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 4

    def marks(directory, *callbacks):
        trainer(directory, quiet(), *callbacks).fit(Model())
        events = list(read_events(directory / "fit-rank0.json"))
        return [(event["name"], event["args"]) for event in events if event["ph"] == "i"]

    assert marks(tmp_path / "timer", Timer("00:00:00:00", verbose=False)) == [
        ("time limit reached", {"reason": "duration", "step": 0})
    ]
    assert marks(tmp_path / "other", Stops()) == [("should_stop", {"step": 4})]


def test_our_own_hooks_are_not_in_the_trace(tmp_path):
    """What the callback itself costs is not shown as the user's time."""
    trainer(tmp_path, quiet()).fit(Model())
    assert not [each for each in spans_of(tmp_path / "fit-rank0.json") if "TimelineTrace" in each["name"]]


def test_evaluation_and_prediction(tmp_path):
    """fit, validate, test and predict with the same objects leave a file each, with a span per batch."""
    trace, model = quiet(), Model()
    runner = trainer(tmp_path, trace)
    runner.fit(model)
    for stage in ("validate", "test", "predict"):
        getattr(runner, stage)(model, **({} if stage == "predict" else {"verbose": False}))
        spans = spans_of(tmp_path / f"{stage}-rank0.json")
        (outer,) = named(spans, stage)
        assert len(named(inside(spans, outer), "batch")) == 3
        assert trace.path == str(tmp_path / f"{stage}-rank0.json")


def test_self_times_add_up_to_the_run(tmp_path):
    """The self times of all spans sum to the fit span: no time is counted twice or lost."""
    from lightning_timekeeper.trace.summary import summarize

    trainer(tmp_path, quiet()).fit(Model())
    path = tmp_path / "fit-rank0.json"
    (fit,) = named(spans_of(path), "fit")
    assert sum(summarize(path).run.phases_ns.values()) == fit["end"] - fit["start"]


# ---- when ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"enable": 5, "disable": 9}, range(5, 9)),
        ({"enable": 0, "disable": 3}, range(3)),
        ({"enable": At(1, "epoch")}, range(8, 16)),
        ({"enable": (1, "epoch"), "disable": 11}, range(8, 11)),
        ({"disable": 4}, range(4)),
        ({"enable": lambda trainer: trainer.global_step == 6, "disable": 10}, range(6, 10)),
        ({"enable": Every(4), "disable": At(6)}, [4, 5, *range(8, 16)]),
        ({"enable": 3, "disable": 3}, []),
        ({"schedule": torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=2)}, [3, 4, 8, 9]),
    ],
    ids=str,
)
def test_windows_are_exact(tmp_path, arguments, steps):
    """A window holds its steps, each once and whole; where enable and disable both fire, disable wins."""
    trainer(tmp_path, quiet(**arguments), val_check_interval=4).fit(Model())
    path = tmp_path / "fit-rank0.json"
    assert (steps_of(path) if path.exists() else []) == list(steps)


def test_while_recording_is_off_the_users_profiler_is_back(tmp_path):
    """Outside the window the Trainer has the very profiler that it was given, and no tracer records."""
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append((type(trainer.profiler).__name__, get_tracer() is not None))

    trainer(tmp_path, Look(), quiet(enable=2, disable=5), max_epochs=1).fit(Model())
    off, on = ("PassThroughProfiler", False), ("RecordingProfiler", True)
    assert seen == [off] * 2 + [on] * 3 + [off] * 3


def test_what_a_closed_window_holds_is_on_disk(tmp_path):
    """When the window has closed, its spans are in the file, though the run goes on."""
    found = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 6:
                found.extend(read_events(tmp_path / "fit-rank0.json"))

    trainer(tmp_path, Look(), quiet(enable=2, disable=5), max_epochs=1).fit(Model())
    assert len(named(spans_in(found), "step")) == 3


def test_a_window_that_never_opens_leaves_no_file(tmp_path, caplog):
    """It says so once, at the end."""
    with caplog.at_level("INFO"):
        trainer(tmp_path, quiet(enable=1000)).fit(Model())
    assert not list(tmp_path.glob("*.json"))
    assert sum("no window opened" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("stop_at", [3, 6])
@pytest.mark.parametrize(
    ("window", "steps"),
    [({"enable": 5, "disable": 12}, range(5, 12)), ({"disable": 4}, range(4)), ({}, range(16))],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_window_goes_on_after_a_resume(tmp_path, stop_at, window, steps):
    """Two runs, cut by a checkpoint before or inside the window, record the steps that one run would."""
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", filename="mid", every_n_train_steps=stop_at)
    trainer(tmp_path, quiet(**window), checkpoint, enable_checkpointing=True, max_steps=stop_at).fit(Model())
    trainer(tmp_path, quiet(**window)).fit(Model(), ckpt_path=tmp_path / "ckpt" / "mid.ckpt")
    paths = [tmp_path / "fit-rank0.json", tmp_path / "fit-rank0-v1.json"]
    assert [step for path in paths if path.exists() for step in steps_of(path)] == list(steps)
    state = torch.load(tmp_path / "ckpt" / "mid.ckpt", weights_only=True)["callbacks"]
    assert any(key.startswith("TimelineTrace") for key in state) == bool(window)


def test_an_epoch_without_a_window_has_no_hook_of_ours(tmp_path):
    """Where no trigger can fire in an epoch, Lightning finds no hook to call after its batches."""
    timeline, hooks = quiet(enable=20, disable=(3, "epoch")), []

    class Look(Callback):
        def on_train_batch_start(self, *_):
            hooks.append(timeline.on_train_batch_end is not None)

    trainer(tmp_path, timeline, Look(), max_epochs=4).fit(Model())
    assert hooks == [False] * 16 + [True] * 8 + [False] * 8
    assert steps_of(tmp_path / "fit-rank0.json") == list(range(20, 24))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_half_done_epoch_is_looked_at_again(tmp_path):
    """A window in what is left of an epoch opens, though the first half of it had none in reach."""
    timeline = quiet(enable=6, disable=7)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", filename="mid", every_n_train_steps=3)
    settings = {"enable_checkpointing": True, "max_steps": 3, "limit_train_batches": 4}
    trainer(tmp_path, timeline, checkpoint, **settings).fit(Model())
    assert timeline.on_train_batch_end is None
    trainer(tmp_path, timeline).fit(Model(), ckpt_path=tmp_path / "ckpt" / "mid.ckpt")
    assert steps_of(tmp_path / "fit-rank0.json") == [6]


def test_a_window_in_steps_by_hand(tmp_path):
    """A module that steps twice a batch goes through the window's bounds in the middle of one."""

    class Twice(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().step(lambda: self.layer(batch).sum())

    trainer(tmp_path, quiet(enable=5, disable=9)).fit(Twice())
    assert steps_of(tmp_path / "fit-rank0.json") == [6, 8]


# ---- where -----------------------------------------------------------------------------------------------------------
def test_an_existing_file_is_never_touched(tmp_path):
    """The next free version is taken, also where only the other suffix exists."""
    (tmp_path / "fit-rank0.json.gz").write_bytes(b"mine")
    (tmp_path / "fit-rank0-v1.json").write_bytes(b"mine")
    trace = quiet()
    trainer(tmp_path, trace).fit(Model())
    assert trace.path == str(tmp_path / "fit-rank0-v2.json")
    assert (tmp_path / "fit-rank0.json.gz").read_bytes() == (tmp_path / "fit-rank0-v1.json").read_bytes() == b"mine"


def test_the_template_is_filled_in(tmp_path):
    """Keys and metrics; a metric that was not logged yet is ``nan``."""
    name = "{stage}-{rank}-{node}-{world_size}-{epoch}-{step}-{attempt}-{val_loss:.2f}.json"
    trainer(tmp_path, quiet(filename=name), max_epochs=1).fit(Model())
    assert (tmp_path / "fit-0-0-1-0-0-0-nan.json").exists()


def test_a_new_file_begins_on_the_trigger(tmp_path):
    """Each step is in one file, whole, and no file is left without a step."""
    trainer(tmp_path, quiet(trigger=(3, "step"), filename="{step:03d}.json.gz"), max_epochs=1).fit(Model())
    steps = {path.name: steps_of(path) for path in sorted(tmp_path.glob("*.gz"))}
    assert steps == {"000.json.gz": [0, 1, 2], "003.json.gz": [3, 4, 5], "006.json.gz": [6, 7]}


def test_gz_is_a_whole_gzip_file(tmp_path):
    """It is compressed on close, and the plain file it grew in is gone."""
    trainer(tmp_path, quiet(filename="t.json.gz")).fit(Model())
    with gzip.open(tmp_path / "t.json.gz") as file:
        assert len(named(spans_in(json.load(file)), "step")) == 16
    assert not (tmp_path / "t.json").exists()


def test_filename_none_keeps_the_events_in_memory(tmp_path):
    """No file; the tracer has them."""
    trace = quiet(filename=None)
    trainer(tmp_path, trace).fit(Model())
    assert not list(tmp_path.glob("*.json*"))
    assert len(named(spans_in(trace.tracer.events()), "step")) == 16


def test_dirpath_may_be_a_url(tmp_path):
    """A file system of fsspec's takes it."""
    trace = quiet(dirpath="memory://traces/run")
    trainer(tmp_path, trace).fit(Model())
    with fsspec.open("memory://traces/run/fit-rank0.json") as file:
        assert len(named(spans_in(json.load(file)), "step")) == 16


def test_writer_opens_the_file(tmp_path):
    """A callable gets the path and returns what is written to."""
    asked = []

    def writer(path):
        asked.append(path)
        return open(tmp_path / "elsewhere.json", "wb")

    trainer(tmp_path, quiet(writer=writer)).fit(Model())
    assert asked == [str(tmp_path / "fit-rank0.json")]
    assert len(steps_of(tmp_path / "elsewhere.json")) == 16


def test_a_tracer_of_the_users_own(tmp_path):
    """It gets the spans, and stays open for its owner."""
    tracer = Tracer()
    trainer(tmp_path, quiet(tracer=tracer)).fit(Model())
    tracer.close()
    assert not list(tmp_path.glob("*.json"))
    assert len(named(spans_in(tracer.events()), "step")) == 16


@pytest.mark.parametrize(
    "arguments",
    [
        {"filename": "{nonsense}.json"},
        {"filename": "{epoch.json"},
        {"filename": "trace.txt"},
        {"filename": "{stage!r}.json"},
        {"filename": "../{stage}.json"},
        {"filename": 3},
        {"trigger": (0, "epoch")},
        {"trigger": (1, "year")},
        {"enable": -1},
        {"enable": "100"},
        {"disable": True},
        {"schedule": 3},
        {"schedule": torch.profiler.schedule(wait=1, warmup=1, active=1), "enable": 1},
        {"writer": "file"},
        {"tracer": object()},
        {"max_events": 0},
        {"min_duration_us": -1},
        {"min_duration_us": float("nan")},
        {"dirpath": 7},
    ],
    ids=str,
)
def test_bad_arguments_fail_at_construction(arguments):
    """One error that shows the call and the value."""
    with pytest.raises(MisconfigurationException) as error:
        TimelineTrace(**arguments)
    name, value = next(iter(arguments.items()))
    assert f"`TimelineTrace({name}=" in str(error.value)
    if name != "schedule":
        assert repr(value) in str(error.value)


def test_a_path_that_cannot_be_opened_fails_before_training(tmp_path):
    """The error names the path, and no step was trained."""
    (tmp_path / "file").write_text("")
    runner = trainer(tmp_path, quiet(dirpath=tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="below"):
        runner.fit(Model())
    assert runner.global_step == 0


# ---- beside others ---------------------------------------------------------------------------------------------------
class Log(Profiler):
    def __init__(self):
        super().__init__()
        self.actions = []

    def start(self, action_name):
        self.actions.append(("start", action_name))

    def stop(self, action_name):
        self.actions.append(("stop", action_name))


def test_the_users_profiler_gets_every_action(tmp_path):
    """The same actions in the same order as without us, but for the hooks that we add."""

    def actions(*callbacks):
        profiler = Log()
        runner = trainer(tmp_path, *callbacks, profiler=profiler)
        runner.fit(Model())
        assert runner.profiler is profiler
        return [each for each in profiler.actions if "TimelineTrace" not in each[1]]

    assert actions(quiet()) == actions()


@pytest.mark.parametrize("make", [SimpleProfiler, AdvancedProfiler, PassThroughProfiler])
def test_lightnings_profilers_work_as_before(tmp_path, make):
    """Their summary has the training step; the trace too."""
    profiler, summaries = make(), []

    class Look(Callback):
        def on_train_end(self, trainer, module):
            summaries.append(profiler.summary())

    trainer(tmp_path, quiet(), Look(), profiler=profiler).fit(Model())
    assert make is PassThroughProfiler or "training_step" in summaries[0]
    assert len(steps_of(tmp_path / "fit-rank0.json")) == 16


def test_two_traces_in_one_trainer(tmp_path):
    """Both record all, and the user's spans; the profiler is as it was."""
    runner = trainer(tmp_path, quiet(filename="a.json"), quiet(filename="b.json", enable=4, disable=12))
    before = runner.profiler

    class Mine(Model):
        def training_step(self, batch, batch_idx):
            with span("mine"):
                return super().training_step(batch, batch_idx)

    runner.fit(Mine())
    assert runner.profiler is before
    assert len(named(spans_of(tmp_path / "a.json"), "mine")) == 16
    assert len(named(spans_of(tmp_path / "b.json"), "mine")) == 8
    assert steps_of(tmp_path / "b.json") == list(range(4, 12))


def test_the_proxy_never_tears_the_users_profiler_down(tmp_path):
    """Lightning's profilers tear down when they are garbage: the proxy is garbage while the user's still reports."""
    torn = []

    class Mine(SimpleProfiler):
        def teardown(self, stage):
            torn.append(stage)

    runner = trainer(tmp_path, quiet(), profiler=Mine())
    runner.fit(Model())
    before = list(torn)
    gc.collect()
    assert torn == before


def test_pickles_before_and_after_a_run(tmp_path):
    """Spawned processes get it pickled; files and threads stay behind."""
    trace = quiet(enable=3)
    trainer(tmp_path, trace).fit(Model())
    assert pickle.loads(pickle.dumps(trace)).tracer is None


# ---- the end ---------------------------------------------------------------------------------------------------------
def test_the_summary_is_printed_once(tmp_path, caplog):
    """Phases and shares, and where the trace lies."""
    with caplog.at_level("INFO"):
        trainer(tmp_path, TimelineTrace()).fit(Model())
    (text,) = [record.message for record in caplog.records if "share" in record.message]
    assert "forward" in text
    assert str(tmp_path / "fit-rank0.json") in text


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_two_ranks(tmp_path, strategy):
    """A file per rank, of one version, nothing overwritten; the wait for the slower rank is ``sync``.

    It starts two real processes that talk over gloo.
    """
    (tmp_path / "t-rank1.json").write_text("mine")
    script = Path(__file__).with_name("timeline_ranks.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, strategy, "t.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "t-rank0-v1.json",
        "t-rank1-v1.json",
        "t-rank1.json",
    ]
    assert (tmp_path / "t-rank1.json").read_text() == "mine"
    waited = []
    for rank in range(2):
        events = list(read_events(tmp_path / f"t-rank{rank}-v1.json"))
        assert {key: events[0]["args"][key] for key in ("rank", "world_size")} == {"rank": rank, "world_size": 2}
        spans = spans_in(events)
        steps = named(spans, "step")
        assert [step["args"]["batch"] for step in steps] == list(range(4))
        syncs = named(spans, "sync")
        assert all(any(sync in inside(spans, step) for step in steps) for sync in syncs)
        assert len(syncs) == 3
        waited.append(sum(sync["end"] - sync["start"] for sync in syncs))
    if hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"):  # from Lightning 2.5.2 on
        assert waited[0] > 50_000_000 > waited[1]
