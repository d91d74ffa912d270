"""The harness around Perfetto's engine: it tells good traces from bad ones."""

from __future__ import annotations

import gzip

import perfetto as harness
import pytest

GOOD = """[
{"ph":"X","name":"outer é😀","pid":1,"tid":1,"ts":1.5,"dur":3.25}
,
{"ph":"X","name":"inner","pid":1,"tid":1,"ts":2.125,"dur":1}
,
{"ph":"B","name":"open","pid":1,"tid":2,"ts":7889238000000.001}
"""
SLICES = "select ts, dur, depth, name from slice"


@pytest.fixture
def trace(tmp_path):
    """Write a text to a new file."""

    def write(text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_a_good_trace_is_ok_and_queries_answer_exactly(perfetto, trace):
    """Integers, strings, reals and nulls come back as they are; an array that was never closed opens."""
    report = perfetto.open_trace(trace(GOOD), [SLICES, "select -9007199254740993, 1.5, null, 'ä', ''"])
    assert report.ok
    assert report.rows == [
        [
            [1500, 3250, 0, "outer é😀"],
            [2125, 1000, 1, "inner"],
            [7889238000000001, -1, 0, "open"],
        ],
        [[-9007199254740993, 1.5, None, "ä", ""]],
    ]


def test_many_files_are_opened_apart_from_each_other(perfetto, trace):
    """One engine opens many files, and neither the slices nor the faults of one show in the next."""
    overlap = (
        '[{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":5},{"ph":"X","name":"b","pid":1,"tid":1,"ts":3,"dur":9}]'
    )
    good, cut = trace(GOOD), trace('{"traceEvents":[{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":5},')
    paths = [good, cut, trace(""), good, trace(overlap), trace(gzip.compress(GOOD.encode())), good]
    reports = perfetto.open_traces(paths, ["select count(*) from slice"])
    assert [report.ok for report in reports] == [True, False, False, True, False, True, True]
    assert [report.rows for report in reports if report.ok] == [[[[3]]]] * 4
    assert reports[1].error
    assert reports[2].error
    assert reports[4].error is None  # the file opens, but a slice is lost
    assert reports[4].bad_stats


@pytest.mark.slow
def test_a_trace_that_hangs_the_engine_is_reported_and_the_next_one_opens(perfetto, trace):
    """A NaN in a counter makes Perfetto loop for ever: an error after the timeout, not a test that never ends."""
    hang = trace('[{"ph":"C","name":"a","pid":1,"ts":1,"args":{"v":NaN}}]')
    reports = perfetto.open_traces([trace(GOOD), hang, trace(GOOD)], timeout_s=4)
    assert [report.error for report in reports] == [None, "no answer within 4 s", None]


def test_a_faulty_query_is_an_error_with_its_message(perfetto, trace):
    """A mistake in a test's SQL does not pass for an empty answer."""
    assert "no such column: nope" in perfetto.open_trace(trace(GOOD), ["select nope from slice"]).error


def test_a_missing_engine_skips_unless_it_is_required(monkeypatch):
    """Without node the tests that need it are skipped with the reason, and fail where CI requires them."""
    monkeypatch.setattr(harness.shutil, "which", lambda _: None)
    monkeypatch.delenv("TIMEKEEPER_REQUIRE_PERFETTO", raising=False)
    with pytest.raises(pytest.skip.Exception, match="node is not installed"):
        harness.require()
    monkeypatch.setenv("TIMEKEEPER_REQUIRE_PERFETTO", "1")
    with pytest.raises(pytest.fail.Exception, match="node is not installed"):
        harness.require()
