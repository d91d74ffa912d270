"""What it costs to merge the traces of many ranks: time and peak memory at 2, 8, 32 and 64 ranks of 100,000 events.

The traces are written by the Tracer: 36 spans a step under 12 names, one of them with arguments. Each merge runs in a
process of its own, whose peak of resident memory is compared to that of merging two empty traces.

- As they are: ranks of one machine, whose clocks agree.
- Shifted: each rank on a machine of its own, its wall clock off by up to 5 s, aligned by anchors.
- Compressed: as they are, `.json.gz` in and out.

Usage: python benchmarks/merge.py [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns, time_ns

from _harness import environment, finish

from lightning_timekeeper.trace import drain
from lightning_timekeeper.trace.clocks import ANCHOR
from lightning_timekeeper.trace.tracer import Tracer

NAMES = ["train_dataloader_next", "batch_to_device", "training_step", "backward", "optimizer_step", "zero_grad"]
NAMES += [f"Callback{number}.on_train_batch_end" for number in range(6)]
SPANS_A_STEP = 36

MERGE = """
import json, resource, sys, time
from lightning_timekeeper import merge
begin = time.perf_counter()
merged = merge(sys.argv[2:], sys.argv[1])
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([merged.events, seconds, peak]))
"""


def write(path, rank, events, *, own_machine=False):
    """One rank's trace; with its own machine, the wall clock is off by up to 5 s."""
    off_ns = (rank * 1_700_000_001 % 10_000_000_000) - 5_000_000_000 if own_machine else 0
    drain.boot_id = lambda: f"machine {rank if own_machine else 0}"
    tracer = Tracer(
        path,
        max_events=10**9,
        process_name=f"rank {rank} (host, pid {1000 + rank})",
        metadata={"rank": rank, "world_size": 64, "pid": 1000 + rank},
        pid=1000 + rank,
        sort_index=rank,
        wall_clock=lambda: time_ns() + off_ns,
    )
    handles = [tracer.handle(name, "loop") for name in NAMES]
    track = tracer.track
    for number in range(2):
        args = {"run": "benchmark", "number": number, "call": "barrier", "waited_ns": 10**10, "ago_ns": 0}
        track.point(("i", ANCHOR, "timekeeper", args), perf_counter_ns())
    for step in range(events // SPANS_A_STEP):
        ident = track.begin("step", "loop", {"epoch": 0, "batch": step, "step": step})
        for turn in range(SPANS_A_STEP - 1):
            begin, end = handles[turn % len(handles)]
            begin()
            end()
        track.end(ident)
        if step % 500 == 0:
            tracer.flush()
    tracer.close()


def run(output, paths):
    """Events, seconds, peak MB of a merge in a process of its own."""
    output.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-c", MERGE, output, *paths], capture_output=True, text=True, check=True)
    output.unlink()
    return json.loads(done.stdout)


def main():
    quick = "--quick" in sys.argv
    events = 10_000 if quick else 100_000
    counts = (2, 8) if quick else (2, 8, 32, 64)
    about = environment()
    figures = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "empty0.json", 0, 0)
        write(folder / "empty1.json", 1, 0)
        idle = run(folder / "out.json", [folder / "empty0.json", folder / "empty1.json"])[2]
        print(
            f"\n{'':12}{'ranks':>6}{'events':>12}{'seconds':>10}{'events/s':>12}{'peak MB':>10}   (empty: {idle:.0f} MB)"
        )
        for kind, suffix, output in (
            ("as they are", ".json", "out.json"),
            ("shifted", ".json", "out.json"),
            ("compressed", ".json.gz", "out.json.gz"),
        ):
            paths = [folder / f"rank{rank}{suffix}" for rank in range(counts[-1])]
            for rank, path in enumerate(paths):
                write(path, rank, events, own_machine=kind == "shifted")
            for count in counts:
                total, seconds, peak = run(folder / output, paths[:count])
                figures[f"{kind}, {count}"] = {
                    "events_s": total / seconds,
                    "seconds": seconds,
                    "growth_mb": peak - idle,
                }
                print(f"{kind:12}{count:>6}{total:>12,}{seconds:>10.2f}{total / seconds:>12,.0f}{peak:>10.0f}")
            for path in paths:
                os.unlink(path)
    few, many = (figures[f"shifted, {count}"] for count in (counts[0], counts[-1]))
    rows = [(f"events/s, {name}", figure["events_s"], ">=", 150_000) for name, figure in figures.items()]
    rows += [("peak MB, most over fewest ranks", many["growth_mb"] - few["growth_mb"], "<=", 16)]
    finish(about, rows, figures=figures)


if __name__ == "__main__":
    main()
