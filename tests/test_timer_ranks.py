"""Two real ranks: they stop together, whatever their clocks and states are, and talk about once a second."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timer_fakes import Clock

import lightning_timekeeper.timer
from lightning_timekeeper import Timer

SCRIPT = Path(__file__).with_name("timer_ranks.py")


def environment(root, **more):
    return {**os.environ, "TIMER_RANKS_ROOT": str(root), "OMP_NUM_THREADS": "1", **more}


def results_of(text):
    return {
        name: result for line in text.splitlines() if line.startswith("{") for name, result in json.loads(line).items()
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two ranks has to say about every scenario of timer_ranks.py, run once for all tests."""
    root = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "ddp"],
            env=environment(root, LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
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
    return [results_of(out) for out, _ in outputs]


SAME = ("steps", "batches", "reason", "words")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "steps", "reason"),
    [
        ("fast", 100, "duration"),
        ("slow", 100, "duration"),
        ("only rank 0 has a state", 60, "duration"),
        ("only rank 1 has a state", 100, "duration"),
        ("rank 0 is spent", 0, "duration"),
        ("rank 1 is spent", 100, "duration"),
        ("no limit", 20, None),
        ("epochs", 60, "duration"),
        ("accumulate", 13, "duration"),
        ("validation", 50, "duration"),
        ("slurm on rank 0", 100, "deadline"),
        ("slurm on rank 1", 150, None),
        ("failing save", 50, "duration"),
        ("failing save at an epoch's end", 50, "duration"),
    ],
)
def test_ranks_stop_together(ranks, scenario, steps, reason):
    """Every rank ends with the step that rank 0's clock decides, for the same reason, after as many broadcasts."""
    zero, one = (rank[scenario] for rank in ranks)
    assert (zero["steps"], zero["reason"]) == (steps, reason)
    assert {key: zero[key] for key in SAME} == {key: one[key] for key in SAME}


@pytest.mark.slow
def test_about_one_broadcast_a_second(ranks):
    """20 s of steps take about one broadcast a second, of one tensor used again and again; near the limit a few more."""
    for rank in ranks:
        assert 20 <= rank["one a second"]["words"] <= 20 + 12
        assert 20 <= rank["no limit reached"]["words"] <= 20 + 6
        assert rank["one a second"]["tensors"] == 1


@pytest.mark.slow
def test_nothing_is_pickled(ranks):
    """No pickled object is broadcast in any step, where Lightning's Timer sends one per step."""
    assert {name: rank[name]["pickled"] for rank in ranks for name in rank} == dict.fromkeys(ranks[0], 0)


@pytest.mark.slow
def test_no_limit_no_broadcast(ranks):
    """Without a limit nothing is broadcast; with a Slurm deadline that rank 0 does not have, once."""
    for rank in ranks:
        assert rank["no limit"]["words"] == 0
        assert rank["slurm on rank 1"]["words"] == 1


@pytest.mark.slow
def test_suddenly_slower_steps(ranks):
    """Steps that become ten times slower, wherever they do, end within 8 s and one step of the limit."""
    scenarios = [name for name in ranks[0] if name.startswith("slower")]
    assert len(scenarios) == 8
    for name in scenarios:
        assert 10.0 - 1e-6 <= ranks[0][name]["elapsed_s"] <= 10.0 + 8.0 + 1.0
        assert {key: ranks[0][name][key] for key in SAME} == {key: ranks[1][name][key] for key in SAME}


@pytest.mark.slow
def test_resume_on_two_ranks(ranks):
    """The checkpoint of the last step is written once for all ranks, and their resume trains exactly the rest."""
    for rank in ranks:
        assert (rank["resume"]["steps"], rank["resume"]["batches"]) == (60, 60)


@pytest.mark.slow
def test_save_that_fails_on_one_rank(ranks):
    """Where one rank fails to save, that rank warns once, and no rank waits for ever."""
    for name in ("failing save", "failing save at an epoch's end"):
        assert len(ranks[0][name]["warnings"]) == 1
        assert "x.ckpt" in ranks[0][name]["warnings"][0]
        assert ranks[1][name]["warnings"] == []


@settings(max_examples=300)
@given(
    limit_s=st.floats(0.5, 20),
    step_s=st.floats(0.01, 1),
    slow_from_s=st.floats(0, 4).map(lambda before_s: -before_s),  # seconds before the limit
    slower=st.floats(1, 50),
)
@example(limit_s=10.0, step_s=0.01, slow_from_s=-2.0, slower=10.0)
@example(limit_s=10.0, step_s=0.01, slow_from_s=-1.5, slower=10.0)
@example(limit_s=10.0, step_s=0.01, slow_from_s=-1.2, slower=40.0)
def test_bound_for_slower_steps(limit_s, step_s, slow_from_s, slower):
    """The bound that the docstring states holds: steps k times slower end within max(0, k - 2) s and one step."""
    clock, trainer = Clock(start_s=0.0), Mock(global_rank=0, global_step=0, loggers=[])
    trainer.fit_loop._should_accumulate.return_value = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_timekeeper.timer, "time", clock)
        patch.setattr(Timer, "_hear_rank_zero", lambda self, trainer, *word: word)
        timer = Timer({"seconds": limit_s}, verbose=False)
        timer._ranks = 2
        timer.on_train_start(trainer, Mock())
        while not timer.stop_reason:
            length_s = step_s * (slower if clock.now_s >= limit_s + slow_from_s else 1.0)
            clock.advance(length_s)
            timer.on_train_batch_end(trainer)
    assert -1e-5 <= clock.now_s - limit_s <= max(0.0, slower - 2) + length_s + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_main_process_knows_the_times(tmp_path, strategy):
    """After spawned ranks have trained, the main process knows rank 0's times, and a second fit has what they left."""
    done = subprocess.run(
        [sys.executable, SCRIPT, strategy],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    known = results_of(done.stdout)[strategy]
    assert known["elapsed_s"]["train"] == pytest.approx(5.0, abs=1e-6)
    assert known["elapsed_s"]["test"] == 1.0
    assert known["remaining_s"] == pytest.approx(0.0, abs=1e-6)
    assert known["reason"] == "duration"
    assert known["start_s"] is known["end_s"] is None
    assert known["steps_of_a_second_fit"] == 0
