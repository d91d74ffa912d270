"""Reading traces: every writer's layout, cut anywhere, torn, broken, and none of it in memory at once."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_timekeeper.trace import reader
from lightning_timekeeper.trace.reader import TraceError, read_events
from lightning_timekeeper.trace.tracer import Tracer

EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "rank 0 (häst, pid 1)"}},
    {"ph": "B", "name": 'quoted "😀"', "pid": 1, "tid": 1, "ts": 0.001},
    {"ph": "X", "cat": "forward", "name": "training_step", "pid": 1, "tid": 1, "ts": 1234567.125, "dur": 1234.5},
    {"ph": "C", "name": "queue", "pid": 1, "ts": 1234567.125, "args": {"{[": [1, {"a": []}], "]}": -1e-5}},
    {"ph": "X", "name": "C:/\\", "pid": 1, "tid": 2, "ts": 1234568, "dur": 0},
    {"ph": "X", "cat": "forward", "name": "training_step", "pid": 1, "tid": 1, "ts": 1234569.25, "dur": 12},
]


def dumps(event, **options):
    return json.dumps(event, ensure_ascii=False, **options).encode()


def indented(event):
    return json.dumps(event, indent=4).encode()


COMPACT = [dumps(event, separators=(",", ":")) for event in EVENTS]
TORCH_HEAD = b"""{
  "schemaVersion": 1,
  "deviceProperties": [
    { "id": 0, "name": "a \\"GPU\\"" }
  ],
  "distributedInfo": {"backend": "gloo", "rank": 0, "traceEvents": [1]},
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1759276800000000000,
  "traceEvents": [
  """
TORCH_TAIL = b'\n  ],\n  "traceName": "a.pt.trace.json"\n}\n'
# What each writer puts before the events, the events, what it puts between and after them; whether that closes it
LAYOUTS = {
    "ours": (b"[\n", COMPACT, b",\n", b"\n]\n", True),
    "ours, killed": (b"[\n", COMPACT, b",\n", b"", False),
    "Composer": (b"[\n", [dumps(event) for event in EVENTS], b",\n", b",\n]\n", True),
    "PPE, appending": (b"[\n", [indented(event) for event in EVENTS], b",\n", b",", False),
    "PPE, at once": (
        b"[\n    ",
        [indented(event).replace(b"\n", b"\n    ") for event in EVENTS],
        b",\n    ",
        b"\n]",
        True,
    ),
    "torch": (TORCH_HEAD, [indented(event) for event in EVENTS], b",\n  ", TORCH_TAIL, True),
    "VizTracer": (
        b'{"traceEvents": [',
        COMPACT,
        b",",
        b'], "viztracer_metadata": {"overflow": false}, "file_info": {}}',
        True,
    ),
    "lines": (b"", COMPACT, b"\n", b"\n", True),
    "a BOM": (b"\xef\xbb\xbf [", COMPACT, b" , ", b"]", True),
    "two arrays": (b"[", COMPACT, b"]\n[", b"]", True),
    "an array that was never closed, then another": (b"[", COMPACT, b",[", b"]", False),
}


def text_of(layout):
    before, events, between, after, _ = LAYOUTS[layout]
    return before + between.join(events) + after


def read(data):
    events = read_events(io.BytesIO(data))
    return list(events), events


@pytest.fixture(params=["large chunks", "small chunks", "bracket by bracket"])
def path(request, monkeypatch):
    """Both paths of the reader, and every token on a chunk's border."""
    if request.param != "large chunks":
        monkeypatch.setattr(reader, "_CHUNK", 5)
        monkeypatch.setattr(reader, "_MARGIN", 24)
    if request.param == "bracket by bracket":
        monkeypatch.setattr(reader.Events, "_block", lambda self: [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_whole(layout, path):
    """The events of every writer, in their order and with nothing changed; and whether the file was closed."""
    found, events = read(text_of(layout))
    assert found == EVENTS
    assert (events.complete, events.lost_bytes, events.skipped_bytes) == (LAYOUTS[layout][-1], 0, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_at_any_byte_gives_all_whole_events(layout, path):
    """Cut in a number, an escape, a character: what had ended is read, and what had not is never taken for an event."""
    before, texts, between, after, _ = LAYOUTS[layout]
    data = before + between.join(texts) + after
    ends, end = [], len(before)
    for text in texts:
        ends.append(end + len(text))
        end += len(text) + len(between)
    for cut in range(len(data)):
        found, events = read(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert found == EVENTS[:whole], cut
        assert events.skipped_bytes == 0
        if layout == "lines" and not whole:
            continue  # until its first brace closes, it could be an object form that is cut in its keys
        if whole < len(texts) and cut > len(before):
            assert events.lost_bytes == max(0, cut - ends[whole] + len(texts[whole])), cut
        if events.lost_bytes or layout not in {"lines", "two arrays"}:  # these two are closed in the middle, too
            assert not events.complete or not data[cut:].strip(), cut


def test_the_other_keys_of_an_object_are_kept(path):
    """What torch.profiler writes before the events and VizTracer after them is in ``metadata``."""
    _, events = read(text_of("torch"))
    assert events.metadata["deviceProperties"] == [{"id": 0, "name": 'a "GPU"'}]
    assert events.metadata["baseTimeNanoseconds"] == 1759276800000000000
    assert list(events.metadata)[-1] == "traceName"
    assert "traceEvents" not in events.metadata
    _, events = read(text_of("VizTracer"))
    assert events.metadata == {"viztracer_metadata": {"overflow": False}, "file_info": {}}


def test_a_cut_number_among_the_keys_is_not_kept(path):
    """The beginning of a base time is a wrong base time."""
    _, events = read(b'{"displayTimeUnit": "ms", "baseTimeNanoseconds": 17592')
    assert events.metadata == {"displayTimeUnit": "ms"}
    assert events.lost_bytes == len('"baseTimeNanoseconds": 17592')


@pytest.mark.parametrize("layout", ["ours", "PPE, appending", "torch", "lines"])
def test_a_torn_event_costs_no_other(layout, path):
    """A writer that died in the middle of an event, and another that went on in the same file: one event is lost."""
    before, texts, between, after, _ = LAYOUTS[layout]
    for cut in range(1, len(texts[2])):
        if texts[2][:cut].rstrip().endswith(b":"):
            continue  # the next event passes for the value: two are lost
        torn = [*texts[:2], texts[2][:cut] + b"\n" + texts[3], *texts[4:]]
        found, events = read(before + between.join(torn) + after)
        assert found == EVENTS[:2] + EVENTS[3:], texts[2][:cut]
        assert cut <= events.skipped_bytes + 24  # its last separator and white space are not counted
        assert events.lost_bytes == 0


def test_what_is_no_event_is_skipped_and_counted(path):
    """Numbers, strings, objects without ``ph``, zeros after a power cut, malformed events: the events around survive."""
    one, other = COMPACT[2], COMPACT[4]
    for junk in [
        b"17",
        b'"text"',
        b"{}",
        b'{"name":"a"}',
        b"\0\0\0\0",
        b"null",
        b'{"ph":"X","ts":nan}',
        b"}",
    ]:
        found, events = read(b"[" + one + b"," + junk + b"," + other + b"]")
        assert found == [EVENTS[2], EVENTS[4]], junk
        assert len(junk) <= events.skipped_bytes <= len(junk) + 1, junk  # garbage takes the comma after it along
        assert (events.complete, events.lost_bytes) == (True, 0)
        found, events = read(b"[" + one + b"," + junk)
        assert found == [EVENTS[2]]
        assert (events.complete, events.lost_bytes, events.skipped_bytes) == (False, len(junk), 0), junk


def test_what_json_refuses_and_writers_leave_is_read(path):
    """NaN and infinities are floats, raw tabs stay, bytes that are no UTF-8 become U+FFFD."""
    found, _ = read(
        b'[{"ph":"C","args":{"a":NaN,"b":-Infinity}},{"ph":"X","name":"a\tb"},{"ph":"X","name":"\xff\xc3"}]'
    )
    assert math.isnan(found[0]["args"]["a"])
    assert found[0]["args"]["b"] == -math.inf
    assert [event["name"] for event in found[1:]] == ["a\tb", "\N{REPLACEMENT CHARACTER}" * 2]


@pytest.mark.parametrize(
    "bomb",
    [b"[" * 100_000, b'{"a":' * 100_000, b"[{" * 50_000, b'[{"ph":"X","args":' + b"[" * 100_000, b'[{"ph":' * 50_000],
)
def test_deep_nesting_is_no_recursion(bomb):
    """A hundred thousand open brackets are skipped like any garbage."""
    found, events = read(bomb + b"\n," + COMPACT[2] if bomb.startswith(b"[[") else bomb)
    assert found == ([EVENTS[2]] if bomb.startswith(b"[[") else [])
    assert not events.complete


def test_an_event_beyond_the_limit_is_skipped_and_counted(monkeypatch):
    """One endless event costs neither the memory nor the events after it."""
    monkeypatch.setattr(reader, "_LONGEST", 1000)
    monkeypatch.setattr(reader, "_CHUNK", 100)
    monkeypatch.setattr(reader, "_MARGIN", 100)
    long = b'{"ph":"X","name":"' + b"\\u0041" * 1000 + b'"}'
    found, events = read(b"[" + COMPACT[2] + b"," + long + b"," + COMPACT[4] + b"]")
    assert [event["ph"] for event in found] == ["X"] * 2
    assert found == [EVENTS[2], EVENTS[4]]
    assert (events.skipped_bytes, events.lost_bytes, events.complete) == (len(long), 0, True)
    _, events = read(b'{"a": 1, "files": "' + b"x" * 2000 + b'", "traceEvents": []}')
    assert events.metadata == {"a": 1}


@pytest.mark.parametrize("data", [b"", b" \n", b"\xef", b"\xef\xbb\xbf", b"\x1f", b"[", b"{", b"[]"])
def test_a_file_without_events_is_a_trace_without_events(data):
    """A run killed before its first write is no error."""
    found, events = read(data)
    assert found == []
    assert events.complete == (data == b"[]")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\3\4....", r"no Chrome trace: it begins with b'PK\\x03\\x04....', not with \[ or {"),
        (b"ts,dur\n", "no Chrome trace: it begins with b'ts,dur"),
        (gzip.compress(b"hello"), "no Chrome trace: it begins with b'hello'"),
        (b'{"a": 1, "b": [{"ph": "X"}]}', r"""an object without "traceEvents", its keys are \['a', 'b'\]"""),
    ],
)
def test_a_file_that_is_no_trace_is_an_error_that_shows_it(data, message):
    """Anything else by mistake: one error, at the first event asked for, that says what was found."""
    with pytest.raises(TraceError, match=message):
        next(read_events(io.BytesIO(data)))


def test_gzip_in_several_members_padded(path):
    """Members one after the other are one text; zeros after a member are padding."""
    data = text_of("ours")
    members = gzip.compress(data[:100]) + b"\0" * 7 + gzip.compress(b"") + gzip.compress(data[100:]) + b"\0" * 512
    found, events = read(members)
    assert found == EVENTS
    assert (events.complete, events.lost_bytes) == (True, 0)


def test_gzip_cut_at_any_byte_gives_the_events_it_still_holds():
    """A cut member is read as far as it goes: never less than the members before it, never a half event."""
    data = text_of("ours")
    half = data.index(COMPACT[3])
    first, second = gzip.compress(data[:half]), gzip.compress(data[half:])
    for cut in range(len(first + second)):
        found, events = read((first + second)[:cut])
        assert found == EVENTS[: len(found)]
        assert len(found) >= (3 if cut >= len(first) else 0)
        assert not events.complete


def test_a_fault_in_gzip_costs_only_what_comes_after_it():
    """What was inflated before a fault is read; the bytes after it, and garbage after a member, are counted as lost."""
    data = text_of("ours")
    member = gzip.compress(data)
    found, events = read(member[:-8] + b"12345678")  # a wrong checksum
    assert found == EVENTS
    assert not events.complete
    assert 0 < events.lost_bytes <= 8
    found, events = read(member + b"garbage")
    assert (found, events.complete, events.lost_bytes) == (EVENTS, False, events.lost_bytes)
    assert 0 < events.lost_bytes <= 7
    many = b"[\n" + b",\n".join(COMPACT * 2000)
    noise = bytes(255 - byte for byte in gzip.compress(many)[2000:])
    found, events = read(gzip.compress(many)[:2000] + noise)
    assert found[:500] == (EVENTS * 2000)[:500]  # deflate has no checksum on the way: the last ones may be anything
    assert events.lost_bytes > 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\ \nphX1traceEvents', max_size=200).map(str.encode))
def test_garbage_raises_nothing_but_what_is_documented(garbage):
    """Whatever the bytes, alone or in an array or an object: events or a TraceError, and the count never exceeds them."""
    for data in (garbage, b"[" + garbage, b'{"traceEvents":[' + garbage):
        try:
            found, events = read(data)
        except TraceError:
            continue
        assert all("ph" in event for event in found)
        assert 0 <= events.lost_bytes + events.skipped_bytes <= len(data)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.data())
def test_a_mutated_file_is_the_same_on_both_paths(layout, data):
    """Some bytes replaced anywhere: no error but a TraceError, and the fast path finds what the slow one finds."""
    text = text_of(layout)
    at = data.draw(st.integers(0, len(text)))
    with_ = data.draw(st.binary(max_size=8) | st.sampled_from([b"{", b"}", b"]", b"[", b'"', b"\\", b"\n", COMPACT[2]]))
    text = text[:at] + with_ + text[at + data.draw(st.integers(0, 40)) :]

    def outcome():
        try:
            found, events = read(text)
        except TraceError as error:
            return str(error)
        return found, events.metadata, events.complete, events.lost_bytes, events.skipped_bytes

    fast = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader.Events, "_block", lambda self: [])
        assert json.dumps(outcome()) == json.dumps(fast)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(COMPACT[2]) - 1), st.binary(min_size=1, max_size=12).filter(lambda noise: b"\n" not in noise))
def test_noise_within_a_line_costs_that_line_only(at, noise):
    """One event a line: whatever happens within a line, the events of the other lines are read."""
    if b"[" in noise:
        return  # within a list an object may begin a line, so the list would have to be closed
    line = COMPACT[2][:at] + noise + COMPACT[2][at + len(noise) :]
    found, _ = read(b"[\n" + b",\n".join([*COMPACT[:2], line, *COMPACT[3:]]) + b"\n]\n")
    assert [event for event in EVENTS if event in found] == EVENTS[:2] + EVENTS[3:] or found == EVENTS


class Endless(io.RawIOBase):
    """A file made up while it is read."""

    def __init__(self, before, block, count):
        self._parts = iter([before, *[block] * count])

    def read(self, size=-1):
        return next(self._parts, b"")


@pytest.mark.parametrize("layout", ["ours", "PPE, appending", "torch", "VizTracer"])
def test_memory_does_not_grow_with_the_file(layout, monkeypatch):
    """2 MB in chunks of 32 KiB take no more than 500 kB do, and that is what a few chunks of events take."""
    monkeypatch.setattr(reader, "_CHUNK", 1 << 15)
    before, texts, between, _, _ = LAYOUTS[layout]
    block = between.join(texts * 20) + between

    def peak(size):
        tracemalloc.start()
        count = sum(1 for _ in read_events(Endless(before, block, size // len(block))))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == size // len(block) * 20 * len(texts)
        return peak_bytes

    small = peak(500_000)
    assert peak(2_000_000) < small * 1.2
    assert small < 1_500_000


@pytest.mark.parametrize(
    "data",
    [
        b'[{"ph":"X","name":"' + b"x" * 10_000_000 + b'"},' + COMPACT[2],
        b'[{"ph":"X","name":"' + b"\\u00e4" * 1_600_000 + b'"},' + COMPACT[2],
        b'[{"ph":"X","name":"' + b'\\"' * 2_000_000,
        b'[{"ph":"X","args":{"a":[' + b'{"b":[1]},' * 150_000 + b"0]}}," + COMPACT[2],
        b"[" + b'{"ph":"X"' * 150_000,
        b"[" + b'{"ph":"X"}]' * 50_000,
        b"[" + b'{"ph":"X","a":tru},' * 50_000,
        b"[" + b" " * 10_000_000 + COMPACT[2],
        b"[" + b"," * 5_000_000 + b"a" * 5_000_000 + COMPACT[2],
        b'[{"ph":' + b" " * 10_000_000 + b'"X"}',
        b'[{"ph"' + b" " * 10_000_000 + b':"X"}',
    ],
    ids=lambda data: f"{data[:24].decode()}…{len(data)}",
)
def test_no_input_takes_quadratic_time(data):
    """Long strings, lists, gaps and rows of faults: megabytes of each in a second or two, where a second look at each byte would take hours."""
    start_s = time.perf_counter()
    read(data)
    assert time.perf_counter() - start_s < 20


def test_what_can_be_opened(tmp_path):
    """A string, a path, an open binary file (which stays open), any URL of fsspec's; gzip is seen by its bytes."""
    import fsspec

    plain, packed = tmp_path / "a.json", tmp_path / "b.json"
    plain.write_bytes(text_of("ours"))
    packed.write_bytes(gzip.compress(text_of("ours")))
    with fsspec.open("memory://traces/a.json", "wb") as file:
        file.write(text_of("ours"))
    for source in (plain, str(plain), packed, plain.as_uri(), "memory://traces/a.json"):
        assert list(read_events(source)) == EVENTS
    with plain.open("rb") as file:
        assert list(read_events(file)) == EVENTS
        assert not file.closed
    with read_events(plain) as events:
        assert next(events) == EVENTS[0]
    assert list(events) == []
    with pytest.raises(FileNotFoundError):
        read_events(tmp_path / "no.json")
    with plain.open() as file, pytest.raises(TypeError, match="must be opened in binary mode"):
        next(read_events(file))


def test_our_own_file_cut_at_any_byte(tmp_path):
    """What a tracer wrote, cut after any byte: all events but the one that was being written, and its bytes counted."""
    tracer = Tracer(tmp_path / "a.json", process_name="rank 0 (häst)")
    with tracer, tracer.span("epoch 😀", number=1):
        for loss in (0.5, 0.25):
            tracer.counter("loss", loss)
            with tracer.span("step"):
                tracer.instant('a "quote" and a \\', values=[1, {"a": "b"}])
        tracer.flush()  # the epoch is open: it becomes a begin and an end
    data = (tmp_path / "a.json").read_bytes()
    whole, events = read(data)
    assert whole == json.loads(data)
    assert {event["ph"] for event in whole} == set("MXBECi")
    assert events.complete
    spans = [match.span() for match in re.finditer(rb"^\{.*\}", data, re.MULTILINE)]
    for cut in range(len(data)):
        found, events = read(data[:cut])
        assert found == whole[: sum(end <= cut for _, end in spans)], cut
        assert events.lost_bytes == sum(cut - start for start, end in spans if start < cut < end), cut


def cut_here_and_there(data):
    """A real file, cut at some 300 places."""
    whole, events = read(data)
    assert (events.complete, events.lost_bytes, events.skipped_bytes) == (True, 0, 0)
    for cut in range(0, len(data), len(data) // 300 + 1):
        found, _ = read(data[:cut])
        assert found == whole[: len(found)]
    return whole


@pytest.mark.slow
def test_a_real_torch_profiler_trace(tmp_path):
    """What ``export_chrome_trace`` writes, plain and gzipped, is what json.load finds in it."""
    torch = pytest.importorskip("torch")
    with (
        torch.profiler.profile(record_shapes=True, with_stack=True) as profiler,
        torch.profiler.record_function('"q" ä'),
    ):
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.export_chrome_trace(str(tmp_path / "a.json"))
    data = (tmp_path / "a.json").read_bytes()
    expected = json.loads(data)
    assert cut_here_and_there(data) == expected.pop("traceEvents")
    events = read_events(io.BytesIO(gzip.compress(data)))
    assert len(list(events)) > 5
    assert events.metadata == expected


def test_a_real_viztracer_trace(tmp_path):
    """What VizTracer saves is what json.load finds in it."""
    viztracer = pytest.importorskip("viztracer")
    with viztracer.VizTracer(output_file=str(tmp_path / "a.json"), verbose=0, file_info=True):
        json.dumps({"a": [1, "ä"]}, indent=1)
    data = (tmp_path / "a.json").read_bytes()
    expected = json.loads(data)
    assert cut_here_and_there(data) == expected.pop("traceEvents")
    events = read_events(tmp_path / "a.json")
    assert sum(1 for _ in events) > 5
    assert events.metadata == expected
