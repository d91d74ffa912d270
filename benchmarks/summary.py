"""What it costs to sum up a trace: time and peak memory for a million events of ours, and of another writer's.

Ours are written by the Tracer: steps of 11 spans in the order of a training, one of them with arguments. The others are
those of a tracer of Python calls: complete events with their children first, under 500 names. Each runs in a process of
its own. For comparison the events are only read, by `read_events`; and a tenth of ours shows whether memory grows.

Usage: python benchmarks/summary.py [--quick]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _harness import environment, finish, quick

from lightning_timekeeper.trace.tracer import Tracer

INNER = [
    *(("train_dataloader_next", "data"), ("batch_to_device", "transfer"), ("training_step", "forward")),
    *(("optimizer_zero_grad", "zero_grad"), ("backward", "backward"), ("configure_gradient_clipping", "clip")),
    *(("optimizer", "optimizer"), ("TQDMProgressBar.on_train_batch_end", "callback"), ("augment", "user")),
]

SUM_UP = """
import resource, sys, time
from lightning_timekeeper import read_events, summarize
begin = time.perf_counter()
if sys.argv[1] == "read":
    for event in read_events(sys.argv[2]):
        pass
else:
    summary = summarize(sys.argv[2])
    assert summary.text(80) and summary.json() and summary.lost_bytes == 0
seconds = time.perf_counter() - begin
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def write_ours(path, events):
    """A fit of as many events, with the spans of a step inside one another."""
    tracer = Tracer(path, max_events=10**9, metadata={"rank": 0, "world_size": 1})
    inner = [tracer.handle(*each) for each in INNER]
    batch_begins, batch_ends = tracer.handle("run_training_batch", "loop")
    track = tracer.track
    fit, epoch = track.begin("fit", "loop", {}), track.begin("epoch", "loop", {"epoch": 0})
    for step in range(events // (len(INNER) + 2)):
        ident = track.begin("step", "loop", {"epoch": 0, "batch": step, "step": step})
        batch_begins()
        for begins, ends in inner:
            begins()
            ends()
        batch_ends()
        track.end(ident)
        if step % 500 == 0:
            tracer.flush()
    track.end(epoch)
    track.end(fit)
    tracer.close()


def write_foreign(path, events):
    """The object form, as tracers of Python calls write it."""
    with open(path, "w") as file:
        file.write('{"traceEvents": [')
        for number in range(events):
            event = {"ph": "X", "cat": "FEE", "name": f"call_{number % 500} (model.py:{number % 500 % 90})"}
            event |= {"pid": 1, "tid": 1, "ts": 1.7e15 + number * 3.25, "dur": 2.125 + number % 977}
            file.write(("," if number else "") + json.dumps(event))
        file.write("]}")


def run(what, path):
    """Seconds and peak MB of a process of its own; the best of three, as other processes only make it slower."""
    command = [sys.executable, "-c", SUM_UP, what, path]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    return min(float(seconds) for seconds, _ in runs), max(float(peak) for _, peak in runs)


def main():
    events = 100_000 if quick() else 1_000_000
    about = environment()
    figures = {}
    print(f"\n{'':24}{'events':>12}{'seconds':>10}{'events/s':>12}{'peak MB':>10}")
    with tempfile.TemporaryDirectory() as temporary:
        tenth, ours, foreign = (Path(temporary) / f"{name}.json" for name in ("tenth", "ours", "foreign"))
        write_ours(tenth, events // 10)
        write_ours(ours, events)
        write_foreign(foreign, events)
        for name, what, path, count in (
            ("ours, a tenth", "sum up", tenth, events // 10),
            ("ours", "sum up", ours, events),
            ("ours, only read", "read", ours, events),
            ("another writer's", "sum up", foreign, events),
        ):
            seconds, peak = run(what, path)
            figures[name] = {"seconds": seconds, "events_s": count / seconds, "peak_mb": peak}
            print(f"{name:24}{count:>12,}{seconds:>10.2f}{count / seconds:>12,.0f}{peak:>10.0f}")
    both = figures["ours"], figures["another writer's"]
    rows = [
        ("seconds for a million events", max(each["seconds"] for each in both) * 1e6 / events, "<=", 10),
        ("peak MB", max(each["peak_mb"] for each in both), "<=", 200),
        (
            "MB more for ten times the events",
            figures["ours"]["peak_mb"] - figures["ours, a tenth"]["peak_mb"],
            "<=",
            16,
        ),
        ("time over that of reading", figures["ours"]["seconds"] / figures["ours, only read"]["seconds"], "<=", 3),
    ]
    finish(about, rows, figures=figures)


if __name__ == "__main__":
    main()
