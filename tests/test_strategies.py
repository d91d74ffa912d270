"""Strategies that shard a model over ranks: they restore late, write directories, and let no rank be left alone.

ModelParallelStrategy runs really, on two ranks. FSDP and DeepSpeed need GPUs: what else they do differently is imitated.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from runs import steps_of
from timer_fakes import Clock, Model, quiet_trainer

from lightning_timekeeper import TimelineTrace, Timer

SCRIPT = Path(__file__).with_name("sharded_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks say of three runs: to a limit of 5 s, resumed to one of 9 s, resumed with that spent."""
    root = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, root],
            env={**shared, "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]


@pytest.mark.slow
@pytest.mark.versions
def test_a_sharded_run_resumes_exactly(ranks):
    """Both ranks stop at the same step, write their shards into one directory, and go on with the next batch."""
    for rank in ranks:
        first, resumed, spent = rank
        assert (first["batches"], resumed["batches"], spent["batches"]) == ([0, 1, 2, 3, 4], [5, 0, 1, 2], [])
        assert [run["step"] for run in rank] == [5, 9, 9]
        assert [run["reason"] for run in rank] == ["duration"] * 3
        assert {"__0_0.distcp", "__1_0.distcp"} < set(first["files"])
    assert [run["elapsed_s"] for run in ranks[0]] == [5.0, 9.0, 9.0]


@pytest.mark.slow
@pytest.mark.versions
def test_a_window_goes_on_over_a_sharded_resume(ranks):
    """That it was recording is restored after set-up, in time for the first batch."""
    for rank in ranks:
        assert [run["recorded"] for run in rank] == [[3, 4], [5, 6], None]


class Joint(SingleDeviceStrategy):
    """A rank of two that are run one after the other, with the manners of FSDP and DeepSpeed.

    It writes down each joint call; rank 1, the second to run, gets from a broadcast what rank 0 put in.
    """

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False
    handles_gradient_accumulation = True

    def __init__(self, rank, words):
        super().__init__("cpu")
        self.global_rank = self.local_rank = rank
        self.world_size = 2
        self.words, self.calls = words, []

    @property
    def is_global_zero(self):
        return self.global_rank == 0

    def barrier(self, name=None):
        self.calls.append(f"barrier {name}")

    def broadcast(self, obj, src=0):
        if self.is_global_zero:
            self.words.append(obj)
        self.calls.append("broadcast")
        return self.words[self.calls.count("broadcast") - 1]

    def reduce_boolean_decision(self, decision, all=True):  # noqa: A002 - Lightning's name
        self.calls.append("reduce")
        return decision

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        self.calls.append("save")
        folder = Path(self.broadcast(filepath))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint.pop("state_dict"), folder / f"shard{self.global_rank}.pt")
        if self.is_global_zero:
            torch.save(checkpoint, folder / "meta.pt")

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        assert self.model is not None, "there is nothing yet that the shards could go into"
        folder = Path(self.broadcast(checkpoint_path))
        self.lightning_module.load_state_dict(torch.load(folder / f"shard{self.global_rank}.pt"))
        return torch.load(folder / "meta.pt", weights_only=False)

    def load_model_state_dict(self, checkpoint, strict=True):
        assert "state_dict" not in checkpoint


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run rank 0, then rank 1, each with clocks and callbacks of its own; returns both ranks' findings."""
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_only.rank", 0)

    def both(limit, *, speed=1.0, ckpt_path=None, **settings):
        words, found = [], []
        for rank in range(2):
            clock = Clock(start_s=1e5 * (1 + rank))
            monkeypatch.setattr("lightning_timekeeper.timer.time", clock)
            timer = Timer(limit, save_on_limit=True, validate_on_limit=False, verbose=False)
            timeline = TimelineTrace(enable=4, disable=20, summary=False)
            model = Model(clock, step_s=speed if rank else 1.0)
            strategy = Joint(rank, words)
            settings = {"limit_val_batches": 0, "accelerator": "auto", "use_distributed_sampler": False, **settings}
            trainer = quiet_trainer(tmp_path, timer, timeline, strategy=strategy, **settings)
            trainer.fit(model, ckpt_path=ckpt_path)
            found.append((trainer, timer, timeline, model, strategy.calls))
        return found

    return both


@pytest.mark.parametrize("speed", [0.25, 1.0, 8.0])
def test_no_rank_is_left_alone(run, tmp_path, speed):
    """Whatever a rank's own clock says, both make the same joint calls in the same order, to the save and after it."""
    zero, one = run("6s", speed=speed)
    assert zero[4] == one[4]
    assert "barrier Trainer.save_checkpoint" in zero[4]
    assert [trainer.global_step for trainer, *_ in (zero, one)] == [6, 6]
    assert sorted(os.listdir(tmp_path / "timer.ckpt")) == ["meta.pt", "shard0.pt", "shard1.pt"]


def test_resume_from_shards(run, tmp_path):
    """The time, the step and the window come back after set-up; the directory is replaced by the next limit's."""
    run("6s")
    checkpoint = str(shutil.copytree(tmp_path / "timer.ckpt", tmp_path / "first.ckpt"))  # both ranks read the first one
    ranks = run("10s", speed=3.0, ckpt_path=checkpoint)
    for trainer, timer, timeline, model, _ in ranks:
        assert (trainer.global_step, timer.stop_reason) == (10, "duration")
        assert [batch for _, batch in model.seen] == [6, 7, 8, 9]
        assert steps_of(timeline.path) == [6, 7, 8, 9]
    assert ranks[0][1].time_elapsed() == 10.0
    assert torch.load(tmp_path / "timer.ckpt" / "meta.pt", weights_only=False)["global_step"] == 10
    for trainer, timer, _, model, _ in run("10s", ckpt_path=str(tmp_path / "timer.ckpt")):
        assert (trainer.global_step, timer.stop_reason, model.seen) == (10, "duration", [])


def test_a_strategy_that_accumulates_itself(run):
    """Lightning counts a step at every n-th batch there, too, and the limit holds at the end of such a window."""
    for trainer, timer, _, model, _ in run("6s", accumulate_grad_batches=4):
        assert timer.stop_reason == "duration"
        assert (trainer.global_step, len(model.seen)) == (2, 8)


def test_a_rank_that_cannot_save(run, tmp_path, monkeypatch):
    """A save that fails on one rank ends with the barrier that the others wait at, and a warning."""
    save = Joint.save_checkpoint

    def full(self, checkpoint, filepath, storage_options=None):
        save(self, checkpoint, filepath, storage_options)
        if self.global_rank == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Joint, "save_checkpoint", full)
    with pytest.warns(UserWarning, match=r"save_on_limit=.*could not save.*No space left"):
        zero, one = run("6s")
    assert zero[4] == one[4]
