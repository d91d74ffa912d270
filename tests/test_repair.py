"""Repairing traces: strictly valid, accepted by Perfetto, and nothing lost without a word."""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_timekeeper.trace import reader
from lightning_timekeeper.trace import repair as module
from lightning_timekeeper.trace.reader import TraceError, read_events
from lightning_timekeeper.trace.repair import repair


def event(ph, ts, tid=1, **more):
    return {"ph": ph, "name": "träin 😀", "pid": 1, "tid": tid, "ts": ts, **more}


def refuse(token):
    raise AssertionError(f"{token} is no JSON")


def strictly(path):
    """Parse a file as the standard has it: UTF-8, and no NaN."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    return json.loads(data.decode(), parse_constant=refuse)


@pytest.fixture
def broken(tmp_path):
    """A file that was cut in its last event, with spans open on two tracks."""
    events = [
        event("B", 1.5),
        event("B", 2.25),
        event("X", 2.5, dur=1.125),
        event("E", 4),
        event("B", 3, tid=2),
        event("E", 3.5, tid=3),
        event("X", 4, tid=2, dur=100.5),
    ]
    path = tmp_path / "train-rank0.json"
    path.write_bytes(b"[\n" + b",\n".join(json.dumps(item).encode() for item in events) + b',\n{"ph":"X","na')
    return path


def test_a_cut_file_becomes_valid_and_its_open_spans_end(broken):
    """Each span that was open ends at the latest time in the file and is marked; an end without a begin is left out."""
    before = broken.read_bytes()
    result = repair(broken)
    assert result.output == broken.with_name("train-rank0-repaired.json")
    assert (result.events, result.closed, result.dropped) == (6, 2, 1)
    assert (result.lost_bytes, result.skipped_bytes) == (13, 0)
    events = strictly(result.output)
    assert events[:6] == [item for item in read_events(broken) if item["tid"] != 3]
    end = {"ph": "E", "pid": 1, "ts": 104.5, "args": {"unfinished": True}}
    assert events[6:] == [{**end, "tid": 1}, {**end, "tid": 2}]
    assert broken.read_bytes() == before
    assert sorted(item.name for item in broken.parent.iterdir()) == ["train-rank0-repaired.json", "train-rank0.json"]


def test_the_sentence_says_what_was_lost(broken):
    """The result as a string names the file, and everything that is not in it."""
    assert str(repair(broken)) == (
        f"{broken.with_name('train-rank0-repaired.json')}: 6 events, 2 unfinished spans closed at the latest time; "
        "lost: 13 bytes at the end, 1 event that no viewer takes."
    )
    whole = broken.with_name("a.json")
    whole.write_text('[{"ph":"X"}]')
    assert str(repair(whole)) == f"{whole.with_name('a-repaired.json')}: 1 event; nothing was lost."


def test_perfetto_opens_what_it_refused(perfetto, tmp_path):
    """An object form that was cut, NaN, a backslash at a string's end: refused before, without a fault after."""
    slices = ",".join(
        json.dumps(item)
        for item in [
            event("B", 1),
            event("X", 2, dur=1, args={"path": "C:\\", "loss": float("inf"), "a": ["\\"]}),
            event("X", float("nan"), dur=1),
            event("C", 2, args={"a": float("nan"), "b": 1}),
            event("C", 2, args={"a": float("nan")}),
            event("X", 5, name="back\\", dur=2),
        ]
    )
    path = tmp_path / "a.json"
    path.write_text('{"baseTimeNanoseconds": 1759276800000000000, "traceEvents": [' + slices + ', {"ph": "X"')
    result = repair(path)
    assert result.dropped == 2
    assert strictly(result.output)["baseTimeNanoseconds"] == 1759276800000000000
    queries = ["select ts, dur, name from slice order by ts", "select value from counter"]
    before, after = perfetto.open_traces([path, result.output], queries, timeout_s=20)
    assert before.error
    assert after.ok
    assert after.rows == [[[1000, 6000, "träin 😀"], [2000, 1000, "träin 😀"], [5000, 2000, "back/"]], [[1.0]]]


def test_an_object_form_keeps_its_form_and_its_other_keys(tmp_path):
    """The tools for torch.profiler's traces want the object and its base time; an empty one stays one, too."""
    path = tmp_path / "a.pt.trace.json"
    for events in ('{"ph":"X"},', ""):
        path.write_text('{"a": NaN, "traceEvents": [' + events + '], "b": [1, "\\\\"]}')
        result = repair(path, tmp_path / f"{len(events)}.json")
        assert strictly(result.output) == {
            "traceEvents": [{"ph": "X"}] if events else [],
            "a": "nan",
            "b": [1, "/"],
        }


@pytest.mark.parametrize("text", ["", "[", "[]", "[1, 2]"])
def test_a_file_without_events_becomes_an_empty_array(tmp_path, text):
    """Nothing to save is said, not hidden in an error."""
    path = tmp_path / "a.json"
    path.write_text(text)
    result = repair(path)
    assert strictly(result.output) == []
    assert result.events == 0


def test_gzip_stays_gzip(tmp_path):
    """A cut ``.json.gz`` becomes a whole one, the same each time; a name decides for another."""
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b'[{"ph":"X"},{"ph":"X"}')[:-9])
    result = repair(path)
    assert result.output.name == "a-repaired.json.gz"
    assert strictly(result.output) == [{"ph": "X"}] * result.events
    assert repair(path, tmp_path / "b.json.gz").output.read_bytes() == result.output.read_bytes()
    assert strictly(repair(path, tmp_path / "b.json").output) == strictly(result.output)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a", "a-repaired.json"), ("a.b.json", "a.b-repaired.json"), ("memory://x/y/a.json.gz", "a-repaired.json.gz")],
)
def test_the_default_name(name, expected):
    """Beside the input, and recognisable."""
    assert str(module._name_beside(name)) == expected


def test_nothing_is_overwritten(broken, monkeypatch):
    """An output that exists is refused at once; one that appears meanwhile is left alone, too."""
    output = broken.with_name("out.json")
    output.write_text("precious")
    with pytest.raises(FileExistsError, match=r"`repair\('.*train-rank0.json'\)`: '.*out.json' exists"):
        repair(broken, output)
    with pytest.raises(FileExistsError):
        repair(broken, broken)
    monkeypatch.setattr(module.Path, "exists", lambda self: False)
    with pytest.raises(FileExistsError):
        repair(broken, output)
    assert output.read_text() == "precious"
    assert len(list(broken.parent.iterdir())) == 2


def test_a_file_system_without_links(broken, monkeypatch):
    """Where a hard link is not supported, the file is renamed."""

    def no_link(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", no_link)
    assert len(strictly(repair(broken).output)) == 8
    assert len(list(broken.parent.iterdir())) == 2


def test_a_failure_leaves_nothing_behind(tmp_path):
    """No trace, no input: the error of the reader, and no file."""
    path = tmp_path / "a.json"
    path.write_text("hello")
    with pytest.raises(TraceError):
        repair(path)
    with pytest.raises(FileNotFoundError):
        repair(tmp_path / "b.json")
    assert list(tmp_path.iterdir()) == [path]


_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_events = st.fixed_dictionaries(
    {"ph": st.sampled_from("XBECiM") | _values},
    optional={
        "pid": _values,
        "tid": st.integers(1, 2),
        "ts": st.floats() | _values,
        "dur": st.floats(),
        "args": _values,
    },
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_events, max_size=8), st.booleans(), st.data())
def test_whatever_the_events_the_result_is_strict_and_balanced(tmp_path_factory, events, ascii_only, data):
    """Any values in any place, cut anywhere: strict JSON, every begin with its end, none without; repaired, it stays."""
    text = json.dumps(events, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    folder = tmp_path_factory.mktemp("repair")
    path = folder / "a.json"
    path.write_bytes(text[: data.draw(st.integers(0, len(text)))])
    result = repair(path)
    found = strictly(result.output)
    assert len(found) == result.events + result.closed
    depths = {}
    for item in found:
        track = json.dumps([item.get("pid"), item.get("tid")])
        depths[track] = depths.get(track, 0) + {"B": 1, "E": -1}.get(str(item["ph"]), 0)
        assert depths[track] >= 0
    assert not any(depths.values())
    again = repair(result.output)
    assert (again.closed, again.dropped, again.lost_bytes, again.skipped_bytes) == (0, 0, 0, 0)
    assert again.output.read_bytes() == result.output.read_bytes()


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """Five times as many spans left open take no more: what is kept is a number per track."""
    monkeypatch.setattr(reader, "_CHUNK", 1 << 14)

    def peak(count):
        path = tmp_path / f"{count}.json"
        path.write_text("[" + (json.dumps(event("B", 1)) + ",\n") * count)
        tracemalloc.start()
        assert repair(path).closed == count
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak_bytes

    small = peak(2_000)
    assert peak(10_000) < small * 1.2


def test_an_open_file_is_a_matter_for_read_events(broken):
    """``repair`` takes paths only: it must know where the output goes."""
    with pytest.raises(TypeError):
        repair(io.BytesIO(broken.read_bytes()))
