"""How far clocks are apart: exact within a machine, between machines never farther off than is stated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_timekeeper.trace.clocks import Anchor, Clock, Shift, align

MS = 10**6
S = 10**9
HOUR = 3600 * S


def barriers(times_ns, ahead, waits, seed=0, run="a"):
    """Two clocks that saw the same barriers: the second one is ahead by ``ahead(time)``; one of both waits."""
    rng = random.Random(seed)
    here, there = [], []
    for number, (time_ns, wait_ns) in enumerate(zip(times_ns, waits, strict=True)):
        late = rng.random() < 0.5  # which of them is the last to enter
        entered = time_ns - (0 if late else wait_ns), time_ns - (wait_ns if late else 0)
        left = time_ns + rng.randrange(1000, 200_000), time_ns + rng.randrange(1000, 200_000)
        here.append(Anchor(run, number, entered[0], left[0]))
        there.append(Anchor(run, number, entered[1] + ahead(entered[1]), left[1] + ahead(left[1])))
    return Clock(anchors=here), Clock(anchors=there)


def check(clocks, ahead, times_ns):
    """The second clock's times come out right, within what is stated; returns the largest error stated."""
    alignment = align(clocks)[1]
    assert alignment.by == "anchors"
    stated = []
    for time_ns in times_ns:
        own_ns = time_ns + ahead(time_ns)
        error_ns = alignment.error_ns(own_ns)
        assert abs(alignment.shift(own_ns) - time_ns) <= error_ns + 1
        stated.append(error_ns)
    least_ns, most_ns = alignment.errors_ns(times_ns[0] + ahead(times_ns[0]), times_ns[-1] + ahead(times_ns[-1]))
    assert least_ns <= min(stated) <= max(stated) <= most_ns + 1
    return max(stated)


def test_one_machine_is_exact():
    """Whatever its wall clock said when each trace began."""
    alignments = align([Clock({"b": 100 * S}), Clock({"b": 95 * S}), Clock({"b": 107 * S})])
    assert [alignment.by for alignment in alignments] == ["reference", "same machine", "same machine"]
    assert [alignment.shift(1000 * S) for alignment in alignments] == [1000 * S, 1005 * S, 993 * S]
    assert [alignment.error_ns(0) for alignment in alignments] == [0, 0, 0]


def test_without_anchors_it_is_the_wall_clock():
    """Nothing is shifted, and no error is claimed."""
    for clocks in ([Clock({"a": 1}), Clock({"b": 5})], [Clock(), Clock()]):
        alignment = align(clocks)[1]
        assert (alignment.by, alignment.shift(7), alignment.error_ns(7)) == ("wall clock", 7, None)
        assert alignment.errors_ns(0, 9) is None
    assert align([]) == []


def test_one_barrier_bounds_the_difference():
    """By half the two waits together; the middle is taken."""
    here = Clock(anchors=[Anchor("a", 0, 1000, 1100)])
    there = Clock(anchors=[Anchor("a", 0, 6000, 6300)])  # ahead by 4900 to 5300
    alignment = align([here, there])[1]
    assert alignment.shift(6300) == 6300 - 5100
    assert alignment.error_ns(6300) == 200


def test_the_tightest_barrier_decides():
    """A rank that waits half a minute for a checkpoint takes nothing away from the barriers at the start."""
    times_ns = [S, S + MS, 60 * S, 61 * S]
    clocks = barriers(times_ns, lambda _: -5 * S, [300 * MS, MS, 30 * S, 30 * S])
    assert check(clocks, lambda _: -5 * S, [S, S + MS]) < 2 * MS
    assert check(clocks, lambda _: -5 * S, times_ns) < 60 * S * 50e-6 + 2 * MS


def test_other_runs_and_numbers_are_none_of_ours():
    """Only the same barrier of the same run counts."""
    first = Clock(anchors=[Anchor("a", 0, 0, 10), Anchor("b", 1, 0, 10)])
    second = Clock(anchors=[Anchor("b", 0, 500, 510), Anchor("a", 1, 500, 510)])
    assert align([first, second])[1].by == "wall clock"


def test_clocks_that_drift_apart():
    """20 ppm over ten hours are 0.7 s: no constant fits, and each barrier is honoured."""

    def ahead(time_ns):
        return 3 * S + time_ns * 20 // 10**6

    times_ns = [hour * HOUR // 4 for hour in range(1, 40)]
    clocks = barriers(times_ns, ahead, [2 * MS] * len(times_ns))
    assert check(clocks, ahead, list(range(times_ns[0], times_ns[-1], HOUR // 7))) < 50 * MS
    alignment = align(clocks)[1]
    shifted = [alignment.shift(time_ns) for time_ns in range(times_ns[0], times_ns[0] + 10**6, 7)]
    assert shifted == sorted(shifted)


def test_anchors_that_contradict_each_other_are_not_believed():
    """A barrier that is none, or clocks that were set: then it is the wall clock."""
    here = Clock(anchors=[Anchor("a", 0, 0, 10), Anchor("a", 1, S, S + 10)])
    there = Clock(anchors=[Anchor("a", 0, 0, 10), Anchor("a", 1, 2 * S, 2 * S + 10)])
    assert align([here, there])[1].by == "wall clock"


def test_machines_are_reached_over_others():
    """A restart on other nodes shares one with the run before; the errors add up."""
    run_a = barriers([S], lambda _: 5 * S, [MS], run="a")
    run_b = barriers([100 * S], lambda _: -2 * S, [MS], run="b", seed=1)  # against machine 2's clock, 5 s ahead
    restarted = Clock({"2": 50 * S}, [Anchor(*a[:2], a[2] + 5 * S, a[3] + 5 * S) for a in run_b[0].anchors])
    third = Clock({"3": 0}, [Anchor(*a[:2], a[2] + 5 * S, a[3] + 5 * S) for a in run_b[1].anchors])
    second = Clock({"2": 50 * S}, run_a[1].anchors)
    alignments = align([Clock({"1": 0}, run_a[0].anchors), third, second, restarted])
    assert [alignment.by for alignment in alignments] == ["reference", "anchors", "anchors", "anchors"]
    assert abs(alignments[1].shift(103 * S) - 100 * S) <= alignments[1].error_ns(103 * S)
    assert alignments[1].error_ns(103 * S) > alignments[2].error_ns(6 * S)


def test_all_ranks_of_a_machine_count():
    """The last that entered and the first that left: two of them bound it more tightly than either."""
    here = Clock({"1": 0}, [Anchor("a", 0, 1000, 1100)])
    early = Clock({"2": 0}, [Anchor("a", 0, 5000, 6300)])
    late = Clock({"2": 0}, [Anchor("a", 0, 6000, 6900)])
    alignments = align([here, early, late])
    assert alignments[1].error_ns(6300) == alignments[2].error_ns(6300) == 200


def test_a_merged_trace_stays_as_it_is():
    """Its machines move together."""
    merged = Clock({"1": 10 * S, "2": 20 * S})
    alone = Clock({"2": 25 * S})
    assert align([merged, alone])[1].shift(30 * S) == 25 * S
    assert align([alone, merged])[1].shift(30 * S) == 35 * S


@pytest.mark.parametrize("knots", [[(0, 10), (100, 0)], [(0, 0), (10**18, 10**15)], [(5, 1), (5, 1), (9, 3)]])
def test_a_shift_keeps_the_order(knots):
    """So that spans stay nested."""
    shift = Shift(knots)
    shifted = [shift(time_ns) for time_ns in range(-5, 200)]
    assert shifted == sorted(shifted)
    assert shift.plus(3)(10) == shift(13)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 20 * HOUR), min_size=1, max_size=12, unique=True),
    st.integers(-(10**13), 10**13),
    st.floats(-45e-6, 45e-6),
    st.data(),
)
def test_the_stated_error_holds(times_ns, ahead_ns, drift, data):
    """For any waits, any difference of the clocks, and a drift of up to 45 ppm: no time is farther off than stated."""

    def ahead(time_ns):
        return ahead_ns + int(drift * time_ns)

    times_ns = sorted(times_ns)
    waits = [data.draw(st.sampled_from([0, 10_000, MS, S, 30 * S])) for _ in times_ns]
    clocks = barriers(times_ns, ahead, waits, seed=data.draw(st.integers(0, 99)))
    moments = [data.draw(st.integers(0, 21 * HOUR)) for _ in range(4)]
    alignment = align(clocks)[1]
    for time_ns in [*times_ns, *moments]:
        own_ns = time_ns + ahead(time_ns)
        assert abs(alignment.shift(own_ns) - time_ns) <= alignment.error_ns(own_ns) + 2
