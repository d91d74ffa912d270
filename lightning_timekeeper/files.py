"""Where the files of a run go: directory, name, version, the same on all ranks."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from lightning_timekeeper.template import Template, free_version, join, versioned, with_rank
from lightning_timekeeper.trace.writer import is_url

if TYPE_CHECKING:
    from lightning_timekeeper import names as pl


class TraceFiles:
    """The files of one run, of which :meth:`path` names the next.

    Made on every rank at the same time: finding the directory and the version are collective calls.

    Args:
        trainer: Its log directory is the default.
        stage: Of the run.
        template: Of the file names.
        dirpath: A directory or URL, or None.
        looks: Whether files that exist are to be kept clear of; only a writer knows where its files are.

    Attributes:
        paths: That were named so far; the last one may not have been opened.
    """

    def __init__(
        self, trainer: pl.Trainer, stage: str, template: Template, dirpath: str | None, *, looks: bool
    ) -> None:
        log_dir = trainer.log_dir  # collective, so on every rank, also where it is not needed
        self._directory = dirpath if dirpath is not None else log_dir or trainer.default_root_dir or "."
        if trainer.world_size > 1 and "rank" not in template.keys:
            template = Template(with_rank(template.text))
        self._trainer, self._stage, self._template, self._looks = trainer, stage, template, looks
        version = 0
        if trainer.is_global_zero and looks:
            version = free_version([self._named(rank, 0) for rank in range(trainer.world_size)], _exists)
        self.paths: list[str] = []
        self._version = trainer.strategy.broadcast(version) if trainer.world_size > 1 else version

    def path(self, epoch: int) -> str:
        """The path of this rank's file that begins now, in this epoch; no collective call."""
        path = self._named(self._trainer.global_rank, epoch)
        path = versioned(path, free_version([path], _exists, self._version) if self._looks else self._version)
        self.paths.append(path)
        return path

    def check(self) -> None:
        """See, without making anything, whether a file can be made later.

        Raises:
            OSError: Where it cannot.
        """
        if not self._looks or is_url(self._directory):
            return
        path = self._named(self._trainer.global_rank, self._trainer.current_epoch)
        parent = os.path.dirname(os.path.abspath(path))
        while not os.path.lexists(parent):
            parent = os.path.dirname(parent)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(os.path.join(parent, os.path.basename(path)))  # a name that is too long, say
        code = 0 if os.path.isdir(parent) else errno.ENOTDIR
        if code or not os.access(parent, os.W_OK | os.X_OK):
            code = code or errno.EACCES
            raise OSError(code, os.strerror(code), path)

    def _named(self, rank: int, epoch: int) -> str:
        trainer = self._trainer
        values = {
            "stage": self._stage,
            "rank": rank,
            "node": trainer.node_rank,
            "world_size": trainer.world_size,
            "epoch": epoch,
            "step": trainer.global_step,
            "attempt": attempt(),
        }
        return join(self._directory, self._template.fill(values, trainer.callback_metrics))


def attempt() -> int:
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
