"""What a Timer with a limit adds to a training step, against Lightning's own.

One process: inside a running fit, the six callback hooks that a step with automatic optimization dispatches are
dispatched again and again by Lightning's own function, with nothing, an empty callback, Lightning's Timer or ours as
the Trainer's callbacks. What a callback adds is what this takes longer than with nothing: the dispatch of every hook
is in it, also of those that the callback does not implement, and the step's own noise (tens of µs) is not. Thread CPU
time, so that other work on the machine does not count.

Two ranks (gloo, CPU): the wall time that each step of a fit spends in the Timer's `on_train_batch_end`, broadcasts
included. Wall time, because waiting for the other rank is the cost.

Repeats are interleaved; figures are medians, with the quartiles as their spread. Targets: ours adds at most 0.25 of what
Lightning's adds in one process, and its check costs at most 0.02 of Lightning's under DDP.

Usage: python benchmarks/timer.py [--quick]
"""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
from _harness import environment, finish, quick
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer as LightningTimer
from lightning.pytorch.trainer.call import _call_callback_hooks
from torch.utils.data import DataLoader

from lightning_timekeeper import Timer

CALLS = 2000
WARMUP = 100
STEPS = 1500  # on two ranks


class Tiny(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(steps, *callbacks, **settings):
    trainer = Trainer(
        max_epochs=1,
        limit_train_batches=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=tempfile.gettempdir(),
        **settings,
    )
    trainer.fit(Tiny(), DataLoader([torch.ones(1)] * steps, batch_size=None))


class Dispatch(Callback):
    """In the first batch of a fit, measures the hooks of a step for each set of callbacks."""

    def __init__(self, variants, repeats):
        self.variants, self.repeats = variants, repeats
        self.costs_us = {name: [] for name in variants}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        callbacks, optimizer, loss = trainer.callbacks, trainer.optimizers[0], outputs["loss"]
        for repeat in range(-1, self.repeats):  # the first warms up
            for name, variant in self.variants.items():
                trainer.callbacks = variant
                begin_s = time.thread_time()
                for _ in range(CALLS):
                    _call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
                    _call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
                    _call_callback_hooks(trainer, "on_before_backward", loss)
                    _call_callback_hooks(trainer, "on_after_backward")
                    _call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
                    _call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, batch_idx)
                if repeat >= 0:
                    self.costs_us[name].append((time.thread_time() - begin_s) / CALLS * 1e6)
        trainer.callbacks = callbacks


def one_process(repeats):
    """The CPU time in µs that dispatching a step's hooks takes, per set of callbacks and repeat."""
    theirs, ours = LightningTimer("10:00:00:00"), Timer("10:00:00:00")
    variants = {"nothing": [], "empty callback": [Callback()], "Lightning's Timer": [theirs], "our Timer": [ours]}
    dispatch = Dispatch(variants, repeats)
    fit(1, ours, dispatch, Late(theirs), devices=1)
    return dispatch.costs_us


class Late(Callback):
    """Brings in a second Timer, which a Trainer refuses at its construction."""

    def __init__(self, timer):
        self.timer = timer

    def on_fit_start(self, trainer, pl_module):
        trainer.callbacks.append(self.timer)


def timed(kind):
    """The class of Timer, with the wall time of its `on_train_batch_end` summed up."""

    class Timed(kind):
        check_s, steps = 0.0, 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            torch.distributed.barrier()  # so that a rank's own work before the check is not counted as waiting in it
            begin_s = time.perf_counter()
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            if batch_idx >= WARMUP:
                self.check_s += time.perf_counter() - begin_s
                self.steps += 1

    Timed.__name__ = "Timer"
    return Timed


def one_rank(repeats):
    """Run as each of the two ranks; rank 0 prints the µs that a step spends in each Timer, per repeat."""
    costs = {"Lightning's Timer": [], "our Timer": []}
    for _ in range(repeats):
        for name, kind in zip(costs, (LightningTimer, Timer), strict=True):
            timer = timed(kind)("10:00:00:00")
            fit(WARMUP + STEPS, timer, devices=2, strategy="ddp")
            costs[name].append(timer.check_s / timer.steps * 1e6)
    if os.environ["LOCAL_RANK"] == "0":
        print(json.dumps(costs))
    torch.distributed.destroy_process_group()


def two_ranks(repeats):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in "01":
        place = {"LOCAL_RANK": rank, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "rank", str(repeats)]
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    return json.loads(outputs[0].splitlines()[-1])


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:9.2f}  [{low:.2f} .. {high:.2f}]"


def main(repeats):
    about = environment()
    costs = one_process(repeats)
    names = [name for name in costs if name != "nothing"]
    added = {name: [a - b for a, b in zip(costs[name], costs["nothing"], strict=True)] for name in names}
    print("\nOne process, µs of CPU added to a step")
    for name in names:
        print(f"  {name:20}{spread(added[name])}")
    ratio = statistics.median(a / b for a, b in zip(added["our Timer"], added["Lightning's Timer"], strict=True))
    print()
    checks = two_ranks(max(2, repeats // 3))
    print("Two ranks, µs per step in the Timer's check")
    for name, values in checks.items():
        print(f"  {name:20}{spread(values)}")
    ddp_ratio = statistics.median(checks["our Timer"]) / statistics.median(checks["Lightning's Timer"])
    rows = [
        ("Timer, added to a step / Lightning's", ratio, "<=", 0.25),
        ("Timer on two ranks, its check / Lightning's", ddp_ratio, "<=", 0.02),
    ]
    medians = {name: round(statistics.median(values), 2) for name, values in added.items()}
    checks_us = {name: round(statistics.median(values), 2) for name, values in checks.items()}
    finish(about, rows, added_us=medians, ddp_check_us=checks_us)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    if sys.argv[1:2] == ["rank"]:
        one_rank(int(sys.argv[2]))
    else:
        main(3 if quick() else 9)
