"""What a span costs in a DataLoader worker, and what taking it up costs the rank.

In a worker each half event is formatted and appended to a file at once, so that a killed worker loses nothing: a span
costs microseconds there, not tenths. Measured, in forked children, is the CPU time of the whole process for a `with
span(name)`, one with an argument, and both while nothing is recorded; beside it pytorch-pfn-extras' `add_event`, which
puts each event into a queue to the trainer. Then, in the rank, the CPU time for each span of a child's that the drain
takes into the trace.

Figures are ns, medians over the children; the floor is two reads of the clock.

Usage: python benchmarks/workers.py [--quick]
"""

from __future__ import annotations

import json
import os
import tempfile
import time

from _harness import Figures, environment, finish, loop, quick
from _spans import PPE

from lightning_timekeeper.trace.tracer import Tracer, span

COUNT = 4000
FEW = 400  # of PPE's, whose queue holds a thousand


def in_child(bodies, names):
    """Nanoseconds a turn of each statement, in a forked child."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        turns = {name: loop(body, count, names, time.process_time_ns) for name, (body, count) in bodies.items()}
        taken = {}
        for _ in range(2):  # the first warms up
            taken = {name: turn() for name, turn in turns.items()}
        os.write(there, json.dumps(taken).encode())
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        taken = json.loads(pipe.read())
    os.waitpid(child, 0)
    return taken


def main(repeats):
    about = environment()
    figures = Figures()
    common = {"loop": ("pass", COUNT), "two clock reads": ("perf_counter_ns(); perf_counter_ns()", COUNT)}
    plain, with_argument = ("with span('load'): pass", COUNT), ("with span('load', index=1): pass", COUNT)

    def add(taken):
        for name, value in taken.items():
            figures.add(name, value - (taken["loop"] if name != "loop" else 0))

    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            tracer = Tracer(os.path.join(directory, "t.json"), max_events=10**9, drain_interval_s=3600)
            add(in_child({**common, "off": plain, "off, with an argument": with_argument}, {"span": span}))
            tracer.enable()
            add(in_child({**common, "recorded": plain, "recorded, with an argument": with_argument}, {"span": span}))
            begin_ns = time.process_time_ns()
            tracer.flush(60)
            figures.add("taken up by the rank", (time.process_time_ns() - begin_ns) / (4 * COUNT))
            tracer.close()
            peer = PPE(directory)
            names = {"add_event": peer.tracer.add_event}
            add(in_child({**common, "PPE add_event": ("with add_event('load'): pass", FEW)}, names))

    floor = figures.median("two clock reads")
    print(f"\n{'ns a span':28}  median     p95  x floor")
    for name in figures.samples:
        median = figures.median(name)
        print(f"{name:28}  {median:6.0f}  {figures.p95(name):6.0f}  {median / floor:7.2f}")
    rows = [
        ("worker: µs a span recorded", figures.median("recorded") / 1000, "<=", 5),
        ("worker: PPE add_event / span", figures.median("PPE add_event") / figures.median("recorded"), ">=", 1),
        ("worker: off, x two clock reads", figures.median("off") / floor, "<=", 4),
        ("rank: µs a worker's span taken up", figures.median("taken up by the rank") / 1000, "<=", 2.5),
    ]
    finish(about, rows, repeats=repeats, median_ns={name: round(figures.median(name), 1) for name in figures.samples})


if __name__ == "__main__":
    main(3 if quick() else 30)
