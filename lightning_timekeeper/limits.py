"""What ends a run first: its durations, a deadline, and the margin kept before them."""

from __future__ import annotations

import math
import os
import sys
from datetime import datetime
from typing import TYPE_CHECKING

from lightning_timekeeper.duration import parse_duration, show
from lightning_timekeeper.names import MisconfigurationException

if TYPE_CHECKING:
    from collections.abc import Callable

REASONS = ("duration", "run_duration", "deadline")  # of two that end together, the first is named
SLURM_END = "SLURM_JOB_END_TIME"  # Unix seconds, set by Slurm in a job's environment


class Limits:
    """The limits of a :class:`~lightning_timekeeper.Timer`, as pure functions of clock readings.

    Args:
        duration: The limit on the training time of all runs.
        run_duration: The limit on the time since the run's ``setup``.
        deadline: An aware :class:`~datetime.datetime`, an ISO 8601 string with an offset, or ``"slurm"``.
        margin: What to leave before whichever ends first.

    Raises:
        MisconfigurationException: If a duration or the deadline is not in an accepted form, or a margin comes
            without anything to keep it from.
    """

    def __init__(
        self, duration: object = None, run_duration: object = None, deadline: object = None, margin: object = None
    ) -> None:
        self.duration_s = _seconds(duration, "duration")
        self.run_duration_s = _seconds(run_duration, "run_duration")
        self._deadline = None if deadline is None else _parse_deadline(deadline)
        self.given = not (duration is run_duration is deadline is None)
        if margin is not None and not self.given:
            raise MisconfigurationException(
                f"`Timer(margin={show(margin)})` has nothing to keep the margin from."
                " Expected one of `duration`, `run_duration` and `deadline` with it."
            )
        self.margin_s = _seconds(margin, "margin") or 0.0

    @property
    def deadline_s(self) -> float | None:
        """The deadline in Unix seconds; None without one, and for ``"slurm"`` outside a Slurm job."""
        # read at every use: a Timer may be made, or pickled, before its job starts
        return _slurm_end() if self._deadline == "slurm" else self._deadline  # type: ignore[return-value]

    @property
    def misses_slurm(self) -> bool:
        """Whether Slurm's end time was asked for and there is none."""
        return self._deadline == "slurm" and _slurm_end() is None

    def first(self, train_s: float, run_s: float, wall_clock: Callable[[], float]) -> tuple[float, str | None]:
        """Which limit ends the run first, and when.

        Args:
            train_s: Seconds trained in all runs.
            run_s: Seconds since this run's ``setup``.
            wall_clock: Tells the Unix time in seconds; read only where there is a deadline.

        Returns:
            The seconds left, zero or less when it is time to stop, and the limit's name: one of
            :data:`REASONS`. Infinity and None without a limit.
        """
        left_s = (
            math.inf if self.duration_s is None else self.duration_s - train_s,
            math.inf if self.run_duration_s is None else self.run_duration_s - run_s,
            math.inf if (deadline_s := self.deadline_s) is None else deadline_s - wall_clock(),
        )
        least_s = min(left_s)
        if math.isinf(least_s):
            return math.inf, None
        return least_s - self.margin_s, REASONS[left_s.index(least_s)]


def _seconds(duration: object, argument: str) -> float | None:
    return None if duration is None else parse_duration(duration, argument).total_seconds()


def _slurm_end() -> float | None:
    try:
        end_s = float(os.environ[SLURM_END])
    except (KeyError, ValueError):
        return None
    return end_s if math.isfinite(end_s) else None


def _parse_deadline(deadline: object) -> float | str:
    moment = deadline
    if isinstance(deadline, str):
        text = deadline.strip()
        if text == "slurm":
            return text
        if sys.version_info < (3, 11) and text.endswith(("Z", "z")):
            text = text[:-1] + "+00:00"
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = None
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        naive = " names no time zone" if isinstance(moment, datetime) else " is not a deadline"
        raise MisconfigurationException(
            f"`Timer(deadline={show(deadline)})`{naive}. Expected a datetime with a time zone, an ISO 8601 string with an"
            " offset such as '2030-01-31T18:00:00+01:00', or 'slurm' for the end of the Slurm job."
        )
    return moment.timestamp()
