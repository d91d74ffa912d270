"""One rank of a real sharded training on two: FSDP2 of torch under Lightning's ModelParallelStrategy, on the CPU.

It is the one strategy that restores after set-up, and writes a directory of shards, and needs no GPU. Prints a line of
JSON about each of its runs. The ranks' clocks are fakes that differ.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

from lightning.pytorch.strategies import ModelParallelStrategy
from runs import steps_of
from timer_fakes import Clock, Model, quiet_trainer

import lightning_timekeeper.timer as timer_module
from lightning_timekeeper import TimelineTrace, Timer

RANK = int(os.environ.get("LOCAL_RANK", "0"))


class Sharded(Model):
    """Its layer lies on both ranks in halves."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def train(root, limit, ckpt_path=None):
    clock = timer_module.time = Clock(start_s=1e5 * (1 + RANK))
    timer = Timer(limit, save_on_limit=True, validate_on_limit=False, verbose=False)
    timeline = TimelineTrace(enable=3, disable=7, summary=False)
    model = Sharded(clock, step_s=1.0 + RANK)  # rank 0's clock counts
    trainer = quiet_trainer(
        root, timer, timeline, devices=2, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return {
        "step": trainer.global_step,
        "batches": [batch for _, batch in model.seen],
        "reason": timer.stop_reason,
        "elapsed_s": timer.time_elapsed(),
        "recorded": steps_of(timeline.path) if timeline.path else None,
        "files": sorted(os.listdir(os.path.join(root, "timer.ckpt"))),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    root = sys.argv[1]
    checkpoint = os.path.join(root, "timer.ckpt")
    for limit, path in (("5s", None), ("9s", checkpoint), ("9s", checkpoint)):
        print(json.dumps(train(root, limit, path)), flush=True)
