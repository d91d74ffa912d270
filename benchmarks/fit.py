"""What a whole `Trainer.fit` takes with each of the callbacks and profilers, against the same fit without.

Two models: Tiny has four weights, so that a step is Lightning's own work and little else, the worst case; Small is a
net of two layers on a batch of 64. Three empty callbacks are in all fits. Kinds: nothing; Lightning's Timer and ours, each
with a limit of ten days; SimpleProfiler; PyTorchProfiler as Lightning sets it up; TimelineTrace with a window that never
opens, recording to a file, and recording beside our Timer. A third part has two DataLoader workers, and records a span
in them for each item.

Wall time from `on_train_start` to `on_train_end` per step. The kinds take turns, none always after the same one; each round
gives one ratio to the fit without that ran beside it. A difference is claimed only where the middle half of those ratios
lies on one side of 1.

Usage: python benchmarks/fit.py [--quick]
"""

from __future__ import annotations

import statistics
import sys
import tempfile

from _harness import Figures, environment, finish, quick
from _training import Clock, Rows, Small, Tiny, silence, trainer
from lightning.pytorch.callbacks import Timer as LightningTimer
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch.utils.data import DataLoader

from lightning_timekeeper import TimelineTrace, Timer, TracedDataset

WITHOUT, RECORDING, OFF = "nothing", "TimelineTrace", "TimelineTrace, no window open"
DAYS = "10:00:00:00"


def trace(**arguments):
    return TimelineTrace(summary=False, max_events=10**9, **arguments)


def kinds(directory):
    """Name -> what makes the callbacks and the profiler of a fit."""
    return {
        WITHOUT: lambda: ([], None),
        "Lightning's Timer": lambda: ([LightningTimer(DAYS)], None),
        "Timer": lambda: ([Timer(DAYS)], None),
        "SimpleProfiler": lambda: ([], SimpleProfiler()),
        "PyTorchProfiler": lambda: ([], PyTorchProfiler(dirpath=directory, filename="torch")),
        OFF: lambda: ([trace(enable=10**9)], None),
        RECORDING: lambda: ([trace()], None),
        "TimelineTrace and Timer": lambda: ([trace(), Timer(DAYS)], None),
    }


def measure(directory, title, runs, rounds, steps):
    """Interleaved fits; ``runs`` are functions that return the seconds of one."""
    figures = Figures()
    names = list(runs)
    for at in range(rounds + 1):
        turned = names[at % len(names) :] + names[: at % len(names)]
        seconds = {name: runs[name]() for name in turned}
        if at:  # the first warms up
            for name, value in seconds.items():
                figures.add(name, value / steps * 1e6)
                figures.add(f"{name} / {WITHOUT}", value / seconds[WITHOUT])
    print(f"\n{title + f', {steps} steps, µs a step':44} median      p95    ratio   middle half of the ratios")
    found = {}
    for name in names:
        ratio = f"{name} / {WITHOUT}"
        low, middle, high = statistics.quantiles(figures.samples[ratio], n=4)
        found[name] = {"us": round(figures.median(name), 1), "ratio": round(middle, 4), "half": [low, high]}
        verdict = "slower" if low > 1 else "faster" if high < 1 else "no difference"
        print(
            f"{name:42}{figures.median(name):9.1f}{figures.p95(name):9.1f}{middle:9.3f}"
            f"   {low:.3f} to {high:.3f}  {'' if name == WITHOUT else verdict}"
        )
    return found


def fits(directory, model, rounds, steps):
    def run(make):
        callbacks, profiler = make()
        clock = Clock()
        trainer(directory, steps, *callbacks, clock, profiler=profiler).fit(model(), model.loader(steps))
        return clock.seconds

    runs = {name: (lambda make=make: run(make)) for name, make in kinds(directory).items()}
    return measure(directory, model.__name__, runs, rounds, steps)


def fits_with_workers(directory, rounds, steps):
    def run(*callbacks, dataset):
        clock = Clock()
        loader = DataLoader(dataset, batch_size=8, num_workers=2, persistent_workers=True)
        trainer(directory, steps, *callbacks, clock).fit(Tiny(), loader)
        return clock.seconds

    rows = Rows(8 * steps)
    runs = {
        WITHOUT: lambda: run(dataset=rows),
        RECORDING: lambda: run(trace(), dataset=rows),
        f"{RECORDING} and TracedDataset": lambda: run(trace(), dataset=TracedDataset(rows, "item")),
    }
    return measure(directory, "Tiny, two workers", runs, rounds, steps)


def main():
    silence()
    about = environment()
    rounds, steps = (3, 100) if quick() else (24, 500)
    with tempfile.TemporaryDirectory() as directory:
        found = {model.__name__: fits(directory, model, rounds, steps) for model in (Tiny, Small)}
        found["workers"] = fits_with_workers(directory, max(3, rounds // 3), steps)
    rows = [
        (f"fit of {model}: {name} / nothing", found[model][name]["ratio"], "<=", 1.0)
        for model in ("Tiny", "Small")
        for name in (OFF, RECORDING)
    ]
    finish(about, rows, fits=found)


if __name__ == "__main__":
    sys.exit(main())
