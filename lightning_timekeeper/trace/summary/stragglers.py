"""Ranks side by side, and which of them the others wait for.

In distributed training the ranks meet in backward, where gradients are reduced, and in Lightning's own broadcasts
(``sync``). So a rank that is late there is the one that *waits least*, while the others' backward looks slow. That
alone is no proof: a rank is named only where its own work, by which it is late, is as much longer as the others wait.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_timekeeper.trace.summary.step_table import StepTable

COLUMNS = {
    "data": ("data",),
    "transfer": ("transfer",),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("optimizer", "clip", "zero_grad"),
    "callbacks": ("callback", "module", "logger", "checkpoint", "validation"),
    "own spans": ("user",),
    "sync": ("sync",),
    "other": ("other",),
}
"""Column of the ranks' table -> the phases in it."""

WAITS = ("backward", "sync")
LEAST_STEPS = 20
LEAST_WAIT = 0.1  # of a step
LEAST_ERRORS = 3.0  # standard errors of the waits' means
LEAST_EXPLAINED = 0.8


@dataclass(frozen=True)
class Rank:
    """One rank's steady state.

    Attributes:
        rank: Its number.
        steps: How many steps were counted.
        step_ns: Mean time of a step.
        columns_ns: Column -> mean self time per step, None where nothing was measured; they add up to the step.
    """

    rank: int
    steps: int
    step_ns: float
    columns_ns: dict[str, float | None]

    @property
    def wait_ns(self) -> float:
        """Mean time per step in which it may wait for others."""
        return sum(self.columns_ns[column] or 0.0 for column in WAITS)


@dataclass(frozen=True)
class Spread:
    """One column over all ranks.

    Attributes:
        median_ns: Of the ranks' means.
        worst_ns: The greatest of them.
        worst_rank: Whose it is.
        skew: The greatest over the median; None where that is 0.
    """

    median_ns: float
    worst_ns: float
    worst_rank: int
    skew: float | None


@dataclass(frozen=True)
class Stragglers:
    """The ranks, and the one that the others wait for.

    Attributes:
        ranks: By number.
        spreads: Column -> its spread; only of a rank's own work, not of waits.
        rank: The rank that the others wait for, None where none can be named.
        cause: The column in which it is slower.
        wait_ns: How much longer the others wait than it, per step.
        explained: The part of that which the cause explains; from 0.8 on where a rank is named.
        share: ``wait_ns`` as a part of a step, 0 to 1.
        why: The reason for the answer, one sentence.
    """

    ranks: tuple[Rank, ...]
    spreads: dict[str, Spread] = field(default_factory=dict)
    rank: int | None = None
    cause: str | None = None
    wait_ns: float | None = None
    explained: float | None = None
    share: float | None = None
    why: str = ""


def compare(tables: dict[int, StepTable]) -> Stragglers:
    """Set the ranks side by side.

    Args:
        tables: Rank -> the table of its steady state.
    """
    ranks = tuple(_rank(number, table) for number, table in sorted(tables.items()))
    spreads = {column: spread for column in COLUMNS if column not in WAITS and (spread := _spread(ranks, column))}
    found = Stragglers(ranks, spreads)
    if len(ranks) < 2:
        return found
    steps = min(rank.steps for rank in ranks)
    if steps < LEAST_STEPS:
        return replace(found, why=f"{steps} steps are too few to name a straggler: it takes {LEAST_STEPS}.")
    culprit = min(ranks, key=lambda rank: rank.wait_ns)
    others = [rank for rank in ranks if rank is not culprit]
    wait_ns = statistics.median(rank.wait_ns for rank in others) - culprit.wait_ns
    share = wait_ns / culprit.step_ns if culprit.step_ns else 0.0
    # a few steps in which a rank was held up by chance make a mean, too, but one that is as uncertain as it is large
    deviations_ns = {rank.rank: tables[rank.rank].wait_deviation_ns / math.sqrt(rank.steps) for rank in ranks}
    error_ns = math.hypot(deviations_ns[culprit.rank], statistics.median(deviations_ns[rank.rank] for rank in others))
    if share < LEAST_WAIT:
        why = "No rank waits for another before backward. One that is slow in backward itself cannot be told from its waits."
        return replace(found, wait_ns=wait_ns, share=share, why=why)
    excess_ns = {
        column: (culprit.columns_ns[column] or 0.0)
        - statistics.median(rank.columns_ns[column] or 0.0 for rank in others)
        for column in spreads
    }
    if wait_ns < LEAST_ERRORS * error_ns:
        why = f"Rank {culprit.rank} waits least, but the waits vary too much from step to step to name it."
        return replace(found, wait_ns=wait_ns, share=share, why=why)
    cause = max(excess_ns, key=lambda column: excess_ns[column], default="other")
    explained = max(0.0, excess_ns.get(cause, 0.0) / wait_ns)
    if explained < LEAST_EXPLAINED:
        why = f"Rank {culprit.rank} waits least, but nothing that it does by itself is slow enough to be the cause: cannot tell."
        return replace(found, wait_ns=wait_ns, explained=explained, share=share, why=why)
    why = f"The others wait {wait_ns / 1e6:.1f} ms a step for rank {culprit.rank}, whose {cause} takes {excess_ns[cause] / 1e6:.1f} ms longer."
    return Stragglers(ranks, spreads, culprit.rank, cause, wait_ns, explained, share, why)


def _rank(number: int, table: StepTable) -> Rank:
    columns_ns = {
        column: table.per_step_ns(*phases) if any(table.row(phase).steps for phase in phases) else None
        for column, phases in COLUMNS.items()
    }
    return Rank(number, table.steps, table.whole.mean_ns or 0.0, columns_ns)


def _spread(ranks: tuple[Rank, ...], column: str) -> Spread | None:
    measured = [(value_ns, rank.rank) for rank in ranks if (value_ns := rank.columns_ns[column]) is not None]
    if not measured:
        return None
    median_ns = statistics.median(value_ns for value_ns, _ in measured)
    worst_ns, worst_rank = max(measured, key=lambda each: each[0])
    return Spread(median_ns, worst_ns, worst_rank, worst_ns / median_ns if median_ns else None)
