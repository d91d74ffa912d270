"""Makes the picture in the README: ``python tests/picture.py PICTURE.png``.

A real run of two ranks with two DataLoader workers each, merged, and some of its steps in the Perfetto UI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import browser
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_timekeeper import TimelineTrace, TracedDataset, instant, merge, read_events, span
from lightning_timekeeper.demo import Bars, ConvNet
from lightning_timekeeper.view import view

STEPS = range(12, 18)


class Augmented(Bars):
    """Bars that take a while to make, as images that are decoded do."""

    def __getitem__(self, index):
        with span("decode"):
            image, label = super().__getitem__(index)
            for _ in range(6):
                image = image + 0.01 * torch.randn(64, 24, 24).mean(0)
        with span("augment"):
            return image.clamp(0, 1), label


class Net(ConvNet):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == STEPS[2]:
            instant("spike", loss=float(outputs["loss"]))


def train(directory):
    """One of the two ranks; Lightning starts the other."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=30,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[TimelineTrace(summary=False)],
    )
    images = DataLoader(TracedDataset(Augmented(4096, 0), "train"), batch_size=48, num_workers=2)
    trainer.fit(Net(), images)


def main(picture):
    with tempfile.TemporaryDirectory() as directory, browser.perfetto_ui() as ui, browser.chromium() as chromium:
        command = [sys.executable, __file__, "--train", directory]
        subprocess.run(command, check=True, env={**os.environ, "MASTER_PORT": "29517"})
        trace = Path(directory, "run.json")
        print(merge(sorted(Path(directory).glob("fit-rank*.json")), trace))
        steps = [event for event in read_events(trace) if event.get("args", {}).get("step") in STEPS]
        begin_us, end_us = min(step["ts"] for step in steps), max(step["ts"] for step in steps)
        page = chromium.new_page(viewport={"width": 1500, "height": 770}, device_scale_factor=1)
        serving = threading.Thread(
            target=view, args=([trace],), kwargs={"ui": ui, "open_browser": lambda address: None}
        )
        serving.start()
        shown = f"visStart={int(begin_us * 1000)}&visEnd={int(end_us * 1000)}"
        page.goto(f"{ui}/#!/?url=http://127.0.0.1:9001/{trace.name}&{shown}")
        browser.wait_for_trace(page)
        serving.join()
        page.keyboard.press("Control+b")  # the sidebar away
        page.wait_for_timeout(1500)
        page.screenshot(path=picture)


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(sys.argv[2])
    else:
        main(sys.argv[1])
