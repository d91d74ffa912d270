"""Where the time went, from exact events."""

from __future__ import annotations

import pytest

from lightning_timekeeper import Tracer, span
from lightning_timekeeper.trace.summary import summarize


def event(ph, ts, dur=None, cat="a", tid=1, **more):
    made = {"ph": ph, "cat": cat, "name": cat, "pid": 1, "tid": tid, "ts": ts, **more}
    return made if dur is None else {**made, "dur": dur}


def rows(events):
    return {row.phase: (row.self_us, row.calls, row.longest_us) for row in summarize(events).rows}


def test_self_times():
    """A span's time is its own, without that of the spans inside it, whether they are X or B and E."""
    assert rows(
        [
            event("B", 0, cat="run"),
            event("X", 10, 30, cat="step"),
            event("X", 15, 5, cat="data"),
            event("X", 20, 20, cat="forward"),  # from where data ends to where step ends
            event("X", 50, 10, cat="step"),
            event("E", 100),
        ]
    ) == {"run": (60, 1, 100), "step": (15, 2, 30), "data": (5, 1, 5), "forward": (20, 1, 20)}


def test_a_cut_trace():
    """A span without an end lasts until the latest time of its track."""
    assert rows([event("B", 0, cat="run"), event("X", 10, 30, cat="step")]) == {"run": (10, 1, 40), "step": (30, 1, 30)}


def test_tracks_are_apart():
    """The same times on another track are other spans; shares are of the sum."""
    summary = summarize([event("X", 0, 10), event("X", 0, 10, tid=2, cat="b")])
    assert summary.total_us == 20
    assert str(summary).count("50.0 %") == 2


@pytest.mark.parametrize(
    "bad", [{"ts": "soon"}, {"ts": None}, {"ts": float("nan")}, {"tid": [1]}, {"dur": {}}, {"cat": 3}]
)
def test_foreign_events_do_no_harm(bad):
    """A time that is none is passed over; any track and any category is taken."""
    assert rows([event("X", 0, 10), {**event("X", 20, 5), **bad}])["a"][1] >= 1


def test_from_a_file(tmp_path):
    """A path is read."""
    with Tracer(tmp_path / "t.json"), span("x"):
        pass
    (row,) = summarize(tmp_path / "t.json").rows
    assert (row.phase, row.calls) == ("user", 1)
