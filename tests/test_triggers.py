"""Triggers fire on the counters, once, wherever the run was cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_timekeeper import At, Every, Trigger
from lightning_timekeeper.triggers import NEVER, Counts, as_trigger


def fired(trigger, counts, unit="step"):
    states = [Counts(**{unit: count}) for count in counts]
    return [
        after[("step", "batch", "epoch").index(unit)]
        for before, after in itertools.pairwise(states)
        if trigger.fires(before, after, None)
    ]


def test_every_fires_at_each_multiple():
    """Not at 0."""
    assert fired(Every(3), range(10)) == [3, 6, 9]


def test_at_fires_once():
    """When that many are done."""
    assert fired(At(4), range(10)) == [4]


def test_a_step_that_did_not_count_fires_nothing():
    """In an accumulation window the counter stands still."""
    assert fired(Every(2), [0, 0, 1, 1, 2, 2, 2, 3]) == [2]


@pytest.mark.parametrize("unit", ["batch", "epoch"])
def test_units(unit):
    """Batches and epochs have their own counters."""
    assert fired(Every(2, unit), range(5), unit) == [2, 4]
    assert fired(At(3, unit), range(5), unit) == [3]


@given(st.integers(1, 20), st.integers(0, 50), st.integers(0, 50))
def test_a_resumed_run_fires_where_an_uninterrupted_one_does(n, cut, more):
    """Whatever the counters are when the run is cut."""
    for trigger in (Every(n), At(n)):
        whole = fired(trigger, range(cut + more + 1))
        assert fired(trigger, range(cut + 1)) + fired(trigger, range(cut, cut + more + 1)) == whole


@given(st.integers(1, 20), st.sampled_from(["step", "batch", "epoch"]), st.lists(st.booleans(), max_size=60))
def test_a_resting_trigger_does_not_fire(n, unit, steps):
    """Not looking at it for as long as it says, in batches that step or not, changes nothing within an epoch."""
    for trigger in (Every(n, unit), At(n, unit), NEVER):
        every_time, seldom, resting = [], [], trigger.rests(Counts())
        before = looked_at = Counts()
        for stepped in steps:
            after = Counts(before.step + stepped, before.batch + 1)
            if trigger.fires(before, after, None):
                every_time.append(after)
            if resting >= 1:
                resting -= 1
            else:
                if trigger.fires(looked_at, after, None):
                    seldom.append(after)
                looked_at, resting = after, trigger.rests(after)
            before = after
        assert seldom == every_time


def test_a_trigger_of_the_users_own_never_rests():
    """Only what is known to be idle is left unasked."""

    class Mine(Trigger):
        def fires(self, before, after, trainer):
            return True

    assert Mine().rests(Counts()) == as_trigger(bool, "x").rests(Counts()) == 0


def test_what_may_be_passed():
    """A trigger, a pair, also as a list from YAML, a number of steps, a callable, or nothing."""
    assert as_trigger((2, "epoch"), "x") == as_trigger([2, "epoch"], "x") == Every(2, "epoch")
    assert as_trigger(7, "x") == At(7)
    assert as_trigger(At(1, "batch"), "x") == At(1, "batch")
    assert as_trigger(lambda trainer: trainer == "it", "x").fires(Counts(), Counts(), "it")
    assert not as_trigger(None, "x").fires(Counts(), Counts(1), None)


@pytest.mark.parametrize(
    "bad", [(0, "step"), (1, "day"), (1.5, "step"), (True, "step"), (1,), (1, 2, 3), "10", 1.0, -1, True]
)
def test_bad_triggers(bad):
    """One error, with the value and what is accepted."""
    with pytest.raises(ValueError, match="expected") as error:
        as_trigger(bad, "F(enable")
    assert f"`F(enable={bad!r}" in str(error.value)


@pytest.mark.parametrize("make", [lambda: Every(0), lambda: Every(1, "day"), lambda: At(-1), lambda: At(1.0)])
def test_bad_constructions(make):
    """Also of the classes themselves."""
    with pytest.raises(ValueError, match="expected"):
        make()
