"""Steps of 36 spans, recorded by our Tracer and by pytorch-pfn-extras'."""

from __future__ import annotations

import os

from lightning_timekeeper.trace.tracer import Tracer

NAMES = [
    "train_dataloader_next",
    "batch_to_device",
    "training_step",
    "backward",
    "optimizer_step",
    "on_train_batch_end",
]
SPANS_A_STEP = 36


def make(path, **arguments):
    return Tracer(path, max_events=10**9, **arguments)


def actions(tracer):
    """A span of each name, as context managers on kept pairs."""

    class Action:
        __slots__ = ("__enter__", "__exit__")

        def __init__(self, begin, end):
            self.__enter__ = begin
            self.__exit__ = lambda kind, value, traceback: end()

    return [Action(*tracer.handle(name, "loop")) for name in NAMES]


def record_ours(spans, steps):
    a, b, c, d, e, f = spans
    for _ in range(steps * SPANS_A_STEP // 6):
        with a:
            pass
        with b, c, d:
            pass
        with e, f:
            pass


def record_ppe(tracer, steps):
    add = tracer.add_event
    a, b, c, d, e, f = NAMES
    for _ in range(steps * SPANS_A_STEP // 6):
        with add(a):
            pass
        with add(b), add(c), add(d):
            pass
        with add(e), add(f):
            pass


class PPE:
    """Its tracer and its writer, as its TimelineTrace uses them."""

    def __init__(self, directory):
        from pytorch_pfn_extras.profiler import ChromeTracer
        from pytorch_pfn_extras.writing import SimpleWriter

        self.tracer, self.writer = ChromeTracer(), SimpleWriter(out_dir=directory)
        self.path = os.path.join(directory, "ppe.json")
        self.tracer.initialize_writer("ppe.json", self.writer)

    def flush(self):
        self.tracer.flush("ppe.json", self.writer)

    def close(self):
        self.tracer.finalize()
        self.writer.finalize()
