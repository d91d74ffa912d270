"""Quantiles in bounded memory: how far they may be off."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_timekeeper.trace.summary.quantiles import RELATIVE_ERROR, Histogram

DURATIONS = st.lists(st.one_of(st.integers(0, 1000), st.integers(0, 10**16)), min_size=1, max_size=200)


def filled(durations, *, at_once=False):
    times = Histogram()
    if at_once:
        times.add_all(np.array(durations, dtype=np.int64), np.arange(len(durations)))
    else:
        for duration_ns in durations:
            times.add(duration_ns)
    return times


@given(DURATIONS, st.floats(0, 1), st.booleans())
def test_quantiles_are_within_one_percent(durations, share, at_once):
    """Of the element that has that share of all at or below it, one by one or many at a time; the sum is exact."""
    times = filled(durations, at_once=at_once)
    true = sorted(durations)[max(1, math.ceil(share * len(durations))) - 1]
    assert abs(times.quantile(share) - true) <= RELATIVE_ERROR * true * (1 + 1e-9)
    assert (times.count, times.total_ns, times.longest_ns) == (len(durations), sum(durations), max(durations))
    assert times.longest_at == (durations.index(max(durations)) if at_once else None)


@given(DURATIONS, DURATIONS)
def test_merged_is_as_if_counted_together(first, second):
    """Histograms can be merged and copied."""
    together = filled(first)
    together.merge(filled(second))
    copy = together.copy()
    copy.add(5)
    whole = filled([*first, *second])
    assert all(together.quantile(share / 10) == whole.quantile(share / 10) for share in range(11))
    assert copy.quantile(1) is not None
    assert (together.count, copy.count) == (whole.count, whole.count + 1)


@given(DURATIONS, st.integers(1, 60))
def test_bars_hold_all(durations, most):
    """The distribution has no more bars than asked for, in order, without those of no time at all."""
    bars = filled(durations).bars(most)
    assert len(bars) <= most
    assert sum(bar.count for bar in bars) == sum(duration_ns > 0 for duration_ns in durations)
    assert all(bar.from_ns < bar.to_ns or bar.to_ns <= 50 for bar in bars)  # whole ns, of widths below one


def test_nothing_has_no_quantile():
    """It is None, and not 0."""
    assert Histogram().quantile(0.5) is None
    assert Histogram().bars() == ()
