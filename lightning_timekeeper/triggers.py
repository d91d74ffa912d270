"""When something is to happen: every n steps, batches or epochs, once after n of them, or when a callable says so.

A trigger is a function of counters before and after a batch or an epoch, and keeps no state: a run that was resumed
fires where the run without interruption fires.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable  # LightningCLI reads the annotations
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

UNITS = {"step": "step", "batch": "batch", "iteration": "batch", "epoch": "epoch"}

ACCEPTED = (
    '(n, "step" | "batch" | "iteration" | "epoch"), a whole number of steps, a Trigger, or a callable of the trainer'
)


class Counts(NamedTuple):
    """How much of the running stage is done.

    Attributes:
        step: Optimizer steps, ``trainer.global_step``.
        batch: Batches of the running stage.
        epoch: Epochs.
    """

    step: int = 0
    batch: int = 0
    epoch: int = 0

    def of(self, unit: str) -> int:
        """The counter of a unit."""
        count: int = getattr(self, UNITS[unit])
        return count


class Trigger(ABC):
    """Something that fires between two states of the counters."""

    @abstractmethod
    def fires(self, before: Counts, after: Counts, trainer: Any) -> bool:
        """Whether it fires between ``before`` and ``after``; asked at the end of a batch and of each epoch."""

    def rests(self, counts: Counts) -> float:
        """For how many batches of this epoch it certainly does not fire, from 0; it is not asked at their ends.

        A batch is at most one step here; where the module steps by hand, it is asked at each.
        """
        del counts
        return 0


@dataclass(frozen=True)
class Every(Trigger):
    """Fires whenever a multiple of ``n`` is reached.

    Args:
        n: From 1.
        unit: ``"step"`` (optimizer steps), ``"batch"`` or ``"iteration"`` (batches of the stage), ``"epoch"``.

    Raises:
        ValueError: For anything else.
    """

    n: int
    unit: str = "step"

    def __post_init__(self) -> None:
        _check(self, self.n, self.unit, 1)

    def fires(self, before: Counts, after: Counts, trainer: Any) -> bool:
        """Whether a multiple of n lies between, the latter included."""
        return after.of(self.unit) // self.n > max(before.of(self.unit), 0) // self.n

    def rests(self, counts: Counts) -> float:
        """Until the next multiple."""
        return math.inf if self.unit == "epoch" else self.n - counts.of(self.unit) % self.n - 1


@dataclass(frozen=True)
class At(Trigger):
    """Fires once, when ``n`` are done; 0 means before the first.

    Args:
        n: From 0.
        unit: As for :class:`Every`.

    Raises:
        ValueError: For anything else.
    """

    n: int
    unit: str = "step"

    def __post_init__(self) -> None:
        _check(self, self.n, self.unit, 0)

    def fires(self, before: Counts, after: Counts, trainer: Any) -> bool:
        """Whether n lies between, the latter included."""
        return before.of(self.unit) < self.n <= after.of(self.unit)

    def rests(self, counts: Counts) -> float:
        """Until n, and for ever after."""
        left = self.n - counts.of(self.unit) - 1
        return math.inf if self.unit == "epoch" or left < 0 else left


@dataclass(frozen=True)
class _When(Trigger):
    """Fires when a callable of the trainer returns true."""

    function: Callable[[Any], Any]

    def fires(self, before: Counts, after: Counts, trainer: Any) -> bool:
        return bool(self.function(trainer))


@dataclass(frozen=True)
class _Never(Trigger):
    def fires(self, before: Counts, after: Counts, trainer: Any) -> bool:
        return False

    def rests(self, counts: Counts) -> float:
        return math.inf


NEVER: Trigger = _Never()

TriggerLike: TypeAlias = Trigger | tuple[int, str] | int | Callable[[Any], Any]
"""What a user may pass where a trigger is wanted."""


def as_trigger(value: Any, argument: str) -> Trigger:
    """What a user may pass where a trigger is wanted.

    Args:
        value: A trigger, ``(n, unit)``, a number of steps, a callable of the trainer; None never fires.
        argument: How the user wrote it, for the error: ``TimelineTrace(enable=...)``.

    Raises:
        ValueError: For anything else.
    """
    if value is None:
        return NEVER
    if isinstance(value, Trigger):
        return value
    try:
        if isinstance(value, (tuple, list)) and len(value) == 2:  # (n, unit); YAML brings a list
            return Every(*value)
        if isinstance(value, int) and not isinstance(value, bool):
            return At(value)
    except ValueError as error:
        raise ValueError(f"`{argument}={value!r}`: expected {ACCEPTED}. {error}") from None
    if callable(value):
        return _When(value)
    raise ValueError(f"`{argument}={value!r}`: expected {ACCEPTED}.")


def _check(trigger: Trigger, n: Any, unit: Any, least: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < least:
        raise ValueError(f"`{type(trigger).__name__}({n!r}, {unit!r})`: expected a whole number from {least}.")
    if unit not in UNITS:
        units = ", ".join(map(repr, UNITS))
        raise ValueError(f"`{type(trigger).__name__}({n!r}, {unit!r})`: expected one of {units} as unit.")
