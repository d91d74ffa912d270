"""With TensorBoard's logger, the CSV logger, and none: where the files go, and what the loggers are given."""

from __future__ import annotations

import csv

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from timer_fakes import Clock, Model, quiet_trainer

from lightning_timekeeper import TimelineTrace, Timer


def rows_of_csv(directory):
    """(step, elapsed seconds of training) of each row that has them."""
    with open(directory / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("timer/train_elapsed")]
    return [(int(row["step"]), float(row["timer/train_elapsed"])) for row in rows]


def rows_of_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return [(event.step, event.value) for event in events.Scalars("timer/train_elapsed")]


@pytest.fixture
def fit(tmp_path, monkeypatch):
    def run(*callbacks, **settings):
        clock = Clock()
        monkeypatch.setattr("lightning_timekeeper.timer.time", clock)
        timer, timeline = Timer("9s", log=True, save_on_limit=True, verbose=False), TimelineTrace(summary=False)
        trainer = quiet_trainer(
            tmp_path, timer, timeline, *callbacks, limit_val_batches=0, log_every_n_steps=4, **settings
        )
        trainer.fit(Model(clock))
        assert timer.stop_reason == "duration"
        return timeline

    return run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of protobuf, by tensorboard
@pytest.mark.parametrize("kind", ["TensorBoard", "CSV"])
def test_a_logger(fit, tmp_path, kind):
    """Trace and checkpoint lie in its version's directory, and it is given the times at the Trainer's interval and at its end."""
    if kind == "TensorBoard":
        pytest.importorskip("tensorboard")
    make, rows = {"TensorBoard": (TensorBoardLogger, rows_of_tensorboard), "CSV": (CSVLogger, rows_of_csv)}[kind]
    timeline = fit(logger=make(tmp_path, name="run"))
    directory = tmp_path / "run" / "version_0"
    assert timeline.path == str(directory / "fit-rank0.json")
    assert (directory / "timer.ckpt").is_file()
    assert rows(directory) == [(3, 4.0), (7, 8.0), (8, 9.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_loggers(fit, tmp_path):
    """The first one's directory is the run's, as for Lightning; both are given the times."""
    pytest.importorskip("tensorboard")
    timeline = fit(logger=[CSVLogger(tmp_path, name="c"), TensorBoardLogger(tmp_path, name="t")])
    assert timeline.path == str(tmp_path / "c" / "version_0" / "fit-rank0.json")
    assert rows_of_csv(tmp_path / "c" / "version_0") == rows_of_tensorboard(tmp_path / "t" / "version_0")


def test_no_logger(fit, tmp_path):
    """Trace and checkpoint lie in the Trainer's root directory, and ``log=True`` asks for nothing that is not there."""
    timeline = fit()
    assert timeline.path == str(tmp_path / "fit-rank0.json")
    assert (tmp_path / "timer.ckpt").is_file()


def test_a_checkpoint_callback_beside_no_logger(fit, tmp_path):
    """The last step's checkpoint lies beside the others."""
    fit(ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=4), enable_checkpointing=True)
    assert (tmp_path / "checkpoints" / "timer.ckpt").is_file()
