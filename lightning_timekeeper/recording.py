"""The recording of one run: where its spans begin and end, and whether they are recorded at all."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.anchors import Anchors
from lightning_timekeeper.logger_times import LoggerTimes
from lightning_timekeeper.profiler import RecordingProfiler, Watch
from lightning_timekeeper.steps import OptimizerTime, Steps
from lightning_timekeeper.triggers import Counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper.files import TraceFiles
    from lightning_timekeeper.live import Live
    from lightning_timekeeper.trace.tracer import Tracer

CLOSE_S = 30.0
"""The longest that the end of a run waits for its file."""


class Recording:
    """The recording of one fit, validate, test or predict.

    The spans stand in one another: stage > epoch > ``run_training_epoch`` > step > Lightning's actions. A step begins
    with the fetch of its batch and ends where the next one's begins: no hook of Lightning's is there, but the
    profiler's action is.

    Args:
        trainer: The run's.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        owner: The callback.
        make: Makes the tracer, when recording begins.
        failed: Is given what a call from the profiler or an optimizer raises.
        lost: Is told of an exception that ends the run, and of which no hook of the owner's will tell.
        closes: Whether the tracer is ours to close.
    """

    def __init__(
        self,
        trainer: Any,
        stage: str,
        owner: Any,
        make: Callable[[], Tracer],
        failed: Callable[[Exception], None],
        lost: Callable[[type[BaseException]], None],
        *,
        closes: bool,
    ) -> None:
        self.trainer = trainer
        self.stage = stage
        self.tracer: Tracer | None = None
        self.recording = False
        self.wanted = True
        self.counts = Counts()
        self.resting: float = 0  # batches at whose ends no trigger can fire
        self.eval_batches = 0
        self.rotate_to: str | None = None
        self.files: TraceFiles | None = None
        self.writer: Callable[[str], Any] | None = None
        self.live: Live | None = None
        self.anchors = Anchors(trainer, failed)  # a collective call
        self._owner = owner
        self._make = make
        self._failed = failed
        self._lost = lost
        self._closes = closes
        self._proxy: RecordingProfiler | None = None
        self._open: list[tuple[str, int]] = []  # our own spans, the outermost first
        self.trial = False  # the tuner runs the loops, without us
        self._steps: Steps | None = None
        self._optimizer = OptimizerTime(failed)
        self._loggers = LoggerTimes()
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
        if tracer is None or tracer._drain is None:
            return
        self._steps = steps = Steps(self, self._owner, tracer.track, tracer._drain)
        optimizer = self._optimizer
        optimizer.record(tracer.track)
        self._loggers.record(self.trainer.loggers, tracer.track)
        evaluated_next, evaluated = Watch(before=steps.fetch_to_evaluate), Watch(ending=steps.batch_ran)
        watches = {
            "train_dataloader_next": Watch(before=steps.fetch_to_train),
            "val_next": evaluated_next,
            "test_next": evaluated_next,
            "predict_next": evaluated_next,
            "run_training_epoch": Watch(before=self._epoch_runs, ending=steps.end),
            "run_training_batch": Watch(
                before=steps.batch_runs, ending=steps.batch_ran, after=self.live.look if self.live is not None else None
            ),
            "validation_step": evaluated,
            "test_step": evaluated,
            "predict_step": evaluated,
            "save_checkpoint": Watch(after=self._saved),
            "configure_gradient_clipping": Watch(after=optimizer.begins),
            "[LightningModule].on_before_optimizer_step": Watch(after=optimizer.begins_by_hand),
            "optimizer_step": Watch(ending=optimizer.ends),
        }
        if self.live is not None:
            self.live.attach(tracer)
        tracer.enable()
        self.anchors.record(tracer)
        # spans that are open in a tracer of the user's own are the user's
        self._since_ns = None if self._closes else tracer.now_ns()
        self._begin(self.stage, "loop")
        if in_epoch:
            self.begin_epoch()
        inner = self.trainer.profiler
        own = f"[Callback]{self._owner.state_key}."
        self._proxy = RecordingProfiler(inner, tracer, own, watches, self._failed, self._hook_raised)
        self.trainer.profiler = self._proxy
        self.recording = self.wanted = True

    def stop(self) -> None:
        """Cease to record, with what was recorded on disk and the user's profiler back in place."""
        self._restore_profiler()
        self.anchors.hold()
        self.recording = False
        self._open.clear()
        self._steps = None
        self._optimizer.record(None)
        if self.tracer is not None:
            self.tracer.disable()
            self.tracer.close_open({}, since_ns=self._since_ns)
            self.tracer.flush()

    def close(self, mark: dict[str, Any]) -> None:
        """End the recording and the file."""
        self.note_stop()
        self._optimizer.unwatch()
        self.anchors.unwatch()
        self._restore_profiler()
        self.recording = False
        if self._open and not mark:
            self._end_through(self._open[0][0])
        self._close_tracer(mark)

    def abandon(self) -> None:
        """After a failure of ours: leave all as it was found, as far as that goes."""
        self.recording = False
        for each in (
            self._optimizer.unwatch,
            self.anchors.unwatch,
            self._restore_profiler,
            lambda: self._close_tracer({"error": "TimelineTrace"}),
        ):
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
        self._loggers.restore()
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

    def rotate(self) -> None:
        """Begin the new file that is due: where something begins, so that no file is left without a step."""
        if self.rotate_to is not None and self.tracer is not None:
            path, self.rotate_to = self.rotate_to, None
            self.tracer.switch(path, self.writer)

    def _end_through(self, name: str) -> None:
        """End the span of this name and those inside it."""
        while self._is_open(name):
            if self._steps is not None:
                self._steps.close()
            self._end()

    def open_stage(self, name: str) -> None:
        """A validation or the sanity check begins."""
        self.end_step()
        if self.recording:
            self._begin(name, "validation", step=self.trainer.global_step)

    def close_stage(self, name: str) -> None:
        """It ends."""
        self.end_step()
        self._end_through(name)

    def begin_epoch(self, *, new: bool = False) -> None:
        """An epoch begins, or goes on."""
        if new:
            self._end_through("epoch")
            self.rotate()
        if self._open and not self._is_open("epoch"):
            self._begin("epoch", "loop", epoch=self.trainer.current_epoch)

    def end_epoch(self) -> None:
        """The last epoch ends."""
        self._end_through("epoch")

    def _epoch_runs(self) -> bool:
        """An epoch that was left half done goes on: then no hook has told of it."""
        self.trial = self._owner not in self.trainer.callbacks
        if self._steps is not None:
            self._steps.begin_epoch()
        if not self.trial:
            self.begin_epoch()
        return self.recording

    def evaluate(self, batch_idx: int, dataloader_idx: int) -> None:
        """The batch of an evaluation is known."""
        if self._steps is not None:
            self._steps.evaluate(batch_idx, dataloader_idx)

    def end_step(self) -> None:
        """The open step is over."""
        if self._steps is not None:
            self._steps.end()

    def between_steps(self) -> None:
        """Where a window closes: each step is recorded whole, or not."""
        # after a full disk or max_events, the user's profiler goes on alone
        if self.recording and (not self.wanted or self.over):
            self.stop()

    def watch_optimizers(self) -> None:
        """Training begins."""
        self._optimizer.watch(self.trainer)

    def _hook_raised(self, hook: str, error: type[BaseException]) -> None:
        """An exception leaves another callback's hook.

        The tuner takes all callbacks out of the Trainer while it tries, and leaves them out when it fails; and what
        raises in ``on_exception`` keeps that of the callbacks after it from being called.
        """
        if hook == "on_exception" or self._owner not in self.trainer.callbacks:
            self._lost(error)

    # ---- marks -----------------------------------------------------------------------------------------------------
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
