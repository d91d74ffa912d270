"""The recording of one run: where its spans begin and end, and whether they are recorded at all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.profiler import RecordingProfiler, Watch
from lightning_timekeeper.triggers import Counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper.trace.tracer import Tracer

CLOSE_S = 30.0
"""The longest that the end of a run waits for its file."""


class Recording:
    """The recording of one fit, validate, test or predict.

    The spans stand in one another: stage > epoch > ``run_training_epoch`` > step > Lightning's actions. A step begins
    with the fetch of its batch and ends where the next one's begins: no hook of Lightning's is there, but the
    profiler's action is.
    """

    def __init__(self, trainer: Any, stage: str, make: Callable[[], Tracer], own: str, *, closes: bool) -> None:
        self.stage = stage
        self.tracer: Tracer | None = None
        self.recording = False
        self.wanted = True
        self.in_batch = False
        self.counts = Counts()
        self._trainer = trainer
        self._make = make
        self._own = own
        self._closes = closes
        self._proxy: RecordingProfiler | None = None
        self.version = 0
        self.writer: Callable[[str], Any] | None = None
        self.rotates = False
        self.rotate_to: str | None = None
        self.eval_batches = 0
        self._open: list[tuple[str, int]] = []  # our own spans, the outermost first
        self._batch_args: dict[str, Any] | None = None
        self._hooks: list[Any] = []
        self._optimizer_open: int | None = None
        self._since_ns: int | None = None
        self._stop_told = False

    # ---- recording on and off --------------------------------------------------------------------------------------
    def start(self, *, in_epoch: bool) -> None:
        """Begin to record: the file where there is none yet, the profiler, and the spans that are open already."""
        if self.tracer is None:
            self.tracer = self._make()
        fetch = Watch(before=self._fetch)
        watches = {
            "train_dataloader_next": fetch,
            "val_next": fetch,
            "test_next": fetch,
            "predict_next": fetch,
            "run_training_epoch": Watch(before=self._epoch_runs, ending=self.end_step),
            "save_checkpoint": Watch(after=self._saved),
            "configure_gradient_clipping": Watch(after=self._optimizer_begins),
            "[LightningModule].on_before_optimizer_step": Watch(after=self._manual_optimizer_begins),
            "optimizer_step": Watch(ending=self._optimizer_ends),
        }
        self.tracer.enable()
        # spans that are open in a tracer of the user's own are the user's
        self._since_ns = None if self._closes else self.tracer.now_ns()
        self._begin(self.stage, "loop")
        if in_epoch:
            self.begin_epoch()
        inner = self._trainer.profiler
        self._proxy = RecordingProfiler(inner, self.tracer, self._own, watches)
        self._trainer.profiler = self._proxy
        self.recording = self.wanted = True

    def stop(self) -> None:
        """Cease to record, with what was recorded on disk and the user's profiler back in place."""
        self._restore_profiler()
        self.recording = False
        self._open.clear()
        self._batch_args = self._optimizer_open = None
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
        if self.tracer is None:
            return
        if self._open and not mark:
            self._end_through(self._open[0][0])
        if self._closes:
            self.tracer.close(CLOSE_S, mark=mark or None)
        else:
            self.tracer.close_open(mark, since_ns=self._since_ns)
            self.tracer.disable()

    def abandon(self) -> None:
        """After a failure of ours: leave all as it was found."""
        try:
            self.close({"error": "TimelineTrace"})
        except Exception:  # noqa: BLE001 - it has been warned of
            self._restore_profiler()

    def _restore_profiler(self) -> None:
        proxy, self._proxy = self._proxy, None
        if proxy is None:
            return
        if self._trainer.profiler is proxy:
            self._trainer.profiler = proxy.inner
            return
        outer = self._trainer.profiler  # another TimelineTrace's, set up after us
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
            self._begin("step" if self._trainer.training else "batch", "loop")

    def _step_open(self) -> bool:
        return bool(self._open) and self._open[-1][0] in ("step", "batch")

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
            self._begin(name, "validation", step=self._trainer.global_step)

    def close_stage(self, name: str) -> None:
        """It ends."""
        self._end_through(name)

    def begin_epoch(self, *, new: bool = False) -> None:
        """An epoch begins, or goes on."""
        if new:
            self._end_through("epoch")
            self._rotate()
        if self._open and not self._is_open("epoch"):
            self._begin("epoch", "loop", epoch=self._trainer.current_epoch)

    def end_epoch(self) -> None:
        """The last epoch ends."""
        self._end_through("epoch")

    def _fetch(self) -> bool:
        """A batch is about to be fetched: the step before it is over, and its own begins."""
        if not self.in_batch:  # a training_step that takes its batches itself fetches within a step
            if self._batch_args is not None:
                self._note_sync()
                self.end_step()
            self._rotate()
            self._begin_step()
        return self.recording

    def _note_sync(self) -> None:
        """Between a step's last hook and the next fetch a rank waits for the others: Lightning broadcasts there."""
        if self.tracer is not None and self._trainer.world_size > 1 and self._trainer.training:
            self.tracer.track.since_last("sync", "sync")

    def _epoch_runs(self) -> bool:
        """An epoch that was left half done goes on: then no hook has told of it."""
        self.begin_epoch()
        return self.recording

    def begin_batch(self, batch_idx: int, dataloader_idx: int) -> None:
        """The batch of the open step is known."""
        self.in_batch = True
        if self._batch_args is not None:  # no fetch was seen since: training_step takes its batches itself
            self.end_step()
        if not self.recording:
            return
        self._begin_step()
        trainer = self._trainer
        self._batch_args = {"epoch": trainer.current_epoch, "batch": batch_idx, "step": trainer.global_step}
        if dataloader_idx:
            self._batch_args["dataloader"] = dataloader_idx

    def end_step(self, error: type[BaseException] | None = None) -> None:
        """The open step is over."""
        if self._step_open():
            if error is not None:
                self._batch_args = {**(self._batch_args or {}), "error": error.__name__}
            self._end_through(self._open[-1][0])
        self.between_steps()

    def between_steps(self) -> None:
        """Where a window closes: each step is recorded whole, or not."""
        if self.recording and not self.wanted:
            self.stop()

    # ---- optimizer time --------------------------------------------------------------------------------------------
    def watch_optimizers(self) -> None:
        """Learn from torch when an optimizer has stepped."""
        self._unwatch()
        for optimizer in self._trainer.optimizers:
            register = getattr(optimizer, "register_step_post_hook", None)
            if callable(register):
                self._hooks.append(register(lambda *_: self._optimizer_ends()))

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _manual_optimizer_begins(self) -> None:
        if not self._trainer.lightning_module.automatic_optimization:
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
        trainer = self._trainer
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
        trainer = self._trainer
        if self.stage != "fit":
            return Counts(trainer.global_step, self.eval_batches, 0)
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return Counts(trainer.global_step, batches, trainer.fit_loop.epoch_progress.current.processed)
