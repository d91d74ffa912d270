"""What is kept of one rank while its spans pass by: steps, epochs, validations, checkpoints, and times by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.summary.selftime import INDEX, PHASES, Kinds, Marked, Track
from lightning_timekeeper.trace.summary.step_bins import Step
from lightning_timekeeper.trace.summary.step_table import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_EPOCHS = 1000
MOST_MARKS = 1000
"""Validations and checkpoints of which each is kept."""

_CHECKPOINT = INDEX["checkpoint"]
_SETUP = INDEX["setup"]
_CUT_SHORT = ("error", "unfinished")


@dataclass
class Spell:
    """Some spans of one sort taken together.

    Attributes:
        count: How many.
        total_ns: Their time.
        longest_ns: The longest.
    """

    count: int = 0
    total_ns: int = 0
    longest_ns: int = 0

    def add(self, duration_ns: int) -> None:
        """Count one."""
        self.count += 1
        self.total_ns += duration_ns
        self.longest_ns = max(self.longest_ns, duration_ns)


@dataclass
class Epoch:
    """One epoch, as far as it was recorded.

    Attributes:
        epoch: Its number; None where the trace does not say.
        start_ns: Its begin, since the begin of the trace.
        duration_ns: All of it.
        steps: How many steps it has.
        train_ns: Time of the steps, without the checkpoints in them.
        validation: Its validations.
        checkpoint: Its checkpoints.
        gap_ns: From the end of the last step, validation or checkpoint before it to its first step; None for the first.
        first_step_ns: Begin of its first step, since the begin of the trace; None before there is one.
    """

    epoch: int | None
    start_ns: int
    duration_ns: int = 0
    steps: int = 0
    train_ns: int = 0
    validation: Spell = field(default_factory=Spell)
    checkpoint: Spell = field(default_factory=Spell)
    gap_ns: int | None = None
    first_step_ns: int | None = None


@dataclass
class Mark:
    """A validation or a checkpoint.

    Attributes:
        start_ns: Its begin, since the begin of the trace.
        duration_ns: How long it took.
        step: Optimizer steps done before, None where the trace does not say.
        path: Of a checkpoint, where the trace tells it.
    """

    start_ns: int
    duration_ns: int
    step: int | None = None
    path: str | None = None


class RankTimes:
    """One rank.

    Args:
        rank: Its number; None for a trace that names none.
        stepped: Is given each step of a training.
    """

    def __init__(self, rank: int | None = None, stepped: Callable[[Step], None] | None = None) -> None:
        self.rank = rank
        self.kinds = Kinds()
        self.beside = Kinds(timed=True)
        self.steps = Steps("step")
        self.batches = Steps("batch")
        self.epochs: dict[int | None, Epoch] = {}
        self.epochs_left_out = 0
        self.validations: list[Mark] = []
        self.checkpoints: list[Mark] = []
        self.validation, self.checkpoint, self.sanity = Spell(), Spell(), Spell()
        self.stages: dict[str, int] = {}  # name -> its time
        self.origin_ns: int | None = None
        self.first_step_ns: int | None = None  # from the stage's begin
        self.stepping_ns = 0  # from the first step of a fit to its end
        self.own_ns = [0] * len(PHASES)  # of all that has ended, in steps or not
        self.unordered = 0
        self._stepped = stepped
        self._epoch: Epoch | None = None
        self._gap_due = False
        self._busy_until_ns: int | None = None
        self._latest_step: int | None = None
        self._stage: Marked | None = None
        self._stage_first_step_ns: int | None = None
        self._in_training = False
        self._track: Track | None = None

    def track(self) -> Track:
        """A new track of this rank, on which its loop may run."""
        track = Track(lambda span: self._opened(track, span), lambda *closed: self._closed(track, *closed))
        return track

    def finish(self, track: Track) -> None:
        """One of the tracks has ended."""
        track.finish()
        self.own_ns = list(map(int.__add__, self.own_ns, track.own_ns))
        self.unordered += track.unordered

    # ---- spans with a role -----------------------------------------------------------------------------------------
    def _opened(self, track: Track, span: Marked) -> None:
        role, start_ns = span.kind.role, span.start_ns
        if role == "step" or (role == "batch" and self._stage is not None and self._stage.kind.name != "fit"):
            if role == "step" and self._stage_first_step_ns is None:
                self._stage_first_step_ns = start_ns
                # a window that opens later begins with a step: nothing was set up in it
                if self._stage is not None and self.first_step_ns is None and track.calls[_SETUP]:
                    self.first_step_ns = start_ns - self._stage.start_ns
            if role == "step" and self._epoch is not None and self._epoch.first_step_ns is None:
                self._epoch.first_step_ns = start_ns - (self.origin_ns or 0)
            if self._gap_due and self._epoch is not None:
                self._gap_due = False
                if self._busy_until_ns is not None:
                    self._epoch.gap_ns = start_ns - self._busy_until_ns
            span.apart = track.begin_apart()
        elif role == "stage" and self._stage is None:
            self._stage, self._stage_first_step_ns, self._busy_until_ns = span, None, None
        elif role == "epoch":
            self._begin_epoch(span.args.get("epoch"), start_ns)

    def _begin_epoch(self, number: Any, start_ns: int) -> None:
        number = _integer(number)
        epoch = self.epochs.get(number)
        if epoch is None:
            epoch = Epoch(number, start_ns - (self.origin_ns or 0))
            self._gap_due = self._busy_until_ns is not None
            if len(self.epochs) < MOST_EPOCHS:
                self.epochs[number] = epoch
            else:
                self.epochs_left_out += 1
        self._epoch = epoch

    def _closed(self, track: Track, span: Marked, duration_ns: int, whole: bool) -> None:
        role, args, start_ns = span.kind.role, span.args, span.start_ns
        if role in ("step", "batch"):
            if span.apart is not None:
                if whole and args.get("batch") != "none" and not any(mark in args for mark in _CUT_SHORT):
                    self._step(track, span, duration_ns, args)
                track.end_apart(span.apart)
        elif role == "epoch":
            if self._epoch is not None:
                self._epoch.duration_ns += duration_ns
        elif role == "stage":
            if span is self._stage:
                self.stages[span.kind.name] = self.stages.get(span.kind.name, 0) + duration_ns
                if self._stage_first_step_ns is not None:
                    self.stepping_ns += span.end_ns - self._stage_first_step_ns
                self._stage = self._epoch = None
        elif role == "sanity check":
            self.sanity.add(duration_ns)
        elif role == "validation":
            self.validation.add(duration_ns)
            if self._epoch is not None:
                self._epoch.validation.add(duration_ns)
            self._mark(self.validations, start_ns, duration_ns, _integer(args.get("step")))
            self._busy_until_ns = span.end_ns
        elif role == "checkpoint":
            self.checkpoint.add(duration_ns)
            if self._epoch is not None:
                self._epoch.checkpoint.add(duration_ns)
            self._mark(self.checkpoints, start_ns, duration_ns, self._latest_step)
            self._busy_until_ns = span.end_ns

    def _step(self, track: Track, span: Marked, duration_ns: int, args: dict[str, Any]) -> None:
        training = span.kind.role == "step"
        number = _integer(args.get("step" if training else "batch"))
        own_ns, calls = track.own_ns, track.calls
        step = Step(number, _integer(args.get("epoch")), span.start_ns, duration_ns, own_ns, calls, track.input_ns)
        (self.steps if training else self.batches).add(step)
        if not training:
            return
        self._latest_step, self._busy_until_ns = number, span.end_ns
        if self._epoch is not None:
            self._epoch.steps += 1
            self._epoch.train_ns += duration_ns - own_ns[_CHECKPOINT]
        if self._stepped is not None:
            self._stepped(step)

    def _mark(self, marks: list[Mark], start_ns: int, duration_ns: int, step: int | None) -> None:
        if len(marks) < MOST_MARKS:
            marks.append(Mark(start_ns - (self.origin_ns or 0), duration_ns, step))

    def saved(self, track: Track, time_ns: int, path: Any) -> None:
        """An instant tells where the latest checkpoint is."""
        track.reach(time_ns)
        if isinstance(path, str) and len(self.checkpoints) == self.checkpoint.count > 0:
            self.checkpoints[-1].path = path


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
