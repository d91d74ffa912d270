"""Datasets that note what they do beside the trace, for the tests of workers; spawned workers import this module."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lightning_timekeeper import span


def note(directory, name, number):
    """One line in this process' own file, after the fact."""
    handle = os.open(Path(directory) / f"{os.getpid()}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{name} {number}\n".encode())
    os.close(handle)


def done_in(directory):
    """What all processes noted: (name, number) -> how often."""
    lines = [line for path in Path(directory).glob("*.txt") for line in path.read_text().splitlines()]
    return Counter((name, int(number)) for name, number in (line.rsplit(" ", 1) for line in lines))


class Stored(Dataset):
    """Map-style; notes each item."""

    def __init__(self, size, directory):
        self.size, self.directory = size, str(directory)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        with span("read", number=index):
            item = torch.full((4,), float(index))
        note(self.directory, "read", index)
        return item


class Batched(Stored):
    """Reads batches at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Streamed(IterableDataset):
    """Iterable; each worker yields its share."""

    def __init__(self, size, directory):
        self.size, self.directory = size, str(directory)

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.size, step):
            with span("stream", number=number):
                item = torch.full((4,), float(number))
            note(self.directory, "stream", number)
            yield item
