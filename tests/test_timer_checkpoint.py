"""`save_on_limit`: a checkpoint of the last step, from which a resume repeats and skips no batch."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from timer_fakes import Clock, Model, fit, quiet_trainer

from lightning_timekeeper import Timer
from lightning_timekeeper.limit_checkpoint import LimitCheckpoint


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr("lightning_timekeeper.timer.time", fake)
    return fake


ALL = [(epoch, batch) for epoch in range(5) for batch in range(12)]

SETTINGS = {
    "none": None,
    "default": {},
    "every_n_train_steps": {"every_n_train_steps": 7},
    "train_time_interval": {"train_time_interval": timedelta(hours=1)},
    "every_n_epochs": {"every_n_epochs": 2},
    "monitor": {"monitor": "val_loss"},
    "save_last": {"save_last": True},
    "save_on_exception": {"save_on_exception": True},
}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("stop_s", [1, 27, 36, 60])
@pytest.mark.parametrize("setting", SETTINGS)
def test_sixty_of_sixty(tmp_path, clock, setting, stop_s):
    """Under each usual ModelCheckpoint setting the last step is saved, and the resume trains exactly the rest."""
    for option in SETTINGS[setting] or ():
        if option not in inspect.signature(ModelCheckpoint).parameters:
            pytest.skip(f"this Lightning's ModelCheckpoint has no {option}")  # save_on_exception came with 2.5.3

    def train(timer, model, ckpt_path=None):
        checkpoints = [] if SETTINGS[setting] is None else [ModelCheckpoint(tmp_path, **SETTINGS[setting])]
        return fit(tmp_path, timer, model, *checkpoints, ckpt_path=ckpt_path, enable_checkpointing=bool(checkpoints))

    first, rest = Model(clock), Model(clock)
    trainer = train(Timer(timedelta(seconds=stop_s), save_on_limit=True), first)
    saved = torch.load(tmp_path / "timer.ckpt")
    assert saved["global_step"] == trainer.global_step == stop_s
    assert saved["callbacks"]["Timer"]["time_elapsed"]["train"] == stop_s
    for name, weight in first.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][name], weight)
    resumed = train(Timer(), rest, tmp_path / "timer.ckpt")
    assert first.seen + rest.seen == ALL
    assert (resumed.global_step, resumed.current_epoch) == (60, 5)


TRAININGS = {
    "no validation": {"limit_val_batches": 0},
    "val_check_interval": {"val_check_interval": 6},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2},
    "steps over epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
    "max_steps": {"max_steps": 60},
    "max_steps, no validation": {"max_steps": 60, "limit_val_batches": 0},
    "accumulate": {"accumulate_grad_batches": 4},
    "accumulate, max_steps": {"accumulate_grad_batches": 4, "max_steps": 15},
    "epochs": {"interval": "epoch"},
    "epochs, max_steps": {"interval": "epoch", "max_steps": 60},
    "min_epochs": {"min_epochs": 3},
    "min_epochs, max_steps": {"min_epochs": 3, "max_steps": 60},
    "min_steps": {"min_steps": 30},
    "no extra validation": {"validate_on_limit": False},
}


@pytest.mark.parametrize("stop_s", [5, 6, 11.9, 12, 12.5, 18, 18.5, 24.5])
@pytest.mark.parametrize("training", TRAININGS)
def test_exact_resume_from_any_stop(tmp_path, clock, training, stop_s):
    """Wherever the limit falls, in a step, a validation or at an epoch's end, first and second run make up the whole."""
    settings = dict(TRAININGS[training])
    options = {key: settings.pop(key) for key in ("interval", "validate_on_limit") if key in settings}
    first, rest = Model(clock, val_s=0.5), Model(clock)
    fit(tmp_path, Timer(timedelta(seconds=stop_s), save_on_limit=True, **options), first, **settings)
    resumed = fit(tmp_path, Timer(), rest, ckpt_path=tmp_path / "timer.ckpt", **settings)
    assert first.seen + rest.seen == ALL
    assert rest.seen
    assert resumed.current_epoch == 5


class CountingStop(EarlyStopping):
    """Never stops; tells what its checks saw."""

    def __init__(self):
        super().__init__("val_loss", patience=1000, min_delta=1e9)


@pytest.mark.parametrize("settings", [{}, {"max_steps": 60}, {"val_check_interval": 6}], ids=str)
@pytest.mark.parametrize("stop_s", [12, 12.5, 15, 24, 18.5])
def test_early_stopping_is_in_step(tmp_path, clock, settings, stop_s):
    """The file holds EarlyStopping after its check of the last step, and its resume neither repeats nor misses one."""
    whole = CountingStop()
    fit(tmp_path, Timer(), Model(clock), whole, **settings)
    model = Model(clock, val_s=0.5)
    timer = Timer(timedelta(seconds=stop_s), save_on_limit=True)
    fit(tmp_path, timer, model, CountingStop(), **settings)
    resumed = CountingStop()
    fit(tmp_path, Timer(), Model(clock), resumed, ckpt_path=tmp_path / "timer.ckpt", **settings)
    assert resumed.wait_count == whole.wait_count > 0


def test_file_is_written_after_all_callbacks(tmp_path, clock):
    """What a callback after the Timer does about the last step is in the file."""

    class Late(Callback):
        steps = 0

        def on_train_batch_end(self, *args):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

    fit(tmp_path, Timer("15s", save_on_limit=True), Model(clock), Late())
    assert {"steps": 15} in torch.load(tmp_path / "timer.ckpt")["callbacks"].values()


def test_schedulers_are_in_step(tmp_path, clock):
    """A learning rate that falls with each step, or with each epoch, goes on where it was."""
    for interval in ("step", "epoch"):

        class Scheduled(Model):
            rates = ()

            def configure_optimizers(self):
                optimizer = super().configure_optimizers()
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                return [optimizer], [{"scheduler": scheduler, "interval": interval}]  # noqa: B023

            def training_step(self, batch, batch_idx):
                self.rates = (*self.rates, self.optimizers().param_groups[0]["lr"])
                return super().training_step(batch, batch_idx)

        whole = Scheduled(clock)
        fit(tmp_path, Timer(), whole)
        for stop_s in (12, 27):
            first, rest = Scheduled(clock), Scheduled(clock)
            fit(tmp_path, Timer(timedelta(seconds=stop_s), save_on_limit=True), first)
            fit(tmp_path, Timer(), rest, ckpt_path=tmp_path / "timer.ckpt")
            assert first.rates + rest.rates == whole.rates


# ---- where it goes


def test_beside_the_first_model_checkpoint(tmp_path, clock):
    """True puts the file beside the first ModelCheckpoint's."""
    callbacks = [ModelCheckpoint(tmp_path / "a"), ModelCheckpoint(tmp_path / "b", every_n_epochs=2)]
    fit(tmp_path, Timer("15s", save_on_limit=True), Model(clock), *callbacks, enable_checkpointing=True)
    assert [path.parent.name for path in tmp_path.rglob("timer.ckpt")] == ["a"]


def test_under_the_log_dir(tmp_path, clock):
    """Without a ModelCheckpoint, True puts the file into the Trainer's log dir."""
    logger = CSVLogger(tmp_path, name="run", version=3)
    fit(tmp_path, Timer("15s", save_on_limit=True), Model(clock), logger=logger, log_every_n_steps=1)
    assert (tmp_path / "run" / "version_3" / "timer.ckpt").is_file()


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_at_a_path(tmp_path, clock, kind):
    """A path is used as it is, its folders are made, and an existing file is replaced."""
    path = tmp_path / "deep" / "er" / "last.ckpt"
    for steps in (15, 17):
        fit(tmp_path, Timer(timedelta(seconds=steps), save_on_limit=kind(path)), Model(clock))
        assert torch.load(path)["global_step"] == steps


def test_no_file_without_a_stop(tmp_path, clock):
    """A fit that ends by itself, or trains nothing, writes no file."""
    fit(tmp_path, Timer("1h", save_on_limit=True), Model(clock))
    fit(tmp_path, Timer("0s", save_on_limit=True), Model(clock))
    fit(tmp_path, Timer("1s", save_on_limit=True), Model(clock), fast_dev_run=2)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_spent_budget_leaves_the_file_alone(tmp_path, clock):
    """A resume that trains nothing keeps the file that it resumed from, byte for byte."""
    fit(tmp_path, Timer("15s", save_on_limit=True), Model(clock))
    before = (tmp_path / "timer.ckpt").read_bytes()
    fit(tmp_path, Timer("15s", save_on_limit=True), Model(clock), ckpt_path=tmp_path / "timer.ckpt")
    assert (tmp_path / "timer.ckpt").read_bytes() == before


# ---- what it must not disturb


def test_failing_save_is_a_warning(tmp_path, clock):
    """A save that fails is one warning that names the path, and training ends in order."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.ckpt"
    ends = []

    class End(Callback):
        def on_train_end(self, trainer, pl_module):
            ends.append(trainer.global_step)

    with pytest.warns(UserWarning, match=r"could not save '.*file/x.ckpt': \w+Error") as warnings:
        trainer = fit(tmp_path, Timer("24s", save_on_limit=path), Model(clock), End())
    assert len([w for w in warnings if "could not save" in str(w.message)]) == 1
    assert (ends, trainer.state.status) == ([24], "finished")


@pytest.mark.parametrize("fails", [False, True])
def test_trainer_is_as_before(tmp_path, clock, fails):
    """After the fit, also one that failed, the Trainer's callbacks are the user's, and it may fit again."""

    class Fails(Callback):
        def on_train_epoch_end(self, *args):
            if fails:
                raise RuntimeError("x")

    trainer = quiet_trainer(tmp_path, Timer("15s", save_on_limit=True), Fails())
    callbacks = list(trainer.callbacks)
    try:
        trainer.fit(Model(clock))
    except RuntimeError:
        assert fails
    assert trainer.callbacks == callbacks
    assert trainer.checkpoint_callbacks == []
    fails = False
    trainer.fit(Model(clock))
    assert not any(isinstance(callback, LimitCheckpoint) for callback in trainer.callbacks)


def test_own_checkpoints_keep_their_counts(tmp_path, clock):
    """The counts are changed in the timer's file only: a ModelCheckpoint's file of the same epoch's end has Lightning's."""
    checkpoint = ModelCheckpoint(tmp_path, filename="own", save_on_train_epoch_end=True)
    fit(tmp_path, Timer("24s", save_on_limit=True), Model(clock), checkpoint, enable_checkpointing=True)
    own, ours = (torch.load(tmp_path / name)["loops"]["fit_loop"] for name in ("own.ckpt", "timer.ckpt"))
    assert own["epoch_progress"]["total"]["processed"] == 2
    assert ours["epoch_progress"]["total"]["processed"] == 1
