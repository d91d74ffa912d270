"""What the recording and the writing benchmark share: loops without overhead of their own, statistics, the last line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from itertools import repeat
from time import perf_counter_ns, thread_time_ns


def environment():
    """Print and return where this was measured."""
    about = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
    for name in ("numpy", "torch", "pytorch-pfn-extras", "viztracer"):
        about[name] = importlib.metadata.version(name)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    return about


def loop(body, count, names, clock=thread_time_ns):
    """A function that runs a statement ``count`` times and returns ns a turn, the loop itself included.

    The thread's CPU time is measured, so that what other threads and processes do does not count.
    """
    source = (
        f"def run():\n begin = clock()\n for _ in turns(None, count):\n  {body}\n return (clock() - begin) / count\n"
    )
    space = {**names, "turns": repeat, "count": count, "clock": clock, "perf_counter_ns": perf_counter_ns}
    exec(source, space)
    return space["run"]


class Figures:
    """Repeated measurements by name, taken in turns so that whatever disturbs one disturbs all."""

    def __init__(self):
        self.samples = {}

    def add(self, name, value):
        self.samples.setdefault(name, []).append(value)

    def median(self, name):
        return statistics.median(self.samples[name])

    def least(self, name):
        return min(self.samples[name])

    def p95(self, name):
        ordered = sorted(self.samples[name])
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def targets(rows):
    """Print name, value, target and whether it is met; each row is (name, value, "<=" or ">=", target)."""
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'target':{width}}   reached    wanted")
    missed = []
    for name, value, relation, target in rows:
        met = value <= target if relation == "<=" else value >= target
        if not met:
            missed.append(name)
        print(f"{name:{width}}  {value:8.3g}  {relation} {target:<6g}{'' if met else '  MISSED'}")
    return missed


def finish(result):
    """The result as the last line on stdout."""
    sys.stdout.flush()
    print(json.dumps(result))
