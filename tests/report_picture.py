"""Makes the picture of a report in the README: ``python tests/report_picture.py PICTURE.png``.

A real run of two ranks, of which one augments its images at length; the upper part of its page, as a desktop shows it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import browser
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_timekeeper import TimelineTrace
from lightning_timekeeper.demo import Bars, ConvNet
from lightning_timekeeper.report import report


class Net(ConvNet):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            for _ in range(16):  # a rank whose work is dearer
                batch[0].add_(0.001 * torch.randn_like(batch[0]))
        return super().training_step(batch, batch_idx)


def train(directory):
    """One of the two ranks; Lightning starts the other."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[TimelineTrace(summary=False), ModelCheckpoint(directory)],
    )
    trainer.fit(Net(), DataLoader(Bars(1920, 0), batch_size=32), DataLoader(Bars(256, 1), batch_size=32))


def main(picture):
    with tempfile.TemporaryDirectory() as directory, browser.chromium() as chromium:
        command = [sys.executable, __file__, "--train", directory]
        subprocess.run(command, check=True, env={**os.environ, "MASTER_PORT": "29519"})
        page = chromium.new_page(viewport={"width": 1060, "height": 1190}, color_scheme="light")
        page.goto(report(sorted(Path(directory).glob("fit-rank*.json")), Path(directory, "report.html")).as_uri())
        page.screenshot(path=picture)


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(sys.argv[2])
    else:
        main(sys.argv[1])
