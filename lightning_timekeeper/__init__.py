"""Time budgets and timelines for PyTorch Lightning.

Two callbacks, :class:`Timer` and :class:`TimelineTrace`, and the small trace library that they stand on.
The public names are resolved on first use (PEP 562), so that neither torch nor Lightning is loaded before
a callback is asked for: the command line starts in hundredths of a second instead of five.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_timekeeper.dataset import TracedDataset as TracedDataset
    from lightning_timekeeper.timeline import TimelineTrace as TimelineTrace
    from lightning_timekeeper.timer import Timer as Timer
    from lightning_timekeeper.trace.merge import merge as merge
    from lightning_timekeeper.trace.reader import read_events as read_events
    from lightning_timekeeper.trace.summary import summarize as summarize
    from lightning_timekeeper.trace.tracer import Tracer as Tracer
    from lightning_timekeeper.trace.tracer import counter as counter
    from lightning_timekeeper.trace.tracer import get_tracer as get_tracer
    from lightning_timekeeper.trace.tracer import instant as instant
    from lightning_timekeeper.trace.tracer import iterate as iterate
    from lightning_timekeeper.trace.tracer import span as span
    from lightning_timekeeper.triggers import At as At
    from lightning_timekeeper.triggers import Every as Every
    from lightning_timekeeper.triggers import Trigger as Trigger

__version__ = "0.1.0"

_HOMES = {
    "At": "triggers",
    "Every": "triggers",
    "TimelineTrace": "timeline",
    "Timer": "timer",
    "TracedDataset": "dataset",
    "Tracer": "trace.tracer",
    "Trigger": "triggers",
    "counter": "trace.tracer",
    "get_tracer": "trace.tracer",
    "instant": "trace.tracer",
    "iterate": "trace.tracer",
    "merge": "trace.merge",
    "read_events": "trace.reader",
    "span": "trace.tracer",
    "summarize": "trace.summary",
}

__all__ = [
    "At",
    "Every",
    "TimelineTrace",
    "Timer",
    "TracedDataset",
    "Tracer",
    "Trigger",
    "counter",
    "get_tracer",
    "instant",
    "iterate",
    "merge",
    "read_events",
    "span",
    "summarize",
]


if not TYPE_CHECKING:  # to a type checker, a module with this function has every name

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value  # the next look-up does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
