"""What the benchmarks share: the environment, loops without overhead of their own, statistics, targets, the last line."""

from __future__ import annotations

import contextlib
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
    about = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": _processor()}
    for name in ("lightning-timekeeper", "lightning", "torch", "numpy", "pytorch-pfn-extras", "viztracer", "keke"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            about[name] = importlib.metadata.version(name)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    return about


def _processor():
    """The model that Linux names, else the architecture."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as lines:
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def quick():
    """Whether the command line asks for a few repeats only, to see that all runs."""
    return "--quick" in sys.argv


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


def finish(about, rows, **figures):
    """Print the targets, as :func:`targets` takes them, and all of it as JSON on the last line of stdout."""
    missed = targets(rows)
    reached = [
        {"target": name, "reached": round(value, 4), "wanted": f"{relation} {target:g}", "met": name not in missed}
        for name, value, relation, target in rows
    ]
    sys.stdout.flush()
    print(json.dumps({"environment": about, "targets": reached, **figures}))
