"""One rank of a real training on two (``ddp SCENARIO...``), or a main process that spawns two (``ddp_spawn``, …).

Prints a line of JSON for each scenario. The ranks' clocks are fakes of their own, set to differ.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback
from timer_fakes import Clock, Model, quiet_trainer

import lightning_timekeeper.timer as timer_module
from lightning_timekeeper import Timer

RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Broadcasts:
    """Counts what goes through torch.distributed: the Timer's word, and anything pickled."""

    def __init__(self):
        self.words, self.tensors, self.pickled = 0, set(), 0
        self._broadcast, self._broadcast_object = torch.distributed.broadcast, torch.distributed.broadcast_object_list
        torch.distributed.broadcast = self.broadcast
        torch.distributed.broadcast_object_list = self.broadcast_object

    def broadcast(self, tensor, *args, **kwargs):
        if tensor.dtype == torch.int64 and tensor.numel() == 2:
            self.words += 1
            self.tensors.add(tensor.data_ptr())
        return self._broadcast(tensor, *args, **kwargs)

    def broadcast_object(self, *args, **kwargs):
        self.pickled += 1
        return self._broadcast_object(*args, **kwargs)

    def close(self):
        torch.distributed.broadcast = self._broadcast
        torch.distributed.broadcast_object_list = self._broadcast_object


class PickledPerStep(Callback):
    """What is pickled between the first and the last batch."""

    def __init__(self, counts):
        self.counts, self.first, self.last = counts, None, None

    def on_train_batch_start(self, *args):
        self.first = self.counts.pickled if self.first is None else self.first

    def on_train_batch_end(self, *args):
        self.last = self.counts.pickled


class Paced(Model):
    """Steps of ``step_s``, and ``slow`` times that from the step ``slow_from`` on."""

    slow, slow_from = 1.0, 10**9

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step >= self.slow_from:
            self.clock.advance(self.step_s * (self.slow - 1.0))
        return super().training_step(batch, batch_idx)


def train(root, timer, step_s=0.1, speed=1.0, slow=1.0, slow_from=10**9, ckpt_path=None, batches=400, **settings):
    """Train on this rank, whose clock runs ``speed`` times as fast as rank 0's and began elsewhere."""
    clock = timer_module.time = Clock(start_s=1e5 * (1 + RANK))
    model = Paced(clock, step_s * (speed if RANK else 1.0), batches=2 * batches)
    model.slow, model.slow_from = slow, slow_from
    counts = Broadcasts()
    probe = PickledPerStep(counts)
    settings = {"limit_val_batches": 0, "max_epochs": 3, "devices": 2, "strategy": "ddp", **settings}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(root, timer, probe, **settings)
        trainer.fit(model, ckpt_path=ckpt_path)
    counts.close()
    return {
        "steps": trainer.global_step,
        "batches": len(model.seen),
        "reason": timer.stop_reason,
        "words": counts.words,
        "tensors": len(counts.tensors),
        "pickled": probe.last - probe.first if probe.last is not None else 0,
        "elapsed_s": timer.time_elapsed(),
        "warnings": [str(w.message) for w in caught if "Timer" in str(w.message)],
    }


def state(seconds):
    return {"time_elapsed": dict.fromkeys(("train", "sanity_check", "validate", "test", "predict"), seconds)}


def with_state(on_rank, seconds, duration="10s"):
    timer = Timer(duration)
    if on_rank == RANK:
        timer.load_state_dict(state(seconds))
    return timer


def slurm(root, on_rank):
    os.environ.pop("SLURM_JOB_END_TIME", None)
    if on_rank == RANK:
        os.environ["SLURM_JOB_END_TIME"] = str(1_900_000_010)
    try:
        return train(root, Timer(deadline="slurm"), max_epochs=1, batches=150)
    finally:
        os.environ.pop("SLURM_JOB_END_TIME", None)


def resume(root):
    path = root / "timer.ckpt"
    first = train(root, Timer("5s", save_on_limit=path), batches=20)
    rest = train(root, Timer(), batches=20, ckpt_path=path)
    return {**first, "batches": first["batches"] + rest["batches"], "steps": rest["steps"]}


def failing_save(root, batches):
    """Under DDP rank 0 alone writes, so it alone fails."""
    if RANK == 0:
        (root / "file").write_text("")
    return train(root, Timer("5s", save_on_limit=root / "file" / "x.ckpt"), batches=batches)


SCENARIOS = {
    "fast": lambda root: train(root, Timer("10s"), speed=7.0),
    "slow": lambda root: train(root, Timer("10s"), speed=0.1),
    "only rank 0 has a state": lambda root: train(root, with_state(0, 4.0)),
    "only rank 1 has a state": lambda root: train(root, with_state(1, 4.0)),
    "rank 0 is spent": lambda root: train(root, with_state(0, 11.0)),
    "rank 1 is spent": lambda root: train(root, with_state(1, 11.0)),
    "no limit": lambda root: train(root, Timer(), max_epochs=1, batches=20),
    "one a second": lambda root: train(root, Timer("20s"), step_s=0.05),
    "no limit reached": lambda root: train(root, Timer("1h"), step_s=0.05, max_epochs=1),
    "epochs": lambda root: train(root, Timer("5s", interval="epoch"), batches=20),
    "accumulate": lambda root: train(root, Timer("5s"), accumulate_grad_batches=4),
    "validation": lambda root: train(root, Timer("5s"), limit_val_batches=1.0, val_check_interval=20),
    "slurm on rank 0": lambda root: slurm(root, 0),
    "slurm on rank 1": lambda root: slurm(root, 1),
    "resume": resume,
    "failing save": lambda root: failing_save(root, 400),
    "failing save at an epoch's end": lambda root: failing_save(root, 50),
    **{
        f"slower from {step}": lambda root, step=step: train(root, Timer("10s"), slow=10.0, slow_from=step)
        for step in (0, 1, 70, 79, 80, 81, 90, 97)
    },
}


class UseClock(Callback):
    """The fake clock in the spawned processes."""

    def setup(self, trainer, pl_module, stage):
        timer_module.time = pl_module.clock


def spawn(strategy, root):
    """What the main process knows after its ranks have trained."""
    timer = Timer("5s")
    timer.load_state_dict(state(1.0))
    model = Paced(Clock(), 0.1, batches=400)
    trainer = quiet_trainer(root, UseClock(), timer, devices=2, strategy=strategy, limit_val_batches=0)
    trainer.fit(model)
    known = {
        "elapsed_s": timer.state_dict()["time_elapsed"],
        "remaining_s": timer.time_remaining(),
        "start_s": timer.start_time(),
        "end_s": timer.end_time(),
        "reason": timer.stop_reason,
    }
    again = quiet_trainer(root, timer, max_epochs=1)
    again.fit(Model())
    return {**known, "steps_of_a_second_fit": again.global_step}


def main(strategy, *names):
    root = Path(os.environ["TIMER_RANKS_ROOT"])
    if strategy != "ddp":
        print(json.dumps({strategy: spawn(strategy, root)}), flush=True)
        return
    for name in names or SCENARIOS:
        folder = root / name
        folder.mkdir(exist_ok=True)
        print(json.dumps({name: SCENARIOS[name](folder)}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    tempfile.tempdir = os.environ["TIMER_RANKS_ROOT"]
    main(*sys.argv[1:])
