"""The main job on real data: fit, test, predict and a resume, timed and traced, looked at in Perfetto's engine."""

from __future__ import annotations

import time

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import inside, named, spans_of
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_timekeeper import TimelineTrace, Timer, read_events

BATCH = 64


class Digits(LightningModule):
    """Images of 8 x 8 pixels to ten classes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


@pytest.fixture(scope="module")
def loaders():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, rest = TensorDataset(images[:1280], labels[:1280]), TensorDataset(images[1280:], labels[1280:])
    return DataLoader(train, batch_size=BATCH, shuffle=True), DataLoader(rest, batch_size=BATCH)


def make(directory, timer, trace, **arguments):
    checkpoint = ModelCheckpoint(directory / "ckpt", save_last=True)
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[timer, trace, checkpoint],
        **arguments,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_main_job(tmp_path, loaders, perfetto):
    """Times agree with the wall clock, every batch is in the trace with its parts, and Perfetto has no complaint."""
    seed_everything(0, verbose=False)
    train, rest = loaders
    timer, trace, model = Timer(), TimelineTrace(summary=False), Digits()
    runner = make(tmp_path, timer, trace, max_epochs=4)

    walls = {}

    def timed(stage, call):
        begin = time.monotonic()
        result = call()
        walls[stage] = time.monotonic() - begin
        return result

    timed("train", lambda: runner.fit(model, train, rest))
    (scores,) = timed("test", lambda: runner.test(model, rest, verbose=False))
    predicted = timed("predict", lambda: runner.predict(model, rest))
    assert scores["accuracy"] > 0.8
    assert sum(len(batch) for batch in predicted) == len(rest.dataset)

    # the clocks run from the stage's first hook to its last: a little less than the call
    for stage, wall_s in walls.items():
        assert 0 < timer.time_elapsed(stage) <= wall_s
    assert timer.time_elapsed("train") > 0.5 * walls["train"]
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed("train")

    steps = 4 * len(train)
    spans = spans_of(tmp_path / "fit-rank0.json")
    assert len(named(spans, "step")) == steps
    for step in named(spans, "step"):
        for part in ("train_dataloader_next", "training_step", "backward", "optimizer_step"):
            assert len(named(inside(spans, step), part)) == 1, part
    phases = {span["cat"] for span in spans}
    assert phases >= {"data", "forward", "backward", "optimizer", "validation", "checkpoint", "callback"}

    # ---- the resume
    before_s = timer.time_elapsed("train")
    last = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=True)
    saved_s = last["callbacks"]["Timer"]["time_elapsed"]["train"]
    assert saved_s <= before_s
    resumed, again = Timer(), TimelineTrace(summary=False)
    runner = make(tmp_path, resumed, again, max_epochs=6)
    runner.fit(Digits(), train, rest, ckpt_path=tmp_path / "ckpt" / "last.ckpt")
    own_s = resumed.end_time("train") - resumed.start_time("train")
    assert resumed.time_elapsed("train") == pytest.approx(saved_s + own_s, abs=0.05)
    assert len(named(spans_of(tmp_path / "fit-rank0-v1.json"), "step")) == 2 * len(train)

    # ---- Perfetto
    files = [
        tmp_path / name for name in ("fit-rank0.json", "test-rank0.json", "predict-rank0.json", "fit-rank0-v1.json")
    ]
    reports = perfetto.open_traces(files, ["select count(*) from slice", "select count(*) from slice where dur < 0"])
    for path, report in zip(files, reports, strict=True):
        assert report.ok, (path, report.error, report.bad_stats)
        slices = sum(event["ph"] in ("X", "B", "i") for event in read_events(path))  # an instant is a slice there
        assert report.rows == [[[slices]], [[0]]]
