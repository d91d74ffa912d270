"""Where the time of the latest steps went, for the user's loggers while the run goes on.

The spans are added up by what sums up a trace, as the background thread takes them to the file. Of that a training step
notices a comparison; when it is time to log, a subtraction and what the loggers themselves take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_timekeeper.trace.summary.rank_times import RankTimes
from lightning_timekeeper.trace.summary.selftime import INDEX
from lightning_timekeeper.trace.writer import trouble

if TYPE_CHECKING:
    from lightning_timekeeper.trace.pairing import Batch, Single
    from lightning_timekeeper.trace.summary.step_bins import Step
    from lightning_timekeeper.trace.tracer import Tracer, Track

_FORWARD, _BACKWARD, _OPTIMIZER = INDEX["forward"], INDEX["backward"], INDEX["optimizer"]


class _Totals(NamedTuple):
    """Sums over all steps so far; a new one for each step, so that another thread never sees half of it."""

    steps: int = 0
    step_ns: int = 0
    data_ns: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    optimizer_ns: int = 0


class Live:
    """Logs the mean times per step since the last time, at the Trainer's own interval.

    They are those of the steps that are on their way to the file, half a second behind the training at most; where
    there is no new one, nothing is logged.

    Args:
        trainer: Of the fit.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._totals = self._told = _Totals()
        self._told_at = -1
        self._ended = False
        self._times = RankTimes(stepped=self._add)
        self._spans = self._times.track()
        self._track: Track | None = None

    def attach(self, tracer: Tracer) -> None:
        """Listen to what the calling thread records."""
        self._track = tracer.track
        if tracer._drain is not None:
            tracer._drain.listener = self._hear

    # ---- in the background thread ----------------------------------------------------------------------------------
    def _hear(self, track: Track, batch: Batch) -> None:
        if track is not self._track or self._ended:
            return
        try:
            self._take(track, batch)
        except Exception as error:  # noqa: BLE001 - the file is to be written all the same
            self._fail(error)

    def _take(self, track: Track, batch: Batch) -> None:
        names, kinds, span = track.names, self._times.kinds, self._spans.span
        rows = zip(
            *(each.tolist() for each in (batch.position, batch.ident, batch.start_ns, batch.duration_ns)), strict=True
        )
        row = next(rows, None)
        for single in batch.singles:
            while row is not None and row[0] < single.position:
                name, category = names[row[1]]
                span(kinds[category, name], row[2], row[3], None)
                row = next(rows, None)
            self._take_single(track, single)
        while row is not None:
            name, category = names[row[1]]
            span(kinds[category, name], row[2], row[3], None)
            row = next(rows, None)

    def _take_single(self, track: Track, single: Single) -> None:
        if single.lane or single.phase == "P":
            return
        if single.phase == "E":
            self._spans.end(single.start_ns, single.payload)
            return
        name, category, args = (
            (*track.names[single.ident], single.payload) if single.ident < len(track.names) else single.payload
        )
        kind = self._times.kinds[category, name]
        if single.phase == "B":
            self._spans.begin(kind, single.start_ns, args)
        else:
            self._spans.span(kind, single.start_ns, single.duration_ns, args)

    def _add(self, step: Step) -> None:
        sums, own_ns = self._totals, step.own_ns
        self._totals = _Totals(
            sums.steps + 1,
            sums.step_ns + step.duration_ns,
            sums.data_ns + step.input_ns,
            sums.forward_ns + own_ns[_FORWARD],
            sums.backward_ns + own_ns[_BACKWARD],
            sums.optimizer_ns + own_ns[_OPTIMIZER],
        )

    # ---- in the training -------------------------------------------------------------------------------------------
    def look(self) -> None:
        """After a training batch: log, where the Trainer does."""
        stepped = self._epoch_loop._batches_that_stepped
        every = self._trainer.log_every_n_steps
        if not every or (stepped + 1) % every or self._ended or stepped == self._told_at:
            return
        trainer = self._trainer
        # as the Trainer's own metrics: not amid an accumulation window
        if not (trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()):
            self._tell(stepped)

    def finish(self) -> None:
        """At the end, with all spans taken: log what is left."""
        stepped = self._epoch_loop._batches_that_stepped - 1
        if self._trainer.log_every_n_steps and stepped > self._told_at:
            self._spans.finish()
            self._tell(stepped)
        self._ended = True

    def _tell(self, stepped: int) -> None:
        sums = self._totals
        since = _Totals(*map(int.__sub__, sums, self._told))
        if self._ended or not since.steps:
            return
        self._told, self._told_at = sums, stepped
        times_ns = {name.removesuffix("_ns"): total_ns for name, total_ns in zip(since._fields, since, strict=True)}
        del times_ns["steps"]
        metrics = {f"time/{name}": ns / since.steps / 1e9 for name, ns in times_ns.items() if ns}  # what was measured
        if since.data_ns:
            metrics["time/data_share"] = since.data_ns / since.step_ns
        try:
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics, step=stepped)
        except Exception as error:  # noqa: BLE001 - instrumentation never kills a training run
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._ended:
            self._ended = True
            trouble(f"`TimelineTrace(log=True)` stopped logging: {type(error).__name__}: {error}")
