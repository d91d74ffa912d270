"""The one place that knows that Lightning has two names, and makes our classes at home under both.

``lightning.pytorch`` and ``pytorch_lightning`` are two packages of different classes with the same names: neither's
Callback is the other's, and neither's Trainer finds the other's Timer. Ours are to be of both, whatever is imported in
whatever order. But importing us must not import a name that the user did not: each name takes over the console lines
of the other (the logger behind ``rank_zero_info`` is a global that the latest import sets), and it may be broken.

So a class of ours is born under the name that is loaded, ``lightning.pytorch`` if none or both are, and its base from
the other name is added once that is loaded, too: ``__bases__`` can be assigned. After that each ``isinstance`` and
``issubclass``, of the Trainer, the LightningCLI or the user, sees both bases and asks us nothing. The moment is found by
listening to imports: first on ``sys.meta_path`` stands a finder that finds nothing, but looks at each import of a module
whether the awaited classes are there by now. Lightning imports its Trainer, and tens of modules more, after them.

The base that a class was born with comes first and is the one that runs: since Lightning's Callback has every hook, the
second adds a kinship and no behaviour.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = [
    "Callback",
    "Checkpoint",
    "LightningTimer",
    "MisconfigurationException",
    "PassThroughProfiler",
    "Profiler",
    "RunningStage",
    "both_names",
    "rank_zero_info",
    "rank_zero_warn",
    "under_both_names",
]

_Class = TypeVar("_Class", bound=type)

_PYTORCH = ("lightning.pytorch", "pytorch_lightning")
_FABRIC = ("lightning.fabric", "lightning_fabric")


def both_names(cls: type) -> tuple[type, ...]:
    """A class of Lightning's, and its namesake under the other name if that is loaded."""
    for here, there in (_PYTORCH, _PYTORCH[::-1], _FABRIC, _FABRIC[::-1]):
        if f"{cls.__module__}.".startswith(f"{here}."):
            module = sys.modules.get(there + cls.__module__.removeprefix(here))
            namesake = getattr(module, "__dict__", {}).get(cls.__name__)  # not there yet in one that is being imported
            return (cls, namesake) if isinstance(namesake, type) else (cls,)
    return (cls,)


class _Listener:
    """A finder of modules that finds none: it hears of every import."""

    def __init__(self) -> None:
        self.waiting: list[type] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self.waiting:
            self.complete()

    def complete(self) -> None:
        """Give each class its base of the other name, if that is there by now."""
        for cls in tuple(self.waiting):
            bases = tuple(namesake for base in cls.__bases__ for namesake in both_names(base))
            if len(bases) > len(cls.__bases__):
                # TypeError: no such class can be; ValueError: another thread was faster. Neither is the importer's affair.
                with contextlib.suppress(TypeError, ValueError):
                    self.waiting.remove(cls)
                    cls.__bases__ = bases


_listener = _Listener()
sys.meta_path.insert(0, _listener)


def under_both_names(cls: _Class) -> _Class:
    """Class decorator: what is derived from a class of Lightning's is derived from its namesake, too."""
    _listener.waiting.append(cls)
    _listener.complete()
    return cls


def _born_under() -> str:
    for name in _PYTORCH:
        if sys.modules.get(name) is not None:
            return name
    try:
        importlib.import_module(_PYTORCH[0])
    except Exception:
        with contextlib.suppress(Exception):  # the error to tell of is the first name's
            importlib.import_module(_PYTORCH[1])
            return _PYTORCH[1]
        raise
    return _PYTORCH[0]


if TYPE_CHECKING:
    # To a type checker ours are callbacks of both names from the start, and their hooks take either name's Trainer.
    # Ignored is that two hooks of one name take different Trainers: ours take both.
    from typing import TypeAlias

    import lightning.pytorch as pl
    import pytorch_lightning as pl2
    from lightning.fabric.utilities import exceptions
    from lightning.pytorch import callbacks
    from lightning.pytorch.profilers import PassThroughProfiler, Profiler
    from lightning.pytorch.trainer.states import RunningStage
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
    from lightning_fabric.utilities import exceptions as exceptions2
    from pytorch_lightning import callbacks as callbacks2

    Trainer: TypeAlias = pl.Trainer | pl2.Trainer
    LightningModule: TypeAlias = pl.LightningModule | pl2.LightningModule

    class Callback(pl.Callback, pl2.Callback):  # type: ignore[misc]
        """Lightning's."""

    class Checkpoint(callbacks.Checkpoint, callbacks2.Checkpoint):  # type: ignore[misc]
        """Lightning's."""

    class LightningTimer(callbacks.Timer, callbacks2.Timer):  # type: ignore[misc]
        """Lightning's Timer."""

    class _MisconfigurationException(exceptions.MisconfigurationException, exceptions2.MisconfigurationException):
        """Lightning's."""
else:
    _name = _born_under()
    _callbacks = importlib.import_module(f"{_name}.callbacks")
    _profilers = importlib.import_module(f"{_name}.profilers")
    _utilities = importlib.import_module(f"{_name}.utilities")
    Callback, Checkpoint, LightningTimer = _callbacks.Callback, _callbacks.Checkpoint, _callbacks.Timer
    PassThroughProfiler, Profiler = _profilers.PassThroughProfiler, _profilers.Profiler
    RunningStage = importlib.import_module(f"{_name}.trainer.states").RunningStage
    rank_zero_info, rank_zero_warn = _utilities.rank_zero_info, _utilities.rank_zero_warn
    _MisconfigurationException = importlib.import_module(f"{_name}.utilities.exceptions").MisconfigurationException


@under_both_names
class MisconfigurationException(_MisconfigurationException):
    """An argument that is not in an accepted form: both ``MisconfigurationException`` of Lightning's at once."""
