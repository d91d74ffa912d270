"""TimelineTrace: a Chrome trace of a run, streamed while it runs."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_timekeeper.hooks import drop_empty_hooks
from lightning_timekeeper.recording import Recording
from lightning_timekeeper.template import Template, free_version, join, versioned, with_rank
from lightning_timekeeper.trace.tracer import Tracer
from lightning_timekeeper.trace.writer import is_url, trouble
from lightning_timekeeper.triggers import Counts, as_trigger

if TYPE_CHECKING:
    from collections.abc import Callable

    import lightning.pytorch as pl

    from lightning_timekeeper.triggers import Trigger


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
        trigger: Any = (1, "epoch"),
        filename: str | None = "{stage}-rank{rank}.json",
        enable: Any = None,
        disable: Any = None,
        tracer: Tracer | None = None,
        writer: Callable[[str], Any] | None = None,
        *,
        dirpath: str | os.PathLike[str] | None = None,
        schedule: Callable[[int], Any] | None = None,
        min_duration_us: float = 10.0,
        max_events: int = 2_000_000,
        summary: bool = True,
    ) -> None:
        super().__init__()
        drop_empty_hooks(self)
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
        self._given = {"filename": filename, "dirpath": dirpath, "enable": enable, "disable": disable}
        self._starts_off = enable is not None
        self._schedule = schedule
        self._own_tracer = tracer
        self._writer = writer
        self._dirpath = None if dirpath is None else os.fspath(dirpath)
        self._directory = "."
        self._max_events = max_events
        self._min_duration_us = min(float(min_duration_us), 1e12)
        self._summary = summary
        self._run: Recording | None = None
        self._last_tracer: Tracer | None = None
        self._restored: bool | None = None
        self._was_recording = not self._starts_off

    # ---- what users read -------------------------------------------------------------------------------------------
    @property
    def tracer(self) -> Tracer | None:
        """The tracer of this run, or of the latest; None before the first span was recorded."""
        return self._run.tracer if self._run is not None else self._last_tracer

    @property
    def path(self) -> str | None:
        """The file of this run, or of the latest."""
        return self.tracer.path if self.tracer is not None else None

    @property
    def state_key(self) -> str:
        """Tells two of us in one Trainer apart."""
        return self._generate_state_key(**{key: repr(value) for key, value in self._given.items()})

    def state_dict(self) -> dict[str, Any]:
        """Whether it was recording: all that a resumed run cannot derive from its counters."""
        return {"recording": self._was_recording if self._run is None else self._run.wanted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        recording = state_dict.get("recording")
        self._restored = recording if isinstance(recording, bool) else None

    def __getstate__(self) -> dict[str, Any]:
        # threads and files stay in their process
        return {**self.__dict__, "_run": None, "_last_tracer": None}

    # ---- the run ---------------------------------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the file and take the profiler's place."""
        self._close({"unfinished": True})  # of a run that ended without a word
        self._was_recording = not self._starts_off
        self._restored = None
        stage = str(getattr(stage, "value", stage))
        make, version = self._tracer_factory(trainer, stage)
        self._run = run = Recording(
            trainer, stage, make, f"[Callback]{self.state_key}.", closes=self._own_tracer is None
        )
        run.version, run.writer = version, self._writer
        template = self._template
        run.rotates = template is not None and self._own_tracer is None and bool(template.keys & {"epoch", "step"})
        if self._starts_off or self._schedule is not None:
            return
        # here, before training, a path that cannot be opened is the user's to hear of
        run.start(in_epoch=False)

    def _tracer_factory(self, trainer: pl.Trainer, stage: str) -> tuple[Callable[[], Tracer], int]:
        given = self._own_tracer
        if given is not None:
            return lambda: given, 0
        # collective calls: on every rank, in the same order, whatever each of them will record
        log_dir = trainer.log_dir
        if self._dirpath is None:
            self._directory = log_dir or trainer.default_root_dir or "."
        version = 0
        if trainer.is_global_zero and self._writer is None and self._template is not None:
            ranks = range(trainer.world_size)
            version = free_version([self._named(trainer, stage, rank, 0) for rank in ranks], _exists)
        if trainer.world_size > 1:
            version = trainer.strategy.broadcast(version)
        path = self._path(trainer, stage, version, epoch=0)
        world_size, rank, node = trainer.world_size, trainer.global_rank, trainer.node_rank
        metadata = {"rank": rank, "world_size": world_size, "node": node, "attempt": _attempt(), "stage": stage}
        several_hosts = getattr(trainer, "num_nodes", 1) > 1

        def make() -> Tracer:
            return Tracer(
                path,
                opener=self._writer,
                max_events=self._max_events,
                min_duration_us={"callback": self._min_duration_us, "module": self._min_duration_us},
                process_name=f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})",
                metadata=metadata,
                pid=10_000_000 + rank if several_hosts else os.getpid(),
                sort_index=rank,
            )

        return make, version

    def _named(self, trainer: pl.Trainer, stage: str, rank: int, epoch: int) -> str:
        """The path of a rank's file, without a version."""
        template = self._template
        assert template is not None  # noqa: S101 - the callers know
        if trainer.world_size > 1 and "rank" not in template.keys:
            template = Template(with_rank(template.text))
        values = {
            "stage": stage,
            "rank": rank,
            "node": trainer.node_rank,
            "world_size": trainer.world_size,
            "epoch": epoch,
            "step": trainer.global_step,
            "attempt": _attempt(),
        }
        return join(self._dirpath or self._directory, template.fill(values, trainer.callback_metrics))

    def _path(self, trainer: pl.Trainer, stage: str, version: int, epoch: int) -> str | None:
        """The path of this rank's file; no collective call."""
        if self._template is None:
            return None
        path = self._named(trainer, stage, trainer.global_rank, epoch)
        if self._writer is None:
            version = free_version([path], _exists, version)
        return versioned(path, version)

    def _guard(self, hook: Callable[[Recording], None]) -> None:
        """Call a hook of the run; a failure of ours ends the recording with one warning, and nothing else."""
        run = self._run
        if run is None:
            return
        try:
            hook(run)
        except Exception as error:  # noqa: BLE001 - instrumentation never kills a training run
            self._run = None
            self._last_tracer = run.tracer
            trouble(f"TimelineTrace stopped recording: {type(error).__name__}: {error}")
            run.abandon()

    def _close(self, mark: dict[str, Any]) -> None:
        self._guard(lambda run: run.close(mark))
        if self._run is not None:
            self._was_recording, self._last_tracer = self._run.wanted, self._run.tracer
            self._run = None

    def _advance(self, run: Recording, trainer: pl.Trainer, *, in_epoch: bool) -> None:
        """Look at the triggers, after a batch or an epoch."""
        before, after = run.counts, run.count()
        run.counts = after
        if self._schedule is not None:
            run.wanted = _records(self._schedule, after.step)
        elif self._disable.fires(before, after, trainer):
            run.wanted = False
        elif self._enable.fires(before, after, trainer):
            run.wanted = True
        if run.wanted and not run.recording:
            run.start(in_epoch=in_epoch)
        if run.rotates and self._trigger.fires(before, after, trainer):
            run.rotate_to = self._path(trainer, run.stage, run.version, after.epoch)

    # ---- hooks -----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide whether a run that begins, or goes on from a checkpoint, is in a window."""

        def begin(run: Recording) -> None:
            run.counts = counts = run.count()
            if self._schedule is not None:
                run.wanted = _records(self._schedule, counts.step)
            elif self._starts_off:
                before = Counts(-1, -1, -1) if counts == Counts() else counts
                fires = self._enable.fires(before, counts, trainer) and not self._disable.fires(before, counts, trainer)
                run.wanted = fires if self._restored is None else self._restored
            run.watch_optimizers()
            if run.wanted and not run.recording:
                run.start(in_epoch=False)

        self._guard(begin)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open ``sanity check``."""
        self._guard(lambda run: run.open_stage("sanity check"))

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close it."""
        self._guard(lambda run: run.close_stage("sanity check"))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open ``validate``, within a fit."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._guard(lambda run: run.open_stage("validate"))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close it."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._guard(lambda run: run.close_stage("validate"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open ``epoch``."""
        self._guard(lambda run: run.begin_epoch(new=True))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the triggers that count epochs."""

        def end(run: Recording) -> None:
            run.end_step()
            self._advance(run, trainer, in_epoch=False)
            run.between_steps()

        self._guard(end)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the last epoch."""
        self._guard(Recording.end_epoch)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Name the step."""
        self._guard(lambda run: run.begin_batch(batch_idx, 0))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the triggers."""

        def end(run: Recording) -> None:
            run.in_batch = False
            run.note_stop()
            self._advance(run, trainer, in_epoch=True)

        self._guard(end)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Name the step."""
        self._guard(lambda run: run.begin_batch(batch_idx, dataloader_idx))

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Look at the triggers, outside a fit: within one they count its own batches."""

        def end(run: Recording) -> None:
            run.in_batch = False
            if run.stage != "fit":
                run.eval_batches += 1
                self._advance(run, trainer, in_epoch=False)

        self._guard(end)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the last step."""
        self._guard(lambda run: run.end_step())

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_predict_batch_start = on_validation_batch_start
    on_predict_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
    on_predict_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the file: after an exception there is no teardown."""

        def fail(run: Recording) -> None:
            if run.recording and run.tracer is not None:
                run.tracer.instant("exception", "timekeeper", type=type(exception).__name__)

        self._guard(fail)
        self._close({"error": type(exception).__name__})

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the file, and say where the time went."""
        run = self._run
        self._close({})
        if run is not None:
            self._tell(trainer, run)

    def _tell(self, trainer: pl.Trainer, run: Recording) -> None:
        tracer = self._last_tracer
        if tracer is None:
            rank_zero_info(f"TimelineTrace: no window opened in this {run.stage}, so there is no trace of it.")
            return
        if not (self._summary and trainer.is_global_zero and self._own_tracer is None):
            return
        from lightning_timekeeper.trace.summary import summarize  # noqa: PLC0415 - at the end, where it is wanted

        try:
            local = tracer.path is not None and self._writer is None
            source: Any = tracer.path if local else tracer.events()
            rank_zero_info(f"{summarize(source)}\nTrace: {tracer.path or 'in memory'}")
        except Exception as error:  # noqa: BLE001 - a file elsewhere, or one that cannot be read back
            rank_zero_info(f"TimelineTrace: no summary of {tracer.path}: {error}")


def _records(schedule: Callable[[int], Any], step: int) -> bool:
    return str(getattr(schedule(step), "name", "")).startswith("RECORD")


def _attempt() -> int:
    """Which start of this job it is, as Slurm and torchrun count them."""
    for variable in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return 0


def _exists(path: str) -> bool:
    if not is_url(path):
        return os.path.lexists(path)
    import fsspec  # noqa: PLC0415 - only where a URL is given

    filesystem, inner = fsspec.core.url_to_fs(path)
    return bool(filesystem.exists(inner))
