"""Clock anchors: when this rank entered and left the calls in which all ranks wait for one another.

No rank leaves a barrier before the last one has entered it, so each pair of ranks bounds how far their clocks are apart:
by no more than the two waits together (see trace/clocks.py). Lightning has barriers of its own at the start of every
stage, two of them in a row, of which the second is a tight one, and after every checkpoint: they are watched, and none
is added. All that this costs the ranks is one broadcast per run, of a name that tells its barriers from another run's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_timekeeper.trace.clocks import ANCHOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_timekeeper.trace.tracer import Tracer

JOINT_CALLS = ("barrier", "reduce_boolean_decision")
"""Methods of a strategy that no rank leaves before all have entered them. The second, which early stopping and
ModelCheckpoint call, reads the result of a reduction over all ranks."""

MOST_HELD = 32
"""Anchors that are kept for a recording that has not begun; later ones replace the oldest."""


class _Anchor(NamedTuple):
    name: str
    number: int
    entered_ns: int
    left_ns: int


class Anchors:
    """Records a clock anchor at each joint call of a run on several ranks; on one rank it does nothing.

    Made on every rank at the same time, whatever that rank records: the name of the run is broadcast.

    Args:
        trainer: The run's.
        failed: Is given what goes wrong within a joint call, which goes on.
    """

    def __init__(self, trainer: Any, failed: Callable[[Exception], None]) -> None:
        self._strategy = trainer.strategy
        self._failed = failed
        self._tracer: Tracer | None = None
        self._held: deque[_Anchor] = deque(maxlen=MOST_HELD)
        self._count = 0
        self._thread = threading.get_ident()
        self._run = trainer.strategy.broadcast(uuid.uuid4().hex[:16]) if trainer.world_size > 1 else None
        self._watched: list[_Joint] = []

    def watch(self) -> None:
        """Begin to count the joint calls, on every rank from the same one on."""
        if self._run is not None:
            self._watched = [_Joint.of(self._strategy, name) for name in JOINT_CALLS]
            for joint in self._watched:
                joint.listeners.append(self._passed)

    def unwatch(self) -> None:
        """Leave the strategy as it was."""
        self._tracer = None
        watched, self._watched = self._watched, []
        for joint in watched:
            joint.release(self._passed)

    def record(self, tracer: Tracer) -> None:
        """Record in a tracer from here on, and what was held until now."""
        if tracer._clock is time.perf_counter_ns:  # of a clock of the user's own nothing is known
            self._tracer = tracer
            held = list(self._held)
            self._held.clear()
            for anchor in held:
                self._write(tracer, anchor)

    def hold(self) -> None:
        """Record no more, and keep the next ones for the recording that follows."""
        self._tracer = None

    def _passed(self, name: str, entered_ns: int, left_ns: int) -> None:
        if threading.get_ident() != self._thread:  # whose order is not that of the other ranks
            return
        anchor = _Anchor(name, self._count, entered_ns, left_ns)
        self._count += 1
        try:
            if self._tracer is None:
                self._held.append(anchor)
            else:
                self._write(self._tracer, anchor)
        except Exception as error:  # noqa: BLE001 - Lightning calls it, in the middle of its barrier
            self._failed(error)

    def _write(self, tracer: Tracer, anchor: _Anchor) -> None:
        now_ns = tracer.now_ns()
        args = {
            "run": self._run,
            "number": anchor.number,
            "call": anchor.name,
            "waited_ns": anchor.left_ns - anchor.entered_ns,
            "ago_ns": now_ns - anchor.left_ns,  # before this event: it may have waited for the recording to begin
        }
        tracer.track.point(("i", ANCHOR, "timekeeper", args), now_ns)


class _Joint:
    """Stands in the place of a strategy's joint call and tells its listeners of each."""

    def __init__(self, strategy: Any, name: str) -> None:
        self.listeners: list[Callable[[str, int, int], None]] = []
        self._strategy, self._name = strategy, name
        self._call = getattr(strategy, name)
        self._before = vars(strategy).get(name)
        with contextlib.suppress(AttributeError, TypeError):
            functools.update_wrapper(self, self._call, updated=())

    @classmethod
    def of(cls, strategy: Any, name: str) -> _Joint:
        """The one that stands there, or a new one."""
        joint = vars(strategy).get(name)
        if not isinstance(joint, cls):
            joint = cls(strategy, name)
            setattr(strategy, name, joint)
        return joint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered_ns = time.perf_counter_ns()
        result = self._call(*args, **kwargs)
        left_ns = time.perf_counter_ns()
        given = args[0] if args else kwargs.get("name")
        name = given if self._name == "barrier" and isinstance(given, str) else self._name
        for listener in tuple(self.listeners):
            listener(name, entered_ns, left_ns)
        return result

    def release(self, listener: Callable[[str, int, int], None]) -> None:
        """Forget a listener, and go where there is none left."""
        self.listeners.remove(listener)
        if not self.listeners and vars(self._strategy).get(self._name) is self:
            if self._before is None:
                delattr(self._strategy, self._name)
            else:
                setattr(self._strategy, self._name, self._before)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        # a copy of the strategy, as in a copy of a module with its Trainer, is nobody's to watch
        return _unwatched, (self._call,)


def _unwatched(call: Any) -> Any:
    return call
