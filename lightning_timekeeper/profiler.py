"""The proxy that takes the place of ``trainer.profiler``: records every action, forwards it to the user's profiler.

Lightning reads ``trainer.profiler`` at every use and opens each hook and loop action with ``profile(name)``, or
``start`` and ``stop``. Its default profiler's ``profile`` is a generator context manager, 970-1470 ns for nothing. Ours
is a look-up in a dict that returns a context manager made once per action: 400 ns with the recording, 500 on average
over a step's actions with what is called around some of them (benchmarks/actions.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_timekeeper.names import PassThroughProfiler, Profiler, both_names, under_both_names
from lightning_timekeeper.phases import phase_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from lightning_timekeeper.trace.tracer import Tracer

MOST_ACTIONS = 4096
"""Actions that get a context manager of their own; Lightning has fewer than a hundred, a user's may be numbered."""


class Watch(NamedTuple):
    """What is called around an action.

    Attributes:
        before: Outside its span; returns whether to record the action.
        ending: Inside it, at its end; is given the class of the exception that ends it, or None.
        after: Outside it.
    """

    before: Callable[[], bool] | None = None
    ending: Callable[[type[BaseException] | None], None] | None = None
    after: Callable[[], None] | None = None


class _Action:
    """Context manager of one action: its two methods are slots, so that the cheapest callables can stand there."""

    __slots__ = ("__enter__", "__exit__", "begin", "end")

    def __init__(
        self, begin: Callable[[], None], end: Callable[[], None], fail: Callable[[type[BaseException]], None]
    ) -> None:
        self.begin, self.end = begin, end

        def leave(kind: type[BaseException] | None, value: object, traceback: object) -> None:
            if kind is None:
                end()
            else:
                fail(kind)

        self.__enter__, self.__exit__ = begin, leave


class _Unrecorded(_Action):
    def __init__(self) -> None:
        super().__init__(_nothing, _nothing, lambda kind: None)


def _nothing() -> None:
    return


class _Both:
    """One action in the user's profiler and in ours, ours inside: what theirs costs does not count as the action's."""

    __slots__ = ("_ours", "_theirs")

    def __init__(self, ours: _Action, theirs: AbstractContextManager[Any]) -> None:
        self._ours, self._theirs = ours, theirs

    def __enter__(self) -> Any:
        value = self._theirs.__enter__()
        self._ours.begin()
        return value

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        self._ours.__exit__(kind, value, traceback)
        return self._theirs.__exit__(kind, value, traceback)


@under_both_names
class RecordingProfiler(Profiler):
    """Records actions in a tracer and forwards them.

    Args:
        inner: The user's profiler; Lightning's PassThroughProfiler does nothing and is not called.
        tracer: Records on the track of the thread that makes the proxy.
        own: Prefix of the actions that are not recorded: the hooks of the callback that records.
        watches: Last component of an action's name -> what is called around it. ``[LightningModule].x`` names the
            module's hook x alone.
        failed: Is given what a watch raises, which goes no further.
        hook_raised: Is told of a callback's hook, by its name, that an exception has left.
    """

    def __init__(
        self,
        inner: Profiler,
        tracer: Tracer,
        own: str,
        watches: Mapping[str, Watch],
        failed: Callable[[Exception], None],
        hook_raised: Callable[[str, type[BaseException]], None],
    ) -> None:
        # Profiler.__init__ is left out on purpose: its attributes are the inner one's
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "actions", _Actions(tracer, own, watches, failed, hook_raised))
        self.rewire(inner)

    inner: Profiler
    actions: _Actions

    def rewire(self, inner: Profiler) -> None:
        """Forward to another profiler."""
        object.__setattr__(self, "inner", inner)
        if type(inner) in both_names(PassThroughProfiler):
            actions = self.actions
            object.__setattr__(self, "profile", actions.__getitem__)
            object.__setattr__(self, "start", lambda action_name: actions[action_name].begin())
            object.__setattr__(self, "stop", lambda action_name: actions[action_name].end())
        else:
            object.__setattr__(self, "profile", self._profile_both)
            for name in ("start", "stop"):
                self.__dict__.pop(name, None)

    def _profile_both(self, action_name: str) -> _Both:
        return _Both(self.actions[action_name], self.inner.profile(action_name))

    def start(self, action_name: str) -> None:
        """Begin an action."""
        self.inner.start(action_name)
        self.actions[action_name].begin()

    def stop(self, action_name: str) -> None:
        """End an action."""
        self.actions[action_name].end()
        self.inner.stop(action_name)

    def summary(self) -> str:
        """The user's profiler's."""
        return self.inner.summary()

    def describe(self) -> None:
        """The user's profiler's."""
        self.inner.describe()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """The user's profiler's."""
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        """The user's profiler's."""
        self.inner.teardown(stage)

    def __del__(self) -> None:
        """Lightning's profilers tear themselves down here; that of the user lives on."""

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "actions"):  # not there yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


class _Actions(dict[str, _Action]):
    """Action name -> its context manager, made at the first use."""

    def __init__(
        self,
        tracer: Tracer,
        own: str,
        watches: Mapping[str, Watch],
        failed: Callable[[Exception], None],
        hook_raised: Callable[[str, type[BaseException]], None],
    ) -> None:
        super().__init__()
        self._track, self._own, self._watches, self._failed = tracer.track, own, watches, failed
        self._hook_raised = hook_raised
        self._numbered: dict[str, list[int]] = {}

    def __missing__(self, action: str) -> _Action:
        try:
            return self._make(action)
        except Exception as error:  # noqa: BLE001 - a name that is no text, say: the training goes on
            self._failed(error)
            return _Unrecorded()

    def _make(self, action: str) -> _Action:
        if action.startswith(self._own):
            made: _Action = _Unrecorded()
        else:
            name, category = phase_of(action)
            if len(self) >= MOST_ACTIONS:
                return self._once(action, name, category)
            _, begin, end = self._track.pair(name, category)
            fail = self._track.failing(name, category)
            last = action.rpartition(".")[2]
            if category == "callback":
                watch, fail = None, self._raising(last, fail)
            else:
                watch = self._watches.get(last)
            if watch is None and action.startswith("[LightningModule]"):
                watch = self._watches.get(f"[LightningModule].{last}")
            made = _Action(begin, end, fail) if watch is None else _watched(begin, end, fail, watch, self._failed)
        self[action] = made
        return made

    def _raising(self, hook: str, fail: Callable[[type[BaseException]], None]) -> Callable[[type[BaseException]], None]:
        def raised(kind: type[BaseException]) -> None:
            fail(kind)
            try:
                self._hook_raised(hook, kind)
            except Exception as error:  # noqa: BLE001 - instrumentation never kills a training run
                self._failed(error)

        return raised

    def _once(self, action: str, name: str, category: str) -> _Action:
        """One that is not kept: what its begin leaves for its end is kept while it is open."""
        track, numbered = self._track, self._numbered

        def begin() -> None:
            numbered.setdefault(action, []).append(track.begin(name, category, {}))

        def end(kind: type[BaseException] | None = None) -> None:
            idents = numbered.get(action)
            if idents:  # else it began before us
                track.end(idents.pop(), None if kind is None else {"error": kind.__name__})
                if not idents:
                    del numbered[action]

        return _Action(begin, end, end)


def _watched(
    begin: Callable[[], None],
    end: Callable[[], None],
    fail: Callable[[type[BaseException]], None],
    watch: Watch,
    failed: Callable[[Exception], None],
) -> _Action:
    before, ending, after = watch

    def watched_begin() -> None:
        try:
            if before is None or not before():
                return
        except Exception as error:  # noqa: BLE001 - instrumentation never kills a training run
            failed(error)
        begin()

    def watched_end(kind: type[BaseException] | None = None) -> None:
        try:
            if ending is not None:
                ending(kind)
        except Exception as error:  # noqa: BLE001 - see above
            failed(error)
        if kind is None:
            end()
        else:
            fail(kind)
        try:
            if after is not None:
                after()
        except Exception as error:  # noqa: BLE001 - see above
            failed(error)

    return _Action(begin if before is None else watched_begin, watched_end, watched_end)
