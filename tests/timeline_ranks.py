"""A run of two real ranks, started by a test as a program of its own: ``timeline_ranks.py DIRECTORY STRATEGY FILENAME``."""

from __future__ import annotations

import sys
import time
import warnings

from runs import Model, trainer

from lightning_timekeeper import TimelineTrace

warnings.simplefilter("ignore")


class Slow(Model):
    """Rank 1 takes 20 ms longer in each step, so that rank 0 waits."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.sleep(0.02 * self.global_rank)


if __name__ == "__main__":
    directory, strategy, filename = sys.argv[1:]
    trace = TimelineTrace(filename=filename, summary=False)
    trainer(directory, trace, devices=2, strategy=strategy, max_epochs=1).fit(Slow())
