"""Makes the picture of a report in the README: ``python tests/report_picture.py PICTURE.png``.

A real run of two ranks, of which one augments its images at length; the upper half of its page, as a desktop shows it.
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


class Augmented(Bars):
    """Bars that take longer on rank 1, as images on a slow disk do."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        for _ in range(2 * int(os.environ.get("LOCAL_RANK", "0"))):
            image = image + 0.01 * torch.randn(64, 24, 24).mean(0)
        return image, label


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
    images = DataLoader(Augmented(1920, 0), batch_size=32)
    trainer.fit(ConvNet(), images, DataLoader(Bars(256, 1), batch_size=32))


def main(picture):
    with tempfile.TemporaryDirectory() as directory, browser.chromium() as chromium:
        command = [sys.executable, __file__, "--train", directory]
        subprocess.run(command, check=True, env={**os.environ, "MASTER_PORT": "29519"})
        # the policy is set aside for a font like those of most desktops
        page = chromium.new_page(viewport={"width": 1060, "height": 800}, color_scheme="light", bypass_csp=True)
        page.goto(report(sorted(Path(directory).glob("fit-rank*.json")), Path(directory, "report.html")).as_uri())
        page.add_style_tag(content="body { font-family: Liberation Sans, Arial, sans-serif }")
        box = page.get_by_role("figure", name="Step time over the run").bounding_box()
        page.screenshot(
            path=picture, full_page=True, clip={"x": 0, "y": 0, "width": 1060, "height": box["y"] + box["height"] + 24}
        )


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(sys.argv[2])
    else:
        main(sys.argv[1])
