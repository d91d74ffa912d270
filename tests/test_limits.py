"""Which limit comes first, as a function of clock readings."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_timekeeper.limits import REASONS, Limits

NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


def noon():
    return NOON.timestamp()


def test_no_limit():
    """Without a limit there is no end and no reason, and no clock is read."""
    assert Limits().first(5.0, 5.0, wall_clock=None) == (math.inf, None)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"duration": "10s"}, (7.0, "duration")),
        ({"run_duration": "10s"}, (8.0, "run_duration")),
        ({"deadline": NOON + timedelta(seconds=4)}, (4.0, "deadline")),
        ({"duration": "10s", "run_duration": "8s", "deadline": NOON + timedelta(hours=1)}, (6.0, "run_duration")),
        ({"duration": "11s", "run_duration": "10s"}, (8.0, "duration")),
        ({"duration": "10s", "margin": "2s"}, (5.0, "duration")),
        ({"duration": "10s", "deadline": NOON - timedelta(seconds=1), "margin": "2s"}, (-3.0, "deadline")),
        ({"duration": "0s"}, (-3.0, "duration")),
    ],
)
def test_the_first_to_come_wins(limits, expected):
    """The least time left wins, the order of the arguments decides a tie, and the margin is kept from the winner."""
    assert Limits(**limits).first(train_s=3.0, run_s=2.0, wall_clock=noon) == expected


@given(*[st.floats(0, 1e9) for _ in range(4)])
def test_never_later_than_any_limit(duration_s, run_s, deadline_s, margin_s):
    """Whatever the limits are, the time left is the least of them less the margin."""
    limits = Limits(
        timedelta(seconds=duration_s),
        timedelta(seconds=run_s),
        NOON + timedelta(seconds=deadline_s),
        timedelta(seconds=margin_s),
    )
    left_s, reason = limits.first(0.0, 0.0, noon)
    lefts_s = dict(zip(REASONS, (duration_s, run_s, deadline_s), strict=True))
    assert left_s == pytest.approx(min(lefts_s.values()) - margin_s, abs=1e-5)
    assert lefts_s[reason] == pytest.approx(min(lefts_s.values()), abs=1e-5)


@pytest.mark.parametrize(
    "deadline",
    [
        NOON,
        NOON.astimezone(timezone(timedelta(hours=5, minutes=30))),
        "2030-01-31T12:00:00+00:00",
        " 2030-01-31 13:00:00+01:00 ",
        "2030-01-31T12:00:00Z",
        "2030-01-31T07:00-05:00",
    ],
)
def test_deadlines(deadline):
    """A deadline is a moment, however its time zone is written."""
    assert Limits(deadline=deadline).deadline_s == noon()


@pytest.mark.parametrize(
    "deadline",
    [
        NOON.replace(tzinfo=None),
        "2030-01-31T12:00:00",
        "2030-01-31",
        date(2030, 1, 31),
        "",
        "noon",
        "SLURM",
        0,
        1.9e9,
        [],
    ],
)
def test_refused_deadlines(deadline):
    """A moment without a time zone, and anything that is no moment, fails at construction and shows what is expected."""
    with pytest.raises(MisconfigurationException, match=r"`Timer\(deadline=.*Expected a datetime with a time zone"):
        Limits(deadline=deadline)


@given(st.text() | st.floats() | st.integers() | st.datetimes() | st.dates() | st.binary())
def test_no_deadline_raises_anything_else(deadline):
    """Whatever is given as a deadline, the outcome is a moment or a MisconfigurationException."""
    try:
        assert math.isfinite(Limits(deadline=deadline).deadline_s)
    except MisconfigurationException:
        return


def test_slurm(monkeypatch):
    """'slurm' is the end of the job, read when it is needed: a Timer may be made before its job starts."""
    limits = Limits(deadline="slurm")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(noon()) + 60))
    assert limits.first(0.0, 0.0, noon) == (60.0, "deadline")
    assert not limits.misses_slurm


@pytest.mark.parametrize("value", [None, "", "soon", "nan", "inf"])
def test_slurm_without_a_job(monkeypatch, value):
    """Outside Slurm, or with an unreadable end, there is no deadline, and that can be told."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if value is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", value)
    limits = Limits(deadline="slurm")
    assert limits.misses_slurm
    assert limits.first(0.0, 0.0, noon) == (math.inf, None)


def test_margin_alone():
    """A margin without a limit would do nothing and is refused."""
    with pytest.raises(MisconfigurationException, match=r"`Timer\(margin='10m'\)` has nothing to keep the margin from"):
        Limits(margin="10m")


@pytest.mark.parametrize("argument", ["duration", "run_duration", "margin"])
def test_errors_name_the_argument(argument):
    """Each duration is refused under its own name."""
    with pytest.raises(MisconfigurationException, match=rf"`Timer\({argument}=12\)` is a number"):
        Limits(**{"duration": "1h", argument: 12})
