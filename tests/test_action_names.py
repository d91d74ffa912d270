"""The profiler actions that the timeline is made of: texts in Lightning's code, the same in 2.5.0, 2.5.6 and 2.6.6.

Where a test here fails for a new Lightning, it has renamed, dropped or added an action: see what phases.py and the
watches in recording.py make of it, then write the new name down here.
"""

from __future__ import annotations

import re

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.profilers import Profiler
from timer_fakes import Model, quiet_trainer

from lightning_timekeeper import phases

ACTIONS = {
    "[LightningModule].configure_callbacks",
    "[LightningModule].configure_gradient_clipping",
    "[LightningModule].configure_optimizers",
    "[LightningModule].optimizer_step",
    "[LightningModule].optimizer_zero_grad",
    "[LightningModule].predict_dataloader",
    "[LightningModule].setup",
    "[LightningModule].teardown",
    "[LightningModule].test_dataloader",
    "[LightningModule].train_dataloader",
    "[LightningModule].transfer_batch_to_device",
    "[LightningModule].val_dataloader",
    "[Strategy].backward",
    "[Strategy].batch_to_device",
    "[Strategy].predict_step",
    "[Strategy].test_step",
    "[Strategy].training_step",
    "[Strategy].validation_step",
    "[_EvaluationLoop].test_next",
    "[_EvaluationLoop].val_next",
    "[_PredictionLoop].predict_next",
    "[_TrainingEpochLoop].train_dataloader_next",
    "[Callback].setup",
    "[Callback].teardown",
    "run_training_batch",
    "run_training_epoch",
    "save_checkpoint",
}


class Names(Profiler):
    """Writes down the actions: the kind in brackets and the last component, in the order of their begins."""

    def __init__(self):
        super().__init__()
        self.begun, self.open, self.parents = [], [], {}

    def start(self, action_name):
        name = re.sub(r"^\[(\w+)\].*\.(\w+)$", r"[\1].\2", action_name, flags=re.DOTALL)
        self.begun.append(name)
        self.parents.setdefault(name, set()).add(self.open[-1] if self.open else None)
        self.open.append(name)

    def stop(self, action_name):
        self.open.pop()


@pytest.fixture
def trainer(tmp_path):
    def make(*callbacks, **settings):
        limits = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), 1)
        return quiet_trainer(
            tmp_path,
            *callbacks,
            **{"profiler": Names(), "max_epochs": 1, "limit_train_batches": 2, **limits, **settings},
        )

    return make


def no_hooks(names):
    return {name for name in names if not re.search(r"\]\.on_", name)}


def test_the_actions_are_those_that_we_know(tmp_path, trainer):
    """A fit with a sanity check, clipping and checkpoints, a validation, a test and a prediction have these, no others."""
    settings = {"num_sanity_val_steps": 1, "gradient_clip_val": 1.0, "enable_checkpointing": True}
    run, model = trainer(EarlyStopping("val_loss", strict=False), ModelCheckpoint(tmp_path), **settings), Model()
    run.fit(model)
    run.validate(model, verbose=False)
    run.test(model, verbose=False)
    run.predict(model)
    found = no_hooks(run.profiler.begun)
    assert found == ACTIONS, f"new: {sorted(found - ACTIONS)}, gone: {sorted(ACTIONS - found)}"


def test_the_actions_of_a_step_lie_in_one_another_as_we_know(trainer):
    """The spans of a step are found by what is around them."""
    run = trainer(gradient_clip_val=1.0)
    run.fit(Model())
    parents = run.profiler.parents
    step = "[LightningModule].optimizer_step"
    assert (
        parents["run_training_batch"] == parents["[_TrainingEpochLoop].train_dataloader_next"] == {"run_training_epoch"}
    )
    assert parents["[Strategy].batch_to_device"] == {"run_training_epoch"}
    assert parents[step] == {"run_training_batch"}
    for inner in (
        "[Strategy].training_step",
        "[LightningModule].optimizer_zero_grad",
        "[Strategy].backward",
        "[LightningModule].on_before_optimizer_step",
        "[LightningModule].configure_gradient_clipping",
    ):
        assert parents[inner] == {step}, inner


def test_the_actions_of_manual_optimization(trainer):
    """The user's step is an action without a kind."""

    class Manual(Model):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self(batch))
            optimizer.step()

    run = trainer()
    run.fit(Manual())
    parents = run.profiler.parents
    assert parents["optimizer_step"] == {"[Strategy].training_step"}
    assert "[LightningModule].optimizer_step" not in parents


def test_each_name_that_a_phase_is_known_by_is_lightnings():
    """A name that no Lightning has any more would be found out here."""
    known = {name.rpartition(".")[2] for name in ACTIONS}
    hooks = {"on_before_batch_transfer", "on_after_batch_transfer"}
    # only where the module or its data implement them, or the loop comes to them
    rare = {"prepare_data", "configure_model", "configure_sharded_model", "lr_scheduler_step"}
    assert set(phases._BY_METHOD) <= known | hooks | rare
