"""Small models to train in the benchmarks, and a Trainer that does nothing beside the training."""

from __future__ import annotations

import logging
import time
import warnings

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Tiny(LightningModule):
    """Four weights: a step is Lightning's own work, and hardly anything else."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    @staticmethod
    def loader(steps, **arguments):
        return DataLoader(torch.ones(steps, 4), **arguments)


class Small(LightningModule):
    """Two layers of 256 and a batch of 64: the smallest that anyone would train."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        rows, labels = batch
        return torch.nn.functional.cross_entropy(self.net(rows), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-6)

    @staticmethod
    def loader(steps, **arguments):
        rows = torch.randn(64, 256).repeat(steps, 1)
        return DataLoader(TensorDataset(rows, torch.zeros(len(rows), dtype=torch.long)), batch_size=64, **arguments)


class Rows(Dataset):
    """Made in the worker: 64 values, 0.2 ms of Python."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([float(sum(range(100)) + column) for column in range(64)])[:4]


class First(Callback):
    pass


class Second(Callback):
    pass


class Third(Callback):
    pass


class Clock(Callback):
    """Wall time between the first and the last step."""

    def on_train_start(self, *_):
        self.begin_s = time.perf_counter()

    def on_train_end(self, *_):
        self.seconds = time.perf_counter() - self.begin_s


def trainer(directory, steps, *callbacks, profiler=None):
    """With three empty callbacks, which is what a step of 36 profiler actions has."""
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        profiler=profiler,
        callbacks=[First(), Second(), Third(), *callbacks],
    )


def silence():
    """Neither Lightning's advice nor its news."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
