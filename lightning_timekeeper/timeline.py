"""TimelineTrace: a Chrome trace of a run, streamed while it runs."""

from __future__ import annotations

import os
import shlex
import socket
import weakref
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.files import TraceFiles, attempt
from lightning_timekeeper.hooks import drop_empty_hooks
from lightning_timekeeper.live import Live
from lightning_timekeeper.names import Callback, MisconfigurationException, rank_zero_info, under_both_names
from lightning_timekeeper.recording import Recording
from lightning_timekeeper.template import Template
from lightning_timekeeper.trace.tracer import Tracer, tell_children
from lightning_timekeeper.trace.writer import is_url, trouble
from lightning_timekeeper.triggers import Counts, TriggerLike, as_trigger  # LightningCLI reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper import names as pl
    from lightning_timekeeper.triggers import Trigger


@under_both_names
class TimelineTrace(Callback):
    """Records every phase of a run and streams it to a file that the Perfetto UI opens, also when the run is killed.

    Each of Lightning's profiler actions becomes a span, under a short name and with its phase as category; around them
    stand a ``step`` span per batch, an ``epoch`` span, and one for the stage. The user's own profiler works as before.

    Args:
        trigger: When a new file begins, where the file name has ``{step}`` or ``{epoch}``: ``(n, "step" | "batch" |
            "iteration" | "epoch")``, a number of steps, a :class:`Trigger`, or a callable of the trainer. What is
            recorded is in the file within half a second whatever the trigger is.
        filename: Template of ``{stage} {rank} {node} {world_size} {epoch} {step} {attempt}`` and logged metrics, such
            as ``{val_loss:.3f}``, that ends in ``.json`` or ``.json.gz``. With several ranks ``-rank{rank}`` is added
            where ``{rank}`` is missing. An existing file is never touched: ``-v1``, ``-v2`` ... None keeps the events
            in memory, see :attr:`tracer`.
        enable: When to begin to record; None records from the start. ``enable=100, disable=120`` records the steps
            100 to 119.
        disable: When to stop; where both fire, it wins.
        tracer: Record into this :class:`Tracer`, whose owner closes it, instead of a file of ours.
        writer: ``path -> writable binary file``, in place of fsspec's open.
        dirpath: Where the files go, also a URL that fsspec knows; by default the trainer's log directory.
        schedule: A ``torch.profiler.schedule(...)``, instead of ``enable`` and ``disable``.
        min_duration_us: Hooks of callbacks and of the module that take less, µs from 0, are left out: four events of
            five.
        max_events: The most events in one file, from 1; the viewers bear about two million.
        log: Log ``time/data`` (the wait for it), ``time/forward``, ``time/backward``, ``time/optimizer`` and
            ``time/step``, s, and ``time/data_share``, 0 to 1, to the Trainer's loggers at its own interval: means over
            the steps since the last time.
        summary: Print where the time went when a run ends (rank 0).

    Raises:
        MisconfigurationException: For an argument that is not of these forms.

    Example::

        from lightning.pytorch import Trainer
        from lightning_timekeeper import TimelineTrace

        trainer = Trainer(callbacks=[TimelineTrace()])
    """

    def __init__(
        self,
        trigger: TriggerLike | None = (1, "epoch"),
        filename: str | None = "{stage}-rank{rank}.json",
        enable: TriggerLike | None = None,
        disable: TriggerLike | None = None,
        tracer: Tracer | None = None,
        writer: Callable[[str], Any] | None = None,
        *,
        dirpath: str | os.PathLike[str] | None = None,
        schedule: Callable[[int], Any] | None = None,
        min_duration_us: float = 10.0,
        max_events: int = 2_000_000,
        log: bool = False,
        summary: bool = True,
    ) -> None:
        super().__init__()
        try:
            self._trigger: Trigger = as_trigger(trigger, "TimelineTrace(trigger")
            self._enable: Trigger = as_trigger(enable, "TimelineTrace(enable")
            self._disable: Trigger = as_trigger(disable, "TimelineTrace(disable")
            self._template = None if filename is None else Template(filename)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from None
        for argument, value in (("writer", writer), ("schedule", schedule)):
            if value is not None and not callable(value):
                raise MisconfigurationException(f"`TimelineTrace({argument}={value!r})`: expected a callable.")
        if schedule is not None and (enable is not None or disable is not None):
            raise MisconfigurationException(
                f"`TimelineTrace(schedule={schedule!r}, enable={enable!r}, disable={disable!r})`: expected a schedule, "
                "or enable and disable, not both."
            )
        if tracer is not None and not isinstance(tracer, Tracer):
            raise MisconfigurationException(f"`TimelineTrace(tracer={tracer!r})`: expected a Tracer.")
        if not isinstance(max_events, int) or isinstance(max_events, bool) or max_events < 1:
            raise MisconfigurationException(
                f"`TimelineTrace(max_events={max_events!r})`: expected a whole number from 1."
            )
        if (
            isinstance(min_duration_us, bool)
            or not isinstance(min_duration_us, (int, float))
            or not min_duration_us >= 0
        ):
            raise MisconfigurationException(
                f"`TimelineTrace(min_duration_us={min_duration_us!r})`: expected microseconds from 0."
            )
        if dirpath is not None and not isinstance(dirpath, (str, os.PathLike)):
            raise MisconfigurationException(f"`TimelineTrace(dirpath={dirpath!r})`: expected a directory or a URL.")
        # not dirpath: a resumed run, with a directory of its own, is to find its state
        given = {"filename": filename, "enable": enable, "disable": disable}
        self._state_key = self._generate_state_key(**{key: repr(value) for key, value in given.items()})
        self._starts_off, self._ends = enable is not None, disable is not None
        rotates = self._template is not None and tracer is None and bool(self._template.keys & {"epoch", "step"})
        self._rotates = rotates
        self._schedule = schedule
        self._own_tracer = tracer
        self._writer = writer
        self._dirpath = None if dirpath is None else os.fspath(dirpath)
        self._max_events = max_events
        self._min_duration_us = min(float(min_duration_us), 1e12)
        self._log = log  # the Trainer sets `log` to the LightningModule's
        self._summary = summary
        self._runs: list[Recording] = []  # more than one where a Trainer runs inside another's
        self._last_tracer: Tracer | None = None
        self._last_trainer: Callable[[], pl.Trainer | None] = _nobody  # weak
        self._restored: bool | None = None
        self._was_recording = not self._starts_off
        drop_empty_hooks(self)
        self._looks = rotates or enable is not None or disable is not None or schedule is not None
        if not self._looks:
            drop_empty_hooks(self, _BATCH_ENDS, TimelineTrace)  # no trigger to look at

    # ---- what users read -------------------------------------------------------------------------------------------
    @property
    def tracer(self) -> Tracer | None:
        """The tracer of this run, or of the latest; None before the first span was recorded."""
        return self._runs[-1].tracer if self._runs else self._last_tracer

    @property
    def path(self) -> str | None:
        """The file of this run, or of the latest."""
        return self.tracer.path if self.tracer is not None else None

    @property
    def state_key(self) -> str:
        """Tells two of us in one Trainer apart."""
        return self._state_key  # Lightning asks for it at every hook

    def state_dict(self) -> dict[str, Any]:
        """Whether it was recording, where there is a window: all that a resumed run cannot derive from its counters."""
        if not (self._starts_off or self._ends):
            return {}  # nothing is put into the checkpoint: a resume without us warns of nothing
        return {"recording": self._runs[-1].wanted if self._runs else self._was_recording}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        recording = state_dict.get("recording") if isinstance(state_dict, dict) else None
        self._restored = recording if isinstance(recording, bool) else None

    def __getstate__(self) -> dict[str, Any]:
        # threads and files stay in their process
        return {**self.__dict__, "_runs": [], "_last_tracer": None, "_last_trainer": _nobody}

    # ---- the run ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the file and take the profiler's place."""
        for run in reversed(self._runs):  # that ended without a word, as where another callback's on_exception raises
            if run.trainer is trainer or run.trainer.state.status != "running":
                self._close(run, {"unfinished": True})
        # a fit that goes on where the last one of this Trainer ended, as a resume does
        windows = self._starts_off or self._ends
        goes_on = windows and self._last_trainer() is trainer and trainer.global_step > 0
        self._restored = self._was_recording if goes_on else None
        self._was_recording = not self._starts_off
        stage = str(getattr(stage, "value", stage))
        run = self._new_run(trainer, stage)
        # here, before training, a path that cannot be opened is the user's to hear of
        if self._starts_off or self._schedule is not None:
            tell_children()  # workers may be started long before the window
            if run.files is not None:
                run.files.check()
        else:
            try:
                run.open()
            except RuntimeError as error:  # no thread to be had, under a limit of processes: not for us to end a run
                trouble(f"`TimelineTrace` records nothing of this {stage}: {error}.")
                return
        if run.over and self._own_tracer is not None:
            trouble(f"`TimelineTrace(tracer=...)`: the tracer has ended; nothing of this {stage} is recorded.")
            return
        self._look_again()  # an epoch that is gone on with begins without a hook
        self._runs.append(run)
        self._guard(trainer, lambda run: run.anchors.watch())
        if run.tracer is not None:
            self._guard(trainer, lambda run: run.start(in_epoch=False))

    def _new_run(self, trainer: pl.Trainer, stage: str) -> Recording:
        given, template = self._own_tracer, self._template
        files: TraceFiles | None = None
        if given is None and template is not None:
            files = TraceFiles(trainer, stage, template, self._dirpath, looks=self._writer is None)
        world_size, rank, node = trainer.world_size, trainer.global_rank, trainer.node_rank
        several_hosts = getattr(trainer, "num_nodes", 1) > 1

        def make() -> Tracer:
            if given is not None:
                return given
            return Tracer(
                files.path(trainer.current_epoch) if files is not None else None,
                opener=self._writer,
                max_events=self._max_events,
                min_duration_us={"callback": self._min_duration_us, "module": self._min_duration_us},
                process_name=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
                metadata={"rank": rank, "world_size": world_size, "node": node, "attempt": attempt(), "stage": stage},
                pid=10_000_000 + rank if several_hosts else os.getpid(),
                sort_index=rank,
            )

        run = Recording(
            trainer,
            stage,
            self,
            make,
            failed=lambda error: self._fail(run, error),
            lost=lambda error: self._end_badly(run, error),
            closes=given is None,
        )
        run.writer = self._writer
        run.files = files
        if self._log and stage == "fit" and trainer.is_global_zero and trainer.loggers:
            run.live = Live(trainer)
        return run

    # ---- what must not reach the training --------------------------------------------------------------------------
    def _guard(self, trainer: pl.Trainer, hook: Callable[[Recording], None]) -> None:
        """Call a hook of a Trainer's run; a failure of ours ends the recording with one warning, and nothing else."""
        for run in reversed(self._runs):
            if run.trainer is trainer:
                try:
                    hook(run)
                except Exception as error:  # noqa: BLE001 - instrumentation never kills a training run
                    self._fail(run, error)
                return

    def _fail(self, run: Recording, error: Exception) -> None:
        if run in self._runs:  # else it has been told
            self._runs.remove(run)
            self._last_tracer = run.tracer
            trouble(f"TimelineTrace stopped recording: {type(error).__name__}: {error}")
            run.abandon()

    def _close(self, run: Recording, mark: dict[str, Any]) -> None:
        self._guard(run.trainer, lambda run: run.close(mark))
        if run in self._runs:
            self._runs.remove(run)
            self._last_tracer = run.tracer
            if run.stage == "fit":
                self._was_recording, self._last_trainer = run.wanted, weakref.ref(run.trainer)

    def _end_badly(self, run: Recording, error: type[BaseException]) -> None:
        if run.recording and run.tracer is not None:
            run.tracer.instant("exception", "timekeeper", type=error.__name__)
        self._close(run, {"error": error.__name__})

    def _advance(self, run: Recording, trainer: pl.Trainer, *, in_epoch: bool) -> None:
        """Look at the triggers, after a batch or an epoch."""
        before, after = run.counts, run.count()
        run.counts = after
        run.resting = self._rests(run, trainer)
        if run.over:
            return
        if self._schedule is not None:
            run.wanted = _records(self._schedule, after.step)
        elif self._disable.fires(before, after, trainer):
            run.wanted = False
        elif self._enable.fires(before, after, trainer):
            run.wanted = True
        if run.wanted and not run.recording:
            run.start(in_epoch=in_epoch)
        if self._rotates and self._trigger.fires(before, after, trainer) and run.files is not None:
            run.rotate_to = run.files.path(after.epoch)

    def _rests(self, run: Recording, trainer: pl.Trainer) -> float:
        """For how many batches there is no trigger to look at: the hook that looks is 15 µs, and one that rests 1."""
        if run.stage != "fit" or self._schedule is not None or not trainer.lightning_module.automatic_optimization:
            return 0
        # a run that is over only counts on, for what it says in a checkpoint
        looked_at = [self._enable, self._disable, *([self._trigger] if self._rotates else [])]
        return min(trigger.rests(run.counts) for trigger in looked_at)

    def _look_again(self) -> None:
        if self._looks and vars(self).get("on_train_batch_end", self) is None:
            del self.on_train_batch_end

    def _rest_for_an_epoch(self, run: Recording, trainer: pl.Trainer) -> None:
        """Without a hook a batch costs nothing at all."""
        self._look_again()
        if self._looks and len(self._runs) == 1 and run.resting >= trainer.num_training_batches:
            drop_empty_hooks(self, ("on_train_batch_end",), TimelineTrace)

    # ---- hooks -----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide whether a run that begins, or goes on from a checkpoint, is in a window."""

        def begin(run: Recording) -> None:
            run.counts = counts = run.count()
            run.resting = self._rests(run, trainer)
            if self._schedule is not None:
                run.wanted = _records(self._schedule, counts.step)
            elif self._starts_off:
                before = Counts(-1, -1, -1) if counts == Counts() else counts
                fires = self._enable.fires(before, counts, trainer) and not self._disable.fires(before, counts, trainer)
                run.wanted = fires if self._restored is None else self._restored
            elif self._restored is not None:
                run.wanted = self._restored
            run.between_steps()
            run.watch_optimizers()
            if run.wanted and not run.recording and not run.over:
                run.start(in_epoch=False)

        self._guard(trainer, begin)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open ``sanity check``."""
        self._guard(trainer, lambda run: run.open_stage("sanity check"))

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close it."""
        self._guard(trainer, lambda run: run.close_stage("sanity check"))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open ``validate``, within a fit."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._guard(trainer, lambda run: run.open_stage("validate"))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close it."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._guard(trainer, lambda run: run.close_stage("validate"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open ``epoch``."""

        def begin(run: Recording) -> None:
            run.begin_epoch(new=True)
            self._rest_for_an_epoch(run, trainer)

        self._guard(trainer, begin)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the triggers that count epochs."""

        def end(run: Recording) -> None:
            run.end_step()
            self._advance(run, trainer, in_epoch=False)
            run.between_steps()

        self._guard(trainer, end)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the last epoch."""
        self._guard(trainer, Recording.end_epoch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the triggers, where one may fire."""
        run = self._runs[-1] if self._runs else None
        if run is not None and run.resting >= 1 and run.trainer is trainer:
            run.resting -= 1
            return
        self._guard(trainer, lambda run: self._advance(run, trainer, in_epoch=True))

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Name the step."""
        self._guard(trainer, lambda run: run.evaluate(batch_idx, dataloader_idx))

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Look at the triggers, outside a fit: within one they count its own batches."""

        def end(run: Recording) -> None:
            if run.stage != "fit":
                run.eval_batches += 1
                self._advance(run, trainer, in_epoch=False)

        self._guard(trainer, end)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the last step."""
        self._guard(trainer, lambda run: run.end_step())

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_predict_batch_start = on_validation_batch_start
    on_predict_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
    on_predict_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the file: after an exception there is no teardown."""
        self._guard(trainer, lambda run: self._end_badly(run, type(exception)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the file, and say where the time went."""

        def end(run: Recording) -> None:
            self._close(run, {})
            if run.live is not None:
                run.live.finish()
            self._tell(trainer, run)

        self._guard(trainer, end)

    def _tell(self, trainer: pl.Trainer, run: Recording) -> None:
        tracer = run.tracer
        if tracer is None:
            rank_zero_info(f"TimelineTrace: no window opened in this {run.stage}, so there is no trace of it.")
            return
        if not (self._summary and trainer.is_global_zero and self._own_tracer is None):
            return
        try:
            paths = run.files.paths if run.files is not None and self._writer is None else []
            rank_zero_info(_summary_of(run, tracer, paths))
        except Exception as error:  # noqa: BLE001 - a file elsewhere, or one that cannot be read back
            rank_zero_info(f"TimelineTrace: no summary of {tracer.path}: {error}")


SUMMED_UP_BYTES = 50_000_000
"""Of a run's files together, 450,000 events: up to there the summary at its end takes no more than about three seconds."""

_BATCH_ENDS = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")


def _summary_of(run: Recording, tracer: Tracer, paths: list[str]) -> str:
    """Where the time of a run went, or how to learn it where that would keep the run waiting."""
    from lightning_timekeeper.trace.summary import summarize  # noqa: PLC0415 - at the end, where it is wanted
    from lightning_timekeeper.trace.summary.text import terminal_width  # noqa: PLC0415

    paths = [path for path in paths if path != run.rotate_to and (is_url(path) or os.path.exists(path))]
    size = sum(os.path.getsize(path) * (8 if path.endswith(".gz") else 1) for path in paths if not is_url(path))
    if tracer._drain is not None and (tracer.path is None or is_url(tracer.path)):
        size += tracer._drain._events * 110
    if size > SUMMED_UP_BYTES:
        if tracer.path is None:
            return "TimelineTrace: to see where the time went, call `summarize(trace.tracer.events())`"
        files = " ".join(shlex.quote(path) for path in paths[:3]) + (" ..." if len(paths) > 3 else "")
        return f"TimelineTrace: to see where the time went, call `timekeeper summary {files}`"
    if tracer.path is None:
        return f"{summarize(tracer.events()).text(terminal_width())}\nTrace: in memory"
    if not paths:
        return f"Trace: {tracer.path}"
    more = f" and {len(paths) - 1} before it" if len(paths) > 1 else ""
    return f"{summarize(*paths).text(terminal_width())}\nTrace: {tracer.path}{more}"


def _nobody() -> None:
    return


def _records(schedule: Callable[[int], Any], step: int) -> bool:
    return str(getattr(schedule(step), "name", "")).startswith("RECORD")
