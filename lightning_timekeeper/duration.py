"""Every form a duration can be written in, read into a timedelta, and the one form in which we write it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_timekeeper.names import MisconfigurationException

if TYPE_CHECKING:
    from typing import TypeAlias

    Duration: TypeAlias = Mapping[str, float] | str | timedelta
else:
    # LightningCLI hands a number on to us, whose error says to quote, rather than refuse it with one that does not. Its
    # saved file has each value as it was given in this order only.
    Duration = Mapping[str, float] | str | timedelta | int | float

ACCEPTED_FORMS = (
    "a string in the format DD:HH:MM:SS, a duration with units such as '36h', '1d12h30m' or '90s',"
    " ISO 8601 such as 'PT12H' or 'P1DT30M', Slurm's 'D-HH', 'D-HH:MM' or 'D-HH:MM:SS', a datetime.timedelta,"
    " or a mapping of timedelta's keywords such as {'hours': 36}"
)

# Digits are bounded, so that a number too long for int() is an unknown form and not an error of its own.
_WHOLE = r"[0-9]{1,18}"
_DECIMAL = rf"{_WHOLE}(?:\.[0-9]{{1,18}})?"
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        # Lightning's: any number of days, two digits for the rest, which may exceed a clock's (12:34:56:65)
        rf"(?P<days>{_WHOLE}):(?P<hours>[0-9]{{2}}):(?P<minutes>[0-9]{{2}}):(?P<seconds>[0-9]{{2}})",
        # Slurm's with days; its minutes, MM:SS and HH:MM:SS are left out, as they read differently elsewhere
        rf"(?P<days>{_WHOLE})-(?P<hours>[0-9]{{1,2}})(?::(?P<minutes>[0-9]{{2}})(?::(?P<seconds>[0-9]{{2}}))?)?",
        # units, in falling order and each at most once; only seconds have decimals
        (
            rf"(?=.)(?:(?P<weeks>{_WHOLE})w)?(?:(?P<days>{_WHOLE})d)?(?:(?P<hours>{_WHOLE})h)?"
            rf"(?:(?P<minutes>{_WHOLE})m)?(?:(?P<seconds>{_DECIMAL})s)?"
        ),
        # ISO 8601 without years and months, which have no fixed length
        (
            rf"P(?=.)(?:(?P<weeks>{_WHOLE})W)?(?:(?P<days>{_WHOLE})D)?(?:T(?=.)(?:(?P<hours>{_WHOLE})H)?"
            rf"(?:(?P<minutes>{_WHOLE})M)?(?:(?P<seconds>{_DECIMAL})S)?)?"
        ),
    )
)
_NUMBER = re.compile(rf"\s*[+-]?{_DECIMAL}\s*")  # the text into which LightningCLI may make one
_KEYWORDS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")


def show(value: object) -> str:
    """The value as an error message shows it: its repr, cut to 120 characters, and its type if that raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # also an int of more than 4300 digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:117]}..."


def parse_duration(value: object, argument: str = "duration") -> timedelta:
    """Read a duration in any of the accepted forms.

    Args:
        value: A string, a :class:`~datetime.timedelta` or a mapping of its keywords, zero or more. Days have
            24 hours. Strings keep microseconds, finer decimals are rounded.
        argument: The argument of :class:`~lightning_timekeeper.Timer` that the value was given for, named in
            the error.

    Raises:
        MisconfigurationException: If the value is anything else: among others a number, a bool, NaN or an infinity,
            negative, empty, with an unknown key, or too large for a timedelta (999,999,999 days).

    Example::

        >>> parse_duration("1d12h30m")
        datetime.timedelta(days=1, seconds=45000)
        >>> parse_duration("PT90S") == parse_duration({"seconds": 90}) == parse_duration("00:00:01:30")
        True
    """
    call = f"`Timer({argument}={show(value)})`"
    if isinstance(value, (int, float)) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        raise MisconfigurationException(
            f"{call} is a number without a unit, which is not a duration. YAML makes a number of an unquoted"
            f" 10:00:00:00, so quote it: '10:00:00:00'. Expected {ACCEPTED_FORMS}."
        )
    try:
        if isinstance(value, timedelta):
            duration = timedelta(value.days, value.seconds, value.microseconds)
        elif isinstance(value, str):
            duration = _from_text(value.strip())
        elif isinstance(value, Mapping):
            duration = _from_mapping(dict(value))
        else:
            raise TypeError(f"it is a {type(value).__name__}")  # noqa: TRY301
    except Exception as error:
        raise MisconfigurationException(
            f"{call} is not a valid duration: {error}. Expected {ACCEPTED_FORMS}."
        ) from error
    if duration < timedelta(0):
        raise MisconfigurationException(f"{call} is negative. Expected a duration of zero or more: {ACCEPTED_FORMS}.")
    return duration


def _from_text(text: str) -> timedelta:
    for form in _FORMS:
        if match := form.fullmatch(text):
            # the fraction goes in as microseconds of its own: one float would round a long duration
            whole, _, fraction = (match["seconds"] or "0").partition(".")
            parts = {unit: int(digits) for unit, digits in match.groupdict("0").items() if unit != "seconds"}
            return timedelta(**parts, seconds=int(whole), microseconds=float(f"0.{fraction or 0}") * 1e6)
    raise ValueError("its form is not known" if text else "it is empty")


def _from_mapping(parts: dict[object, object]) -> timedelta:
    if not parts:
        raise ValueError("it is empty")
    if unknown := [key for key in parts if key not in _KEYWORDS]:
        raise ValueError(f"it has the unknown key {unknown[0]!r}, the keys are {', '.join(_KEYWORDS)}")
    for key, number in parts.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{key!r} is not a number")
    return timedelta(**parts)  # type: ignore[arg-type]  # checked just above


def format_duration(duration: timedelta) -> str:
    """Write a duration with units, the way :func:`parse_duration` reads it back exactly.

    Args:
        duration: Zero or more.

    Example::

        >>> format_duration(timedelta(days=1, hours=12, seconds=1.5))
        '1d12h1.5s'
        >>> format_duration(timedelta(0))
        '0s'
    """
    minutes, seconds = divmod(duration.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    second = f"{seconds}.{duration.microseconds:06}".rstrip("0").rstrip(".") if duration.microseconds else f"{seconds}"
    parts = (f"{duration.days}d", f"{hours}h", f"{minutes}m", f"{second}s")
    return "".join(part for part in parts if part not in ("0d", "0h", "0m", "0s")) or "0s"
