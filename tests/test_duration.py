"""Durations: every accepted form, every refusal."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_timekeeper.duration import ACCEPTED_FORMS, format_duration, parse_duration

DURATIONS = st.timedeltas(min_value=timedelta(0), max_value=timedelta.max)
SMALL = st.integers(min_value=0, max_value=99)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("00:00:00:22", timedelta(seconds=22)),
        ("12:34:56:65", timedelta(days=12, hours=34, minutes=56, seconds=65)),
        (" 00:12:00:00 ", timedelta(hours=12)),
        ("36h", timedelta(hours=36)),
        ("1d12h30m", timedelta(days=1, hours=12, minutes=30)),
        ("90s", timedelta(seconds=90)),
        ("1.5s", timedelta(seconds=1.5)),
        ("2w", timedelta(weeks=2)),
        ("0s", timedelta(0)),
        ("PT12H", timedelta(hours=12)),
        ("P1DT30M", timedelta(days=1, minutes=30)),
        ("P2W", timedelta(weeks=2)),
        ("PT0.25S", timedelta(milliseconds=250)),
        ("1-12", timedelta(days=1, hours=12)),
        ("0-06:30", timedelta(hours=6, minutes=30)),
        ("2-00:00:05", timedelta(days=2, seconds=5)),
        (timedelta(weeks=52, milliseconds=1), timedelta(weeks=52, milliseconds=1)),
        (timedelta(0), timedelta(0)),
        ({"weeks": 52, "days": 1}, timedelta(weeks=52, days=1)),
        ({"hours": 1.5}, timedelta(hours=1.5)),
        ({"hours": 0}, timedelta(0)),
    ],
)
def test_accepted_forms(written, expected):
    """Each documented form means what its own convention says."""
    assert parse_duration(written) == expected


@pytest.mark.parametrize(
    "refused",
    [
        *("", "  ", "6:00:00", "60 minutes", "36", "h", "1h1h", "30m1h", "1.5h", "-1h", "+1h", "1 h", "1h 30m", "36H"),
        *("P", "PT", "P1DT", "P1Y", "P1M", "pt12h", "PT-1H", "00:00:00", "-1:00:00:00", "0:0:0:1", "1-", "1-100"),
        *("1-12:5", "1:2-3", "nan", "inf", "1e3s", "٣٦h", "36h\n36h", "99999999999d", "9" * 5000 + "h", "9" * 18 + "w"),
        *(0, 1, 2160000, -1, 1.5, math.nan, math.inf, True, False, 10**5000, None, [], (), b"36h", object()),
        *({}, {"hours": "1"}, {"hours": True}, {"hours": None}, {"hours": math.nan}, {"hours": math.inf}),
        *({"hour": 1}, {1: 1}, {"years": 1}, {"hours": 10**400}, {"days": -1}, {"hours": Fraction(1, 2)}),
        *(timedelta(microseconds=-1), timedelta.min, datetime(2030, 1, 1)),  # noqa: DTZ001
    ],
    ids=lambda value: type(value).__name__,
)
def test_refusals(refused):
    """Anything else is one MisconfigurationException that shows the argument and the accepted forms."""
    with pytest.raises(MisconfigurationException) as error:
        parse_duration(refused, "run_duration")
    assert "`Timer(run_duration=" in str(error.value)
    assert ACCEPTED_FORMS in str(error.value)


def test_message_shows_the_value():
    """The error quotes the call as the user wrote it."""
    with pytest.raises(MisconfigurationException, match=r"`Timer\(duration='6:00:00'\)` is not a valid duration: its"):
        parse_duration("6:00:00")


def test_numbers_are_refused_with_the_reason():
    """A number, also as text, is refused because YAML turns 10:00:00:00 into one, and the error says to quote it."""
    for number in (2160000, 1.5, "2160000", " 1.5"):
        with pytest.raises(MisconfigurationException, match=r"\)` is a number.*YAML.*quote it: '10:00:00:00'"):
            parse_duration(number)


def test_a_repr_that_raises_is_no_other_error():
    """Also a value that cannot even be shown ends in the one error."""

    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    with pytest.raises(MisconfigurationException, match=r"`Timer\(duration=<Broken>\)`"):
        parse_duration(Broken())


@given(DURATIONS)
def test_round_trip(duration):
    """What we write, we read back to the microsecond."""
    assert parse_duration(format_duration(duration)) == duration


@given(DURATIONS)
def test_round_trip_of_other_writings(duration):
    """The same holds for ISO 8601, a mapping, a timedelta, and without fractions for Lightning's and Slurm's form."""
    seconds, micros = duration.seconds, duration.microseconds
    assert parse_duration(f"P{duration.days}DT{seconds}.{micros:06}S") == duration
    assert parse_duration({"days": duration.days, "seconds": seconds, "microseconds": micros}) == duration
    assert parse_duration(duration) == duration
    whole = timedelta(days=duration.days, seconds=seconds)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    assert parse_duration(f"{duration.days}:{clock}") == parse_duration(f"{duration.days}-{clock}") == whole


@given(
    st.one_of(
        st.text(),
        st.text(alphabet="0123456789:-.PTWDHMSwdhms "),
        st.floats(),
        st.integers(),
        st.booleans(),
        st.binary(),
        st.dictionaries(st.text() | st.sampled_from(["days", "hours"]), st.floats() | st.integers() | st.text()),
        st.timedeltas(),
        st.datetimes(),
        st.lists(st.integers()),
    )
)
def test_no_input_raises_anything_else(value):
    """Whatever is given, the outcome is a duration of zero or more, or a MisconfigurationException."""
    try:
        duration = parse_duration(value)
    except MisconfigurationException:
        return
    assert duration >= timedelta(0)


@given(SMALL, SMALL, SMALL, SMALL)
def test_units_add_up(days, hours, minutes, seconds):
    """Units are independent of each other and may exceed a clock's."""
    expected = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    assert parse_duration(f"{days}d{hours}h{minutes}m{seconds}s") == expected
    assert parse_duration(f"{days}:{hours:02}:{minutes:02}:{seconds:02}") == expected
