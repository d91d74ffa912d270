"""Where the time of a run went: one pass over its traces, in bounded memory.

Of our own traces the spans of the training loop are nested and their self times added up, per step and by phase. Of any
other trace it is known only that its spans have names: there the whole spans are added up, by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_timekeeper.trace.summary.by_name import Named, by_class, named
from lightning_timekeeper.trace.summary.collect import Collection, begin_ns
from lightning_timekeeper.trace.summary.selftime import PHASES, Kinds
from lightning_timekeeper.trace.summary.stragglers import Stragglers, compare
from lightning_timekeeper.trace.summary.verdict import Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_timekeeper.trace.summary.rank_times import Epoch, Mark, RankTimes, Spell
    from lightning_timekeeper.trace.summary.step_bins import Bin
    from lightning_timekeeper.trace.summary.step_table import StepTable

_DEAREST = 5


@dataclass(frozen=True)
class Run:
    """Times of the whole run, of the rank that is shown.

    Attributes:
        stages_ns: ``fit``, ``validate``, ``test``, ``predict`` -> how long it was recorded.
        first_step_ns: From the begin of the fit to that of its first step; None where that was not recorded.
        training_ns: From the first step of a fit to its end.
        sanity_check_ns: Of the sanity check.
        validation: The validations in a fit.
        checkpoint: The checkpoints.
        phases_ns: Category -> self time of its spans on the tracks of the loop, in steps and out of them.
    """

    stages_ns: dict[str, int]
    first_step_ns: int | None
    training_ns: int | None
    sanity_check_ns: int | None
    validation: Spell
    checkpoint: Spell
    phases_ns: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """Where the time of a run went. ``str()`` of it is the report for a terminal of 100 columns.

    All times are in ns; those that are moments count from the begin of the trace. Nothing unmeasured is 0: it is None.

    Attributes:
        verdict: What bounds the run.
        rank: The rank that is shown, the least; None where the trace has none.
        ranks: How many ranks there are.
        files: How many files.
        table: The steps, without the warm-up; None where there are none.
        warmup: The steps of the warm-up; None where there are none.
        run: The run as a whole; None where the trace is not ours.
        epochs: In order, at most 1,000.
        epochs_left_out: Epochs beyond those.
        validations: Each one, at most 1,000.
        checkpoints: Each one, at most 1,000.
        bins: The training steps in a row, in at most 500 bins.
        stragglers: The ranks side by side.
        callbacks: The dearest five by name and hook.
        callback_classes: Time of all callbacks, by class.
        loggers: Time of loggers; empty where it was not recorded.
        user_spans: Spans of the user's own on the track of the loop.
        beside: Spans that ran beside the loop, in DataLoader workers and other threads, of all ranks.
        spans: All spans of traces that are not ours, by name.
        lost_bytes: Bytes that could not be read.
        unordered: Spans that are not in order, and whose phases may be wrong.
    """

    verdict: Verdict
    rank: int | None
    ranks: int
    files: int
    table: StepTable | None
    warmup: StepTable | None
    run: Run | None
    epochs: tuple[Epoch, ...]
    epochs_left_out: int
    validations: tuple[Mark, ...]
    checkpoints: tuple[Mark, ...]
    bins: tuple[Bin, ...]
    stragglers: Stragglers
    callbacks: tuple[Named, ...]
    callback_classes: tuple[Named, ...]
    loggers: tuple[Named, ...]
    user_spans: tuple[Named, ...]
    beside: tuple[Named, ...]
    spans: tuple[Named, ...]
    lost_bytes: int
    unordered: int

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100) -> str:
        """The report for a terminal.

        Args:
            width: Of the terminal, columns from 80.
        """
        from lightning_timekeeper.trace.summary.text import text  # noqa: PLC0415 - it needs this module

        return text(self, width)

    def json(self) -> str:
        """All of it for a program: one JSON object with the names of the attributes."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))


def summarize(*sources: str | os.PathLike[str] | Iterable[dict[str, Any]]) -> Summary:
    """Sum up the traces of a run.

    Files of one rank count as parts of one run, those of several ranks are compared. Traces that are not ours, of PPE,
    torch.profiler, VizTracer or anybody else, give a plain table of spans by name.

    Args:
        *sources: Paths or URLs, as for :func:`read_events`, or events; merged traces, too.

    Returns:
        What it comes to; print it, or take its figures.

    Raises:
        OSError: A file cannot be read.
        TraceError: It is no Chrome trace.
        ValueError: Without a source.

    Example::

        summary = summarize("fit-rank0.json", "fit-rank1.json")
        print(summary)
        print(summary.verdict.bound, summary.table.row("data").share)
    """
    if not sources:
        raise ValueError("`summarize()`: expected one or more traces.")
    collection = Collection()
    paths = [source for source in sources if isinstance(source, (str, os.PathLike))]
    for source in [*(each for each in sources if each not in paths), *sorted(paths, key=begin_ns)]:
        collection.read(source)
    return result(collection)


def result(collection: Collection) -> Summary:
    """What was collected, as a summary."""
    ranks = sorted(collection.ranks.values(), key=lambda each: -1 if each.rank is None else each.rank)
    shown = next((each for each in ranks if each.steps.count), ranks[0] if ranks else None)
    warmup, table = _tables(shown) if shown is not None else (None, None)
    steady = {each.rank: steps for each in ranks if each.rank is not None and (steps := _tables(each)[1])}
    stragglers = compare({rank: steps for rank, steps in steady.items() if table and steps.unit == table.unit})
    run = _run(shown) if shown is not None else None
    validation, checkpoint = (_share(run, spell) for spell in (run.validation, run.checkpoint)) if run else (None, None)
    beside = Kinds(timed=True)
    for each in ranks:
        beside.merge(each.beside)
    kinds = shown.kinds if shown is not None else Kinds()
    callbacks = [kind for kind in kinds.values() if kind.category == "callback"]
    return Summary(
        verdict=judge(table, stragglers, validation, checkpoint),
        rank=shown.rank if shown is not None else None,
        ranks=len(ranks),
        files=collection.files,
        table=table,
        warmup=warmup,
        run=run,
        epochs=tuple(shown.epochs.values()) if shown is not None else (),
        epochs_left_out=shown.epochs_left_out if shown is not None else 0,
        validations=tuple(shown.validations) if shown is not None else (),
        checkpoints=tuple(shown.checkpoints) if shown is not None else (),
        bins=shown.steps.bins(shown.origin_ns or 0) if shown is not None else (),
        stragglers=stragglers,
        callbacks=named(callbacks)[:_DEAREST],
        callback_classes=by_class(callbacks),
        loggers=named(kind for kind in kinds.values() if kind.category == "logger"),
        user_spans=named(kind for kind in kinds.values() if kind.times is not None),
        beside=named(beside.values()),
        spans=named(collection.spans.values()),
        lost_bytes=collection.lost_bytes,
        unordered=sum(each.unordered for each in ranks),
    )


def _tables(rank: RankTimes) -> tuple[StepTable | None, StepTable | None]:
    steps = rank.steps if rank.steps.count else rank.batches
    return steps.tables(steps.warmup())


def _run(rank: RankTimes) -> Run:
    return Run(
        rank.stages,
        rank.first_step_ns,
        rank.stepping_ns or None,
        rank.sanity.total_ns if rank.sanity.count else None,
        rank.validation,
        rank.checkpoint,
        {phase: own_ns for phase, own_ns in zip(PHASES, rank.own_ns, strict=True) if own_ns},
    )


def _share(run: Run, spell: Spell) -> float | None:
    return spell.total_ns / run.training_ns if run.training_ns and spell.count else None
