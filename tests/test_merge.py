"""Merging traces: every span once, clocks aligned within the stated error, ranks told apart, memory flat."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import PERIOD_NS, WALL_NS, ZERO_NS, Clock, make_tracer, read, slices

from lightning_timekeeper import merge, read_events
from lightning_timekeeper.__main__ import main
from lightning_timekeeper.trace import encode, reader
from lightning_timekeeper.trace.reader import TraceError

BASE_NS = WALL_NS - ZERO_NS
S = 10**9


def ours(
    path, rank=0, *, off_ns=0, boot="boot", host="host", pid=None, attempt=0, at_ns=0, lines=(), cut=0, number=None
):
    """A trace in our dialect that began ``at_ns`` after WALL_NS on the machine's own clock, whose wall clock is off."""
    pid = 1000 + rank if pid is None else pid
    number = pid if number is None else number
    args = {
        "name": f"rank {rank} ({host}, pid {pid})",
        "schema_version": 1,
        "host": host,
        "pid": pid,
        "base_unix_s": BASE_NS // S,
        "unix_ns": str(WALL_NS + at_ns + off_ns),
        "clock_ns": str(S + at_ns),
        "rank": rank,
        "attempt": attempt,
        "boot": boot,
    }
    head = [
        encode.event("M", "process_name", number, 0, args=args),
        encode.event("M", "process_sort_index", number, 0, args={"sort_index": rank}),
        encode.event("M", "thread_name", number, 1, args={"name": "MainThread"}),
        encode.event("M", "thread_sort_index", number, 1, args={"sort_index": 1}),
    ]
    made = [line(number, ZERO_NS + at_ns + off_ns) for line in lines]
    text = b"[\n" + b",\n".join([*head, *made]) + b"\n]\n"
    path.write_bytes(text[: len(text) - cut])
    return path


def span(name, start_ns, length_ns, tid=1, **args):
    return lambda pid, zero_ns: encode.event(
        "X", name, pid, tid, zero_ns + start_ns, category="loop", duration_ns=length_ns, args=args
    )


def begin(name, start_ns, tid=1):
    return lambda pid, zero_ns: encode.event("B", name, pid, tid, zero_ns + start_ns, category="loop")


def end(time_ns, tid=1):
    return lambda pid, zero_ns: encode.event("E", "", pid, tid, zero_ns + time_ns)


def anchor(number, entered_ns, left_ns, run="run"):
    args = {"run": run, "number": number, "call": "barrier", "waited_ns": left_ns - entered_ns, "ago_ns": 50}
    return lambda pid, zero_ns: encode.event(
        "i", "clock anchor", pid, 1, zero_ns + left_ns + 50, category="timekeeper", args=args, extra='"s":"t"'
    )


def foreign(path, *events, **about):
    path.write_text(json.dumps({"traceEvents": list(events), **about}) if about else json.dumps(list(events)))
    return path


def x(name, ts=1.0, pid=1, tid=1, dur=1.0, **more):
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


def merged(tmp_path, *paths, name="merged.json"):
    """The result and the events of a merge that is valid JSON."""
    result = merge(paths, tmp_path / name)
    return result, read(tmp_path / name)


def spans_in(events):
    return {event["name"]: event for event in events if event["ph"] in "XB"}


def process_names(events):
    return {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}


# ---- clocks ----------------------------------------------------------------------------------------------------------
def test_one_machine_is_aligned_to_the_ns(tmp_path):
    """Its wall clock was set between the starts of the ranks; their monotonic clock was not."""
    one = ours(tmp_path / "0.json", 0, lines=[span("a", 7, 5)])
    two = ours(tmp_path / "1.json", 1, off_ns=5 * S + 3, at_ns=S, lines=[span("b", 7, 5)])
    result, events = merged(tmp_path, one, two)
    spans = spans_in(events)
    assert spans["a"]["ts_ns"] == ZERO_NS + 7
    assert spans["b"]["ts_ns"] == ZERO_NS + S + 7
    assert [file.aligned_by for file in result.files] == ["reference", "same machine"]
    assert [file.error_us for file in result.files] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("off_ns", [5 * S, -5 * S])
def test_machines_are_aligned_by_anchors(tmp_path, off_ns):
    """No time is farther off than is stated, and the barrier's exits agree."""
    one = ours(tmp_path / "0.json", 0, lines=[anchor(0, 0, 90_000), span("a", 10**6, 10)])
    two = ours(
        tmp_path / "1.json", 1, boot="other", off_ns=off_ns, lines=[anchor(0, 50_000, 95_000), span("b", 10**6, 10)]
    )
    result, events = merged(tmp_path, one, two)
    spans = spans_in(events)
    least_us, most_us = result.files[1].error_us
    assert 0 < least_us <= most_us < 70 + 1
    assert abs(spans["b"]["ts_ns"] - spans["a"]["ts_ns"]) <= most_us * 1000
    left = [event["ts_ns"] - event["args"]["ago_ns"] for event in events if event.get("name") == "clock anchor"]
    assert abs(left[0] - left[1]) <= most_us * 1000
    assert str(result.files[1]).endswith(
        f"by anchors, within ±{least_us:.3g} µs at best and ±{most_us:.3g} µs at worst"
    )


def test_without_anchors_it_is_the_wall_clock(tmp_path):
    """And that is said."""
    one = ours(tmp_path / "0.json", 0, lines=[span("a", 7, 5)])
    two = ours(tmp_path / "1.json", 1, boot="other", off_ns=S, lines=[span("b", 7, 5)])
    result, events = merged(tmp_path, one, two)
    assert spans_in(events)["b"]["ts_ns"] == ZERO_NS + S + 7
    assert "by wall clock, error unknown" in str(result)


def test_spans_stay_nested_where_clocks_drift(tmp_path):
    """A shift that changes from barrier to barrier moves begins and ends alike."""
    rng = random.Random(3)
    hour_ns = 3600 * S
    drifts = [anchor(number, number * hour_ns, number * hour_ns + 10_000) for number in range(5)]
    drifted = [
        anchor(number, number * hour_ns + number * 10**7, number * hour_ns + number * 10**7 + 10_000)
        for number in range(5)
    ]
    lines = []
    for _ in range(300):
        at_ns, length_ns = rng.randrange(5 * hour_ns), rng.randrange(1, 10**7)
        lines += [span("outer", at_ns, length_ns), span("inner", at_ns + rng.randrange(2), length_ns // 2)]
    one = ours(tmp_path / "0.json", 0, lines=drifts)
    two = ours(tmp_path / "1.json", 1, boot="other", lines=[*drifted, *lines])
    result, events = merged(tmp_path, one, two)
    assert result.files[1].aligned_by == "anchors"
    found = slices([event for event in events if event["pid"] == 1001 and event["ph"] != "M"])  # fails where two cross
    assert len(found) == 600


def test_ns_are_exact(tmp_path):
    """Times near the end of a period have 16 digits; no float touches them."""
    lines = [span("a", PERIOD_NS - ZERO_NS - 10_000_000_001 + step, 123_456_789_012_345) for step in range(50)]
    one = ours(tmp_path / "0.json", 0, lines=[span("z", 0, 1)])
    two = ours(tmp_path / "1.json", 1, off_ns=1, lines=lines)
    _, events = merged(tmp_path, one, two)
    found = [(event["ts_ns"], event["dur_ns"]) for event in events if event["name"] == "a"]
    assert found == [(PERIOD_NS - 10_000_000_001 + step, 123_456_789_012_345) for step in range(50)]


def test_a_trace_of_torch_profiler_goes_under_its_process(tmp_path):
    """It has the same base and the same pid, and its clock is off as its rank's is."""
    base = {"baseTimeNanoseconds": BASE_NS, "host_name": "host1"}
    names = [
        {"ph": "M", "name": "process_name", "ts": 1.0, "pid": 1001, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "ts": 1.0, "pid": 1001, "tid": 1001, "args": {"name": "thread 1001"}},
    ]
    at_us = (ZERO_NS + 5 * S) / 1000
    kineto = foreign(tmp_path / "k.json", *names, x("aten::mm", at_us, 1001, 1001), x("gpu", at_us, 0, 7), **base)
    one = ours(tmp_path / "0.json", 0, host="host0", lines=[anchor(0, 0, 90), span("a", 0, 10)])
    two = ours(tmp_path / "1.json", 1, boot="other", host="host1", off_ns=5 * S, lines=[anchor(0, 10, 90)])
    result, events = merged(tmp_path, one, two, kineto)
    spans = spans_in(events)
    assert (spans["aten::mm"]["pid"], spans["aten::mm"]["tid"]) == (1001, 1001)
    assert abs(spans["aten::mm"]["ts_ns"] - ZERO_NS) < 1000
    assert process_names(events)[1001] == "rank 1 (host1, pid 1001)"
    assert process_names(events)[spans["gpu"]["pid"]] == "pid 0 (k.json)"
    assert spans["gpu"]["pid"] not in (0, 1000, 1001)
    assert [file.aligned_by for file in result.files] == ["reference", "anchors", "anchors"]


def test_a_clock_of_which_nothing_is_known(tmp_path):
    """PPE counts from the machine's start: such traces keep their distance and begin where the others do."""
    one = ours(tmp_path / "0.json", 0, lines=[span("a", 500, 5)])
    two, three = foreign(tmp_path / "1.json", x("b", 1000.5)), foreign(tmp_path / "2.json", x("c", 1003))
    result, events = merged(tmp_path, one, two, three)
    spans = spans_in(events)
    assert [spans[name]["ts_ns"] - ZERO_NS for name in "abc"] == [500, 500, 500 + 2500]
    assert "clock unknown" in str(result.files[1])
    _, events = merged(tmp_path, two, three, name="alone.json")
    assert [spans_in(events)[name]["ts_ns"] for name in "bc"] == [1_000_500, 1_003_000]


# ---- processes and tracks --------------------------------------------------------------------------------------------
def test_ranks_are_in_order(tmp_path):
    """Whatever the order of the arguments."""
    paths = [ours(tmp_path / f"{rank}.json", rank) for rank in (2, 0, 1)]
    result, events = merged(tmp_path, *paths)
    assert [Path(file.path).stem for file in result.files] == ["0", "1", "2"]
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert order == {1000: 0, 1001: 1, 1002: 2}


def test_attempts_stand_side_by_side(tmp_path):
    """Of a run that was killed and restarted: what was open ends where the trace does, so that the downtime shows."""
    first = ours(tmp_path / "a.json", 3, pid=50, lines=[begin("fit", 0), span("step", 10, 20)], cut=3)
    second = ours(tmp_path / "b.json", 3, pid=60, at_ns=100 * S, lines=[span("fit", 0, 30)])
    result, events = merged(tmp_path, second, first)
    assert process_names(events) == {50: "rank 3, attempt 0 (host, pid 50)", 60: "rank 3, attempt 1 (host, pid 60)"}
    assert result.files[0].closed == 1
    ends = {slice_.start_ns: slice_.end_ns for slice_ in slices(events_of(events, 50))}
    assert ends[ZERO_NS] == ZERO_NS + 30
    (unfinished,) = [event for event in events if event["ph"] == "E"]
    assert unfinished["args"] == {"unfinished": True}


def events_of(events, pid):
    return [event for event in events if event["pid"] == pid and event["ph"] != "M"]


def test_attempts_are_numbered_as_slurm_does(tmp_path):
    """Where the traces tell."""
    paths = [ours(tmp_path / f"{n}.json", 0, pid=n, attempt=n, at_ns=n * S) for n in (2, 5)]
    _, events = merged(tmp_path, *paths)
    assert list(process_names(events).values()) == [f"rank 0, attempt {n} (host, pid {n})" for n in (2, 5)]


def test_files_of_one_process_are_one_process(tmp_path):
    """A new file per epoch: one name, the same tracks, in the order of time."""
    two = ours(tmp_path / "b.json", 0, lines=[span("b", 20, 5)])
    one = ours(tmp_path / "a.json", 0, lines=[span("a", 10, 5)])
    _, events = merged(tmp_path, two, one)
    assert [event["name"] for event in events if event["ph"] == "X"] == ["a", "b"]
    assert Counter(event["name"] for event in events if event["ph"] == "M") == dict.fromkeys(
        ("process_name", "process_sort_index", "thread_name", "thread_sort_index"), 1
    )


def test_tracks_that_are_called_otherwise_are_kept_apart(tmp_path):
    """Two Tracers of one process number their threads each for itself."""

    def named(name, tid):
        return lambda pid, _: encode.event("M", "thread_name", pid, tid, args={"name": name})

    one = ours(tmp_path / "a.json", 0, lines=[named("loader", 2), span("a", 1, 5, tid=2)])
    two = ours(tmp_path / "b.json", 0, at_ns=1, lines=[named("saver", 2), span("b", 1, 5, tid=2)])
    _, events = merged(tmp_path, one, two)
    tids = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    threads = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert {name: threads[tid] for name, tid in tids.items()} == {"a": "loader", "b": "saver"}


def test_colliding_pids_are_kept_apart(tmp_path):
    """Containers number their processes alike, and so do foreign traces."""
    one = ours(tmp_path / "0.json", 0, pid=7, host="a", boot="a", lines=[span("a", 1, 1)])
    two = ours(tmp_path / "1.json", 1, pid=7, host="b", boot="b", lines=[span("b", 1, 1)])
    three, four = (foreign(tmp_path / f"{name}.json", x(name, pid=7)) for name in "cd")
    _, events = merged(tmp_path, one, two, three, four)
    pids = {name: event["pid"] for name, event in spans_in(events).items()}
    assert pids["a"] == 7
    assert pids["b"] == 10_000_001
    assert len(set(pids.values())) == 4
    assert process_names(events)[pids["d"]] == "pid 7 (d.json)"


@pytest.mark.parametrize("bad", ["Spans", 0, -3, 2**32, 2**70, 1.5, None, True, [1], ""])
def test_numbers_that_viewers_do_not_take(tmp_path, bad):
    """Processes and tracks that have texts, 0, or more than 32 bits for numbers get one, and keep their names."""
    path = foreign(tmp_path / "a.json", x("a", pid=bad, tid=bad), x("b", pid=bad, tid=bad), x("c", pid="12", tid="13"))
    _, events = merged(tmp_path, path)
    spans = spans_in(events)
    assert all(1 <= event[key] < 2**32 for event in spans.values() for key in ("pid", "tid"))
    assert (spans["a"]["pid"], spans["a"]["tid"]) == (spans["b"]["pid"], spans["b"]["tid"])
    assert (spans["c"]["pid"], spans["c"]["tid"]) == (12, 13)
    if bad == "Spans":
        assert process_names(events)[spans["a"]["pid"]] == "Spans (a.json)"
        assert {e["args"]["name"] for e in events if e.get("name") == "thread_name"} == {"Spans"}


def test_flows_of_several_traces_are_kept_apart(tmp_path):
    """All of torch.profiler's begin at the same number."""
    flow = [
        {"ph": ph, "name": "f", "cat": "c", "id": 5, "pid": 1, "tid": 1, "ts": ts} for ph, ts in (("s", 1), ("f", 2))
    ]
    odd = [
        {"ph": "s", "name": "f", "cat": "c", "id": id_, "pid": 1, "tid": 1, "ts": 3} for id_ in ("0x5", "x", -1, None)
    ]
    paths = [foreign(tmp_path / f"{n}.json", *flow, *odd) for n in range(2)]
    _, events = merged(tmp_path, *paths)
    ids = [event["id"] for event in events if event["ph"] in "sf"]
    assert all(isinstance(id_, int) and 0 <= id_ < 2**53 for id_ in ids)
    assert ids[0] == ids[1] == ids[2] != ids[6] == ids[7] == ids[8]
    assert len(set(ids)) == 8


def test_a_merged_trace_may_be_merged_again(tmp_path):
    """Alone it stays what it is, to the byte; with others its names and numbers stay, and theirs give way."""
    paths = [ours(tmp_path / f"{rank}.json", rank, lines=[begin("fit", 1), span("a", 2, 5)]) for rank in range(2)]
    restarted = ours(tmp_path / "r.json", 1, pid=9, at_ns=S, lines=[span("b", 2, 5)])
    about = {"baseTimeNanoseconds": BASE_NS}
    kineto = foreign(tmp_path / "k.json", x("k", 5.5, 1001), {**x("f", 6), "ph": "s", "id": 3}, **about)
    merge([*paths, restarted, kineto], tmp_path / "one.json")
    merge([tmp_path / "one.json"], tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    late = ours(tmp_path / "2.json", 2, pid=1000, host="b", boot="b", lines=[span("c", 2, 5)])
    again = foreign(tmp_path / "l.json", {**x("g", 6), "ph": "s", "id": 3}, **about)
    _, before = merged(tmp_path, tmp_path / "one.json", name="three.json")
    _, after = merged(tmp_path, late, again, tmp_path / "one.json", name="four.json")
    assert process_names(after).items() > process_names(before).items()
    assert process_names(after)[10_000_002] == "rank 2 (b, pid 1000)"
    assert [event for event in after if event["pid"] in process_names(before)] == before
    assert len({event["id"] for event in after if event["ph"] == "s"}) == 2


# ---- any trace -------------------------------------------------------------------------------------------------------
def variants(tmp_path):
    """The same three spans by every writer, whole and cut: name -> path, and how many of them can be read."""
    events = [x(f"{at}", at) for at in range(3)]
    text = json.dumps(events)
    made = {
        "array.json": (text.encode(), 3),
        "ppe-append.json": (("[" + "".join(f"\n{json.dumps(e, indent=4)}," for e in events)).encode(), 3),
        "cut.json": (text[:-9].encode(), 2),
        "object.json": (json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode(), 3),
        "object-cut.json": (json.dumps({"traceEvents": events}, indent=1)[:-20].encode(), 2),
        "lines.json": ("\n".join(map(json.dumps, events)).encode(), 3),
        "a.json.gz": (gzip.compress(text.encode()), 3),
        "members.json.gz": (gzip.compress(text[:50].encode()) + gzip.compress(text[50:].encode()), 3),
        "empty.json": (b"", 0),
        "bracket.json": (b"[", 0),
    }
    for name, (data, _) in made.items():
        (tmp_path / name).write_bytes(data)
    made["ours.json"] = b"", 3
    ours(tmp_path / "ours.json", 0, lines=[span(str(at), at, 1) for at in range(3)])
    made["ours-cut.json"] = b"", 2
    ours(tmp_path / "ours-cut.json", 1, lines=[span(str(at), at, 1) for at in range(3)], cut=9)
    torn = ours(tmp_path / "ours-torn.json", 2, lines=[span(str(at), at, 1) for at in range(3)])
    torn.write_bytes(torn.read_bytes().replace(b'"dur":0.001},\n', b'"du,\n', 1))
    made["ours-torn.json"] = b"", 2
    ours(tmp_path / "ours.gz", 3, lines=[span(str(at), at, 1) for at in range(3)])
    whole = gzip.compress((tmp_path / "ours.gz").read_bytes())
    (tmp_path / "ours.gz").write_bytes(whole)
    made["ours.gz"] = b"", 3
    return {tmp_path / name: count for name, (_, count) in made.items()}


def test_any_mix_of_traces(tmp_path, perfetto):
    """Each span of each writer exactly once, also in Perfetto, which finds no fault."""
    counts = variants(tmp_path)
    result, events = merged(tmp_path, *counts)
    assert {Path(file.path): file.events for file in result.files} == counts
    assert result.events == len(events_in(events)) == sum(counts.values())
    report = perfetto.open_trace(tmp_path / "merged.json", ["select name, count(*) from slice group by name"])
    assert report.ok, report
    assert dict(report.rows[0]) == Counter(event["name"] for event in events_in(events))


def events_in(events):
    return [event for event in events if event["ph"] != "M"]


def test_what_was_lost_is_counted(tmp_path):
    """At the end and before, in bytes, by file; and it is said."""
    paths = [path for path in variants(tmp_path) if path.name in ("ours-cut.json", "ours-torn.json", "cut.json")]
    files = {Path(file.path).name: file for file in merge(paths, tmp_path / "merged.json").files}
    assert files["ours-cut.json"].lost_bytes > 0 == files["ours-cut.json"].skipped_bytes
    assert files["ours-torn.json"].skipped_bytes > 0 == files["ours-torn.json"].lost_bytes
    assert files["cut.json"].lost_bytes > 0
    assert str(files["ours-cut.json"]).endswith(f"{files['ours-cut.json'].lost_bytes:,} bytes unreadable")


def test_both_ways_say_the_same(tmp_path):
    """A line that is taken apart at its time, and the same one with a space in it, which is parsed and encoded."""
    lines = [
        span("a", 5, 6),
        begin("b", 7),
        span("ä 😀", 8, 1, loss=0.5, text='a "quoted" one', deep={"a": [1, True]}),
        end(10),
        anchor(3, 11, 12),
        lambda pid, zero_ns: encode.event("C", "c", pid, 1, zero_ns + 9, args={"value": 1.5}),
        span("zero", 13, 0),
        end(14),
    ]
    fast = ours(tmp_path / "fast.json", 0, lines=lines)
    slow = tmp_path / "slow.json"
    slow.write_bytes(fast.read_bytes().replace(b',"name":', b', "name":').replace(b',"pid"', b', "pid"'))
    slow.write_bytes(
        slow.read_bytes().replace(b'{"ph":"M", "name":"process_name", "pid"', b'{"ph":"M","name":"process_name","pid"')
    )
    for path in (fast, slow):
        result = merge([path], path.with_suffix(".out"))
        assert (result.files[0].events, result.files[0].dropped) == (7, 1)
    one, two = (path.with_suffix(".out").read_bytes() for path in (fast, slow))
    assert one.replace(b"fast.json", b"slow.json") == two


def test_what_no_viewer_takes_is_left_out(tmp_path, perfetto):
    """NaN, infinities, nulls, ends without a begin, unknown metadata, strings that end in a backslash."""
    nan = float("nan")
    path = foreign(
        tmp_path / "a.json",
        x("nan", nan),
        x("inf", dur=float("inf")),
        x("good\\", args={"x": None, "y": nan, "z": "C:\\", "control": "a\x00b\ud800", "line": "a\nb", "n": [None]}),
        {"ph": "E", "pid": 1, "tid": 1, "ts": 2},
        {"ph": "C", "name": "c", "pid": 1, "tid": 1, "ts": 2, "args": {"a": nan}},
        {"ph": "C", "name": "c", "pid": 1, "tid": 1, "ts": 2, "args": {"a": nan, "b": 2}},
        {"ph": "M", "name": "made up", "pid": 1, "tid": 1, "args": {}},
        x("", ts=9),
        {**x("no name", ts=11), "name": None},
        {"ph": 5, "ts": 3},
        {"ph": "X", "name": "bare", "ts": 12},
    )
    result, events = merged(tmp_path, path)
    assert (result.events, result.files[0].dropped) == (5, 6)
    args = spans_in(events)["good/"]["args"]
    assert args == {
        "x": "None",
        "y": "nan",
        "z": "C:/",
        "control": "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}",
        "line": "a\nb",
        "n": ["None"],
    }
    report = perfetto.open_trace(tmp_path / "merged.json")
    assert report.ok, report


# ---- the output ------------------------------------------------------------------------------------------------------
def test_the_result_says_what_was_made(tmp_path):
    """A line for the whole and one for each trace."""
    paths = [ours(tmp_path / f"{rank}.json", rank, lines=[begin("a", 1)]) for rank in range(2)]
    assert str(merge(paths, tmp_path / "out.json.gz")) == (
        f"{tmp_path / 'out.json.gz'}: 2 events of 2 traces\n"
        f"  {paths[0]}: 1 events, the reference clock, 1 unfinished spans closed\n"
        f"  {paths[1]}: 1 events, same clock as the reference, 1 unfinished spans closed"
    )
    assert len(events_in(json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes())))) == 4


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ([], ValueError, r"`merge\(\[\], '.*out.json'\)`: expected at least one trace"),
        (["a.json", "a.json"], ValueError, "'.*a.json' is given twice"),
        (["a.json", "old.json"], FileExistsError, None),
        (["none.json"], FileNotFoundError, "none.json"),
        (["a.json", "text.json"], TraceError, "text.json: no Chrome trace"),
        (["."], OSError, None),
    ],
)
def test_errors(tmp_path, paths, error, message):
    """Each names the call or the file, and nothing is left behind."""
    ours(tmp_path / "a.json")
    (tmp_path / "old.json").write_text("[]")
    (tmp_path / "text.json").write_text("hello")
    before = sorted(tmp_path.iterdir())
    output = tmp_path / ("old.json" if error is FileExistsError else "out.json")
    with pytest.raises(error, match=message):
        merge([tmp_path / path for path in paths], output)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old.json").read_text() == "[]"


def test_an_output_that_exists_is_not_overwritten(tmp_path):
    """Whatever it is."""
    (tmp_path / "out.json").write_text("precious")
    with pytest.raises(FileExistsError, match="exists, and is not overwritten"):
        merge([ours(tmp_path / "a.json")], tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == "precious"


def test_traces_without_events(tmp_path):
    """Make an empty array."""
    (tmp_path / "a.json").write_text("[]")
    _, events = merged(tmp_path, tmp_path / "a.json")
    assert events == []


def test_the_command(tmp_path, capsys):
    """It prints the result; nothing of its progress where nobody looks."""
    paths = [str(ours(tmp_path / f"{rank}.json", rank)) for rank in range(2)]
    output = str(tmp_path / "out.json")
    assert main(["merge", *paths, "-o", output]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{output}: 0 events of 2 traces\n")
    assert err == ""
    assert main(["merge", *paths, "-o", output]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_progress(tmp_path, capsys, monkeypatch):
    """Is written over itself, and taken away."""
    monkeypatch.setattr("lightning_timekeeper.trace.merge._SAID_EVERY_S", 0.0)
    merge([ours(tmp_path / "a.json", lines=[span("a", 1, 1)])], tmp_path / "out.json", progress=True)
    err = capsys.readouterr().err
    assert "\r0 of 1 traces, 1 events, " in err
    assert err.endswith("\r\x1b[K")


def test_memory_does_not_grow_with_the_traces(tmp_path, monkeypatch):
    """Five times the events take no more, of ours and of others, also where names never repeat."""
    monkeypatch.setattr(reader, "_CHUNK", 1 << 14)
    monkeypatch.setattr("lightning_timekeeper.trace.merge.rewrite.MOST_PLANS", 100)
    monkeypatch.setattr("lightning_timekeeper.trace.merge.rewrite._EVENTS_AT_ONCE", 100)

    def peak(count):
        lines = [line for at in range(count) for line in (span("a", at, 1), begin(f"{at}", at))]
        mine = ours(tmp_path / f"{count}.json", lines=lines)
        other = foreign(tmp_path / f"{count}-b.json", *(x(f"{at}", at) for at in range(count)))
        tracemalloc.start()
        assert merge([mine, other], tmp_path / f"{count}.out").events == 3 * count
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak_bytes

    peak(100)
    assert peak(6000) < peak(1200) * 1.3


# ---- what the Tracer writes ------------------------------------------------------------------------------------------
def test_traces_of_tracers(tmp_path, perfetto):
    """Real ones, with threads' tracks, arguments, counters and open spans: Perfetto has every span once, and no fault."""
    paths = []
    for rank in range(3):
        clock = Clock()
        tracer = make_tracer(
            tmp_path / f"{rank}.json",
            clock,
            pid=4711,
            sort_index=rank,
            process_name=f"rank {rank}",
            metadata={"rank": rank, "pid": rank},
        )
        tracer.enable()
        for step in range(50):
            with tracer.span("step", step=step):
                clock.go(500)
                with tracer.span("backward"):
                    clock.go(1000)
            tracer.counter("queue", step)
        tracer.instant("done")
        tracer.close()
        paths.append(tmp_path / f"{rank}.json")
    result, events = merged(tmp_path, *paths)
    assert result.events == 3 * 151
    for pid in {event["pid"] for event in events}:
        assert len(slices(events_of(events, pid))) == 100
    sql = [
        "select count(*) from process where name like 'rank%'",
        "select count(*) from slice",
        "select count(*) from counter",
    ]
    report = perfetto.open_trace(tmp_path / "merged.json", sql)
    assert report.ok, report
    assert report.rows == [[[3]], [[3 * 101]], [[3 * 50]]]


# ---- whatever comes --------------------------------------------------------------------------------------------------
_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
_events = st.fixed_dictionaries(
    {"ph": st.sampled_from("XBECiMsfbn") | _values},
    optional={
        "name": st.sampled_from(["a", "process_name", "thread_name", "clock anchor"]) | _values,
        "cat": st.just("timekeeper") | _values,
        "pid": st.integers(998, 1002) | _values,
        "tid": st.integers(1, 2) | _values,
        "ts": st.floats(0, 1e13) | _values,
        "dur": st.floats(0, 1e6) | _values,
        "id": _values,
        "args": st.fixed_dictionaries(
            {}, optional=dict.fromkeys(("name", "rank", "pid", "unix_ns", "number", "merged", "waited_ns"), _values)
        )
        | _values,
    },
)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_whatever_the_traces(tmp_path_factory, data):
    """Any events, in any mix of forms, cut anywhere: strict JSON that balances, or one of the errors documented."""
    folder = tmp_path_factory.mktemp("merge")
    paths = []
    for number in range(data.draw(st.integers(1, 3))):
        events = data.draw(st.lists(_events, max_size=6))
        path = folder / f"{number}.json"
        form = data.draw(st.sampled_from(["ours", "array", "object"]))
        if form == "ours":
            lines = [lambda *_, event=event: _compact(event) for event in events]
            boot = data.draw(st.sampled_from(["a", "b", ""]))
            ours(path, number, boot=boot, lines=[anchor(1, 5, 6), span("z", 7, 1), *lines])
        else:
            array = b"[" + b",\n".join(map(_compact, events)) + b"]"
            path.write_bytes(array if form == "array" else b'{"traceEvents":' + array + b',"baseTimeNanoseconds":5}')
        text = path.read_bytes()
        text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]
        if data.draw(st.booleans()):
            text = gzip.compress(text, mtime=0)
            text = text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]
        path.write_bytes(text)
        paths.append(path)
    output = folder / "out.json"
    try:
        result = merge(paths, output)
    except TraceError:
        assert not output.exists()
        return
    found = read(output)
    assert len(events_in(found)) == result.events + sum(file.closed for file in result.files)
    depths = Counter()
    for event in found:
        depths[event["pid"], event["tid"]] += {"B": 1, "E": -1}.get(event["ph"], 0)
        assert depths[event["pid"], event["tid"]] >= 0
        assert 1 <= event["pid"] < 2**32
    assert not any(depths.values())
    again = merge([output], folder / "again.json")
    assert again.events == len(events_in(found))
    assert sum(file.dropped + file.closed + file.lost_bytes + file.skipped_bytes for file in again.files) == 0


def _compact(event):
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The traces of two real ranks, on machines whose wall clocks are 10 s apart."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("timeline_ranks.py")
    done = subprocess.run(
        [sys.executable, script, folder, "ddp", "t.json", "--skewed"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [folder / "t-rank0.json", folder / "t-rank1.json"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_real_ranks_are_aligned_within_the_stated_error(two_ranks, tmp_path):
    """Both have the same monotonic clock, of which merge does not know: it tells how far off the result really is."""
    events = [event for path in two_ranks for event in read_events(path)]
    before = [event["args"] for event in events if event.get("name") == "process_name"]
    apart_ns = [int(args["unix_ns"]) - int(args["clock_ns"]) for args in before]
    assert abs(apart_ns[0] - apart_ns[1]) > 9 * S
    result, events = merged(tmp_path, *two_ranks)
    heads = [event["args"] for event in events if event.get("name") == "process_name"]
    apart_ns = [int(args["unix_ns"]) - int(args["clock_ns"]) for args in heads]
    least_us, most_us = result.files[1].error_us
    assert result.files[1].aligned_by == "anchors"
    assert abs(apart_ns[0] - apart_ns[1]) <= most_us * 1000
    assert 0 < least_us <= most_us < 1e6
    calls = {}
    for event in events:
        if event.get("name") == "clock anchor":
            args = event["args"]
            left_ns = event["ts_ns"] - args["ago_ns"]
            calls.setdefault((args["number"], args["call"]), []).append((left_ns - args["waited_ns"], left_ns))
    assert {call for _, call in calls} >= {"run-stage", "Trainer.save_checkpoint"}
    for one, two in calls.values():
        # none is left before both have entered it: so the exits are as far apart as the waits at most
        slack_ns = round(most_us * 1000) + 1
        assert max(one[0], two[0]) <= min(one[1], two[1]) + slack_ns
        assert abs(one[1] - two[1]) <= max(one[1] - one[0], two[1] - two[0]) + slack_ns


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_real_ranks_in_perfetto(two_ranks, tmp_path, perfetto):
    """Two processes, tracks for the loop and each worker, no fault, and each span of each rank exactly once."""
    merge(two_ranks, tmp_path / "merged.json")
    tracks = "from thread_track t join thread using (utid) join process p using (upid)"
    sql = [
        f"select p.name, s.name, count(*) {tracks} join slice s on s.track_id = t.id group by 1, 2",
        f"select distinct p.name, thread.name {tracks} join slice s on s.track_id = t.id",
        "select count(*) from process where pid > 0",
    ]
    report = perfetto.open_trace(tmp_path / "merged.json", sql)
    assert report.ok, report
    recorded = Counter()
    for rank, path in enumerate(two_ranks):
        for event in read_events(path):
            if event["ph"] in "XBi":
                recorded[rank, event["name"]] += 1
        assert recorded[rank, "read.__getitem__"] == 2 * 8  # 16 items an epoch, half of them on each rank
    assert Counter({(int(name[5]), span): count for name, span, count in report.rows[0]}) == recorded
    names = {"MainThread", "read worker 0", "read worker 1"}
    assert {(name[:6], track) for name, track in report.rows[1]} == {
        (f"rank {n}", name) for n in range(2) for name in names
    }
    assert report.rows[2] == [[2]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_epoch_end_has_an_anchor(two_ranks):
    """Of the barrier after its checkpoint, on both ranks; and the start of the fit has several."""
    for path in two_ranks:
        events = [event for event in read_events(path) if event["ph"] in "BXi"]
        anchors = [event for event in events if event["name"] == "clock anchor"]
        epochs = [event["ts"] for event in events if event["name"] == "epoch"]
        assert len(epochs) == 2
        assert sum(event["ts"] < epochs[0] for event in anchors) >= 3
        saved = [event["ts"] for event in anchors if event["args"]["call"] == "Trainer.save_checkpoint"]
        assert epochs[0] < saved[0] < epochs[1] < saved[1]
