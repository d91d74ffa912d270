"""Clocks that step, stand still, are far ahead or behind: times stay in order, and limits hold."""

from __future__ import annotations

import random
import time
from datetime import datetime, timedelta, timezone

import pytest
from runs import Model, named, quiet, spans_of, trainer
from traces import Clock, make_tracer, read, slices

from lightning_timekeeper import Timer, merge
from lightning_timekeeper.trace.encode import base_ns

S = 10**9
DAY = 86_400 * S
WALLS = {
    "before 1970": -3 * DAY,
    "1970": 0,
    "2038": (2**31 - 1) * S,
    "2106": (2**32 + 5) * S,
    "the year 9999": 253_402_300_799 * S,
}
UPTIMES = {"none": 0, "a year": 366 * DAY, "a century": 36_500 * DAY}


def test_any_wall_clock_and_any_uptime(tmp_path, perfetto):
    """Before 1970, 2038 and beyond, on a machine that is up for a year: each ns is right, and both read alike."""
    paths = []
    for wall_ns in WALLS.values():
        for uptime_ns in UPTIMES.values():
            clock = Clock()
            clock.now_ns = uptime_ns
            path = tmp_path / f"{len(paths)}.json"
            with make_tracer(path, clock, wall_clock=lambda wall_ns=wall_ns: wall_ns) as tracer:
                for number in range(3):
                    clock.go(5)
                    with tracer.span("work", number=number), tracer.span("inner"):
                        clock.go(DAY + 7)
                    tracer.flush()
            zero_ns = wall_ns - base_ns(wall_ns)
            found = slices(read(path))
            assert [one.start_ns for one in found if one.name == "inner"] == [
                zero_ns + 5 * (number + 1) + (DAY + 7) * number for number in range(3)
            ]
            assert {one.end_ns - one.start_ns for one in found} == {DAY + 7}
            paths.append(path)
    sql = ["select sum(dur) from slice where name = 'inner'"]
    for path, report in zip(paths, perfetto.open_traces(paths, sql), strict=True):
        assert report.ok, (path, report)
        assert report.rows == [[[3 * (DAY + 7)]]]


def test_a_process_whose_clock_stands_still(tmp_path, perfetto):
    """Spans of no length at one time are all there, in the order in which they began."""
    clock = Clock()
    with make_tracer(tmp_path / "t.json", clock) as tracer:
        for number in range(50):
            with tracer.span(f"outer {number}"), tracer.span("inner"):
                pass
            if number % 10 == 0:
                tracer.flush()
    assert len(slices(read(tmp_path / "t.json"))) == 100
    report = perfetto.open_trace(tmp_path / "t.json", ["select count(*) from slice"])
    assert report.ok
    assert report.rows == [[[100]]]


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0, 1e9])
def test_a_wall_clock_that_is_set_in_mid_fit(tmp_path, monkeypatch, step_s):
    """By an hour back and forth, or thirty years: the trace notices nothing, and neither does a duration."""
    offset_s = 0.0
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + offset_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(offset_s * 1e9))

    class Steps(Model):
        def training_step(self, batch, batch_idx):
            nonlocal offset_s
            offset_s += step_s * random.choice([0, 1, -1] if step_s < 1e6 else [1])
            return super().training_step(batch, batch_idx)

    timer = Timer(duration="1h", run_duration="1h")
    runner = trainer(tmp_path, timer, quiet(filename="{epoch}.json"))
    begin_s = time.monotonic()
    runner.fit(Steps())
    elapsed_s = time.monotonic() - begin_s
    assert runner.global_step == 16
    assert timer.stop_reason is None
    assert 0 < timer.time_elapsed() <= elapsed_s
    spans = [span for number in range(2) for span in spans_of(tmp_path / f"{number}.json")]
    assert max(span["end"] for span in spans) - min(span["start"] for span in spans) <= elapsed_s * 1e9
    steps = sorted(named(spans, "step"), key=lambda span: span["start"])
    assert [span["args"]["step"] for span in steps] == list(range(16))


def test_deadlines_at_the_ends_of_time():
    """The first and the last moment that a datetime has, in any zone, are deadlines; one has passed, one never comes."""
    for hours in (-23, 0, 23):
        zone = timezone(timedelta(hours=hours))
        assert Timer(deadline=datetime.min.replace(tzinfo=zone)).time_remaining() < 0
        assert Timer(deadline=datetime.max.replace(tzinfo=zone)).time_remaining() > 1e11


def test_traces_of_clocks_that_are_years_apart(tmp_path):
    """A rank whose clock was never set is merged with one whose was: whole, in order, and it is said how."""
    paths = []
    for rank, wall_ns in enumerate((1_700_000_000 * S, 0, 253_402_300_799 * S)):
        clock = Clock()
        paths.append(tmp_path / f"{rank}.json")
        with make_tracer(
            paths[-1], clock, wall_clock=lambda wall_ns=wall_ns: wall_ns, pid=rank + 1, metadata={"rank": rank}
        ) as tracer:
            clock.go(S)
            with tracer.span("work"):
                clock.go(7)
    merged = merge(paths, tmp_path / "merged.json")
    found = slices(read(tmp_path / "merged.json"))
    assert [one.end_ns - one.start_ns for one in found] == [7, 7, 7]
    assert [file.aligned_by for file in merged.files] == ["reference", "wall clock", "none"]
