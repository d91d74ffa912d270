"""TracedDataset: records what a dataset does, in whatever process it does it, without a change to it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace import tracer
from lightning_timekeeper.trace.tracer import _Waits, span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# looked up on the type, so an attribute that is passed through is not enough; and there only where the dataset has them
_PASSED_ON = (
    "__add__",
    "__bool__",
    "__call__",
    "__contains__",
    "__delitem__",
    "__enter__",
    "__exit__",
    "__len__",
    "__length_hint__",
    "__next__",
    "__reversed__",
    "__setitem__",
)
_OWN = frozenset({"_traced_dataset", "_traced_name"})


class TracedDataset:
    """Stands for a dataset, and records each ``__getitem__``, ``__getitems__`` and each wait of an iteration.

    It has the dataset's attributes, length, operators and class (``isinstance`` holds, so a DataLoader takes an
    ``IterableDataset`` for what it is), and can be pickled and copied as it can. While nothing records it only calls.

    Args:
        dataset: Map-style or iterable.
        name: Begins the names of the spans, ``train.__getitem__``, and names the workers' tracks, ``train worker 0``; by
            default the class of the dataset.

    Raises:
        TypeError: It is no dataset.

    Example::

        loader = DataLoader(TracedDataset(dataset, "train"), num_workers=4)
    """

    __slots__ = ("__weakref__", "_traced_dataset", "_traced_name")

    _traced_dataset: Any
    _traced_name: str

    def __new__(cls, dataset: Any, name: str | None = None) -> TracedDataset:  # noqa: D102
        kind = type(dataset)
        call = f"`TracedDataset({kind.__name__}, {name!r})`"
        if isinstance(dataset, type) or not (hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")):
            raise TypeError(f"{call}: expected an object with `__getitem__` or `__iter__`, not {dataset!r}.")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{call}: expected a text for the name.")
        methods: dict[str, Any] = {name: _passed_on(name) for name in _PASSED_ON if hasattr(kind, name)}
        methods |= {name: method for name, method in _RECORDED.items() if callable(getattr(dataset, name, None))}
        members = {"__slots__": (), "__module__": __name__, **methods}
        made: TracedDataset = object.__new__(type(cls.__name__, (cls,), members))
        object.__setattr__(made, "_traced_dataset", dataset)
        object.__setattr__(made, "_traced_name", name or getattr(dataset, "_traced_name", kind.__name__))
        return made

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The dataset's."""
        kind: type = self._traced_dataset.__class__
        return kind

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # of an object that is being made
            raise AttributeError(name)
        return getattr(self._traced_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._traced_dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._traced_dataset, name)

    def __dir__(self) -> list[str]:
        return dir(self._traced_dataset)

    def __repr__(self) -> str:
        return f"TracedDataset({self._traced_dataset!r}, {self._traced_name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TracedDataset, (self._traced_dataset, self._traced_name)

    def __copy__(self) -> TracedDataset:
        return TracedDataset(copy.copy(self._traced_dataset), self._traced_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedDataset:
        return TracedDataset(copy.deepcopy(self._traced_dataset, memo), self._traced_name)


def _passed_on(name: str) -> Callable[..., Any]:
    if name == "__add__":  # its result is to hold the traced one

        def add(self: TracedDataset, other: Any) -> Any:
            return type(self._traced_dataset).__add__(self, other)

        return add

    def method(self: TracedDataset, *args: Any) -> Any:
        return getattr(self._traced_dataset, name)(*args)

    return method


def _getitem(self: TracedDataset, index: Any) -> Any:
    if not tracer._recording:
        return self._traced_dataset[index]
    with span(f"{self._traced_name}.__getitem__", index=index):
        return self._traced_dataset[index]


def _getitems(self: TracedDataset, indices: Any) -> Any:
    if not tracer._recording:
        return self._traced_dataset.__getitems__(indices)
    with span(f"{self._traced_name}.__getitems__", indices=indices):
        return self._traced_dataset.__getitems__(indices)


def _iter(self: TracedDataset) -> Iterator[Any]:
    return iter(_Waits(iter(self._traced_dataset), f"{self._traced_name}.__next__"))


_RECORDED: dict[str, Callable[..., Any]] = {"__getitem__": _getitem, "__getitems__": _getitems, "__iter__": _iter}
