"""The recording of one run: where its spans begin and end, and whether they are recorded at all."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.profiler import RecordingProfiler, Watch
from lightning_timekeeper.triggers import Counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper.files import TraceFiles
    from lightning_timekeeper.trace.tracer import Tracer

CLOSE_S = 30.0
"""The longest that the end of a run waits for its file."""


class Recording:
    """The recording of one fit, validate, test or predict.

    The spans stand in one another: stage > epoch > ``run_training_epoch`` > step > Lightning's actions. A step begins
    with the fetch of its batch and ends where the next one's begins: no hook of Lightning's is there, but the
    profiler's action is. In training all is taken from the profiler's actions, because a hook costs 3 µs a batch.

    Args:
        trainer: The run's.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        owner: The callback.
        make: Makes the tracer, when recording begins.
        failed: Is given what a call from the profiler or an optimizer raises.
        closes: Whether the tracer is ours to close.
    """

    def __init__(
        self,
        trainer: Any,
        stage: str,
        owner: Any,
        make: Callable[[], Tracer],
        failed: Callable[[Exception], None],
        *,
        closes: bool,
    ) -> None:
        self.trainer = trainer
        self.stage = stage
        self.tracer: Tracer | None = None
        self.recording = False
        self.wanted = True
        self.counts = Counts()
        self.eval_batches = 0
        self.rotate_to: str | None = None
        self.files: TraceFiles | None = None
        self.writer: Callable[[str], Any] | None = None
        self._owner = owner
        self._make = make
        self._failed = failed
        self._closes = closes
        self._proxy: RecordingProfiler | None = None
        self._open: list[tuple[str, int]] = []  # our own spans, the outermost first
        self._batch_args: dict[str, Any] | None = None  # of the open step, once its batch is known
        self._ready = -1  # batches that Lightning has begun, when the open step's is one of them
        self._in_batch = False
        self._trial = False
        self._hooks: list[Any] = []
        self._optimizer_open: int | None = None
        self._since_ns: int | None = None
        self._stop_told = False

    @property
    def over(self) -> bool:
        """Whether nothing can be recorded any more: the file was full, or could not be written."""
        return self.tracer is not None and (self.tracer._drain is None or self.tracer._drain.ended)

    def open(self) -> None:
        """Open the file, where there is none yet.

        Raises:
            OSError: Where it cannot be opened.
        """
        if self.tracer is None:
            self.tracer = self._make()

    # ---- recording on and off --------------------------------------------------------------------------------------
    def start(self, *, in_epoch: bool) -> None:
        """Begin to record: the file where there is none yet, the profiler, and the spans that are open already."""
        self.open()
        tracer = self.tracer
        assert tracer is not None  # noqa: S101 - open() made it
        fetch, evaluated = Watch(before=self._fetch), Watch(ending=self._batch_ran)
        watches = {
            "train_dataloader_next": fetch,
            "val_next": fetch,
            "test_next": fetch,
            "predict_next": fetch,
            "run_training_epoch": Watch(before=self._epoch_runs, ending=self.end_step),
            "run_training_batch": Watch(before=self._batch_runs, ending=self._batch_ran),
            "validation_step": evaluated,
            "test_step": evaluated,
            "predict_step": evaluated,
            "save_checkpoint": Watch(after=self._saved),
            "configure_gradient_clipping": Watch(after=self._optimizer_begins),
            "[LightningModule].on_before_optimizer_step": Watch(after=self._manual_optimizer_begins),
            "optimizer_step": Watch(ending=self._optimizer_ends),
        }
        tracer.enable()
        # spans that are open in a tracer of the user's own are the user's
        self._since_ns = None if self._closes else tracer.now_ns()
        self._begin(self.stage, "loop")
        if in_epoch:
            self.begin_epoch()
        inner = self.trainer.profiler
        own = f"[Callback]{self._owner.state_key}."
        self._proxy = RecordingProfiler(inner, tracer, own, watches, self._failed)
        self.trainer.profiler = self._proxy
        self.recording = self.wanted = True

    def stop(self) -> None:
        """Cease to record, with what was recorded on disk and the user's profiler back in place."""
        self._restore_profiler()
        self.recording = False
        self._open.clear()
        self._batch_args = self._optimizer_open = None
        self._in_batch = False
        if self.tracer is not None:
            self.tracer.disable()
            self.tracer.close_open({}, since_ns=self._since_ns)
            self.tracer.flush()

    def close(self, mark: dict[str, Any]) -> None:
        """End the recording and the file."""
        self.note_stop()
        self._unwatch()
        self._restore_profiler()
        self.recording = False
        if self._open and not mark:
            self._end_through(self._open[0][0])
        self._close_tracer(mark)

    def abandon(self) -> None:
        """After a failure of ours: leave all as it was found, as far as that goes."""
        self.recording = False
        for each in (self._unwatch, self._restore_profiler, lambda: self._close_tracer({"error": "TimelineTrace"})):
            with contextlib.suppress(Exception):
                each()

    def _close_tracer(self, mark: dict[str, Any]) -> None:
        if self.tracer is None:
            return
        if self._closes:
            self.tracer.close(CLOSE_S, mark=mark or None)
        else:
            self.tracer.close_open(mark, since_ns=self._since_ns)
            self.tracer.disable()

    def _restore_profiler(self) -> None:
        proxy, self._proxy = self._proxy, None
        if proxy is None:
            return
        if self.trainer.profiler is proxy:
            self.trainer.profiler = proxy.inner
            return
        outer = self.trainer.profiler  # another TimelineTrace's, set up after us
        while isinstance(outer, RecordingProfiler):
            if outer.inner is proxy:
                outer.rewire(proxy.inner)
            outer = outer.inner

    # ---- our own spans ---------------------------------------------------------------------------------------------
    def _begin(self, name: str, category: str, **args: Any) -> None:
        if self.tracer is not None:
            self._open.append((name, self.tracer.track.begin(name, category, args)))

    def _end(self, args: dict[str, Any] | None = None) -> None:
        if self.tracer is not None and self._open:
            self.tracer.track.end(self._open.pop()[1], args)

    def _is_open(self, name: str) -> bool:
        return any(opened == name for opened, _ in self._open)

    def _begin_step(self) -> None:
        if self.recording and not self._step_open():
            name = "step" if self.trainer.training else "batch"
            # the steps of the LR finder and of the batch size finder are none of the training's
            self._begin(f"trial {name}" if self._trial else name, "loop")

    def _step_open(self) -> bool:
        return bool(self._open) and self._open[-1][0].endswith(("step", "batch"))

    def _rotate(self) -> None:
        """Begin the new file that is due: where something begins, so that no file is left without a step."""
        if self.rotate_to is not None and self.tracer is not None:
            path, self.rotate_to = self.rotate_to, None
            self.tracer.switch(path, self.writer)

    def _end_through(self, name: str) -> None:
        """End the span of this name and those inside it."""
        while self._is_open(name):
            if self._step_open():
                self._end(self._batch_args)
                self._batch_args = None
            else:
                self._end()

    def open_stage(self, name: str) -> None:
        """A validation or the sanity check begins."""
        if self.recording:
            self.end_step()
        if self.recording:
            self._begin(name, "validation", step=self.trainer.global_step)

    def close_stage(self, name: str) -> None:
        """It ends."""
        self._end_through(name)

    def begin_epoch(self, *, new: bool = False) -> None:
        """An epoch begins, or goes on."""
        if new:
            self._end_through("epoch")
            self._rotate()
        if self._open and not self._is_open("epoch"):
            self._begin("epoch", "loop", epoch=self.trainer.current_epoch)

    def end_epoch(self) -> None:
        """The last epoch ends."""
        self._end_through("epoch")

    def _fetch(self) -> bool:
        """A batch is about to be fetched: the step before it is over, and its own begins."""
        trainer = self.trainer
        self._trial = self._owner not in trainer.callbacks  # the tuner runs without us, and tells of no batch
        if self._in_batch or (self._trial and not trainer.training):
            return self.recording  # a step that takes its batches itself fetches within
        if self._has_batch():
            self._note_sync()
            self.end_step()
        self._rotate()
        self._begin_step()
        if trainer.training and self.recording:
            loop = trainer.fit_loop.epoch_loop
            self._know_batch(loop.batch_idx + 1)
            self._ready = loop.batch_progress.current.ready + 1
        return self.recording

    def _note_sync(self) -> None:
        """Between a step's last hook and the next fetch a rank waits for the others: Lightning broadcasts there."""
        if self.tracer is not None and self.trainer.world_size > 1 and self.trainer.training:
            self.tracer.track.since_last("sync", "sync")

    def _epoch_runs(self) -> bool:
        """An epoch that was left half done goes on: then no hook has told of it."""
        if self._owner in self.trainer.callbacks:  # else see _fetch
            self.begin_epoch()
        return self.recording

    def _batch_runs(self) -> bool:
        """A training batch is run, be it that it was fetched, or that training_step fetches it itself."""
        if self.recording:
            loop = self.trainer.fit_loop.epoch_loop
            if not self._step_open() or self._ready != loop.batch_progress.current.ready:
                if self._step_open():
                    self._note_sync()
                self.end_step()
                self._begin_step()
                self._know_batch(loop.batch_idx)
                self._ready = loop.batch_progress.current.ready
        self._in_batch = self.recording
        return self.recording

    def _batch_ran(self, error: type[BaseException] | None) -> None:
        self._in_batch = False

    def _has_batch(self) -> bool:
        """Whether the open step got its batch: the fetch may have found that there is none."""
        if self._batch_args is None or not self.trainer.training:
            return self._batch_args is not None
        return bool(self._ready <= self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _know_batch(self, batch_idx: int, dataloader_idx: int = 0) -> None:
        trainer = self.trainer
        self._batch_args = {"epoch": trainer.current_epoch, "batch": batch_idx, "step": trainer.global_step}
        if dataloader_idx:
            self._batch_args["dataloader"] = dataloader_idx

    def begin_eval_batch(self, batch_idx: int, dataloader_idx: int) -> None:
        """The batch of the open step is known."""
        if self._batch_args is not None:  # no fetch was seen since: the step takes its batches itself
            self.end_step()
        if self.recording:
            self._begin_step()
            self._know_batch(batch_idx, dataloader_idx)
            self._in_batch = True

    def end_step(self, error: type[BaseException] | None = None) -> None:
        """The open step is over."""
        if self._step_open():
            if not self._has_batch() and self._batch_args is not None:
                self._batch_args = {"batch": "none"}
            if error is not None:
                self._batch_args = {**(self._batch_args or {}), "error": error.__name__}
            self._end_through(self._open[-1][0])
            self._in_batch = False
        self.note_stop()
        self.between_steps()

    def between_steps(self) -> None:
        """Where a window closes: each step is recorded whole, or not."""
        # after a full disk or max_events, the user's profiler goes on alone
        if self.recording and (not self.wanted or self.over):
            self.wanted = False
            self.stop()

    # ---- optimizer time --------------------------------------------------------------------------------------------
    def watch_optimizers(self) -> None:
        """Learn from torch when an optimizer has stepped."""
        self._unwatch()
        for optimizer in self.trainer.optimizers:
            register = getattr(optimizer, "register_step_post_hook", None)
            if callable(register):
                self._hooks.append(register(self._optimizer_stepped))

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _optimizer_stepped(self, *_: Any) -> None:
        try:
            self._optimizer_ends()
        except Exception as error:  # noqa: BLE001 - torch calls it, in the middle of the user's step
            self._failed(error)

    def _manual_optimizer_begins(self) -> None:
        if not self.trainer.lightning_module.automatic_optimization:
            self._optimizer_begins()

    def _optimizer_begins(self) -> None:
        """Forward and backward are done, gradients are clipped: what follows is the optimizer's own work."""
        if self.tracer is not None and self._optimizer_open is None and self._hooks:
            self._optimizer_open = self.tracer.track.begin("optimizer", "optimizer", {})

    def _optimizer_ends(self, error: type[BaseException] | None = None) -> None:
        if self.tracer is not None and self._optimizer_open is not None:
            self.tracer.track.end(self._optimizer_open, {"error": error.__name__} if error is not None else None)
            self._optimizer_open = None

    def note_stop(self) -> None:
        """Mark, once, that the training is to stop, and which limit of a Timer it is, if it is one."""
        trainer = self.trainer
        if self._stop_told or not trainer.should_stop or self.tracer is None or not self.recording:
            return
        self._stop_told = True
        reasons = [reason for each in trainer.callbacks if (reason := getattr(each, "stop_reason", None))]
        if reasons:
            self.tracer.instant("time limit reached", "timekeeper", reason=reasons[0], step=trainer.global_step)
        else:
            self.tracer.instant("should_stop", "timekeeper", step=trainer.global_step)

    # ---- the rest --------------------------------------------------------------------------------------------------
    def _saved(self) -> None:
        """Mark a checkpoint, with its path: Lightning tells it to nobody, but the frame that saved it has it."""
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code.co_name != "save_checkpoint":
            frame = frame.f_back
        path = frame.f_locals.get("filepath") if frame is not None else None
        if self.tracer is not None:
            self.tracer.instant("checkpoint saved", "checkpoint", path=str(path))

    def count(self) -> Counts:
        """The counters of the running stage."""
        trainer = self.trainer
        if self.stage != "fit":
            return Counts(trainer.global_step, self.eval_batches, 0)
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return Counts(trainer.global_step, batches, trainer.fit_loop.epoch_progress.current.processed)
