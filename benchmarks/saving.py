"""How long the training stands still when a trace is saved: ours, PPE's, torch.profiler's and VizTracer's.

Spans are recorded, 100,000 and 1,000,000 of them (with --quick 20,000), and then it is measured how long the call takes
that brings them into the file: our `close`, which finds most of them written, and has the rest of one quarter of a second
to write; `flush` of PPE's append-mode file; `export_chrome_trace` of torch.profiler after it stopped; `save` of
VizTracer. Wall time, since that is what the training waits.

Usage: python benchmarks/saving.py [--quick]
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time

import torch
from _harness import environment, finish, quick
from _spans import PPE, SPANS_A_STEP, actions, make, record_ours, record_ppe


def ours(directory, count):
    tracer = make(os.path.join(directory, "ours.json"))
    spans = actions(tracer)
    for _ in range(count // (100 * SPANS_A_STEP) + 1):
        record_ours(spans, 100)
        while len(tracer.track.buffer) > 400_000:  # a training is slower than this loop; let the drain keep up
            time.sleep(0.01)
    return timed(tracer.close)


def ppe(directory, count):
    peer = PPE(directory)
    record_ppe(peer.tracer, count // SPANS_A_STEP)
    seconds = timed(peer.flush)
    peer.close()
    return seconds


def torch_profiler(directory, count):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        record = torch.profiler.record_function
        for _ in range(count):
            with record("backward"):
                pass
        begin_s = time.perf_counter()
    profile.export_chrome_trace(os.path.join(directory, "torch.json"))
    return time.perf_counter() - begin_s


def viztracer(directory, count):
    from viztracer import VizTracer

    tracer = VizTracer(verbose=0, tracer_entries=count + 1000, log_sparse=True)
    tracer.enable = True
    for _ in range(count):
        with tracer.log_event("backward"):
            pass
    tracer.enable = False
    seconds = timed(lambda: tracer.save(os.path.join(directory, "viz.json")))
    tracer.clear()
    return seconds


def timed(call):
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def main():
    about = environment()
    repeats = {20_000: 2} if quick() else {100_000: 5, 1_000_000: 1}
    found = {}
    for count, rounds in repeats.items():
        print(f"\n{count:,} spans, s")
        for name, save in (("ours", ours), ("PPE", ppe), ("torch.profiler", torch_profiler), ("VizTracer", viztracer)):
            seconds = []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
                    seconds.append(save(directory, count))
            found[f"{name}, {count}"] = round(statistics.median(seconds), 4)
            print(f"{name:16}{statistics.median(seconds):9.3f}   {min(seconds):.3f} to {max(seconds):.3f}")
    most = max(repeats)
    rows = [(f"saving {most:,}, PPE's / ours", found[f"PPE, {most}"] / found[f"ours, {most}"], ">=", 20)]
    finish(about, rows, seconds=found)


if __name__ == "__main__":
    sys.exit(main())
