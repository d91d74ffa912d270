"""Whole spans added up by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_timekeeper.trace.summary.selftime import Kinds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_timekeeper.trace.summary.selftime import Kind


@dataclass(frozen=True)
class Named:
    """All spans of one name, each with what is inside it.

    Attributes:
        name: Theirs, as the trace has it.
        category: Theirs, or "".
        calls: How many.
        total_ns: Their time, exact.
        mean_ns: Of one.
        p50_ns: Median, within 1 %; None where it was not kept.
        p95_ns: Within 1 %.
        max_ns: The longest, exact.
    """

    name: str
    category: str
    calls: int
    total_ns: int
    mean_ns: float
    p50_ns: float | None
    p95_ns: float | None
    max_ns: int


def named(kinds: Iterable[Kind]) -> tuple[Named, ...]:
    """Those that have ended spans, the dearest first."""
    dearest = sorted((kind for kind in kinds if kind.calls), key=lambda kind: -kind.total_ns)
    return tuple(
        Named(
            kind.name,
            kind.category,
            kind.calls,
            kind.total_ns,
            kind.total_ns / kind.calls,
            kind.times.quantile(0.5) if kind.times is not None else None,
            kind.times.quantile(0.95) if kind.times is not None else None,
            kind.longest_ns,
        )
        for kind in dearest
    )


def by_class(kinds: Iterable[Kind]) -> tuple[Named, ...]:
    """Those named ``Class.hook``, added up by class."""
    classes = Kinds()
    for kind in kinds:
        classes[kind.category, kind.name.rpartition(".")[0] or kind.name].merge(kind)
    return named(classes.values())
