"""A training that a test ends from outside, or that ends itself: ``timeline_process.py DIRECTORY MODE``."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from pathlib import Path

from runs import Model, trainer

from lightning_timekeeper import TimelineTrace

warnings.simplefilter("ignore")


class Waits(Model):
    """Its fifth step waits for a signal, or leaves."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 4:
            if mode == "sigterm-default":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            (directory / "ready").touch()
            if mode == "sys-exit":
                sys.exit(7)
            until_s = time.monotonic() + 30
            # Lightning's SIGTERM handler only notes it: the step goes on, and ends
            while time.monotonic() < until_s and not self.trainer.received_sigterm:
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    directory, mode = Path(sys.argv[1]), sys.argv[2]
    trainer(directory, TimelineTrace(summary=False)).fit(Waits())
