"""Small real trainings for the tests of the timeline, and what to ask of their traces."""

from __future__ import annotations

import json
from collections import defaultdict

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_timekeeper import TimelineTrace, read_events


class Points(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Model(LightningModule):
    """8 training batches an epoch, 3 of validation, test and prediction."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

    def train_dataloader(self):
        return DataLoader(Points(16), batch_size=2)

    def val_dataloader(self):
        return DataLoader(Points(6), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


def trainer(directory, *callbacks, **arguments):
    """A Trainer on the CPU that prints nothing and writes below a directory."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": directory,
        "callbacks": list(callbacks),
    }
    return Trainer(**{**settings, **arguments})


def quiet(**arguments):
    """A TimelineTrace that prints nothing."""
    return TimelineTrace(summary=False, **arguments)


def spans_of(path):
    """The spans of a trace that is whole JSON, nested strictly: dicts with name, cat, args, start and end in ns."""
    source = path if not str(path).endswith(".json") else None
    with open(path, "rb") as file:
        events = json.load(file) if source is None else list(read_events(path))
    return spans_in(events)


def spans_in(events):
    """As :func:`spans_of`, of events."""
    spans, stacks = [], defaultdict(list)

    def ns(us):
        return round(us * 1000)

    for event in events:
        track = stacks[event["pid"], event["tid"]]
        if event["ph"] == "X":
            start = ns(event["ts"])
            spans.append({**event, "start": start, "end": start + ns(event["dur"]), "args": event.get("args", {})})
        elif event["ph"] == "B":
            span = {**event, "start": ns(event["ts"]), "end": None, "args": dict(event.get("args", {}))}
            spans.append(span)
            track.append(span)
        elif event["ph"] == "E":
            span = track.pop()
            assert event.get("name", span["name"]) == span["name"]
            span["end"] = ns(event["ts"])
            span["args"].update(event.get("args", {}))
    assert not any(stacks.values()), "spans without an end"
    assert_nested(spans)
    return spans


def assert_nested(spans):
    """Any two spans of a track are nested or disjoint."""
    tracks = defaultdict(list)
    for span in spans:
        tracks[span["pid"], span["tid"]].append(span)
    for track in tracks.values():
        stack = []
        for span in sorted(track, key=lambda span: (span["start"], -span["end"])):
            while stack and stack[-1]["end"] <= span["start"]:
                stack.pop()
            assert not stack or span["end"] <= stack[-1]["end"], (stack[-1], span)
            stack.append(span)


def steps_of(path):
    """The optimizer steps of a trace's training steps, in order."""
    return [step["args"]["step"] for step in named(spans_of(path), "step")]


def named(spans, name):
    return [span for span in spans if span["name"] == name]


def inside(spans, outer):
    """The spans within another one, itself left out."""
    return [span for span in spans if outer["start"] <= span["start"] and span["end"] <= outer["end"] and span != outer]
