"""What a profiler action costs: recorded by TimelineTrace, passed through, or timed by Lightning's SimpleProfiler.

A step with three callbacks opens 36 of Lightning's profiler actions. They are noted in a real fit and then replayed as
they stood in one another, inside a running fit, on Lightning's default PassThroughProfiler, on its SimpleProfiler and on
the proxy that records them, with all that it does around them: steps begin and end, the optimizer's time is taken.
Thread CPU time, because the machine may have other work; what the background thread takes is in fit.py.

Usage: python benchmarks/actions.py [--quick]
"""

from __future__ import annotations

import sys
import tempfile
import time

from _harness import Figures, environment, finish, quick
from _training import Tiny, silence, trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from lightning_timekeeper import TimelineTrace

TURNS = 200


class Notes(Profiler):
    """The actions of a fit, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def start(self, action_name):
        self.calls.append(("start", action_name))

    def stop(self, action_name):
        self.calls.append(("stop", action_name))


def one_step(directory):
    """The actions of one step as a function of a profiler that opens them as Lightning does, and their number."""
    notes = Notes()
    trainer(directory, 4, profiler=notes).fit(Tiny(), Tiny.loader(4))
    fetch = "[_TrainingEpochLoop].train_dataloader_next"
    fetches = [at for at, call in enumerate(notes.calls) if call == ("start", fetch)]
    lines, depth = ["def step(profiler, progress):", " profile = profiler.profile"], 1
    step = notes.calls[fetches[1] : fetches[2]]
    for kind, name in step:
        if name == fetch:
            lines.append(f"{' ' * depth}profiler.{kind}({name!r})")
        elif kind == "start":
            lines.append(f"{' ' * depth}with profile({name!r}):")
            depth += 1
            lines.append(f"{' ' * depth}pass")
        else:
            depth -= 1
        if (kind, name) == ("stop", fetch):
            lines.append(f"{' ' * depth}progress.ready += 1")
    space = {}
    exec("\n".join(lines), space)
    return space["step"], len(step) // 2


class Replays(TimelineTrace):
    """Measures in its own hook, which is not recorded, so that the replayed steps stand where real ones do."""

    def __init__(self, step, actions, rounds, figures):
        super().__init__(summary=False, max_events=10**9)
        self.step, self.actions, self.rounds, self.figures = step, actions, rounds, figures

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step != 3:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        ready = progress.ready
        profilers = {"recorded": trainer.profiler, "pass through": PassThroughProfiler(), "simple": SimpleProfiler()}
        for at in range(self.rounds + 1):
            for name, profiler in profilers.items():
                begin_ns = time.thread_time_ns()
                for _ in range(TURNS):
                    self.step(profiler, progress)
                ns = (time.thread_time_ns() - begin_ns) / TURNS / self.actions
                if at:  # the first round makes what is made at the first use
                    self.figures.add(name, ns)
            profilers["simple"].recorded_durations.clear()
            self.tracer.flush()
        progress.ready = ready


def measure_actions(directory, rounds):
    figures = Figures()
    step, actions = one_step(directory)
    trainer(directory, 5, Replays(step, actions, rounds, figures)).fit(Tiny(), Tiny.loader(5))
    print(f"\n{actions} actions of a step, ns an action     median      p95    least")
    for name in figures.samples:
        print(f"{name:34}{figures.median(name):10.0f}{figures.p95(name):9.0f}{figures.least(name):9.0f}")
    return figures, actions


def main():
    silence()
    about = environment()
    with tempfile.TemporaryDirectory() as directory:
        figures, count = measure_actions(directory, 5 if quick() else 40)
    rows = [
        ("action, recorded / pass through", figures.median("recorded") / figures.median("pass through"), "<=", 0.4),
    ]
    finish(about, rows, actions=count, action_ns={name: round(figures.median(name), 1) for name in figures.samples})


if __name__ == "__main__":
    sys.exit(main())
