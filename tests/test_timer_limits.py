"""The limits hold, with at most one step too many, whatever the Trainer does; on real fits with a fake clock."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from timer_fakes import Clock, Model, fit, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_timekeeper import Timer


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr("lightning_timekeeper.timer.time", fake)
    return fake


def deadline_in(clock, seconds):
    return datetime.fromtimestamp(clock.time() + seconds, tz=timezone.utc)


# ---- the first to come, and the message


@pytest.mark.parametrize(
    ("limits", "steps", "reason"),
    [
        ({"duration": "17s"}, 17, "duration"),
        ({"run_duration": "17s"}, 17, "run_duration"),
        ({"duration": "30s", "run_duration": "20s"}, 20, "run_duration"),
        ({"duration": "18.5s", "margin": "2s"}, 17, "duration"),
        ({"duration": {"seconds": 20}, "run_duration": timedelta(seconds=40), "margin": "PT5S"}, 15, "duration"),
    ],
)
def test_the_first_limit_ends_training(tmp_path, clock, caplog, limits, steps, reason):
    """The first limit to come ends the fit with the step in which it is reached, and is named once in the log."""
    timer = Timer(**limits)
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, timer, Model(clock))
    assert trainer.global_step == steps
    assert timer.stop_reason == reason
    [message] = [r.message for r in caplog.records if "Time limit reached" in r.message]
    assert message == (
        f"Time limit reached. The Timer's `{reason}` ends at step {steps}. Elapsed time is {steps}s."
        " Signaling Trainer to stop."
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_deadline_ends_training(tmp_path, clock, as_text):
    """A deadline, less its margin, ends the fit by the wall clock."""
    deadline = deadline_in(clock, 20)
    timer = Timer(deadline=deadline.isoformat() if as_text else deadline, margin="4s")
    assert fit(tmp_path, timer, Model(clock)).global_step == 16
    assert timer.stop_reason == "deadline"
    assert timer.time_remaining() == 0.0


def test_deadline_follows_the_wall_clock(tmp_path, clock):
    """A wall clock set forward ends the run within a second; set back, it does so later; durations do not notice."""

    class SetClock(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 30:
                clock.unix_offset_s += shift_s

    def steps(timer):
        return fit(tmp_path, timer, Model(clock, step_s=0.1), SetClock(), max_epochs=20).global_step

    shift_s = 3600.0
    assert 30 < steps(Timer(deadline=deadline_in(clock, 10))) <= 41
    shift_s = -5.0
    assert steps(Timer(deadline=deadline_in(clock, 10))) == 150
    shift_s = 3600.0
    assert steps(Timer("10s")) == 100


def test_slurm_deadline(tmp_path, clock, monkeypatch):
    """'slurm' ends the fit a margin before the job's end."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(clock.time()) + 20))
    timer = Timer(deadline="slurm", margin="5s")
    assert fit(tmp_path, timer, Model(clock)).global_step in (14, 15)
    assert timer.stop_reason == "deadline"


def test_slurm_outside_a_job(tmp_path, clock, monkeypatch):
    """Outside Slurm there is a warning, no deadline, and the other limits hold."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.warns(UserWarning, match="no end of a Slurm job in `SLURM_JOB_END_TIME`: there is no deadline"):
        trainer = fit(tmp_path, Timer(deadline="slurm"), Model(clock), max_epochs=2)
    assert trainer.global_step == 24
    with pytest.warns(UserWarning, match="no deadline"):
        assert fit(tmp_path, Timer("7s", deadline="slurm"), Model(clock)).global_step == 7


def test_no_message_when_not_verbose(tmp_path, clock, caplog):
    """`verbose=False` is silent."""
    with caplog.at_level("INFO"):
        fit(tmp_path, Timer("7s", verbose=False), Model(clock))
    assert "Time limit" not in caplog.text


def test_stop_reason_is_of_the_latest_fit(tmp_path, clock):
    """A fit that ends by itself has no stop reason, whatever the one before had."""
    timer = Timer(run_duration="15s")
    fit(tmp_path, timer, Model(clock))
    assert timer.stop_reason == "run_duration"
    fit(tmp_path, timer, Model(clock), max_epochs=1)
    assert timer.stop_reason is None


def test_run_duration_counts_setup_and_sanity_check(tmp_path, clock):
    """`run_duration` runs from `setup`: what the set-up and the sanity check take is gone from it, for every fit anew."""

    class Slow(Model):
        def setup(self, stage):
            clock.advance(10.0)

    timer = Timer(run_duration="30s")
    for _ in range(2):
        assert (
            fit(tmp_path, timer, Slow(clock, val_s=2.0), num_sanity_val_steps=2, limit_val_batches=2).global_step == 12
        )
    assert fit(tmp_path, timer, Slow(clock, val_s=10.0), num_sanity_val_steps=2).global_step == 0


def test_remaining(tmp_path, clock):
    """The time remaining is the least over the limits, falls while training, and exists for training alone."""
    assert Timer().time_remaining() is None
    timer = Timer("1h", run_duration="30m", margin="5m")
    assert timer.time_remaining() == 25 * 60
    assert timer.time_remaining("validate") is timer.time_remaining("test") is timer.time_remaining("predict") is None
    fit(tmp_path, timer, Model(clock, step_s=60.0), max_epochs=1)
    assert timer.time_remaining() == 13 * 60
    clock.advance(3600)
    assert timer.time_remaining() == 13 * 60


# ---- where Lightning's Timer loses its limit


def test_limit_holds_in_a_second_fit(tmp_path, clock):
    """A second fit of the same object has what the first left of the duration: nothing, if it ended by it."""
    timer = Timer("15s")
    assert fit(tmp_path, timer, Model(clock), max_epochs=1).global_step == 12
    assert fit(tmp_path, timer, Model(clock)).global_step == 3
    assert fit(tmp_path, timer, Model(clock)).global_step == 0
    assert timer.time_elapsed() == 15.0


def test_limit_holds_when_resumed_into_the_same_object(tmp_path, clock):
    """A resume into the object that trained before has the checkpoint's budget, not a fresh one."""
    timer = Timer("30s")
    fit(tmp_path, timer, Model(clock), max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    fit(tmp_path, timer, Model(clock))
    model = Model(clock)
    assert fit(tmp_path, timer, model, ckpt_path=tmp_path / "x.ckpt").global_step == 30
    assert len(model.seen) == 18
    assert timer.time_elapsed() == 30.0


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_limit_holds_when_batches_are_skipped(tmp_path, clock, interval):
    """With `on_train_batch_start` returning -1, which leaves out `on_train_batch_end`, the epoch's end still stops."""

    class Skipping(Model):
        def on_train_batch_start(self, batch, batch_idx):
            clock.advance(1.0)
            return -1

    trainer = fit(tmp_path, Timer("3.5s", interval=interval), Skipping(clock), max_epochs=50, limit_val_batches=0)
    assert (trainer.current_epoch, trainer.global_step) == (4, 0)


def test_limit_holds_after_a_longer_one(tmp_path, clock):
    """A resume with a longer limit goes on for the difference."""
    fit(tmp_path, Timer("12s"), Model(clock)).save_checkpoint(tmp_path / "x.ckpt")
    timer = Timer("24s")
    assert fit(tmp_path, timer, Model(clock), ckpt_path=tmp_path / "x.ckpt").global_step == 24
    assert timer.time_elapsed() == 24.0


class RestoresLate(SingleDeviceStrategy):
    """As FSDP and DeepSpeed do, it restores a checkpoint after `on_fit_start`."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize("strategy", [lambda: "auto", lambda: RestoresLate("cpu")], ids=["before", "after"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("end", ["mid-epoch", "epoch"])
def test_spent_budget_trains_nothing(tmp_path, clock, interval, strategy, end):
    """A resume with a spent budget trains 0 steps, in both intervals, also where the state comes after set-up."""
    timer = Timer("15s" if end == "mid-epoch" else "12s")
    trainer = fit(tmp_path, timer, Model(clock), limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    model = Model(clock)
    timer = Timer("12s", interval=interval)
    settings = {"accelerator": "auto", "strategy": strategy()}
    resumed = fit(tmp_path, timer, model, ckpt_path=tmp_path / "x.ckpt", **settings)
    assert (model.seen, model.validations) == ([], [])
    assert resumed.global_step == trainer.global_step
    assert timer.stop_reason == "duration"


@pytest.mark.parametrize(
    "limits", [{"duration": "0s"}, {"run_duration": timedelta(0)}, {"duration": "5s", "margin": "6s"}]
)
def test_zero_trains_nothing(tmp_path, clock, limits):
    """A budget of zero, or one that the margin uses up, trains 0 steps."""
    trainer = fit(tmp_path, Timer(**limits), Model(clock))
    assert (trainer.global_step, trainer.current_epoch) == (0, 0)


def test_past_deadline_trains_nothing(tmp_path, clock):
    """A deadline in the past trains 0 steps."""
    assert fit(tmp_path, Timer(deadline=deadline_in(clock, -1)), Model(clock)).global_step == 0


# ---- where Lightning's Timer is late


@pytest.mark.parametrize("settings", [{"val_check_interval": 6}, {"val_check_interval": 12}, {}])
def test_limit_inside_a_validation_ends_with_it(tmp_path, clock, settings):
    """A limit reached in a validation ends the fit at its end: no further step, no second validation."""
    at = settings.get("val_check_interval", 12)
    model, timer = Model(clock, val_s=100.0), Timer(timedelta(seconds=at + 50))
    trainer = fit(tmp_path, timer, model, **settings)
    assert (trainer.global_step, model.validations) == (at, [at])
    assert timer.time_elapsed() == at + 200.0


@pytest.mark.parametrize("step_s", [0.1, 0.3, 1 / 3, 1.0, 7.7])
def test_at_most_one_step_too_many(tmp_path, clock, step_s):
    """The fit ends with the step in which the limit is reached, for steps of any length."""
    timer = Timer("10s")
    steps = fit(tmp_path, timer, Model(clock, step_s=step_s), max_epochs=50, limit_val_batches=0).global_step
    assert (steps - 1) * step_s < 10 - 1e-6
    assert steps * step_s >= 10 - 1e-6


def test_interval_epoch_ends_whole_epochs(tmp_path, clock):
    """With `interval="epoch"` the fit ends after the epoch in which the limit is reached, whatever is validated."""
    model = Model(clock, val_s=0.5)
    assert fit(tmp_path, Timer("16s", interval="epoch"), model, val_check_interval=4).global_step == 24
    assert model.validations == [4, 8, 12, 16, 20, 24]


def test_epoch_end_is_checked_in_both_intervals(tmp_path, clock):
    """A limit reached between the last step and the end of its epoch stops there, also with `interval="step"`."""

    class Slow(Callback):
        def on_train_epoch_end(self, *args):
            clock.advance(100.0)

    timer = Timer("50s")
    trainer = quiet_trainer(tmp_path, Slow(), timer)
    trainer.fit(Model(clock))
    assert trainer.global_step == 12


# ---- what the Trainer can do besides


@pytest.mark.parametrize("limit_s", range(1, 14))
def test_no_accumulation_window_is_cut(tmp_path, clock, limit_s):
    """The fit ends after an optimizer step, never between two, so that no gradient is thrown away."""
    model = Model(clock, batches=10)
    trainer = fit(tmp_path, Timer(timedelta(seconds=limit_s)), model, accumulate_grad_batches=4, limit_val_batches=0)
    ends = [4, 8, 10, 14]  # Lightning steps with an epoch's last batch, too
    assert len(model.seen) == next(end for end in ends if end >= limit_s)
    assert trainer.global_step == ends.index(len(model.seen)) + 1


def test_validation_inside_a_window_waits_for_its_step(tmp_path, clock):
    """A limit reached in a validation in the middle of a window ends the fit with the window's optimizer step."""
    model = Model(clock, val_s=100.0)
    trainer = fit(tmp_path, Timer("50s"), model, accumulate_grad_batches=4, val_check_interval=6)
    assert (len(model.seen), trainer.global_step) == (8, 2)


@pytest.mark.parametrize(("every", "steps"), [(1, 7), (3, 9)])
def test_manual_optimization(tmp_path, clock, every, steps):
    """With manual optimization the fit ends with the batch that steps the optimizer."""

    class Manual(Model):
        def __init__(self, clock):
            super().__init__(clock)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            if (batch_idx + 1) % every == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()

    model = Manual(clock)
    trainer = fit(tmp_path, Timer("7s"), model)
    assert (len(model.seen), trainer.global_step) == (steps, steps // every)


def test_manual_optimization_that_lightning_does_not_count(tmp_path, clock):
    """Where Lightning never counts an optimizer step, each batch may be the last."""

    class Uncounted(Model):
        def __init__(self, clock):
            super().__init__(clock)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            super().training_step(batch, batch_idx).backward()
            optimizer.step()

    model = Uncounted(clock)
    fit(tmp_path, Timer("7s"), model)
    assert len(model.seen) == 7


def test_iterable_dataset_without_validation(tmp_path, clock):
    """The limit holds over an endless iterable dataset in a model without a validation loop."""

    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(2)

    class NoValidation(Model):
        validation_step, val_dataloader = LightningModule.validation_step, LightningModule.val_dataloader

        def train_dataloader(self):
            return DataLoader(Endless(), batch_size=None)

    assert fit(tmp_path, Timer("77s"), NoValidation(clock), max_epochs=None).global_step == 77


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"min_epochs": 2}, 24),
        ({"min_steps": 20, "min_epochs": 0}, 20),
        ({"min_steps": 20}, 20),
        ({"min_steps": 4}, 12),
        ({"min_steps": 30, "min_epochs": 2}, 30),
    ],
)
def test_minima_are_respected_with_one_message(tmp_path, clock, caplog, settings, steps):
    """`min_steps` and `min_epochs` are trained past the limit, with one message instead of one per step."""
    with caplog.at_level("INFO"):
        trainer = fit(tmp_path, Timer("3s"), Model(clock), limit_val_batches=0, **settings)
    assert trainer.global_step == steps
    assert caplog.text.count("Time limit reached") == 1


def test_other_stops_are_left_alone(tmp_path, clock):
    """A stop by another callback is neither undone nor claimed by the Timer."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step >= 5

    timer = Timer("1h")
    trainer = quiet_trainer(tmp_path, Stop(), timer)
    trainer.fit(Model(clock))
    assert (trainer.global_step, timer.stop_reason) == (5, None)


# ---- validate_on_limit


@pytest.mark.parametrize(("validate", "validations"), [(True, [12, 15]), (False, [12])])
def test_validate_on_limit(tmp_path, clock, validate, validations):
    """False leaves out the Trainer's extra validation after a stop in mid-epoch, and puts `limit_val_batches` back."""
    model = Model(clock)
    trainer = fit(tmp_path, Timer("15s", validate_on_limit=validate), model, limit_val_batches=2)
    assert (model.validations, trainer.limit_val_batches) == (validations, 2)


def test_validate_on_limit_at_an_epochs_end(tmp_path, clock):
    """False also leaves out the validation that the stopped epoch would have had anyway."""
    model = Model(clock)
    trainer = fit(tmp_path, Timer("24s", validate_on_limit=False), model)
    assert (model.validations, trainer.limit_val_batches) == ([12], 1.0)


def test_validations_before_a_minimum_are_kept(tmp_path, clock):
    """While `min_steps` keeps training past the limit, the validations go on; the one after the stop is left out."""
    model = Model(clock)
    fit(tmp_path, Timer("3s", validate_on_limit=False), model, min_steps=30)
    assert model.validations == [12, 24]


@pytest.mark.parametrize("steps", [15, 3])
@pytest.mark.parametrize(
    "callback",
    [lambda: EarlyStopping("val_loss"), lambda: ModelCheckpoint(monitor="val_loss")],
    ids=["EarlyStopping", "ModelCheckpoint"],
)
def test_monitored_metric_without_a_value_keeps_the_validation(tmp_path, clock, callback, steps):
    """Where a callback would raise for want of its metric, the extra validation runs after all."""
    model = Model(clock)
    timer = Timer(timedelta(seconds=steps), validate_on_limit=False)
    callback = callback()
    checkpointing = isinstance(callback, ModelCheckpoint)
    fit(tmp_path, timer, model, callback, enable_checkpointing=checkpointing, num_sanity_val_steps=1)
    assert model.validations == ([12] if steps == 15 else [3])


def test_plateau_scheduler_keeps_the_validation(tmp_path, clock):
    """The same holds for a scheduler that waits for a metric without a value."""

    class Plateau(Model):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    model = Plateau(clock)
    fit(tmp_path, Timer("12s", validate_on_limit=False), model)
    assert model.validations == [12]


def test_limit_val_batches_is_put_back_after_an_exception(tmp_path, clock):
    """Also when training fails after the stop, the Trainer gets its `limit_val_batches` back."""

    class Fails(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            assert trainer.limit_val_batches == 0
            raise RuntimeError("x")

    trainer = quiet_trainer(tmp_path, Timer("15s", validate_on_limit=False), Fails(), limit_val_batches=0.5)
    with pytest.raises(RuntimeError, match="x"):
        trainer.fit(Model(clock, batches=20))
    assert trainer.limit_val_batches == 0.5


# ---- our failures


def test_our_failure_is_one_warning(tmp_path, clock):
    """If looking at the limits fails, training goes on to its end with one warning."""

    class Broken(Timer):
        def time_elapsed(self, stage="train"):
            if self.start_time() is not None:
                raise ZeroDivisionError("oops")
            return super().time_elapsed(stage)

    with pytest.warns(
        UserWarning, match="could not look at its limits: ZeroDivisionError: oops. Training goes on"
    ) as w:
        trainer = fit(tmp_path, Broken("5s"), Model(clock), max_epochs=1)
    assert trainer.global_step == 12
    assert len([one for one in w if "oops" in str(one.message)]) == 1
