"""Traces of trainings with exact numbers, for the tests of the summary."""

from __future__ import annotations

import json
from itertools import count

MS = 1000  # a trace's times are in µs
BASE_S = 1790857026


class Run:
    """The trace of a training, whose steps are made of phases one after the other.

    Times are in ms since its begin.
    """

    def __init__(self, rank=0, pid=7, start_ms=5000.0):
        self.now_ms = start_ms
        self.pid = pid
        args = {"name": f"rank {rank}", "schema_version": 1, "base_unix_s": BASE_S, "rank": rank}
        self.events = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": args}]
        self.steps = count()

    def add(self, ph, name=None, cat=None, ms=None, *, tid=1, at_ms=None, **args):
        event = {"ph": ph, "cat": cat, "name": name, "pid": self.pid, "tid": tid}
        event["ts"] = (self.now_ms if at_ms is None else at_ms) * MS
        if ms is not None:
            event["dur"] = ms * MS
        if args:
            event["args"] = args
        self.events.append({key: value for key, value in event.items() if value is not None})

    def span(self, name, cat, ms, **args):
        """A span, after which time has gone on."""
        self.add("X", name, cat, ms, **args)
        self.now_ms += ms

    def step(self, other_ms=0.0, *, epoch=0, **phases_ms):
        """A step of phases, in order, and a rest."""
        number = next(self.steps)
        whole = sum(phases_ms.values()) + other_ms
        self.add("X", "step", "loop", whole, epoch=epoch, batch=number, step=number)
        for phase, ms in phases_ms.items():
            self.span(phase, phase, ms)
        self.now_ms += other_ms
        return self

    def write(self, path, separators=(",", ":")):
        """As a file of ours."""
        lines = [json.dumps(event, separators=separators, ensure_ascii=False) for event in self.events]
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        return path


def training(steps=20, rank=0, pid=7, start_ms=5000.0, **phases_ms):
    """A fit of equal steps."""
    run = Run(rank, pid, start_ms)
    run.add("B", "fit", "loop")
    for _ in range(steps):
        run.step(**phases_ms)
    run.add("E")
    return run
