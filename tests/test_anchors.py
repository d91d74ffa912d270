"""Clock anchors: what is watched, what is recorded of it, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import pickle
import time
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Callback
from runs import Model, quiet, trainer

from lightning_timekeeper import Tracer, read_events
from lightning_timekeeper.anchors import MOST_HELD, Anchors


class Strategy:
    """Of two ranks, as far as one of them sees it."""

    def __init__(self):
        self.calls = []

    def broadcast(self, value):
        self.calls.append("broadcast")
        return "run of rank 0"

    def barrier(self, name=None):
        self.calls.append(name)

    def reduce_boolean_decision(self, decision, all=True):  # noqa: A002 - Lightning's name
        return decision


def make(strategy, world_size=2):
    failures = []
    anchors = Anchors(SimpleNamespace(strategy=strategy, world_size=world_size), failures.append)
    anchors.failures = failures
    return anchors


def anchors_in(events):
    return [event for event in events if event.get("name") == "clock anchor"]


@pytest.fixture
def tracer():
    tracer = Tracer()
    yield tracer
    tracer.close()


def test_each_joint_call_is_an_anchor(tracer):
    """Its number, the call, the wait, and how long ago it was left; what the call returns is passed on."""
    strategy = Strategy()
    anchors = make(strategy)
    anchors.watch()
    anchors.record(tracer)
    before_ns = time.perf_counter_ns()
    strategy.barrier("run-stage")
    strategy.barrier(name="end")
    strategy.barrier()
    assert strategy.reduce_boolean_decision(True) is True
    took_ns = time.perf_counter_ns() - before_ns
    found = anchors_in(tracer.events())
    assert [event["args"]["number"] for event in found] == [0, 1, 2, 3]
    assert [event["args"]["call"] for event in found] == ["run-stage", "end", "barrier", "reduce_boolean_decision"]
    assert {event["args"]["run"] for event in found} == {"run of rank 0"}
    assert all(0 <= event["args"]["waited_ns"] <= took_ns for event in found)
    assert all(0 <= event["args"]["ago_ns"] <= took_ns for event in found)
    assert all((event["ph"], event["cat"], event["tid"]) == ("i", "timekeeper", 1) for event in found)
    assert not anchors.failures


def test_what_comes_before_a_recording_is_held_for_it(tracer):
    """The barriers at the start of a fit are the tight ones, and a window may open much later."""
    strategy = Strategy()
    anchors = make(strategy)
    anchors.watch()
    for _ in range(MOST_HELD + 1):
        strategy.barrier()
    anchors.record(tracer)
    anchors.hold()
    strategy.barrier()
    assert [event["args"]["number"] for event in anchors_in(tracer.events())] == list(range(1, MOST_HELD + 1))
    anchors.record(tracer)
    assert anchors_in(tracer.events())[-1]["args"]["number"] == MOST_HELD + 1


def test_the_ranks_count_alike_whatever_they_record(tracer):
    """A rank without a recording still counts, and makes the same collective calls: it broadcasts once."""
    strategies = Strategy(), Strategy()
    anchors = [make(strategy) for strategy in strategies]
    for each in anchors:
        each.watch()
    anchors[0].record(tracer)
    for strategy in strategies:
        strategy.barrier("a")
    assert strategies[0].calls == strategies[1].calls == ["broadcast", "a"]
    anchors[1].record(tracer)
    assert [event["args"]["number"] for event in anchors_in(tracer.events())] == [0, 0]


def test_one_rank_is_left_alone():
    """No collective call, nothing watched."""
    strategy = Strategy()
    anchors = make(strategy, world_size=1)
    anchors.watch()
    assert vars(strategy) == {"calls": []}
    anchors.unwatch()


def test_the_strategy_is_as_it_was_afterwards():
    """In whatever order two recordings end, and where somebody had replaced the method before."""
    strategy = Strategy()
    own = strategy.barrier = lambda name=None: "own"
    first, second = make(strategy), make(strategy)
    first.watch()
    second.watch()
    assert strategy.barrier("x") == "own"
    first.unwatch()
    second.unwatch()
    first.unwatch()
    assert strategy.barrier is own
    assert "reduce_boolean_decision" not in vars(strategy)


def test_a_barrier_that_raises_is_no_anchor(tracer):
    """And its exception goes on."""

    class Broken(Strategy):
        def barrier(self, name=None):
            raise RuntimeError("connection closed by peer")

    strategy = Broken()
    anchors = make(strategy)
    anchors.watch()
    anchors.record(tracer)
    with pytest.raises(RuntimeError, match="connection closed"):
        strategy.barrier()
    assert not anchors_in(tracer.events())


def test_a_failure_of_ours_does_not_reach_the_barrier(tracer):
    """It is told to who records, and the ranks go on."""
    strategy = Strategy()
    anchors = make(strategy)
    anchors.watch()
    anchors.record(SimpleNamespace(_clock=time.perf_counter_ns))
    strategy.barrier()
    assert [type(error) for error in anchors.failures] == [AttributeError]


def test_a_clock_of_the_users_own_has_no_anchors(tracer):
    """What it counts is not what a barrier is measured in."""
    strategy = Strategy()
    anchors = make(strategy)
    anchors.watch()
    own = Tracer(clock=lambda: 5)
    anchors.record(own)
    strategy.barrier()
    assert not anchors_in(own.events())
    own.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_a_copy_of_the_strategy_is_not_watched(copied):
    """As in a copy of a module with its Trainer: it neither fails nor records."""
    strategy = Strategy()
    anchors = make(strategy)
    anchors.watch()
    other = copied(strategy)
    other.barrier("x")
    assert other.calls == ["broadcast", "x"]
    assert strategy.calls == ["broadcast"]


def test_a_fit_on_one_rank_has_no_anchors(tmp_path):
    """And its strategy is not touched while it runs."""
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append("barrier" in vars(trainer.strategy))

    trainer(tmp_path, quiet(), Look(), max_epochs=1).fit(Model())
    assert not any(seen)
    assert not anchors_in(read_events(tmp_path / "fit-rank0.json"))
