"""Time budgets and timelines for PyTorch Lightning.

Two callbacks, :class:`Timer` and :class:`TimelineTrace`, and the small trace library that they stand on.
The public names are resolved on first use (PEP 562), so that neither torch nor Lightning is loaded before
a callback is asked for: the command line starts in hundredths of a second instead of five.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_timekeeper.timer import Timer as Timer

__version__ = "0.1.0"

_HOMES = {
    "Timer": "timer",
}

__all__ = ["Timer"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
