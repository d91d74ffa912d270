"""Timer as a drop-in: its class, its clocks, its state, its arguments, and what it costs the Trainer."""

from __future__ import annotations

import copy
import io
import math
import pickle
from datetime import timedelta

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.callbacks import Timer as LightningTimer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import RunningStage
from timer_fakes import Clock, Model, fit, quiet_trainer

from lightning_timekeeper import Timer
from lightning_timekeeper.hooks import PER_BATCH

STAGES = [stage.value for stage in RunningStage]
HOOKS = [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr("lightning_timekeeper.timer.time", fake)
    return fake


def elapsed(timer):
    return {stage: timer.time_elapsed(stage) for stage in STAGES}


class Probe(Callback):
    """Does something at every hook."""

    def __init__(self, act):
        for hook in HOOKS:
            setattr(self, hook, lambda *args, hook=hook, **kwargs: act(hook))


# ---- the class


def test_is_lightnings_timer():
    """The Trainer finds our Timer by isinstance, and its state in a checkpoint by the class' name."""
    assert issubclass(Timer, LightningTimer)
    assert Timer.__name__ == Timer().state_key == "Timer"


def test_trainer_without_max_epochs(tmp_path, clock):
    """With our Timer, as with Lightning's, an unset `max_epochs` is no limit."""
    trainer = fit(tmp_path, Timer("15s"), Model(clock), max_epochs=None)
    assert (trainer.max_epochs, trainer.global_step) == (-1, 15)


def test_max_time_is_ignored_beside_a_timer(tmp_path, clock, caplog):
    """`Trainer(max_time=)` beside our Timer is ignored, with a line in the log, even if the Timer has no limit."""
    timer = Timer()
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, timer, Model(clock), max_time="00:00:00:10", max_epochs=2)
    assert trainer.global_step == 24
    assert [c for c in trainer.callbacks if isinstance(c, LightningTimer)] == [timer]
    assert "callbacks list already contains a Timer" in caplog.text


def test_max_time_gives_way_to_the_models_timer(tmp_path, clock):
    """A Timer from `configure_callbacks` takes the place of the one that `max_time` made."""
    timer = Timer("20s")

    class WithTimer(Model):
        def configure_callbacks(self):
            return [timer]

    trainer = quiet_trainer(tmp_path, max_time="00:00:00:10")
    trainer.fit(WithTimer(clock))
    assert trainer.global_step == 20
    assert [c for c in trainer.callbacks if isinstance(c, LightningTimer)] == [timer]


def test_limitless_timer_without_max_epochs_warns(tmp_path, clock):
    """Where neither the Timer nor the Trainer ends the training, a warning says so."""

    class Ends(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 30

    with pytest.warns(UserWarning, match="Nothing ends this training: the Timer has no limit"):
        fit(tmp_path, Timer(), Model(clock), Ends(), max_epochs=None)


@pytest.mark.parametrize("settings", [{"max_epochs": 1}, {"max_epochs": None, "max_steps": 3}, {"fast_dev_run": True}])
def test_no_warning_where_something_ends_it(tmp_path, clock, settings):
    """A limitless Timer is silent where the Trainer has a limit."""
    fit(tmp_path, Timer(), Model(clock), **settings)


# ---- the arguments


@pytest.mark.parametrize("interval", ["invalid", "", None, 1, [], "Step"])
def test_refused_intervals(interval):
    """An unknown interval fails at construction, with the possible ones."""
    with pytest.raises(
        MisconfigurationException, match=r"Unsupported parameter value `Timer\(interval=.*: step, epoch"
    ):
        Timer("1h", interval=interval)


@pytest.mark.parametrize("path", ["", None, 1, ["a"]])
def test_refused_paths(path):
    """What is neither a bool nor a path fails at construction."""
    with pytest.raises(MisconfigurationException, match=r"`Timer\(save_on_limit=.*Expected True, False or a path"):
        Timer("1h", save_on_limit=path)


@pytest.mark.parametrize("argument", ["duration", "run_duration", "margin", "deadline"])
def test_number_is_no_attribute_error(argument):
    """A number is refused at construction, where Lightning's Timer raises an AttributeError."""
    with pytest.raises(MisconfigurationException, match=rf"`Timer\({argument}=3600\)`"):
        Timer(**{argument: 3600})


def test_empty_mapping_is_not_zero():
    """An empty mapping is refused, where Lightning's Timer takes it for 0 s."""
    with pytest.raises(MisconfigurationException, match=r"`Timer\(duration={}\)` is not a valid duration: it is empty"):
        Timer({})


def test_negative_is_refused():
    """A negative duration is refused, where Lightning's Timer accepts it."""
    with pytest.raises(MisconfigurationException, match="is negative"):
        Timer(timedelta(seconds=-1))


# ---- the clocks


def test_clocks_of_all_stages(tmp_path, clock):
    """Each stage has its own time, the sanity check included, summed over runs; validation is part of training."""
    timer, model = Timer(), Model(clock, val_s=0.5)
    trainer = quiet_trainer(tmp_path, timer, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(model)
    assert elapsed(timer) == {"train": 26.0, "sanity_check": 0.5, "validate": 2.0, "test": 0.0, "predict": 0.0}
    for _ in range(2):
        trainer.validate(model, verbose=False)
        trainer.test(model, verbose=False)
        trainer.predict(model)
    assert elapsed(timer) == {"train": 26.0, "sanity_check": 0.5, "validate": 4.0, "test": 8.0, "predict": 12.0}


def test_sanity_check_does_not_count_as_validation(tmp_path, clock):
    """A long sanity check leaves the validation's time alone."""
    timer = Timer()
    fit(tmp_path, timer, Model(clock, val_s=100.0), max_steps=3, num_sanity_val_steps=2)
    assert timer.time_elapsed("sanity_check") == 200.0
    assert timer.time_elapsed("validate") == 0.0
    assert timer.time_elapsed("train") == 3.0


def test_validation_is_counted_from_the_second_run_on(tmp_path, clock):
    """While a second validation runs, its time grows from the first one's sum, where Lightning's is frozen and negative."""
    timer, seen = Timer(), []

    class Validating(Model):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            seen.append(timer.time_elapsed("validate"))

    fit(tmp_path, timer, Validating(clock, val_s=0.5), max_epochs=3)
    assert seen == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


def test_predict_is_tracked(tmp_path, clock):
    """Prediction has a clock with a start and an end."""
    timer = Timer()
    begin_s = clock.now_s
    quiet_trainer(tmp_path, timer).predict(Model(clock))
    assert (timer.start_time("predict"), timer.end_time("predict")) == (begin_s, begin_s + 6.0)


def test_second_fit_is_added(tmp_path, clock):
    """A second fit of the same object goes on from the first one's time, in the clock and in the checkpoint."""
    timer, model = Timer(), Model(clock)
    trainer = fit(tmp_path, timer, model, max_epochs=1)
    clock.advance(1000)  # between fits no clock runs
    assert timer.time_elapsed() == 12.0
    trainer.fit_loop.max_epochs = 2
    states = []
    trainer.callbacks.append(
        Probe(
            lambda hook: states.append(timer.state_dict()["time_elapsed"]["train"]) if hook == "on_train_start" else 0
        )
    )
    trainer.fit(model)
    assert states == [12.0]
    assert timer.time_elapsed() == 24.0


def test_start_and_end_are_the_latest_runs(tmp_path, clock):
    """`start_time` and `end_time` are readings of the monotonic clock; while a stage runs it has no end."""
    timer, ends = Timer(), []
    begin_s = clock.now_s
    trainer = quiet_trainer(tmp_path, timer, Probe(lambda hook: ends.append(timer.end_time("test"))))
    trainer.test(Model(clock), verbose=False)
    assert (timer.start_time("test"), timer.end_time("test")) == (begin_s, begin_s + 4.0)
    ends.clear()
    clock.advance(50)
    trainer.test(Model(clock), verbose=False)
    assert (timer.start_time("test"), timer.end_time("test")) == (begin_s + 54.0, begin_s + 58.0)
    assert None in ends
    assert timer.start_time() is timer.end_time("train") is None


def test_unknown_stage_is_an_error():
    """As in Lightning, a stage that does not exist is a ValueError."""
    with pytest.raises(ValueError, match="nonsense"):
        Timer().time_elapsed("nonsense")


def test_clocks_never_fall(tmp_path, clock):
    """At no hook of several fits, validations, tests and predictions is any clock negative or lower than before."""
    timer = Timer("25s", validate_on_limit=True)
    last = dict.fromkeys(STAGES, 0.0)
    hooks = set()

    def look(hook):
        hooks.add(hook)
        clock.advance(0.001)
        for stage, seconds in elapsed(timer).items():
            assert seconds >= last[stage], (hook, stage)
            last[stage] = seconds

    trainer = quiet_trainer(tmp_path, Probe(look), timer, Probe(look), num_sanity_val_steps=1, val_check_interval=5)
    model = Model(clock, val_s=0.1)
    trainer.fit(model)
    trainer.fit(model)
    for run in (trainer.validate, trainer.test):
        run(model, verbose=False)
    trainer.predict(model)
    assert {"on_validation_end", "on_train_epoch_end", "on_test_batch_end", "on_predict_start"} <= hooks
    assert all(last.values())


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize(
    ("run", "hook"),
    [
        ("fit", "on_sanity_check_start"),
        ("fit", "on_train_batch_end"),
        ("fit", "on_validation_batch_end"),
        ("validate", "on_validation_batch_end"),
        ("test", "on_test_batch_end"),
        ("predict", "on_predict_batch_end"),
    ],
)
def test_exception_closes_the_clocks(tmp_path, clock, run, hook, error):
    """After an exception, SystemExit or Ctrl-C in any stage no clock runs on, and the stage has an end."""

    def fail(name):
        if name == hook:
            clock.advance(1.0)
            raise error

    timer = Timer("1h")
    trainer = quiet_trainer(tmp_path, timer, Probe(fail), num_sanity_val_steps=1)
    with pytest.raises((type(error), SystemExit)):
        getattr(trainer, run)(Model(clock))
    ended, remaining = elapsed(timer), timer.time_remaining()
    clock.advance(3600)
    assert elapsed(timer) == ended
    assert timer.time_remaining() == remaining
    for stage in STAGES:
        assert (timer.end_time(stage) is None) == (timer.start_time(stage) is None)
    assert sum(ended.values()) >= 1.0 or hook == "on_sanity_check_start"


def test_tuner_time_is_not_training_time(tmp_path, clock):
    """The steps of a learning rate finder before training are not counted, and do not spend the budget."""

    class Tuned(Model):
        lr = 0.01

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    timer = Timer("5s")
    model = Tuned(clock, batches=40)
    finder = LearningRateFinder(num_training_steps=20, update_attr=False, early_stop_threshold=None)
    trainer = fit(tmp_path, timer, model, finder, enable_checkpointing=True)
    assert len(model.seen) == 25
    assert (trainer.global_step, timer.time_elapsed()) == (5, 5.0)


# ---- the state


def test_state_is_lightnings(tmp_path, clock):
    """A checkpoint of Lightning's Timer loads into ours with the same time, and ours into Lightning's."""
    theirs, ours = LightningTimer(), Timer()
    theirs.load_state_dict({"time_elapsed": {"train": 12.5}})
    ours.load_state_dict(theirs.state_dict())
    assert ours.time_elapsed() == ours._offset == 12.5
    theirs = LightningTimer()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.time_elapsed() == 12.5

    model = Model(clock)
    for first, second in ((LightningTimer(), Timer()), (Timer(), LightningTimer())):
        trainer = fit(tmp_path, first, model, max_epochs=1)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        saved = torch.load(tmp_path / "x.ckpt")["callbacks"]["Timer"]["time_elapsed"]["train"]
        resumed = quiet_trainer(tmp_path, second, max_epochs=1)
        resumed.fit(model, ckpt_path=tmp_path / "x.ckpt")
        assert second._offset == saved
        assert second.time_elapsed() >= saved


def test_all_stages_are_restored(tmp_path, clock):
    """Every stage goes on from its time in the checkpoint, and downtime is not charged."""
    timer, model = Timer(), Model(clock, val_s=0.5)
    trainer = quiet_trainer(tmp_path, timer, max_epochs=1, num_sanity_val_steps=1)
    trainer.test(model, verbose=False)
    trainer.predict(model)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    before = elapsed(timer)
    assert all(before.values())
    clock.advance(86400)
    timer = Timer()
    fit(tmp_path, timer, model, max_epochs=2, ckpt_path=tmp_path / "x.ckpt")
    assert elapsed(timer) == {**before, "train": before["train"] + 13.0, "validate": before["validate"] + 1.0}


def test_loading_replaces(tmp_path, clock):
    """Loading into a used object equals loading into a new one, also when the loaded time is the smaller."""
    timer = Timer()
    trainer = fit(tmp_path, timer, Model(clock), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    fit(tmp_path, timer, Model(clock), max_epochs=4)
    assert timer.time_elapsed() == 60.0
    new = Timer()
    for loaded in (timer, new):
        fit(tmp_path, loaded, Model(clock), max_epochs=3, ckpt_path=tmp_path / "x.ckpt")
        assert loaded.time_elapsed() == 36.0
    assert timer.state_dict() == new.state_dict()


def test_save_load_save_changes_nothing(clock):
    """A state is the same after any number of loads and saves, also while a clock runs."""
    timer = Timer()
    timer._open(RunningStage.TRAINING)
    clock.advance(0.1)
    state = timer.state_dict()
    for _ in range(3):
        timer.load_state_dict(timer.state_dict())
        assert timer.state_dict() == state
    clock.advance(1.0)
    assert timer.time_elapsed() == pytest.approx(1.1)


BAD = [None, "12", math.nan, math.inf, -0.32, True, [1.0], 10**400, 1e300]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"time_elapsed": None},
        {"time_elapsed": "x"},
        {"time_elapsed": {"validate": 1.0}},
        {"something": 1},
        *({"time_elapsed": {**dict.fromkeys(STAGES, 1.0), "train": bad}} for bad in BAD),
    ],
    ids=lambda state: str(state)[:60],
)
def test_bad_state_counts_as_zero(tmp_path, clock, state):
    """Whatever a checkpoint holds in place of the training time: one warning, 0, and the limit still works."""
    timer = Timer("15s")
    with pytest.warns(UserWarning, match="no valid time in seconds for train=") as warnings:
        timer.load_state_dict(state)
    assert len(warnings) == 1
    assert timer.time_elapsed() == 0.0
    assert fit(tmp_path, timer, Model(clock)).global_step == 15


def test_unknown_stage_in_a_state(clock):
    """A stage that we do not know is named in a warning, and the others are restored."""
    timer = Timer()
    with pytest.warns(UserWarning, match="'tuning', an unknown stage"):
        timer.load_state_dict({"time_elapsed": {**dict.fromkeys(STAGES, 2.0), "tuning": 1.0}})
    assert elapsed(timer) == dict.fromkeys(STAGES, 2.0)


def test_state_that_is_no_mapping():
    """Even a state that is no mapping at all is only a warning."""
    timer = Timer()
    with pytest.warns(UserWarning, match="counted as 0"):
        timer.load_state_dict([1, 2])
    assert timer.time_elapsed() == 0.0


def test_pickling_at_any_moment(tmp_path, clock):
    """At every hook the Timer can be pickled and deep-copied; the copy has its clocks stopped at that moment."""
    timer = Timer("1h", run_duration="2h")
    copies = []

    def at(hook):
        for duplicate in (lambda: pickle.loads(pickle.dumps(timer)), lambda: copy.deepcopy(timer)):
            made = duplicate()
            copies.append(made)
            assert elapsed(made) == elapsed(timer), hook
            clock.advance(0.001)
            assert elapsed(made)["train"] <= elapsed(timer)["train"]
            assert made.time_remaining() == pytest.approx(timer.time_remaining(), abs=0.01)

    fit(tmp_path, timer, Model(clock, val_s=0.5), Probe(at), max_epochs=1, num_sanity_val_steps=1)
    assert len(copies) > 50
    assert not any(hasattr(made, "log") and made.log for made in copies if "log" in vars(made))
    used = copies[-1]
    before = used.time_elapsed()
    fit(tmp_path, used, Model(clock), max_epochs=1)
    assert used.time_elapsed() == pytest.approx(before + 12.0)
    assert timer.time_elapsed() < used.time_elapsed()


def test_torch_save_of_a_timer():
    """A Timer survives `torch.save`, as part of a pickled Trainer or model would."""
    timer = Timer("1h")
    timer.load_state_dict({"time_elapsed": dict.fromkeys(STAGES, 3.0)})
    buffer = io.BytesIO()
    torch.save(timer, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).time_remaining() == 3597.0


# ---- the hooks


def test_only_one_hook_is_called_per_batch(tmp_path, clock):
    """Lightning passes over every per-batch hook but one, and over that too without a limit."""
    actions = []

    class Profiler(type(quiet_trainer(tmp_path).profiler)):
        def start(self, action_name):
            actions.append(action_name)

        def stop(self, action_name):
            pass

    def hooks_of_timer(timer):
        actions.clear()
        trainer = quiet_trainer(tmp_path, timer, max_epochs=1)
        trainer.profiler = Profiler()
        trainer.profiler.profile = lambda name: _Record(name, actions)
        trainer.fit(Model(clock))
        called = [name.split(".")[-1] for name in actions if name.startswith("[Callback]Timer.")]
        return {hook: called.count(hook) for hook in PER_BATCH if hook in called}

    assert hooks_of_timer(Timer("1h")) == {"on_train_batch_end": 12}
    assert hooks_of_timer(Timer()) == {}
    assert hooks_of_timer(Timer("1h", interval="epoch")) == {}


class _Record:
    def __init__(self, name, actions):
        actions.append(name)

    def __enter__(self):
        return None

    def __exit__(self, *exc):
        return None


def test_a_step_reads_one_clock(tmp_path, clock):
    """Between looks at the limits a step costs one clock reading, and a look two or three more."""
    timer = Timer("1h")
    fit(tmp_path, timer, Model(clock, step_s=0.001, batches=500), max_epochs=1, limit_val_batches=0)
    assert clock.readings < 500 + 20


@pytest.mark.parametrize("limit", [None, "30s"])
def test_subclass_hooks_are_called(tmp_path, clock, limit):
    """A subclass that implements a hook we leave empty is called, may call `super()`, and survives pickling."""
    calls = []

    class Sub(Timer):
        def on_train_batch_start(self, *args, **kwargs):
            calls.append("start")
            super().on_train_batch_start(*args, **kwargs)

        def on_train_batch_end(self, *args, **kwargs):
            calls.append("end")
            super().on_train_batch_end(*args, **kwargs)

    Sub.__module__, Sub.__qualname__ = __name__, "Sub"
    globals()["Sub"] = Sub
    timer = pickle.loads(pickle.dumps(Sub(limit)))
    trainer = fit(tmp_path, timer, Model(clock), max_epochs=5 if limit else 1)
    steps = 30 if limit else 12
    assert trainer.global_step == steps
    assert calls == ["start", "end"] * steps


# ---- logging


def test_log(tmp_path, clock):
    """`log=True` logs the times in seconds at the Trainer's interval, beside the user's own metrics."""
    logger = CSVLogger(tmp_path, name="", version="")
    model = Model(clock, val_s=0.5)
    fit(tmp_path, Timer("30s", log=True), model, logger=logger, log_every_n_steps=5)
    logger.save()
    rows = [r for r in logger.experiment.metrics + _read(tmp_path) if "timer/train_elapsed" in r]
    times = {int(r["step"]): float(r["timer/train_elapsed"]) for r in rows if r["timer/train_elapsed"] != ""}
    left = {int(r["step"]): float(r["timer/remaining"]) for r in rows if r["timer/remaining"] != ""}
    assert times[4] == 5.0
    assert left[4] == 25.0
    assert times[14] == 16.0  # a validation of 1 s after step 12
    assert set(times) == {4, 9, 14, 19, 24, 27}  # and the last step
    validated = {int(r["step"]) for r in rows if r.get("timer/validate_elapsed", "") != ""}
    assert validated == {14, 19, 24, 27}  # a stage that has not run is absent, not 0


def _read(folder):
    import csv

    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_log_without_a_logger(tmp_path, clock):
    """`log=True` without any logger changes nothing."""
    assert fit(tmp_path, Timer("15s", log=True), Model(clock)).global_step == 15


def test_log_without_a_limit(tmp_path, clock):
    """`log=True` without a limit logs the elapsed times alone."""
    logger = CSVLogger(tmp_path, name="", version="")
    fit(tmp_path, Timer(log=True), Model(clock), logger=logger, log_every_n_steps=4, max_epochs=1)
    rows = _read(tmp_path)
    assert [float(r["timer/train_elapsed"]) for r in rows if r["timer/train_elapsed"]] == [4.0, 8.0, 12.0]
    assert "timer/remaining" not in rows[0]


def test_failing_logger_does_not_end_training(tmp_path, clock):
    """A logger that fails on our metrics costs one warning, and the limit holds."""

    class Failing(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if "timer/train_elapsed" in metrics:
                raise OSError("disk full")
            super().log_metrics(metrics, step)

    with pytest.warns(UserWarning, match="could not log its times: OSError: disk full. Training goes on") as warnings:
        trainer = fit(tmp_path, Timer("15s", log=True), Model(clock), logger=Failing(tmp_path), log_every_n_steps=1)
    assert trainer.global_step == 15
    assert len([w for w in warnings if "disk full" in str(w.message)]) == 1
