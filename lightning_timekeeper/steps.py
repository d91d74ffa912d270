"""The spans of batches, and the time of the optimizer within them, found from the profiler's actions.

They run in every batch: 36 actions are recorded for what they cost Lightning's disabled profiler, and these few must
not spend what that saves. So nothing here asks ``trainer.training`` or the like, which compares enumerations of texts
for 2 µs, and in training nothing is a hook, which is 3 µs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper.recording import Recording
    from lightning_timekeeper.trace.drain import Drain
    from lightning_timekeeper.trace.tracer import Track


class Steps:
    """The span of a batch, ``step`` in training, else ``batch``: from its fetch to the next one's.

    Args:
        recording: Whose they are; it is told between two of them.
        owner: The callback.
        track: To record on.
        drain: Of the tracer; when it has ended, by a full disk say, so has the recording.
    """

    def __init__(self, recording: Recording, owner: Any, track: Track, drain: Drain) -> None:
        trainer = recording.trainer
        self._drain = drain
        self._recording = recording
        self._owner = owner
        self._track = track
        self._trainer = trainer
        self._fit_loop, self._epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._several_ranks = trainer.world_size > 1
        self._automatic = False
        self._ident: int | None = None  # of the open span
        self._args: dict[str, Any] | None = None  # its batch, once it is known
        self._ready = 0  # what Lightning's counter is when the open step has its batch; 0 outside training
        self._in_batch = False

    def begin_epoch(self) -> None:
        """Learn once in an epoch what is asked for in every step."""
        self._automatic = bool(self._trainer.lightning_module.automatic_optimization)

    def fetch_to_train(self) -> bool:
        """A batch is about to be fetched: the step before it is over, and its own begins."""
        recording = self._recording
        if self._in_batch:  # a training_step that takes its batches itself fetches within
            return recording.recording
        ready = self._epoch_loop.batch_progress.current.ready
        ident = self._ident
        if ident is not None and self._ready <= ready:  # else it is still without one
            # as `_over`, with nothing called that need not be: between two steps all of it is out of the cache
            if self._several_ranks:
                self._track.since_last("sync", "sync")
            self._track.end(ident, self._args)
            self._ident = None
            if self._trainer.should_stop:
                recording.note_stop()
            if self._drain.ended or not recording.wanted:
                recording.between_steps()
        if recording.rotate_to is not None:
            recording.rotate()
        if recording.recording:
            self._begin_step(ready)
        return recording.recording

    def batch_runs(self) -> bool:
        """A training batch is run, be it that it was fetched, or that training_step fetches it itself."""
        recording = self._recording
        ready = self._epoch_loop.batch_progress.current.ready
        if recording.recording and (self._ident is None or self._ready != ready):
            if self._ident is not None:
                self._over()
            if recording.recording:
                self._begin_step(ready - 1)
        self._in_batch = recording.recording
        return recording.recording

    def batch_ran(self, error: type[BaseException] | None) -> None:
        """It, or an evaluation's, has run."""
        self._in_batch = False

    def fetch_to_evaluate(self) -> bool:
        """As :meth:`fetch_to_train`; which batch it is, a hook tells."""
        recording = self._recording
        # the tuner runs without us: no hook tells of its batches
        if not self._in_batch and self._owner in self._trainer.callbacks:
            if self._args is not None:
                self.end()
            if recording.rotate_to is not None:
                recording.rotate()
            if recording.recording and self._ident is None:
                self._begin("batch")
        return recording.recording

    def evaluate(self, batch_idx: int, dataloader_idx: int) -> None:
        """The batch of the open span is known."""
        if self._args is not None:  # no fetch was seen since: the step takes its batches itself
            self.end()
        if not self._recording.recording:
            return
        if self._ident is None:
            self._begin("batch")
        self._args = {"epoch": self._trainer.current_epoch, "batch": batch_idx, "step": self._trainer.global_step}
        if dataloader_idx:
            self._args["dataloader"] = dataloader_idx
        self._in_batch = True

    def end(self, error: type[BaseException] | None = None) -> None:
        """The open span, if there is one, is over."""
        self.close(error)
        self._recording.note_stop()
        self._recording.between_steps()

    def close(self, error: type[BaseException] | None = None) -> None:
        """As :meth:`end`, and all goes on."""
        ident, args = self._ident, self._args
        if ident is None:
            return
        if self._ready > self._epoch_loop.batch_progress.current.ready:
            args = {"batch": "none"}
        if error is not None:
            args = {**(args or {}), "error": error.__name__}
        self._track.end(ident, args)
        self._ident = self._args = None
        self._ready = 0
        self._in_batch = False

    def _over(self) -> None:
        if self._several_ranks:  # between a step's last hook and the next fetch Lightning broadcasts: a rank waits
            self._track.since_last("sync", "sync")
        self.end()

    def _begin_step(self, batch: int) -> None:
        if self._ident is None:
            # the steps of the LR finder and of the batch size finder are none of the training's
            self._begin("trial step" if self._recording.trial else "step")
        self._ready = batch + 1
        self._args = {
            "epoch": self._fit_loop.epoch_progress.current.completed,
            "batch": batch,
            "step": self._optimizer_steps(),
        }

    def _optimizer_steps(self) -> int:
        """As ``trainer.global_step``, which looks for the module through four properties."""
        loop = self._epoch_loop
        if self._automatic:
            steps: int = loop.automatic_optimization.optim_progress.optimizer_steps
        else:
            steps = loop.global_step
        return steps

    def _begin(self, name: str) -> None:
        self._ident, begin, _ = self._track.pair(name, "loop")
        begin()


class OptimizerTime:
    """The optimizer's own work: from the clipping of the gradients to torch's hook after the step.

    Lightning's ``optimizer_step`` holds forward and backward, which run in the closure.

    Args:
        failed: Is given what torch's hook would raise.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._hooks: list[Any] = []
        self._manual = False
        self._open = False
        self._track: Track | None = None
        self._ident = 0
        self._begin = self._end = _nothing

    def watch(self, trainer: Any) -> None:
        """Learn from torch when an optimizer has stepped."""
        self.unwatch()
        self._manual = not trainer.lightning_module.automatic_optimization
        for optimizer in trainer.optimizers:
            register = getattr(optimizer, "register_step_post_hook", None)
            if callable(register):
                self._hooks.append(register(self.stepped))

    def unwatch(self) -> None:
        """Leave the optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def record(self, track: Track | None) -> None:
        """Record on a track, or not at all."""
        self._track, self._open = track, False
        if track is not None:
            self._ident, self._begin, self._end = track.pair("optimizer", "optimizer")

    def begins(self) -> None:
        """Forward and backward are done, gradients are clipped."""
        if self._hooks and not self._open and self._track is not None:
            self._open = True
            self._begin()

    def begins_by_hand(self) -> None:
        """The module calls the optimizer itself, and Lightning clips nothing."""
        if self._manual:
            self.begins()

    def ends(self, error: type[BaseException] | None = None) -> None:
        """The optimizer has stepped, or its step is over without."""
        if self._open and self._track is not None:
            self._open = False
            if error is None:
                self._end()
            else:
                self._track.end(self._ident, {"error": error.__name__})

    def stepped(self, *_: Any) -> None:
        """Torch's hook."""
        try:
            self.ends()
        except Exception as error:  # noqa: BLE001 - torch calls it, in the middle of the user's step
            self._failed(error)


def _nothing() -> None:
    return
