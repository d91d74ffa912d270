"""What a recorded span costs the thread that records it, against its floor and its peers.

The floor is two reads of the clock, which no recorder of spans gets under. Measured are: a `with` on a handle that was
made once (what the profiler proxy does for Lightning's actions, and what a kept `span` object does), a `with span(name)`,
which looks its handle up, one with an argument, a decorated function, and all of it while nothing records. The peers, in
the same process and in turns: pytorch-pfn-extras (`add_event`, and `record` as its documentation shows it), VizTracer's
`log_event` (a C extension), torch's `record_function` under a running profiler.

Figures are ns of the thread's CPU time a span, the loop taken off: median over the repeats, and p95. Ratios are of the
medians. Buffers are emptied between repeats, outside the measurement, as the background threads do meanwhile in a run.

Usage: python benchmarks/recording.py [--quick]
"""

from __future__ import annotations

import sys
import warnings

from _harness import Figures, environment, finish, loop, quick

from lightning_timekeeper.trace.tracer import Tracer, span

COUNT = 4000
FEW = 400  # of what takes µs


class Action:
    """A context manager on a kept begin and end, as the profiler proxy has one for each action."""

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, begin, end):
        def leave(kind, value, traceback):
            end()

        self.__enter__, self.__exit__ = begin, leave


def main(repeats):
    about = environment()
    import torch
    from pytorch_pfn_extras.profiler import ChromeTracer, record
    from viztracer import VizTracer

    tracer = Tracer(None, max_events=10**9, drain_interval_s=3600)
    ppe = ChromeTracer(append=False)
    # only enabled below, and not started: its hook on every call, which more than doubles the cost, is left out
    viz = VizTracer(log_sparse=True, verbose=0, tracer_entries=1_000_000)
    viz.start()
    viz.stop()
    assert sys.getprofile() is None, "a hook on every call would be measured with everything below"

    @span("decorated")
    def decorated():
        pass

    def plain():
        pass

    tracer.enable()
    names = {
        "action": Action(*tracer.handle("action", "loop")),
        "kept": span("kept"),
        "span": span,
        "decorated": decorated,
        "plain": plain,
        "add_event": ppe.add_event,
        "record": record,
        "ppe": ppe,
        "log_event": viz.log_event,
        "record_function": torch.profiler.record_function,
    }
    tracer.disable()
    ours = {
        "with a handle": "with action: pass",
        "with a kept span": "with kept: pass",
        "with span(name)": "with span('forward'): pass",
        "with span(name, arg)": "with span('forward', step=1): pass",
        "decorated function": "decorated()",
    }
    off = {
        "off: with span(name)": "with span('forward'): pass",
        "off: with span(name, arg)": "with span('forward', step=1): pass",
        "off: decorated function": "decorated()",
    }
    run = {name: loop(body, COUNT, names) for name, body in {**ours, **off}.items()}
    run["loop"] = loop("pass", COUNT, names)
    run["two clock reads"] = loop("perf_counter_ns(); perf_counter_ns()", COUNT, names)
    run["plain function"] = loop("plain()", COUNT, names)
    run["PPE add_event"] = loop("with add_event('forward'): pass", FEW, names)
    run["PPE record"] = loop("with record('forward', trace=ppe): pass", FEW, names)
    run["VizTracer log_event"] = loop("with log_event('forward'): pass", COUNT, names)
    run["torch record_function"] = loop("with record_function('forward'): pass", FEW, names)

    figures = Figures()
    for turn in range(repeats + 2):  # the first two warm up
        taken = {name: run[name]() for name in ("loop", "two clock reads", "plain function", *off)}
        tracer.enable()
        for name in ours:
            taken[name] = run[name]()
            tracer.flush(60)
        tracer.disable()
        for name in ("PPE add_event", "PPE record"):
            taken[name] = run[name]()
            ppe.clear()
        viz.enable = True
        taken["VizTracer log_event"] = run["VizTracer log_event"]()
        viz.enable = False
        viz.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                taken["torch record_function"] = run["torch record_function"]()
        if turn >= 2:
            for name, value in taken.items():
                figures.add(name, value - (taken["loop"] if name != "loop" else 0))
    tracer.close()
    ppe.finalize()

    floor = figures.median("two clock reads")
    print(f"\n{'ns a span':26}  median     p95  x floor")
    for name in figures.samples:
        median = figures.median(name)
        print(f"{name:26}  {median:6.0f}  {figures.p95(name):6.0f}  {median / floor:7.2f}")

    def times(name, other):
        return figures.median(name) / figures.median(other)

    rows = []
    for name in ("with a handle", "with a kept span", "with span(name)"):
        rows += [
            (f"{name}, x two clock reads", times(name, "two clock reads"), "<=", 3.3),
            (f"PPE add_event / {name}", times("PPE add_event", name), ">=", 15),
            (f"PPE record / {name}", times("PPE record", name), ">=", 50),
            (f"torch record_function / {name}", times("torch record_function", name), ">=", 20),
            (f"VizTracer log_event / {name}", times("VizTracer log_event", name), ">=", 3),
        ]
    rows.append(("off, x two clock reads", times("off: with span(name)", "two clock reads"), "<=", 2.0))
    finish(
        about,
        rows,
        repeats=repeats,
        median_ns={name: round(figures.median(name), 1) for name in figures.samples},
        p95_ns={name: round(figures.p95(name), 1) for name in figures.samples},
    )


if __name__ == "__main__":
    main(20 if quick() else 200)
