"""A clock that moves when a test says so, and a training whose steps and validations take the time they are told."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset


class Clock:
    """Stands in for the module ``time`` where the Timer reads it."""

    def __init__(self, start_s=7_654_321.25, unix_s=1_900_000_000.0):
        self.now_s = start_s
        self.unix_offset_s = unix_s - start_s
        self.readings = 0

    def advance(self, seconds):
        self.now_s += seconds

    def monotonic(self):
        self.readings += 1
        return self.now_s

    def time(self):
        return self.now_s + self.unix_offset_s


class Items(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.ones(2)


class Model(LightningModule):
    """12 batches an epoch; ``seen`` holds (epoch, batch) of each that was trained, ``validations`` their steps."""

    def __init__(self, clock=None, step_s: float = 1.0, val_s: float = 0.0, batches: int = 12, val_batches: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.clock, self.step_s, self.val_s = clock or Clock(), step_s, val_s
        self.batches, self.val_batches = batches, val_batches
        self.seen, self.validations, self.sanity_batches = [], [], 0

    def forward(self, batch):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def loader(self, n):
        return DataLoader(Items(n), batch_size=None)

    def train_dataloader(self):
        return self.loader(self.batches)

    def val_dataloader(self):
        return self.loader(self.val_batches)

    test_dataloader = predict_dataloader = val_dataloader

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, batch_idx))
        self.clock.advance(self.step_s)
        return self(batch)

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.validations.append(self.trainer.global_step)

    def validation_step(self, batch, batch_idx):
        self.clock.advance(self.val_s)
        if self.trainer.training or self.trainer.validating:
            self.log("val_loss", self(batch))

    def test_step(self, batch, batch_idx):
        self.clock.advance(2.0)

    def predict_step(self, batch, batch_idx):
        self.clock.advance(3.0)
        return batch


def quiet_trainer(root, *callbacks, **settings):
    settings = {
        "max_epochs": 5,
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "devices": 1,
        **settings,
    }
    return Trainer(
        default_root_dir=root,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def fit(root, timer, model, *callbacks, ckpt_path=None, **settings):
    """Train with this timer, and return the Trainer."""
    trainer = quiet_trainer(root, timer, *callbacks, **settings)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer
