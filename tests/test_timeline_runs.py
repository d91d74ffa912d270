"""TimelineTrace in every way that a Trainer runs: each batch has its span, the time adds up, Perfetto takes the file."""

from __future__ import annotations

import shutil
import time
from collections import Counter

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, EarlyStopping, LearningRateFinder
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from runs import Model, Points, inside, named, quiet, spans_of, steps_of, trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_timekeeper import get_tracer, read_events, span
from lightning_timekeeper.trace.summary import summarize

PHASES = {
    *("data", "transfer", "forward", "backward", "optimizer", "clip", "zero_grad", "callback", "module", "sync"),
    *("validation", "checkpoint", "setup", "loop"),
}


@pytest.fixture(scope="module")
def traces():
    """What the tests of this file wrote, for Perfetto's engine, which takes a second to start."""
    return []


@pytest.fixture
def fit(tmp_path, traces):
    """Fits a model with a TimelineTrace and returns the spans of its trace and the Trainer."""

    def run(model, *callbacks, stage="fit", trace=None, **arguments):
        trace = trace or quiet()
        runner = trainer(tmp_path, *callbacks, trace, **arguments)
        before = runner.profiler
        getattr(runner, stage)(model)
        assert runner.profiler is before
        assert get_tracer() is None
        traces.append(trace.path)
        spans = spans_of(trace.path)
        assert {each["cat"] for each in spans} <= PHASES
        return spans, runner

    return run


def batches(spans, name="step"):
    """How many spans there are for each epoch."""
    assert all(isinstance(each["args"]["batch"], int) for each in named(spans, name))
    return dict(Counter(each["args"]["epoch"] for each in named(spans, name)))


class Stream(IterableDataset):
    """Seven points, and no length."""

    def __iter__(self):
        return iter(torch.full((7, 4), 1.0))


# ---- data ------------------------------------------------------------------------------------------------------------
def test_iterable_dataset(fit):
    """Without a length Lightning fetches a batch ahead: still each batch has one step, in every epoch and validation."""

    class Streams(Model):
        def train_dataloader(self):
            return DataLoader(Stream(), batch_size=2)

        val_dataloader = train_dataloader

    spans, _ = fit(Streams(), num_sanity_val_steps=1)
    assert batches(spans) == {0: 4, 1: 4}
    assert [each["args"]["batch"] for each in named(spans, "step")] == [0, 1, 2, 3] * 2
    assert [len(named(inside(spans, each), "batch")) for each in named(spans, "validate")] == [4, 4]


def test_several_validation_loaders(fit):
    """Each batch says which loader it is from."""

    class Two(Model):
        def val_dataloader(self):
            return [DataLoader(Points(4), batch_size=2), DataLoader(Points(6), batch_size=2)]

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

    spans, _ = fit(Two(), max_epochs=1)
    where = [(each["args"].get("dataloader", 0), each["args"]["batch"]) for each in named(spans, "batch")]
    assert where == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(("mode", "steps"), [("min_size", 4), ("max_size_cycle", 8), ("max_size", 8)])
def test_combined_loader(fit, mode, steps):
    """Whatever the mode, a step per combined batch."""

    class Combined(Model):
        def train_dataloader(self):
            return CombinedLoader([DataLoader(Points(16), batch_size=2), DataLoader(Points(4))], mode)

        def training_step(self, batch, batch_idx):
            return super().training_step(next(each for each in batch[0] if each is not None), batch_idx)

    spans, _ = fit(Combined(), max_epochs=1, limit_val_batches=0)
    assert batches(spans) == {0: steps}


def test_data_module_reloaded_every_epoch(fit):
    """The new loader's fetches are in their steps, its making is ``setup``."""

    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Points(6), batch_size=2)

    class Plain(Model):
        train_dataloader = val_dataloader = None

    model = Plain()
    data = Data()
    model.train_dataloader = data.train_dataloader
    spans, _ = fit(model, max_epochs=3, reload_dataloaders_every_n_epochs=1, limit_val_batches=0)
    assert batches(spans) == {0: 3, 1: 3, 2: 3}


def test_loader_with_workers(fit):
    """The fetch of the batches that other processes make is ``data`` as well."""

    class Workers(Model):
        def train_dataloader(self):
            return DataLoader(Points(16), batch_size=2, num_workers=1)

    spans, _ = fit(Workers(), max_epochs=1, limit_val_batches=0)
    assert batches(spans) == {0: 8}


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter`")
def test_steps_that_fetch_for_themselves(fit):
    """With ``dataloader_iter`` in all steps, the fetches lie inside the step that made them."""

    class Own(Model):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.layer(batch).square().mean()

        def validation_step(self, dataloader_iter):
            next(dataloader_iter)

    spans, _ = fit(Own())
    assert batches(spans) == {0: 8, 1: 8}
    for step in named(spans, "step"):
        assert len(named(inside(spans, step), "train_dataloader_next")) == 1
    for validation in named(spans, "validate"):
        assert len(named(inside(spans, validation), "batch")) == 3


# ---- the Trainer's arguments -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "steps", "validations"),
    [
        ({"fast_dev_run": True}, {0: 1}, 1),
        ({"fast_dev_run": 3}, {0: 3}, 1),
        ({"overfit_batches": 2}, {0: 2, 1: 2}, 2),
        ({"inference_mode": False}, {0: 8, 1: 8}, 2),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, {0: 8, 1: 8}, 5),
        ({"val_check_interval": 0.25}, {0: 8, 1: 8}, 8),
        ({"check_val_every_n_epoch": 2}, {0: 8, 1: 8}, 1),
        ({"limit_train_batches": 3}, {0: 3, 1: 3}, 2),
        ({"max_steps": 5}, {0: 5}, 0),
        ({"accumulate_grad_batches": 3}, {0: 8, 1: 8}, 2),
        ({"precision": "bf16-mixed"}, {0: 8, 1: 8}, 2),
        ({"detect_anomaly": True}, {0: 8, 1: 8}, 2),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, {0: 8, 1: 8}, 2),
        ({"max_epochs": 0}, {}, 0),
        ({"limit_train_batches": 0}, {}, 0),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*overfit_batches.*")
def test_arguments_of_the_trainer(fit, arguments, steps, validations):
    """Each batch has one step and each validation its span, whatever the Trainer is told."""
    spans, _ = fit(Model(), **arguments)
    assert batches(spans) == steps
    assert len(named(spans, "validate")) == validations


@pytest.mark.filterwarnings("ignore:You are trying to .self.log")
def test_barebones(tmp_path, traces):
    """Lightning's bare mode lets callbacks be; we record, and its profiler is back afterwards."""
    from lightning.pytorch import Trainer

    trace = quiet()
    runner = Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path, callbacks=[trace])
    before = runner.profiler
    runner.fit(Model())
    assert runner.profiler is before
    traces.append(trace.path)
    assert batches(spans_of(trace.path)) == {0: 8}


def test_gradient_accumulation_is_visible(fit):
    """The batches of a window carry one optimizer step number, and only its last one has the optimizer's work."""
    spans, _ = fit(Model(), accumulate_grad_batches=4, max_epochs=1, limit_val_batches=0)
    steps = named(spans, "step")
    assert [step["args"]["step"] for step in steps] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [len(named(inside(spans, step), "optimizer")) for step in steps] == [0, 0, 0, 1] * 2


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_that_fetches_ahead(fit, stage):
    """Outside a fit too each batch has one span, with a loader that has no length."""

    class Streams(Model):
        def val_dataloader(self):
            return DataLoader(Stream(), batch_size=2)

        test_dataloader = predict_dataloader = val_dataloader

    spans, _ = fit(Streams(), stage=stage)
    assert [each["args"]["batch"] for each in named(spans, "batch")] == [0, 1, 2, 3]


def test_manual_optimization_that_steps_now_and_then(fit):
    """The optimizer's time is in the batches that stepped."""

    class Manual(Model):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.layer(batch).square().mean())
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    spans, _ = fit(Manual(), max_epochs=1)
    assert [len(named(inside(spans, step), "optimizer")) for step in named(spans, "step")] == [0, 1] * 4


@pytest.mark.filterwarnings("ignore:.*returned .None.")
def test_skipped_training_steps(fit):
    """A training_step that returns None skips the optimizer; its batch is there."""

    class Skips(Model):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    spans, _ = fit(Skips(), max_epochs=1)
    assert batches(spans) == {0: 8}


def test_second_order_optimizers(fit):
    """An optimizer that calls its closure several times has one step, and its time is what the closures leave."""

    class Closures(Model):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=1e-6, max_iter=3)

    spans, _ = fit(Closures(), max_epochs=1)
    for step in named(spans, "step"):
        assert len(named(inside(spans, step), "training_step")) >= 1
        assert len(named(inside(spans, step), "optimizer_step")) == 1


@pytest.mark.slow
def test_compiled_module(fit):
    """``torch.compile`` of the module: the same spans."""
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    spans, _ = fit(torch.compile(Model()), max_epochs=1)
    assert batches(spans) == {0: 8}


# ---- the tuner -------------------------------------------------------------------------------------------------------
class Tunable(Model):
    def __init__(self):
        super().__init__()
        self.lr = 1e-6
        self.batch_size = 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return DataLoader(Points(16), batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(Points(6), batch_size=self.batch_size)

    test_dataloader = val_dataloader


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """The tuner leaves checkpoints where it stands."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("first", [True, False], ids=["tuner first", "ours first"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LearningRateFinder(num_training_steps=5),
        lambda: BatchSizeFinder(steps_per_trial=2, max_trials=2, init_val=2),
    ],
    ids=["learning rate", "batch size"],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
def test_tuner_callbacks(tmp_path, traces, make, first):
    """The tuner's trials are told from the training's steps, and lie in the callback that makes them."""
    trace, finder = quiet(), make()
    runner = trainer(tmp_path, *([finder, trace] if first else [trace, finder]), max_epochs=1)
    trained, model = [], Tunable()
    step = model.training_step
    model.training_step = lambda batch, batch_idx: trained.append(batch_idx) or step(batch, batch_idx)
    runner.fit(model)
    traces.append(trace.path)
    spans = spans_of(trace.path)
    steps, trials = named(spans, "step"), named(spans, "trial step")
    assert trials
    assert steps
    # after its learning rate finder, Lightning 2.5.0 leaves out batches of the training
    assert [each["args"]["batch"] for each in trials + steps] == trained
    assert max(each["end"] for each in trials) <= steps[0]["start"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
def test_batch_size_finder_in_evaluation(fit):
    """Its trials know of no batches and are no spans of ours; the evaluation's batches are."""
    spans, runner = fit(Tunable(), BatchSizeFinder(steps_per_trial=2, max_trials=2, init_val=2), stage="validate")
    assert len(named(spans, "batch")) == sum(runner.num_val_batches)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
def test_out_of_memory_in_a_trial(fit):
    """The batch size finder's way is to fail and go on: the failed trial's spans end there, marked."""

    class Small(Tunable):
        def training_step(self, batch, batch_idx):
            if len(batch) > 4:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    spans, _ = fit(Small(), BatchSizeFinder(steps_per_trial=2, max_trials=3, init_val=2), max_epochs=1)
    failed = [each for each in named(spans, "trial step") if each["args"].get("error") == "RuntimeError"]
    assert len(failed) == 1
    assert batches(spans) == {0: 4}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("elsewhere")
def test_tuner_before_the_fit(tmp_path, traces):
    """``Tuner.lr_find`` and ``scale_batch_size`` leave files of their own, and the fit after them is as always."""
    trace, model = quiet(), Tunable()
    runner = trainer(tmp_path, trace, max_epochs=1)
    before = runner.profiler
    tuner = Tuner(runner)
    tuner.lr_find(model, num_training=5)
    tuner.scale_batch_size(model, steps_per_trial=2, max_trials=2)
    runner.fit(model)
    assert runner.profiler is before
    assert get_tracer() is None
    paths = [tmp_path / f"fit-rank0{version}.json" for version in ("", "-v1", "-v2")]
    traces += paths
    assert [len(named(spans_of(path), "step")) for path in paths[:2]] == [0, 0]
    assert batches(spans_of(paths[2])) == {0: runner.num_training_batches}


# ---- beside others ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [False, True], ids=["two traces", "one trace in both"])
def test_a_trainer_inside_another(tmp_path, traces, shared):
    """A fit in a hook of another Trainer's: each records its own run, also where one callback serves both."""
    outer = quiet(dirpath=tmp_path / "outer", enable=1)
    inner = outer if shared else quiet(dirpath=tmp_path / "inner")

    class Nests(Callback):
        def on_train_epoch_end(self, trainer_, module):
            if trainer_.current_epoch == 0:
                trainer(tmp_path, inner, max_epochs=1).fit(Model())

    runner = trainer(tmp_path, outer, Nests())
    before = runner.profiler
    runner.fit(Model())
    assert runner.profiler is before
    assert get_tracer() is None
    name = "outer/fit-rank0-v1.json" if shared else "inner/fit-rank0.json"
    paths = [tmp_path / name, tmp_path / "outer" / "fit-rank0.json"]
    traces += paths
    assert [steps_of(path) for path in paths] == [list(range(1 if shared else 0, 8)), list(range(1, 16))]


def test_several_fits_of_the_same_objects(tmp_path, traces):
    """Each has a file of its own, with its own steps."""
    trace, model = quiet(), Model()
    runner = trainer(tmp_path, trace, max_epochs=1)
    runner.fit(model)
    runner.fit_loop.max_epochs = 2
    runner.fit(model)
    trainer(tmp_path, trace, max_epochs=1).fit(model)
    paths = [tmp_path / f"fit-rank0{version}.json" for version in ("", "-v1", "-v2")]
    traces += paths
    assert [steps_of(path) for path in paths] == [list(range(8)), list(range(8, 16)), list(range(8))]


@pytest.mark.parametrize("arguments", [{"enable": 3, "disable": 11}, {"disable": 4}], ids=str)
def test_a_second_fit_that_goes_on_is_in_the_same_window(tmp_path, arguments):
    """The steps count on from the first fit, and so do the triggers."""
    trace = quiet(**arguments)
    runner = trainer(tmp_path, trace, max_epochs=1)
    runner.fit(Model())
    runner.fit_loop.max_epochs = 2
    runner.fit(Model())
    paths = sorted(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    steps = [step for path in paths for step in steps_of(path)]
    assert steps == list(range(arguments.get("enable", 0), arguments["disable"]))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_order_of_callbacks_does_not_matter(fit, tmp_path, position):
    """First, in the middle or last: the same steps, and the other callbacks' hooks are there."""

    class Busy(Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.0001)  # really waits: hooks that take no time are left out

    class Busier(Busy):
        pass

    callbacks = [Busy(), Busier()]
    trace = quiet()
    callbacks.insert(position, trace)
    runner = trainer(tmp_path, *callbacks, max_epochs=1)
    runner.fit(Model())
    spans = spans_of(trace.path)
    assert batches(spans) == {0: 8}
    for step in named(spans, "step"):
        names = [each["name"] for each in inside(spans, step)]
        assert names.count("Busy.on_train_batch_end") == names.count("Busier.on_train_batch_end") == 1


@pytest.mark.parametrize("fails", [None, 0, 1])
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_traces_end_in_any_order(tmp_path, monkeypatch, fails, first_ends_first):
    """Windows that close in either order, or one that fails: the other goes on, and the profiler is back."""
    ends = [6, 10] if first_ends_first else [10, 6]
    both = [quiet(filename=f"{name}.json", disable=end) for name, end in zip("ab", ends, strict=True)]
    if fails is not None:

        def broken(run, trainer, **_):
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(both[fails], "_advance", broken)
    runner = trainer(tmp_path, *both)
    before = runner.profiler
    if fails is None:
        runner.fit(Model())
    else:
        with pytest.warns(RuntimeWarning, match="a bug of ours"):
            runner.fit(Model())
    assert runner.profiler is before
    assert get_tracer() is None
    assert runner.global_step == 16
    for number, (name, end) in enumerate(zip("ab", ends, strict=True)):
        path = tmp_path / f"{name}.json"
        if number == fails:
            # until then there is no trigger to look at, but at the end of an epoch
            assert len(named(spans_of(path), "step")) == min(end, 8)
        else:
            assert steps_of(path) == list(range(end))


def test_pytorch_profiler(tmp_path):
    """Its record_function names, in their number, are those without us, and its own schedule is kept."""

    def names(*callbacks):
        ready = []
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
        profiler = PyTorchProfiler(schedule=schedule, on_trace_ready=lambda each: ready.append(each.step_num))
        runner = trainer(tmp_path, *callbacks, profiler=profiler, max_epochs=1, limit_val_batches=0)
        runner.fit(Model())
        assert runner.profiler is profiler
        found = Counter(event.name for event in profiler.function_events if event.name.startswith("[pl]"))
        return ready, {name: count for name, count in found.items() if "TimelineTrace" not in name}

    ready, found = names(quiet())
    assert found
    assert (ready, found) == names()


# ---- the time --------------------------------------------------------------------------------------------------------
def test_self_times_add_up_to_the_wall_time(tmp_path):
    """The self times over the named phases add up to the wall time of the fit, to 98 % of it and more."""

    class Works(Model):
        def training_step(self, batch, batch_idx):
            time.sleep(0.01)  # really waits: this is about the real clock
            return super().training_step(batch, batch_idx)

    trace = quiet()
    runner = trainer(tmp_path, trace, max_epochs=5)
    trainer(tmp_path, quiet(filename=None), fast_dev_run=True).fit(Model())  # numpy is loaded at the first use
    begin_s = time.perf_counter()
    runner.fit(Works())
    wall_us = (time.perf_counter() - begin_s) * 1e6
    summary = summarize(trace.path)
    assert summary.run.phases_ns.keys() <= PHASES
    assert 0.98 * wall_us <= sum(summary.run.phases_ns.values()) / 1000 <= wall_us


# ---- when ------------------------------------------------------------------------------------------------------------
def test_windows_across_validations_and_epochs(tmp_path, traces):
    """A window that a validation or the end of an epoch falls into holds it, and its steps whole."""
    trace = quiet(enable=3, disable=11)
    trainer(tmp_path, trace, val_check_interval=4).fit(Model())
    traces.append(trace.path)
    spans = spans_of(trace.path)
    assert steps_of(trace.path) == list(range(3, 11))
    assert len(named(spans, "validate")) == 2
    assert [each["args"]["epoch"] for each in named(spans, "epoch")] == [0, 1]


@pytest.mark.parametrize("stop_at", [2, 4, 6])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_schedule_goes_on_after_a_resume(tmp_path, stop_at):
    """Two runs record the steps that one would: the schedule is asked for the step, not for how often it was asked."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def schedule():
        return torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=2)

    checkpoint = ModelCheckpoint(tmp_path, filename="mid", every_n_train_steps=stop_at)
    first = quiet(schedule=schedule(), filename="a.json")
    trainer(tmp_path, first, checkpoint, enable_checkpointing=True, max_steps=stop_at).fit(Model())
    second = quiet(schedule=schedule(), filename="b.json")
    trainer(tmp_path, second).fit(Model(), ckpt_path=tmp_path / "mid.ckpt")
    paths = [path for path in (tmp_path / "a.json", tmp_path / "b.json") if path.exists()]
    assert [step for path in paths for step in steps_of(path)] == [2, 3, 4, 7, 8, 9]


def test_windows_in_an_evaluation(tmp_path, traces):
    """*batch* counts the batches of the running stage: a window of a test run is as exact as one of a fit."""
    from lightning_timekeeper import At

    trace = quiet(enable=At(1, "batch"), disable=At(2, "batch"))
    trainer(tmp_path, trace).test(Model(), verbose=False)
    traces.append(trace.path)
    assert [each["args"]["batch"] for each in named(spans_of(trace.path), "batch")] == [1]


def test_off_costs_no_action(tmp_path):
    """Without a window nothing of ours runs in a batch but, where it may open, the look at the trigger."""

    def hooks(trace):
        return [
            name
            for name in ("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_after_backward")
            if callable(getattr(trace, name))
        ]

    assert hooks(quiet()) == []
    assert hooks(quiet(enable=1000)) == ["on_train_batch_end"]


def test_a_subclass_keeps_its_hooks(fit):
    """Hooks that we leave out are called where a subclass has its own."""
    from lightning_timekeeper import TimelineTrace

    seen = []

    class Mine(TimelineTrace):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            seen.append(batch_idx)

    spans, _ = fit(Model(), trace=Mine(summary=False), max_epochs=1)
    assert seen == list(range(8))
    assert batches(spans) == {0: 8}


def test_user_spans_in_datasets_and_callbacks(tmp_path):
    """``span`` anywhere in the training's process lands among the others, inside what called it."""

    class Loads(Points):
        def __getitem__(self, index):
            with span("load"):
                return super().__getitem__(index)

    class Looks(Callback):
        def on_train_batch_end(self, *_):
            with span("look"):
                pass

    class Mine(Model):
        def train_dataloader(self):
            return DataLoader(Loads(16), batch_size=2)

    trace = quiet()
    trainer(tmp_path, Looks(), trace, max_epochs=1).fit(Mine())
    spans = spans_of(trace.path)
    for fetch in named(spans, "train_dataloader_next"):
        assert len(named(inside(spans, fetch), "load")) == 2
    assert len(named(spans, "look")) == 8


def test_early_stopping_is_marked(tmp_path):
    """Anyone's ``should_stop`` is an instant in the trace."""
    trace = quiet()
    stops = EarlyStopping("val_loss", patience=0, mode="max", min_delta=1e9)
    trainer(tmp_path, stops, trace, max_epochs=5).fit(Model())
    marks = [event["name"] for event in read_events(trace.path) if event["ph"] == "i"]
    assert marks == ["should_stop"]


@pytest.mark.slow
def test_perfetto_takes_them_all(traces, perfetto):
    """Perfetto's engine finds no fault in any of the traces that the tests above wrote."""
    if not traces:
        pytest.skip("none was written: run the whole file")
    reports = perfetto.open_traces(traces, ["select count() from slice"])
    bad = [(str(path), report) for path, report in zip(traces, reports, strict=True) if not report.ok]
    assert bad == []
