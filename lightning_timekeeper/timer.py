"""Time per stage, and training that ends when its time is up."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping  # LightningCLI reads the annotations
from datetime import datetime, timedelta
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import override

from lightning_timekeeper.duration import Duration, format_duration, parse_duration, show
from lightning_timekeeper.hooks import drop_empty_hooks
from lightning_timekeeper.limit_checkpoint import LimitCheckpoint
from lightning_timekeeper.limits import REASONS, SLURM_END, Limits
from lightning_timekeeper.names import (
    LightningTimer,
    MisconfigurationException,
    RunningStage,
    rank_zero_info,
    rank_zero_warn,
    under_both_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence

    from lightning_timekeeper import names as pl

_T = TypeVar("_T")

_SLOT = {stage: slot for slot, stage in enumerate(RunningStage)}
_MAX_S = timedelta.max.total_seconds()
_RESOLUTION_S = 1e-6  # a timedelta's; the rounding of sums of clock readings is far below it
_LOOK_EVERY_S = 1.0  # between broadcasts, and between looks at a wall clock that may be set
_LEAST_STEP_S = 1e-4


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[union-attr]  # set by a connector
    return callbacks


@under_both_names
class Timer(LightningTimer):
    """Measures the time of each stage and ends training when a limit is reached.

    A drop-in for :class:`lightning.pytorch.callbacks.Timer` whose limits hold and whose clocks are right; the
    checkpoints of the two are interchangeable.

    *Durations* are written ``"DD:HH:MM:SS"``, ``"36h"``, ``"1d12h30m"``, ``"90s"``, in ISO 8601 (``"PT12H"``), in
    Slurm's ``D-HH``, ``D-HH:MM`` or ``D-HH:MM:SS``, as a :class:`~datetime.timedelta`, or as a mapping of its
    keywords. Zero is allowed; a number is not, since YAML makes one of an unquoted ``10:00:00:00``.

    *The limits* are looked at when training starts (a budget already spent trains 0 steps), after each optimizer step,
    after each validation within a fit, and at the end of each epoch; never within an accumulation window, whose
    batches would be lost. The run ends with the step, or the validation, in which the first of them is reached.
    ``min_steps`` and ``min_epochs`` are respected. With manual optimization, a batch without an optimizer step
    belongs to a window, unless this fit has counted no optimizer step at all.

    *With several ranks*, rank 0 decides for all, in about one broadcast a second: it sends the steps until the next
    look, which take a second, or half of the time left if that is less, at the speed of the steps since the last one.
    When steps suddenly become k times slower, training ends at most max(0, k - 2) seconds and one step after the
    limit: 8 seconds for steps ten times slower.

    *Under* ``ddp_spawn``, ``ddp_fork`` *and* ``ddp_notebook`` the times of rank 0 and ``stop_reason`` are known to the
    object in the main process once training has ended; ``start_time`` and ``end_time``, which are readings of another
    process' clock, stay None there.

    ``Trainer(max_time=...)`` is ignored beside a Timer, also beside one without limits (Lightning says so in a line
    of its log): give the limit to the Timer.

    Args:
        duration: The limit on the training time of all runs: over all resumes and all ``fit`` calls of this object.
        interval: ``"step"``, or ``"epoch"`` to end with a whole epoch only.
        verbose: Whether to say, once per fit, that a limit was reached.
        run_duration: The limit on one ``fit`` call, counted from its ``setup``, sanity check included.
        deadline: A moment to end at: an aware :class:`~datetime.datetime`, an ISO 8601 string with an offset, or
            ``"slurm"`` for the end of the Slurm job (``SLURM_JOB_END_TIME``; where it is not set, a warning and no
            deadline). It follows the wall clock, the durations the monotonic one.
        margin: A duration to stop before whichever limit comes first, for the validation and checkpoint that follow.
        save_on_limit: Whether to save a checkpoint of the last step, from which a resume repeats and skips no batch:
            True for ``timer.ckpt`` beside the first ModelCheckpoint's files, else in ``trainer.log_dir``; or a path.
            An existing file is replaced.
        validate_on_limit: False leaves out the validation that the Trainer runs after a stop in mid-epoch or would
            run at the end of that epoch; not where an EarlyStopping, ModelCheckpoint or plateau scheduler monitors a
            metric that has no value yet, as they would raise.
        log: Whether to log ``timer/train_elapsed``, ``timer/remaining`` and the elapsed time of the other stages
            that have run, in seconds, to the Trainer's loggers at its own interval.

    Raises:
        MisconfigurationException: If an argument is not in an accepted form.

    Example::

        # ends 10 minutes before the Slurm job does, with a checkpoint of the last step
        Trainer(callbacks=[Timer(deadline="slurm", margin="10m", save_on_limit=True)])

        # 12 hours of training over all resumes
        timer = Timer("12h")
        timer.time_elapsed("train"), timer.time_remaining(), timer.stop_reason
    """

    def __init__(
        self,
        duration: Duration | None = None,
        interval: str = "step",
        verbose: bool = True,
        *,
        run_duration: Duration | None = None,
        deadline: str | datetime | None = None,
        margin: Duration | None = None,
        save_on_limit: bool | str | os.PathLike[str] = False,
        validate_on_limit: bool = True,
        log: bool = False,
    ) -> None:
        if not isinstance(interval, str) or interval not in ("step", "epoch"):
            raise MisconfigurationException(
                f"Unsupported parameter value `Timer(interval={show(interval)})`. Possible choices are: step, epoch"
            )
        if not isinstance(save_on_limit, (bool, str, os.PathLike)) or save_on_limit == "":
            raise MisconfigurationException(
                f"`Timer(save_on_limit={show(save_on_limit)})` is not supported. Expected True, False or a path."
            )
        super().__init__(None if duration is None else parse_duration(duration), interval, verbose)
        self._limits = Limits(duration, run_duration, deadline, margin)
        self._save_on_limit = save_on_limit if isinstance(save_on_limit, bool) else os.fspath(save_on_limit)
        self._validate_on_limit = validate_on_limit
        self._log = log  # the Trainer sets `log` to the LightningModule's

        # The closed runs of each stage, and last the reason's number: in shared memory, so that the process that
        # spawned the ranks can read what rank 0 wrote.
        self._past_s: MutableSequence[float] = RawArray("d", len(_SLOT) + 1)
        self._run_start_s: float | None = None
        self._run_end_s: float | None = None

        self._checkpoint: LimitCheckpoint | None = None
        self._limit_val_batches: float | None = None  # the Trainer's, while validation is left out
        self._failed: set[str] = set()  # what has been warned about
        self._word: torch.Tensor | None = None  # what rank 0 says
        self._ranks = 1
        self._limited = self._limits.given
        self._logs = False
        self._start_counting(first_step=0, manual=False)
        drop_empty_hooks(self)

    # ---- clocks

    @override
    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """The time spent in a stage, over all its runs, of this object and of what was restored.

        Args:
            stage: ``"train"`` (its validations included), ``"sanity_check"``, ``"validate"``, ``"test"`` or
                ``"predict"``.

        Returns:
            Seconds, never negative; they fall only when a state is loaded, which replaces what was there.
        """
        stage = RunningStage(stage)
        past_s, start_s = self._past_s[_SLOT[stage]], self._start_time[stage]
        if start_s is None or self._end_time[stage] is not None:
            return past_s
        return past_s + (time.monotonic() - start_s)

    @override
    def time_remaining(self, stage: str = RunningStage.TRAINING) -> float | None:
        """The time until training ends for the limit that comes first, its margin taken off.

        Args:
            stage: See :meth:`time_elapsed`.

        Returns:
            Seconds, zero or less when the limit is reached; None for stages other than train and without a limit.
        """
        if RunningStage(stage) != RunningStage.TRAINING:
            return None
        left_s, reason = self._first_limit()
        return None if reason is None else left_s

    @property
    def stop_reason(self) -> str | None:
        """The limit that ended the latest fit, ``"duration"``, ``"run_duration"`` or ``"deadline"``; None if none did."""
        number = int(self._past_s[-1])
        return REASONS[number - 1] if number else None

    def _first_limit(self) -> tuple[float, str | None]:
        return self._limits.first(self.time_elapsed(), self._run_elapsed(), time.time)

    def _run_elapsed(self) -> float:
        if self._run_start_s is None:
            return 0.0
        return (time.monotonic() if self._run_end_s is None else self._run_end_s) - self._run_start_s

    def _open(self, stage: RunningStage) -> None:
        self._close(stage)
        self._start_time[stage], self._end_time[stage] = time.monotonic(), None

    def _close(self, stage: RunningStage) -> None:
        start_s = self._start_time[stage]
        if start_s is not None and self._end_time[stage] is None:
            self._end_time[stage] = end_s = time.monotonic()
            self._past_s[_SLOT[stage]] += end_s - start_s

    def _close_all(self) -> None:
        for stage in RunningStage:
            self._close(stage)
        if self._run_start_s is not None and self._run_end_s is None:
            self._run_end_s = time.monotonic()

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The sanity check begins by setting up the validation's data for the whole fit. That counts as validation
        # (Lightning's tests expect some of it after a fit that did no more), the check itself does not.
        self._open(RunningStage.VALIDATING)

    @override
    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(RunningStage.VALIDATING)
        self._close(RunningStage.SANITY_CHECKING)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            self._close(RunningStage.VALIDATING)
            self._open(RunningStage.SANITY_CHECKING)
        else:
            self._open(RunningStage.VALIDATING)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open(RunningStage.TESTING)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(RunningStage.TESTING)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open(RunningStage.PREDICTING)

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(RunningStage.PREDICTING)

    # ---- state

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage.value: self.time_elapsed(stage) for stage in RunningStage}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the elapsed times, in place of this object's own. A clock that runs goes on from there.

        What cannot be a time in seconds (missing, None, text, NaN, negative) counts as 0, with a warning.
        """
        times = state_dict.get("time_elapsed") if isinstance(state_dict, Mapping) else None
        times = dict(times) if isinstance(times, Mapping) else {}
        wrong = []
        for stage in RunningStage:
            seconds = times.pop(stage.value, None)
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= _MAX_S:
                wrong.append(f"{stage.value}={show(seconds)}")
                seconds = 0.0
            self._past_s[_SLOT[stage]] = seconds
            if self._start_time[stage] is not None and self._end_time[stage] is None:
                self._start_time[stage] = time.monotonic()
        wrong += [f"{show(stage)}, an unknown stage" for stage in times]
        if wrong:
            rank_zero_warn(f"The Timer's state has no valid time in seconds for {'; '.join(wrong)}: counted as 0.")
        # what Lightning's Timer keeps of a restored state
        self._offset = self._past_s[_SLOT[RunningStage.TRAINING]]  # type: ignore[assignment]
        self._look_at_s = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its clocks stopped: another process' monotonic clock may read anything."""
        # `log` and `log_dict` hold the LightningModule; the Trainer sets them for every run
        state = {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}
        state["_word"] = None
        if get_spawning_popen() is not None:
            return state  # for a rank that this process spawns: the times stay shared
        copy = object.__new__(type(self))
        copy.__dict__ = {
            **state,
            "_past_s": list(self._past_s),
            "_start_time": dict(self._start_time),
            "_end_time": dict(self._end_time),
        }
        copy._close_all()
        return copy.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self._past_s, list):
            self._past_s = RawArray("d", self._past_s)

    # ---- limits

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.global_rank > 0:
            self._past_s = list(self._past_s)  # what the parent process reads is rank 0's
        if stage != "fit":
            return
        self._run_start_s, self._run_end_s = time.monotonic(), None
        self._past_s[-1] = 0
        self._failed.clear()
        self._word = None
        self._ranks = trainer.world_size
        self._limited = self._limits.given
        self._logs = self._log and bool(trainer.loggers)
        needs_batches = self._logs or (self._limited and self._interval == "step")
        if needs_batches and vars(self).get("on_train_batch_end", self) is None:
            del self.on_train_batch_end
        elif not needs_batches:
            drop_empty_hooks(self, ("on_train_batch_end",), Timer)
        if self._limits.misses_slurm:
            rank_zero_warn(
                f"`Timer(deadline='slurm')` found no end of a Slurm job in `{SLURM_END}`: there is no deadline."
            )
        if self._first_limit()[1] is None and trainer.fit_loop.max_epochs == trainer.fit_loop.max_steps == -1:
            rank_zero_warn(
                "Nothing ends this training: the Timer has no limit, and with a Timer among its callbacks the Trainer"
                " has no default for `max_epochs` and ignores `max_time`. Set `Timer(duration=...)` or"
                " `Trainer(max_epochs=...)`."
            )
        if self._save_on_limit and self._limited:
            self._checkpoint = LimitCheckpoint(None if self._save_on_limit is True else self._save_on_limit)
            _callbacks(trainer).append(self._checkpoint)

    @override
    def on_fit_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Nothing: some strategies restore the state only after this hook. See :meth:`on_train_start`."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open(RunningStage.TRAINING)
        self._start_counting(trainer.global_step, manual=not pl_module.automatic_optimization)
        self._check_time_remaining(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        # our one hook in a step: until it is time to look, a clock reading and a comparison
        if time.monotonic() >= self._look_at_s:
            self._after_batch(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._close(RunningStage.VALIDATING)
        if trainer.state.fn == "fit" and self._interval == "step" and not self._in_window(trainer):
            self._check_time_remaining(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._check_time_remaining(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(RunningStage.TRAINING)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._finish(trainer)

    def _finish(self, trainer: pl.Trainer) -> None:
        self._close_all()
        if self._limit_val_batches is not None:
            trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None
        if self._checkpoint in (callbacks := _callbacks(trainer)):
            callbacks.remove(self._checkpoint)
        self._checkpoint = None

    def _start_counting(self, first_step: int, *, manual: bool) -> None:
        self._manual = manual
        self._first_step = self._last_step = first_step
        self._manual_window = False
        self._batches = 0  # since the last look
        self._planned = 1  # batches until the next look
        self._looked_at_s = math.nan
        self._step_s = math.inf  # at the last look
        self._look_at_s = -math.inf  # before it, no batch needs attention

    def _after_batch(self, trainer: pl.Trainer) -> None:
        if self._manual:
            step = trainer.global_step
            self._manual_window = step == self._last_step != self._first_step
            self._last_step = step
        self._batches += 1
        due = self._limited and self._interval == "step" and self._batches >= self._planned
        if (due or self._logs) and not self._in_window(trainer):
            if due:
                self._check_time_remaining(trainer)
            if self._logs:
                self._safely("log its times", lambda: self._log_times(trainer))

    def _in_window(self, trainer: pl.Trainer) -> bool:
        """Whether batches since the last optimizer step wait for the next one."""
        return self._manual_window if self._manual else trainer.fit_loop._should_accumulate()

    @override
    def _check_time_remaining(self, trainer: pl.Trainer) -> None:
        """Look at the limits, once for all ranks, and make the Trainer stop when one is reached."""
        if not self._limited:
            return
        if self.stop_reason is None:
            reached, self._planned = 0, 1
            if self._ranks == 1 or trainer.global_rank == 0:
                # nothing may raise here: the other ranks already wait in the broadcast
                reached, self._planned = self._safely("look at its limits", self._look) or (0, 1)
            if self._ranks > 1:
                reached, self._planned = self._hear_rank_zero(trainer, reached, self._planned)
            self._limited = self._planned > 0
            self._batches = 0
            if not reached:
                return
            self._past_s[-1] = reached
            self._look_at_s = -math.inf
            if self._verbose:
                self._safely("say so", lambda: self._announce(trainer))
            if self._checkpoint is not None:
                self._checkpoint.arm()
        trainer.should_stop = True
        if not self._validate_on_limit:
            self._safely("leave out the validation", lambda: self._leave_out_validation(trainer))

    def _look(self) -> tuple[int, int]:
        """The number of the limit that is reached, or 0, and the batches until the next look, 0 for none ever."""
        now_s = time.monotonic()
        left_s, reason = self._first_limit()
        if reason is None:
            self._look_at_s = -math.inf if self._logs else math.inf
            return 0, 0
        if left_s <= _RESOLUTION_S:
            return 1 + REASONS.index(reason), 1
        if self._batches:
            self._step_s = (now_s - self._looked_at_s) / self._batches
        self._looked_at_s = now_s
        if self._ranks > 1:
            return 0, max(1, int(min(_LOOK_EVERY_S, left_s / 2) / max(self._step_s, _LEAST_STEP_S)))
        if not (self._manual or self._logs):  # these need every batch
            # the wall clock may be set at any time, the monotonic one may not
            wait_s = left_s if self._limits.deadline_s is None else min(left_s, _LOOK_EVERY_S)
            self._look_at_s = now_s + wait_s - _RESOLUTION_S
        return 0, 1

    def _announce(self, trainer: pl.Trainer) -> None:
        elapsed = format_duration(timedelta(seconds=round(self.time_elapsed(), 1)))
        rank_zero_info(
            f"Time limit reached. The Timer's `{self.stop_reason}` ends at step {trainer.global_step}."
            f" Elapsed time is {elapsed}. Signaling Trainer to stop."
        )

    def _hear_rank_zero(self, trainer: pl.Trainer, reached: int, planned: int) -> tuple[int, int]:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return trainer.strategy.broadcast((reached, planned))  # strategies with a means of their own, such as XLA
        if self._word is None:
            self._word = torch.zeros(2, dtype=torch.int64, device=trainer.strategy.root_device)
        if trainer.global_rank == 0:
            self._word.copy_(torch.tensor((reached, planned)))
        torch.distributed.broadcast(self._word, src=0)
        reached, planned = self._word.tolist()
        return reached, planned

    def _leave_out_validation(self, trainer: pl.Trainer) -> None:
        if self._limit_val_batches is not None or not trainer.fit_loop._can_stop_early:
            return
        monitors = [getattr(callback, "monitor", None) for callback in _callbacks(trainer)]
        monitors += [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if all(monitor is None or monitor in trainer.callback_metrics for monitor in monitors):
            self._limit_val_batches, trainer.limit_val_batches = trainer.limit_val_batches, 0

    def _log_times(self, trainer: pl.Trainer) -> None:
        if not trainer._logger_connector.should_update_logs:  # what LearningRateMonitor asks, too
            return
        elapsed_s = {f"timer/{stage.value}_elapsed": self.time_elapsed(stage) for stage in RunningStage}
        metrics = {name: seconds for name, seconds in elapsed_s.items() if seconds > 0}  # stages that have run
        if (remaining_s := self.time_remaining()) is not None:
            metrics["timer/remaining"] = remaining_s
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _safely(self, doing: str, action: Callable[[], _T]) -> _T | None:
        """Do something that must not end training: if it fails, warn once per fit."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001
            if doing not in self._failed:
                self._failed.add(doing)
                rank_zero_warn(f"The Timer could not {doing}: {type(error).__name__}: {error}. Training goes on.")
            return None
