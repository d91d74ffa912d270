"""What it costs to get spans into a file, in the background, and what the training notices of it.

- All in: the CPU time of the whole process (recording, pairing, encoding, writing) for each span that is recorded to a
  file; pytorch-pfn-extras' `add_event` and `flush` of its append-mode file for the same spans.
- Encoder: complete spans to bytes, in blocks of 4096; PPE's `ChromeTracingSaveFunc` on the same spans.
- Longest step: a loop of steps of fixed pure Python work, each with 36 spans; without a tracer, with ours draining
  every 0.25 s, and with PPE's flushing every 1,000 steps. The median of each over the repeats of a run's longest step.
- Close: with 100,000 spans waiting; PPE's flush of as many.
- Size: bytes of an event in the file, in the compressed file, and of a span that waits in memory (tracemalloc).
- Growth: ns a span of the first and the last tenth of 1e4 to 5e6 spans, recorded in bursts between which the background
  thread catches up, and the growth of resident memory after the first tenth.

Usage: python benchmarks/writing.py [--quick]
"""

from __future__ import annotations

import gzip
import os
import tempfile
import time
import tracemalloc
from statistics import median

import numpy as np
from _harness import Figures, environment, finish, loop, quick
from _spans import NAMES, PPE, SPANS_A_STEP, actions, make, record_ours, record_ppe

from lightning_timekeeper.trace import encode


def all_in(directory, figures, turn):
    steps = 100
    tracer = make(os.path.join(directory, f"all-{turn}.json"))
    spans = actions(tracer)
    record_ours(spans, steps)
    tracer.flush()
    begin_s = time.process_time()
    for _ in range(10):
        record_ours(spans, steps)
        tracer.flush()
    figures.add("ours, all in, us", (time.process_time() - begin_s) / (10 * steps * SPANS_A_STEP) * 1e6)
    tracer.close()
    ppe = PPE(directory)
    begin_s = time.process_time()
    record_ppe(ppe.tracer, steps)
    ppe.flush()
    figures.add("PPE, all in, us", (time.process_time() - begin_s) / (steps * SPANS_A_STEP) * 1e6)
    ppe.close()
    figures.add("PPE, bytes", os.path.getsize(ppe.path) / (steps * SPANS_A_STEP))
    os.unlink(ppe.path)


def encoder(figures):
    from io import BytesIO

    from pytorch_pfn_extras.profiler._tracing import ChromeTracingSaveFunc

    count = 4096
    rows = encode.Rows([encode.complete_prefix(name, "loop", 4711, 1) for name in NAMES])
    kind = np.arange(count) % len(NAMES)
    start_ns = 3_813_830_123_456_789 + np.arange(count) * 12_345
    duration_ns = np.full(count, 11_111) + np.arange(count)
    figures.add(
        "ours, encoder, us",
        loop(
            "encode(kind, start, length)",
            10,
            {
                "encode": rows.encode,
                "kind": kind,
                "start": start_ns,
                "length": duration_ns,
            },
        )()
        / count
        / 1000,
    )
    events = [
        {"name": NAMES[k], "cat": "", "ph": "X", "ts": s / 1000, "dur": d / 1000, "pid": 4711, "tid": 4711}
        for k, s, d in zip(kind.tolist()[:500], start_ns.tolist(), duration_ns.tolist(), strict=False)
    ]
    figures.add(
        "PPE, encoder, us",
        loop(
            "save(events, file, True)",
            1,
            {
                "save": ChromeTracingSaveFunc(),
                "events": events,
                "file": BytesIO(),
            },
        )()
        / len(events)
        / 1000,
    )


def work():
    total = 0
    for number in range(15_000):  # about half a millisecond
        total += number
    return total


def longest_step(directory, figures, turn, steps):
    def run(record, end_of_step=None):
        longest = 0.0
        for step in range(steps):
            begin_s = time.perf_counter()
            work()
            record()
            if end_of_step is not None and step % 1000 == 999:
                end_of_step()
            longest = max(longest, time.perf_counter() - begin_s)
        return longest * 1000

    figures.add("no tracer, longest step, ms", run(lambda: None))
    tracer = make(os.path.join(directory, f"longest-{turn}.json"))
    spans = actions(tracer)
    figures.add("ours, longest step, ms", run(lambda: record_ours(spans, 1)))
    tracer.close()
    ppe = PPE(directory)
    figures.add("PPE, longest step, ms", run(lambda: record_ppe(ppe.tracer, 1), ppe.flush))
    ppe.close()
    os.unlink(ppe.path)


def close(directory, figures, turn):
    steps = 100_000 // SPANS_A_STEP + 1
    path = os.path.join(directory, f"close-{turn}.json")
    tracer = make(path, drain_interval_s=3600)
    record_ours(actions(tracer), steps)
    begin_s = time.perf_counter()
    assert tracer.close()
    figures.add("ours, close, ms", (time.perf_counter() - begin_s) * 1000)
    figures.add("ours, bytes", os.path.getsize(path) / (steps * SPANS_A_STEP))
    with open(path, "rb") as file:
        figures.add("ours, bytes gz", len(gzip.compress(file.read(), 1, mtime=0)) / (steps * SPANS_A_STEP))
    os.unlink(path)
    if turn == 0 or turn % 5 == 4:
        ppe = PPE(directory)
        record_ppe(ppe.tracer, steps)
        begin_s = time.perf_counter()
        ppe.flush()
        figures.add("PPE, close, ms", (time.perf_counter() - begin_s) * 1000)
        ppe.close()
        os.unlink(ppe.path)


def held(directory, figures):
    def bytes_of(record, steps=500):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        record(steps)
        held_bytes = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return held_bytes / (steps * SPANS_A_STEP)

    tracer = make(None, drain_interval_s=3600)
    spans = actions(tracer)
    figures.add("ours, bytes held", bytes_of(lambda steps: record_ours(spans, steps)))
    tracer.close()
    ppe = PPE(directory)
    figures.add("PPE, bytes held", bytes_of(lambda steps: record_ppe(ppe.tracer, steps)))
    ppe.close()
    os.unlink(ppe.path)


def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(directory, count):
    """Ns a span in the first and the last tenth (least of bursts), and the growth of resident memory, MB."""
    tracer = make(os.path.join(directory, f"growth-{count}.json"))
    spans = actions(tracer)
    burst_steps = 27  # ~1,000 spans
    bursts = count // (burst_steps * SPANS_A_STEP) + 1
    cost_ns = []
    first_mb = most_mb = 0.0
    for burst in range(bursts):
        begin_ns = time.thread_time_ns()
        record_ours(spans, burst_steps)
        cost_ns.append((time.thread_time_ns() - begin_ns) / (burst_steps * SPANS_A_STEP))
        if burst % 10 == 9:
            tracer.flush(60)
        if burst == bursts // 10:
            first_mb = resident_mb()
        elif burst % 100 == 0 or burst == bursts - 1:
            most_mb = max(most_mb, resident_mb())
    tracer.close()
    os.unlink(tracer.path)
    tenth = max(1, bursts // 10)
    return median(cost_ns[:tenth]), median(cost_ns[-tenth:]), max(0.0, most_mb - first_mb)


def main(repeats, steps, counts):
    about = environment()
    figures = Figures()
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(repeats):
            all_in(directory, figures, turn)
            encoder(figures)
            close(directory, figures, turn)
        for turn in range(max(3, repeats // 5)):
            longest_step(directory, figures, turn, steps)
        held(directory, figures)
        for count in counts[:1] + counts:  # the first warms up
            first, last, growth_mb = growth(directory, count)
            if count != counts[0]:
                figures.add(f"growth to {count:.0e}: last tenth / first", last / first)
                figures.add(f"growth to {count:.0e}: memory, MB", growth_mb)

    print(f"\n{'':40}   median      least        p95")
    for name in figures.samples:
        print(f"{name:40} {figures.median(name):8.3f}   {figures.least(name):8.3f}   {figures.p95(name):8.3f}")

    def times(what):
        return figures.median(f"PPE, {what}") / figures.median(f"ours, {what}")

    rows = [
        ("all in, us a span", figures.median("ours, all in, us"), "<=", 0.75),
        ("all in, PPE's / ours", times("all in, us"), ">=", 20),
        ("encoder, PPE's / ours", times("encoder, us"), ">=", 40),
        ("longest step, ms", figures.median("ours, longest step, ms"), "<=", 10),
        ("longest step, PPE's / ours", times("longest step, ms"), ">=", 30),
        ("close with 100,000 waiting, ms", figures.median("ours, close, ms"), "<=", 50),
        ("close, PPE's / ours", times("close, ms"), ">=", 20),
        ("bytes an event", figures.median("ours, bytes"), "<=", 110),
        ("bytes an event, compressed", figures.median("ours, bytes gz"), "<=", 15),
        ("bytes held for a span", figures.median("ours, bytes held"), "<=", 100),
    ]
    rows += [
        (name, figures.median(name), "<=", 16 if "memory" in name else 1.1)
        for name in figures.samples
        if name.startswith("growth")
    ]
    finish(
        about,
        rows,
        repeats=repeats,
        median={name: round(figures.median(name), 4) for name in figures.samples},
        p95={name: round(figures.p95(name), 4) for name in figures.samples},
    )


if __name__ == "__main__":
    if quick():
        main(5, 2000, [10_000, 100_000])
    else:
        main(30, 4000, [10_000, 100_000, 1_000_000, 5_000_000])
