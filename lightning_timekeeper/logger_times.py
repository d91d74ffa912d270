"""Spans around the calls of the user's loggers, which Lightning makes outside of all its profiler actions."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_timekeeper.trace.tracer import Track

_METHODS = ("log_metrics", "save")  # what Lightning calls while it trains


class LoggerTimes:
    """Records ``log_metrics`` and ``save`` of loggers: methods of the instance stand before those of its class."""

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str, Any]] = []

    def record(self, loggers: Iterable[Any], track: Track) -> None:
        """Record what the calling thread does, on its track."""
        self.restore()
        for logger in loggers:
            for method in _METHODS:
                original = getattr(logger, method, None)
                # a method that stands in the instance already is somebody else's doing
                if callable(original) and method not in getattr(logger, "__dict__", {method: None}):
                    timed = _timed(original, f"{type(logger).__name__}.{method}", track)
                    with contextlib.suppress(AttributeError, TypeError):  # it takes no attributes: it is not timed
                        setattr(logger, method, timed)
                        self._wrapped.append((logger, method, timed))

    def restore(self) -> None:
        """Leave the loggers as they were."""
        while self._wrapped:
            logger, method, timed = self._wrapped.pop()
            if vars(logger).get(method) is timed:
                del vars(logger)[method]


def _timed(original: Callable[..., Any], name: str, track: Track) -> Callable[..., Any]:
    _, begin, end = track.pair(name, "logger")
    fail = track.failing(name, "logger")
    thread = threading.get_ident()

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:  # a track is one thread's
            return original(*args, **kwargs)
        begin()
        try:
            value = original(*args, **kwargs)
        except BaseException as error:
            fail(type(error))
            raise
        end()
        return value

    return timed
