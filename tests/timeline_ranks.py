"""A run of two real ranks, started by a test as a program of its own: ``timeline_ranks.py DIRECTORY STRATEGY FILENAME``.

With ``--skewed`` the ranks pretend to be machines of their own, whose wall clocks are 10 s apart; each has two spawned
workers.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings

SKEWED = "--skewed" in sys.argv
RANK = int(os.environ.get("LOCAL_RANK", "0"))
if SKEWED:  # before the Tracer takes the wall clock as a default
    wall_clock, off_ns = time.time_ns, (-5 if RANK else 5) * 10**9
    time.time_ns = lambda: wall_clock() + off_ns

from runs import Model, Points, trainer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_timekeeper import TimelineTrace, TracedDataset  # noqa: E402
from lightning_timekeeper.trace import drain  # noqa: E402

warnings.simplefilter("ignore")
if SKEWED:
    drain.boot_id = lambda: f"machine {RANK}"
    socket.gethostname = lambda: f"machine{RANK}"


class Slow(Model):
    """Rank 1 takes 20 ms longer in each step, so that rank 0 waits."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.02 * self.global_rank)


class WithWorkers(Slow):
    """Its training items are read by workers that last."""

    def train_dataloader(self):
        points = TracedDataset(Points(16), "read")
        settings = {"multiprocessing_context": "spawn", "persistent_workers": True}
        return DataLoader(points, batch_size=2, num_workers=2, **settings)


if __name__ == "__main__":
    directory, strategy, filename = sys.argv[1:4]
    trace = TimelineTrace(filename=filename, summary=False)
    settings = {"enable_checkpointing": True, "max_epochs": 2} if SKEWED else {"max_epochs": 1}
    trainer(directory, trace, devices=2, strategy=strategy, **settings).fit((WithWorkers if SKEWED else Slow)())
