"""Bytes of Chrome JSON: fixed-width rows and single events say the same, in both viewers' dialect."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_timekeeper.trace import encode

TIMES = st.one_of(
    st.integers(0, 10**16 - 1),
    st.integers(0, 16).flatmap(lambda digits: st.integers(max(0, 10**digits - 2), min(10**digits + 1, 10**16 - 1))),
)


@given(rows=st.lists(st.tuples(st.integers(0, 2), TIMES, TIMES), min_size=1, max_size=20))
def test_rows_are_single_events(rows):
    """A row is to the byte what the same span is as a single event, for every time and length that there can be."""
    names = [("a", "user"), ("a longer name", ""), ('é "\N{FIRE}"', "forward")]
    prefixes = [encode.complete_prefix(*name, 7, 1) for name in names]
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    lines = encode.Rows(prefixes).encode(*columns)
    singles = [
        b",\n" + encode.event("X", names[kind][0], 7, 1, start_ns, category=names[kind][1], duration_ns=duration_ns)
        for kind, start_ns, duration_ns in rows
    ]
    assert lines == b"".join(singles)
    ends = encode.row_ends(lines).tolist()
    assert [lines[start:end] for start, end in zip([0, *ends], ends, strict=False)] == singles
    for line, (_, start_ns, duration_ns) in zip(singles, rows, strict=True):
        text = line.decode()
        assert f'"ts":{start_ns // 1000}.{start_ns % 1000:03d},' in text
        assert f'"dur":{duration_ns // 1000}.{duration_ns % 1000:03d}}}' in text


@settings(max_examples=500)
@given(text=st.one_of(st.text(st.characters(), max_size=2000), st.text('\\"/ \x00\x1f\x7f\ud800a', max_size=30)))
def test_text(text):
    """Any text becomes text without what either viewer mistakes, raw UTF-8, not empty as a name and not overlong."""
    line = encode.event("X", text, 1, 1, 0, category=text, duration_ns=0, args={text: text}).decode()
    event = json.loads(line)
    assert 0 < len(event["name"]) <= 256
    ((key, value),) = event["args"].items()
    assert len(key) <= 256
    assert len(value) <= 1024
    for shown in (event["name"], event["cat"] if text else "", key, value):
        assert not re.search("[\x00-\x1f\x7f-\x9f\ud800-\udfff\\\\]", shown)
    assert "\\u" not in line
    assert not re.search(r"\\[^\"]", line)
    if re.fullmatch(r"[\w ]{1,256}", text):
        assert event["name"] == text == value


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.floats(), st.none()), inner, max_size=4),
    ),
)


@given(value=VALUES)
def test_any_value_is_json(value):
    """Any argument becomes JSON without a null, a NaN or an infinity, and a number that JSON keeps stays itself."""
    text = encode.arguments({"value": value})

    def refuse(token):
        raise AssertionError(token)

    shown = json.loads(text, parse_constant=refuse)["value"]
    assert "null" not in re.sub(r'"[^"]*"', "", text)
    if isinstance(value, (bool, int)) and abs(value) < 1 << 63:
        assert shown == value
        assert type(shown) is type(value)


def test_numpy_and_enum_values():
    """Numpy's scalars and enums are shown by their value."""
    import enum

    class Stage(str, enum.Enum):
        FIT = "fit"

    class Level(enum.IntEnum):
        LOW = 1

    args = {"a": np.float32(0.5), "b": np.int64(3), "c": Stage.FIT, "d": Level.LOW, "e": np.bool_(True), "f": np.nan}
    assert json.loads(encode.arguments(args)) == {"a": 0.5, "b": 3, "c": "fit", "d": 1, "e": True, "f": "nan"}


def test_a_container_in_use():
    """A container that its owner changes meanwhile, or that raises, costs the event its arguments and no more."""

    class Changing(dict):
        def items(self):
            raise RuntimeError("dictionary changed size during iteration")

    assert encode.arguments({"a": Changing()}) == ""
    assert encode.event("X", "a", 1, 1, 0, duration_ns=0, args={"a": Changing()}).endswith(b'"dur":0.000}')


def test_many_items():
    """Long containers are cut: an argument is to be looked at, not to carry data."""
    shown = json.loads(encode.arguments({"list": list(range(1000)), "dict": {str(i): i for i in range(1000)}}))
    assert shown["list"] == list(range(64))
    assert len(shown["dict"]) == 64


@pytest.mark.parametrize(
    ("unix_ns", "base"),
    [(0, 0), (7_889_238 * 10**9 - 1, 0), (7_889_238 * 10**9, 7_889_238), (1_700_000_000 * 10**9, 1_696_186_170)],
)
def test_base(unix_ns, base):
    """Time counts from Kineto's base, so that our spans lie beside a torch.profiler trace of the same run."""
    assert encode.base_ns(unix_ns) == base * 10**9
