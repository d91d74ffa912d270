"""What TimelineTrace costs a training: the profiler's actions of a step, and a whole fit whose step is small.

Actions: a step with three callbacks opens 36 of Lightning's profiler actions. They are noted in a real fit and then
replayed as they stood in one another, inside a running fit, on Lightning's default PassThroughProfiler, on its
SimpleProfiler and on the proxy that records them, with all that it does around them: steps begin and end, the
optimizer's time is taken. Thread CPU time, because the machine may have other work; what the background thread takes
of another core is in the second part.

Whole fit: fits of a model with four weights, by turns without us, with TimelineTrace recording to a file, with one
whose window never opens, and with SimpleProfiler; three empty callbacks in all of them. Wall time from `on_train_start`
to `on_train_end` per step. Each round gives one ratio to the fit without us that ran beside it; a difference is
claimed only where the middle half of those ratios lies on one side of 1.

Usage: python benchmarks/timeline.py [--quick]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings

import torch
from _harness import Figures, environment, finish, targets
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler
from torch.utils.data import DataLoader

from lightning_timekeeper import TimelineTrace


class Tiny(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class First(Callback):
    pass


class Second(Callback):
    pass


class Third(Callback):
    pass


class Clock(Callback):
    """Wall time between the first and the last step."""

    def on_train_start(self, *_):
        self.begin_s = time.perf_counter()

    def on_train_end(self, *_):
        self.seconds = time.perf_counter() - self.begin_s


def trainer(directory, steps, *callbacks, profiler=None):
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        profiler=profiler,
        callbacks=[First(), Second(), Third(), *callbacks],
    )


def loader(steps):
    return DataLoader(torch.ones(steps, 4))


def trace(**arguments):
    return TimelineTrace(summary=False, max_events=10**9, **arguments)


# ---- actions ---------------------------------------------------------------------------------------------------------
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
    trainer(directory, 4, profiler=notes).fit(Tiny(), loader(4))
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


TURNS = 200


def measure_actions(directory, rounds):
    figures = Figures()
    step, actions = one_step(directory)
    trainer(directory, 5, Replays(step, actions, rounds, figures)).fit(Tiny(), loader(5))
    print(f"\n{actions} actions of a step, ns an action     median      p95    least")
    for name in figures.samples:
        print(f"{name:34}{figures.median(name):10.0f}{figures.p95(name):9.0f}{figures.least(name):9.0f}")
    return figures, actions


# ---- whole fits ------------------------------------------------------------------------------------------------------
WITHOUT = "without"


def measure_fits(directory, rounds, steps):
    kinds = {
        WITHOUT: lambda: ([], None),
        "recording": lambda: ([trace()], None),
        "window not open": lambda: ([trace(enable=10**9)], None),
        "simple profiler": lambda: ([], SimpleProfiler()),
    }
    figures = Figures()
    for at in range(rounds + 1):
        names = list(kinds)
        names = names[at % len(names) :] + names[: at % len(names)]  # no kind always follows the same one
        seconds = {}
        for name in names:
            callbacks, profiler = kinds[name]()
            clock = Clock()
            trainer(directory, steps, *callbacks, clock, profiler=profiler).fit(Tiny(), loader(steps))
            seconds[name] = clock.seconds
        if at:
            for name, value in seconds.items():
                figures.add(name, value / steps * 1e6)
                figures.add(f"{name} / {WITHOUT}", value / seconds[WITHOUT])
    print(f"\nfit of {steps} steps, µs a step       median      p95    ratio   middle half of the ratios")
    for name in kinds:
        ratio = f"{name} / {WITHOUT}"
        low, _, high = statistics.quantiles(figures.samples[ratio], n=4)
        verdict = "slower" if low > 1 else "faster" if high < 1 else "no difference"
        verdict = "" if name == WITHOUT else verdict
        print(
            f"{name:30}{figures.median(name):10.1f}{figures.p95(name):9.1f}{figures.median(ratio):9.3f}"
            f"   {low:.3f} to {high:.3f}  {verdict}"
        )
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    about = environment()
    with tempfile.TemporaryDirectory() as directory:
        actions, count = measure_actions(directory, 5 if quick else 40)
        fits = measure_fits(directory, 3 if quick else 24, 100 if quick else 500)
    action = actions.median("recorded") / actions.median("pass through")
    ratios = {
        name.split(" / ")[0]: [round(quartile, 4) for quartile in statistics.quantiles(values, n=4)]
        for name, values in fits.samples.items()
        if name.endswith(f" / {WITHOUT}") and not name.startswith(WITHOUT)
    }
    missed = targets(
        [
            ("recorded / pass through, an action", action, "<=", 0.4),
            ("fit, recording / without, median ratio", ratios["recording"][1], "<=", 1.0),
            ("fit, window not open / without, median ratio", ratios["window not open"][1], "<=", 1.0),
        ]
    )
    result = {
        "environment": about,
        "actions": count,
        "action_ns": {name: round(actions.median(name), 1) for name in actions.samples},
        "action_ratio": round(action, 4),
        "fit_us_per_step": {
            name: round(fits.median(name), 2) for name in fits.samples if not name.endswith(f" / {WITHOUT}")
        },
        "fit_ratio_quartiles": ratios,
        "missed": missed,
    }
    finish(result)


if __name__ == "__main__":
    sys.exit(main())
