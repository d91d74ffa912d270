"""Two real ranks, each with two workers, as a program of its own: ``worker_ranks.py DIRECTORY STRATEGY METHOD``.

The process that starts them records too, which is rank 0 itself with ``ddp``.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from pathlib import Path

from runs import Model, trainer
from torch.utils.data import DataLoader
from worker_datasets import Stored

from lightning_timekeeper import TimelineTrace, TracedDataset, Tracer

warnings.simplefilter("ignore")


class Loads(Model):
    """Each rank has a DistributedSampler's half of the items, and two workers."""

    def __init__(self, directory, method):
        super().__init__()
        self.directory, self.method = directory, method

    def train_dataloader(self):
        dataset = TracedDataset(Stored(16, self.directory), "train")
        return DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context=self.method)


if __name__ == "__main__":
    directory, strategy, method = Path(sys.argv[1]), *sys.argv[2:]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "worker_datasets"])
    trace = TimelineTrace(dirpath=directory, summary=False)
    fit = trainer(directory, trace, devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0).fit
    with Tracer():
        fit(Loads(directory, method))
