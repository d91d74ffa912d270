"""Action names of Lightning's -> short names and phases."""

from __future__ import annotations

import pytest

from lightning_timekeeper.phases import phase_of


@pytest.mark.parametrize(
    ("action", "name", "phase"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "train_dataloader_next", "data"),
        ("[_EvaluationLoop].val_next", "val_next", "data"),
        ("[_EvaluationLoop].test_next", "test_next", "data"),
        ("[_PredictionLoop].predict_next", "predict_next", "data"),
        ("[Strategy]SingleDeviceStrategy.batch_to_device", "batch_to_device", "transfer"),
        ("[Strategy]DDPStrategy.training_step", "training_step", "forward"),
        ("[Strategy]DDPStrategy.validation_step", "validation_step", "validation"),
        ("[Strategy]DDPStrategy.backward", "backward", "backward"),
        ("[LightningModule]Net.optimizer_step", "optimizer_step", "optimizer"),
        ("[LightningModule]Net.configure_gradient_clipping", "configure_gradient_clipping", "clip"),
        ("[LightningModule]Net.optimizer_zero_grad", "optimizer_zero_grad", "zero_grad"),
        ("[LightningModule]Net.on_train_start", "Net.on_train_start", "module"),
        ("[LightningDataModule]Data.setup", "setup", "setup"),
        ("[Callback]TQDMProgressBar.on_train_batch_end", "TQDMProgressBar.on_train_batch_end", "callback"),
        ("[Callback]main.<locals>.Mine.on_fit_end", "Mine.on_fit_end", "callback"),
        ("[Callback]My.setup", "My.setup", "callback"),
        (
            "[Callback]ModelCheckpoint{'monitor': 'a.b', 'mode': 'min', 'every_n_train_steps': 0}.on_train_batch_end",
            "ModelCheckpoint.on_train_batch_end",
            "callback",
        ),
        ("[Strategy]DDPStrategy.on_train_batch_start", "DDPStrategy.on_train_batch_start", "loop"),
        ("save_checkpoint", "save_checkpoint", "checkpoint"),
        ("run_training_epoch", "run_training_epoch", "loop"),
        ("optimizer_step", "optimizer_step", "optimizer"),
        ("my own action", "my own action", "user"),
        ("v1.2", "v1.2", "user"),
        ("", "", "user"),
    ],
)
def test_actions(action, name, phase):
    """A short name without the strategy's or a whole state key, and the phase that the time counts for."""
    assert phase_of(action) == (name, phase)
