"""The checkpoint of the last step, from which a run that reached its time limit goes on exactly where it ended."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_timekeeper.hooks import drop_empty_hooks
from lightning_timekeeper.names import Checkpoint, under_both_names

if TYPE_CHECKING:
    from lightning_timekeeper import names as pl

FILENAME = "timer.ckpt"


@under_both_names
class LimitCheckpoint(Checkpoint):
    """Saves once training is about to end for the time limit.

    :class:`~lightning_timekeeper.Timer` adds it to the Trainer's callbacks for the length of a fit. It is a
    :class:`~lightning.pytorch.callbacks.Checkpoint` because Lightning runs those after every other callback: what
    EarlyStopping, an averager or another ModelCheckpoint did about the last step is in the file.

    Three moments can be the last. After a batch, the file resumes with the next batch. After a validation in
    mid-epoch, likewise. At the end of an epoch its callbacks have run, so a file already written after its last batch
    is replaced. As in every checkpoint that Lightning writes at that point, an epoch-wise ReduceLROnPlateau has not
    yet taken its step.

    Args:
        path: Where to save. None: :data:`FILENAME` beside the first ModelCheckpoint's files, else in
            ``trainer.log_dir``. An existing file is replaced.
    """

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self._path = path
        self._armed = self._tried = self._warned = self._at_epoch_end = False
        drop_empty_hooks(self)
        vars(self)["on_train_batch_end"] = None  # until the limit is reached

    def arm(self) -> None:
        """The limit is reached: save as soon as ``min_steps`` and ``min_epochs`` let training end."""
        vars(self).pop("on_train_batch_end", None)
        self._armed = True

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not self._tried:
            self._save(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        # After the epoch's last batch its end follows at once. A file from between the two would make the resume
        # repeat that end without the validation's metrics, and EarlyStopping raise for them.
        if not (self._tried or trainer.sanity_checking or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch):
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if not self._tried or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._at_epoch_end = True
            self._save(trainer)
            self._at_epoch_end = False

    def _save(self, trainer: pl.Trainer) -> None:
        may_end = trainer.fit_loop._can_stop_early  # no public word for min_steps and min_epochs
        if not (self._armed and may_end) or trainer.fast_dev_run:  # type: ignore[union-attr]  # set by a function
            return
        self._tried = True  # whatever comes of it: where to try next must not differ between ranks
        path = self._path or FILENAME
        try:
            path = self._path or self._default_path(trainer)
            trainer.save_checkpoint(path)
        except Exception as error:  # noqa: BLE001  # training still has to end in order
            if not self._warned:
                warnings.warn(
                    f"`Timer(save_on_limit=...)` could not save {path!r}: {type(error).__name__}: {error}."
                    " The last step is in no checkpoint of the timer's.",
                    stacklevel=2,
                )
            self._warned = True
            # where only this rank failed, the others wait for it at the barrier with which a save ends
            trainer.strategy.barrier("Trainer.save_checkpoint")

    @staticmethod
    def _default_path(trainer: pl.Trainer) -> str:
        folder = trainer.log_dir or trainer.default_root_dir  # a collective, so on every rank alike
        for callback in trainer.checkpoint_callbacks:
            if dirpath := getattr(callback, "dirpath", None):
                folder = str(dirpath)
                break
        return os.path.join(folder, FILENAME)  # may be a URL

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give the loops in our file, written at an epoch's end, the counts that they had after its last batch.

        From the counts of an epoch's end Lightning resumes wrongly with ``max_steps``: it skips a whole epoch
        (48 of 60 batches in the tests, in 2.5.0 and in 2.6.6). From those after a batch it resumes exactly.
        """
        if not self._at_epoch_end:
            return
        loops = checkpoint["loops"]["fit_loop"]
        batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
        total = batches["total"]
        # an epoch that `on_train_batch_start` cut short by returning -1 has no last batch; nor is one expected there
        if total["ready"] == total["started"] == total["processed"] == total["completed"]:
            for counts in (batches["total"], batches["current"]):
                counts["completed"] -= 1
            for counts in (epochs["total"], epochs["current"]):
                counts["processed"] -= 1
