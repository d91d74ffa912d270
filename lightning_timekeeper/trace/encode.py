"""Recorded spans -> bytes of the Chrome Trace Event Format.

The events have the dialect that both viewers, Perfetto and chrome://tracing, were measured to take without loss: one
compact event a line, times in µs with three decimals made from integer ns, raw UTF-8, no NaN, no backslash.

Complete spans without arguments, nine events of ten, are encoded as rows of fixed width: the text before the time is
looked up, the digits come from tables of four at a time, and the unused bytes are zeros that one mask removes at the
end. That is ~0.15 µs an event; an f-string needs 0.6 µs, ``json.dumps`` 4 µs.

Source of the format: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINETO_PERIOD_S = 7_889_238
"""``ts`` counts from Unix time floored to a multiple of this, as in torch.profiler's traces: three months in ns, which
a reader's double holds exactly, and the same zero on every rank and in the profiler's trace of the same run."""

LONGEST_NAME = 256
LONGEST_TEXT = 1024
DEEPEST_ARGUMENT = 4
MOST_ITEMS = 64

# Perfetto v52 loses a file in which a string ends in a backslash, HEAD refuses an escaped surrogate pair; what JSON
# would have to escape goes: control characters, lone surrogates
_UNWANTED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_PLAIN = re.compile(r"[ !#-\[\]-~]*")


# made once: json.dumps makes an encoder at each call that has options, 2 µs
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False).encode


def base_ns(unix_ns: int) -> int:
    """The zero of ``ts`` for a recording that began at a Unix time.

    Args:
        unix_ns: Nanoseconds since 1970, from 0.

    Returns:
        Nanoseconds since 1970, at most three months earlier.
    """
    period = KINETO_PERIOD_S * 1_000_000_000
    return unix_ns // period * period


def clean(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text as both viewers take it: no control character, no surrogate, no backslash, not too long."""
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if _PLAIN.fullmatch(text):
        return text
    return _UNWANTED.sub("\N{REPLACEMENT CHARACTER}", text.replace("\\", "/"))


def clean_name(name: object) -> str:
    """A span's, track's or category's name: text, and never empty."""
    return clean(name if isinstance(name, str) else type(name).__name__, LONGEST_NAME) or "(empty)"


def plain_value(value: object, depth: int = 0) -> Any:
    """An argument's value as JSON takes it.

    Numbers, texts, booleans and containers of them are kept, a NaN or infinity becomes text (as a token it makes
    Perfetto loop for ever), None too (a null is refused). Of anything else only the type is shown: a ``repr`` can
    fail, be a megabyte long, or wait for a GPU.
    """
    kind = type(value)
    if kind is str:
        return clean(value)  # type: ignore[arg-type]
    if kind is bool:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else _huge(value)  # type: ignore[operator, arg-type]
    if kind is float:
        return value if math.isfinite(value) else str(value)  # type: ignore[arg-type]
    if value is None:
        return "None"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{kind.__name__}[{len(value)}]"
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        if depth >= DEEPEST_ARGUMENT:
            return f"{kind.__name__}[{len(value)}]"
        if isinstance(value, dict):
            items = list(value.items())[:MOST_ITEMS]
            return {_key(key): plain_value(item, depth + 1) for key, item in items}
        return [plain_value(item, depth + 1) for item in list(value)[:MOST_ITEMS]]
    if isinstance(value, np.generic):
        return plain_value(value.item(), depth)
    # a subclass of a plain type, such as an enum: its value by the base's own method, whatever it overrides
    if isinstance(value, str):
        return clean(str.__str__(value))
    if isinstance(value, int):
        return plain_value(int.__int__(value))
    if isinstance(value, float):
        return plain_value(float.__float__(value))
    return f"<{clean_name(kind.__name__)}>"


def _key(key: object) -> str:
    return clean_name(str(key) if type(key) in (int, float, bool) else key)


def _huge(value: int) -> str:
    """Beyond 64 bits both viewers lose digits, and Python refuses to print more than 4,300 of them."""
    return str(value) if value.bit_length() < 4096 else f"int of {value.bit_length()} bits"


def arguments(args: dict[str, Any]) -> str:
    """The JSON of an event's ``args``; empty where there are none, or none that can be shown."""
    texts = {}  # by key: two may be the same once they are cleaned
    try:
        for key, value in args.items() if len(args) <= MOST_ITEMS else list(args.items())[:MOST_ITEMS]:
            member = _member(key) if type(key) is str and len(key) <= LONGEST_NAME else _member(clean_name(key))
            # a step's span carries three of these; the general way takes 2 µs for each
            if type(value) is int and -(1 << 63) <= value < 1 << 63:
                texts[member] = str(value)
            else:
                texts[member] = _dumps(plain_value(value))
    except Exception:  # noqa: BLE001 - a container changed by its owner meanwhile, or worse: an event without arguments
        return ""
    return "{" + ",".join([member + text for member, text in texts.items()]) + "}"


@functools.lru_cache(4096)
def _member(key: str) -> str:
    return f"{_quoted(clean_name(key))}:"


def event(
    phase: str,
    name: str,
    pid: int,
    tid: int,
    time_ns: int | None = None,
    *,
    category: str = "",
    duration_ns: int | None = None,
    args: dict[str, Any] | None = None,
    extra: str = "",
) -> bytes:
    """One event as a line of JSON, without separator.

    Args:
        phase: The format's letter: X, B, E, i, C, M, s, f.
        name: Of the event; cleaned here. An E is written without one.
        pid: Process, 1 to 2**32 - 1.
        tid: Track, 1 to 2**32 - 1.
        time_ns: Since the file's base, ns, from 0; metadata has none.
        category: Left out where empty.
        duration_ns: From 0; complete events only.
        args: Shown by the viewers beside the event.
        extra: Further members, as JSON, such as ``"s":"t"``.
    """
    if type(name) is not str or len(name) > LONGEST_NAME:  # the cache is to hold short texts
        name = clean_name(name)
    line = f'{_head(phase, name, category)},"pid":{pid},"tid":{tid}'
    if time_ns is not None:
        line += f',"ts":{time_ns // 1000}.{time_ns % 1000:03d}'
    if duration_ns is not None:
        line += f',"dur":{duration_ns // 1000}.{duration_ns % 1000:03d}'
    if extra:
        line += f",{extra}"
    if args and (text := arguments(args)):
        line += f',"args":{text}'
    return (line + "}").encode()


@functools.lru_cache(4096)
def _head(phase: str, name: str, category: str) -> str:
    text = f'{{"ph":"{phase}"'
    if category:
        text += f',"cat":{_quoted(clean_name(category))}'
    return text if phase == "E" else f'{text},"name":{_quoted(clean_name(name))}'


def _quoted(text: str) -> str:
    return f'"{text}"' if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def complete_prefix(name: str, category: str, pid: int, tid: int) -> bytes:
    """All that stands before the time in the line of a complete event, its separator included."""
    head = event("X", name, pid, tid, 0, category=category, duration_ns=0)
    return b",\n" + head[: -len(b'0.000,"dur":0.000}')]


def complete(prefix: bytes, time_ns: int, duration_ns: int, args: dict[str, Any] | None) -> bytes:
    """The line of a complete event after its :func:`complete_prefix`, without separator."""
    end = f'{time_ns // 1000}.{time_ns % 1000:03d},"dur":{duration_ns // 1000}.{duration_ns % 1000:03d}'
    text = arguments(args) if args else ""
    end += f',"args":{text}}}' if text else "}"
    return prefix[2:] + end.encode()


# ---- rows ----------------------------------------------------------------------------------------------------------
Int64s = NDArray[np.int64]


def _digits(count: int, *, stripped: bool) -> Any:
    """Table of the decimal digits of 0 to 10**count - 1, as bytes; zeros in front are NUL where ``stripped``."""
    numbers = np.arange(10**count)
    table = np.empty((10**count, count), dtype=np.uint8)
    for column in range(count):
        power = 10 ** (count - 1 - column)
        table[:, column] = numbers // power % 10 + ord("0")
        if stripped:
            table[numbers < power, column] = 0
    return table


_FULL = _digits(4, stripped=False).view(np.uint32).ravel()
_STRIPPED = _digits(4, stripped=True).view(np.uint32).ravel()
_ONES = np.frombuffer(b"0123456789", dtype=np.uint8)
_DECIMALS = (
    np.hstack([np.full((1000, 1), ord("."), dtype=np.uint8), _digits(3, stripped=False)]).view(np.uint32).ravel()
)
_TIMES = [("a", "u4"), ("b", "u4"), ("c", "u4"), ("d", "u1"), ("e", "u4")]  # 12 digits, one digit, ".ddd"


class Rows:
    """Encodes complete spans without arguments, many at a time.

    Args:
        prefixes: The :func:`complete_prefix` of every kind of row.
    """

    def __init__(self, prefixes: list[bytes]) -> None:
        width = max(map(len, prefixes))
        fields: list[tuple[str, str]] = [("prefix", f"S{width}"), *_TIMES, ("between", "S7")]
        fields += [(name.upper(), kind) for name, kind in _TIMES]
        row = np.dtype([*fields, ("end", "S1")])
        self._fields = row
        templates = np.zeros(len(prefixes), dtype=row)
        templates["prefix"], templates["between"], templates["end"] = prefixes, b',"dur":', b"}"
        self._templates = templates.view(f"V{row.itemsize}")  # copied as one block, ten times faster than by fields

    def encode(self, kind: Int64s, start_ns: Int64s, duration_ns: Int64s) -> bytes:
        """The lines of n spans, each beginning with its separator.

        Args:
            kind: Index into the prefixes, shape (n,).
            start_ns: Since the file's base, 0 to 10**16 - 1 (115 days), shape (n,).
            duration_ns: 0 to 10**16 - 1, shape (n,).
        """
        rows = self._templates.take(kind).view(self._fields)
        _fill(rows, "abcde", start_ns)
        _fill(rows, "ABCDE", duration_ns)
        flat = rows.view(np.uint8)
        lines: bytes = flat[flat != 0].tobytes()
        return lines


def row_ends(lines: bytes) -> Int64s:
    """The offset at which each line of :meth:`Rows.encode` ends."""
    starts = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n")) - 1  # a line begins with ",\n"
    return np.append(starts[1:], len(lines))


def _divided(number: Int64s, by: int) -> tuple[Int64s, Int64s]:
    """Quotient and remainder; numpy divides by a constant with a multiplication, and its ``divmod`` does not."""
    quotient = number // by
    return quotient, number - quotient * by


def _fill(rows: Any, fields: str, time_ns: Int64s) -> None:
    """Write times as ``ddd.ddd`` into five fields of every row; no zeros in front."""
    micros, nanos = _divided(time_ns, 1000)
    rows[fields[4]] = _DECIMALS[nanos]
    tens, ones = _divided(micros, 10)
    rows[fields[3]] = _ONES[ones]
    if int(tens.max(initial=0)) < 10_000:  # up to 100 ms, as most durations are: one table
        rows[fields[2]] = _STRIPPED[tens]
        return
    upper, low = _divided(tens, 10_000)
    high, middle = _divided(upper, 10_000)
    rows[fields[0]] = _STRIPPED[high]
    if int(high.min()) > 0:  # from 17 minutes after the base on, as most time stamps are
        rows[fields[1]], rows[fields[2]] = _FULL[middle], _FULL[low]
        return
    rows[fields[1]] = np.where(high > 0, _FULL[middle], _STRIPPED[middle])
    rows[fields[2]] = np.where(upper > 0, _FULL[low], _STRIPPED[low])
