"""Three runs of two real ranks, started by a test as a program of its own: ``straggler_ranks.py DIRECTORY``.

Rank 1 takes 20 ms longer in each step: in forward, then in the fetch of its data, then in backward.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
from runs import Model, Points, trainer
from torch.utils.data import DataLoader

from lightning_timekeeper import TimelineTrace

warnings.simplefilter("ignore")

STEPS = 40
LATE_S = 0.02


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(LATE_S)
        return gradient


class _LatePoints(Points):
    def __getitem__(self, index):
        time.sleep(LATE_S)
        return super().__getitem__(index)


class Late(Model):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def is_late_in(self, where):
        return self.where == where and self.global_rank == 1

    def training_step(self, batch, batch_idx):
        if self.is_late_in("forward"):
            time.sleep(LATE_S)
        loss = super().training_step(batch, batch_idx)
        return _Late.apply(loss) if self.is_late_in("backward") else loss

    def train_dataloader(self):
        points = (_LatePoints if self.is_late_in("data") else Points)(2 * STEPS)
        return DataLoader(points, batch_size=1)


if __name__ == "__main__":
    for where in ("forward", "data", "backward"):
        trace = TimelineTrace(filename=where + "-rank{rank}.json", summary=False)
        trainer(
            sys.argv[1], trace, devices=2, strategy="ddp", max_epochs=1, limit_val_batches=0, log_every_n_steps=10**6
        ).fit(Late(where))
