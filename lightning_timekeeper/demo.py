"""A small real training under both callbacks: it stops at its limit, resumes, and shows where its time went.

The images are made here: noisy bars at one of four angles, which a small convolutional net learns in seconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_timekeeper.timeline import TimelineTrace
from lightning_timekeeper.timer import Timer
from lightning_timekeeper.trace.summary import summarize
from lightning_timekeeper.trace.tracer import span

if TYPE_CHECKING:
    from collections.abc import Iterator

STAGES = ("train", "sanity_check", "validate")
CLASSES = 4
SIDE = 24  # pixels
EPOCHS_AFTER_RESUME = 2


class Bars(Dataset[tuple[Tensor, int]]):
    """Images of shape (1, 24, 24), values about 0 to 1, of a bar at one of four angles.

    Args:
        size: How many, from 1.
        seed: Same seed, same images.
    """

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._labels = torch.randint(CLASSES, (size,), generator=generator).tolist()
        self._noise = torch.rand(size, 1, SIDE, SIDE, generator=generator)
        axis = torch.linspace(-1.0, 1.0, SIDE)
        self._y, self._x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = self._labels[index]
        angle = math.pi * label / CLASSES
        distance = self._x * math.sin(angle) - self._y * math.cos(angle)
        return (distance.abs() < 0.2).float() * 0.5 + self._noise[index] * 0.8, label


class ConvNet(LightningModule):
    """Two convolutions and a linear layer; images of shape (batch, 1, 24, 24) to (batch, 4) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (SIDE // 4) ** 2, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of a batch."""
        images, labels = batch
        with span("augment"):  # a span of the user's own
            images = images + 0.1 * torch.randn_like(images)
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy of a batch."""
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def demo(directory: str = "timekeeper-demo", seconds: float = 4.0) -> None:
    """Train until the limit, resume with a longer one, and print what the callbacks know.

    Args:
        directory: Where checkpoints and traces go; made where it is missing.
        seconds: The limit of the first run, s.

    Raises:
        OSError: Where nothing can be written there.
    """
    os.makedirs(directory, exist_ok=True)
    with _quiet():
        seed_everything(1)
        print(f"1. Training for at most {seconds:g} s.")
        first = Timer(duration=timedelta(seconds=seconds), verbose=False)
        trace, checkpoint = _fit(directory, first, None, max_epochs=-1)
        print(f"   Stopped by its {first.stop_reason} limit after {trace[1]} steps.\n   Checkpoint: {checkpoint}\n")

        print(
            f"2. Resuming from it, for up to {EPOCHS_AFTER_RESUME} epochs more; the limit is {2 * seconds:g} s in all."
        )
        second = Timer(duration=timedelta(seconds=2 * seconds), verbose=False)
        before_s = first.time_elapsed("train")
        trace, _ = _fit(directory, second, checkpoint, max_epochs=trace[2] + EPOCHS_AFTER_RESUME)
    print(f"   Ended after {trace[1]} steps; the checkpoint brought {before_s:.2f} s of training along.\n")

    print("Time per stage, both runs:")
    for stage in STAGES:
        print(f"   {stage:<13}{second.time_elapsed(stage):7.2f} s")
    print(f"\nWhere the time of the second run went:\n\n{summarize(trace[0])}\n")
    print(f"Trace: {os.path.abspath(trace[0])}")
    print("To look at it: open https://ui.perfetto.dev in a browser and drop the file on it; nothing is uploaded.")


def _fit(directory: str, timer: Timer, resume_from: str | None, *, max_epochs: int) -> tuple[tuple[str, int, int], str]:
    """One run; returns its trace's path, its steps, its epochs, and the path of its checkpoint."""
    checkpoint = ModelCheckpoint(os.path.join(directory, "checkpoints"), save_last=True, every_n_train_steps=20)
    timeline = TimelineTrace(dirpath=directory, summary=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=max_epochs,
        val_check_interval=0.5,
        logger=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[timer, timeline, checkpoint, TQDMProgressBar(refresh_rate=5)],
    )
    images = DataLoader(Bars(4096, seed=0), batch_size=32, shuffle=True)
    validation = DataLoader(Bars(512, seed=1), batch_size=32)
    trainer.fit(ConvNet(), images, validation, ckpt_path=resume_from)
    return (timeline.path or "", trainer.global_step, trainer.current_epoch), checkpoint.last_model_path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's advice on workers and devices: the demo is as it is on purpose."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
