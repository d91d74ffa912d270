"""A summary -> the page: which figures stand where, in which words."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from lightning_timekeeper import __version__
from lightning_timekeeper.report import charts
from lightning_timekeeper.trace.summary.rank_times import MOST_MARKS
from lightning_timekeeper.trace.summary.stragglers import COLUMNS, WAITS
from lightning_timekeeper.trace.summary.text import _counted, _fit, _ms, _percent, _time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lightning_timekeeper.trace.summary import Summary
    from lightning_timekeeper.trace.summary.by_name import Named
    from lightning_timekeeper.trace.summary.rank_times import Epoch, Mark
    from lightning_timekeeper.trace.summary.step_table import StepTable
    from lightning_timekeeper.trace.summary.stragglers import Stragglers

_COLUMN = {phase: column for column, phases in COLUMNS.items() for phase in phases}
_LEVELS = {"ok": "No warning", "warning": "Warning", "critical": "Critical"}
_MOST_FILES = 3
_MOST_NAMES = 100
_MOST_RANKS = 1000
_MOST_OPEN = 12  # rows of a table that is shown at once; a longer one scrolls in its own box
_NAME, _FULL_NAME = 72, 300  # letters


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        name: Its head.
        cells: The others.
        full: The head in full length.
        css: Class of the row.
        swatch: Class of the colour of its mark and bar.
        share: Length of its bar, 0 to 1; None for no bar.
        path: A last cell, of text.
    """

    name: str
    cells: Sequence[str]
    full: str = ""
    css: str = ""
    swatch: str = ""
    share: float | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "full", self.full or self.name)


@dataclass(frozen=True)
class Table:
    """Figures, with a name that screen readers tell."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Row]
    bars: bool = False
    note: str = ""
    tall: bool = False


@dataclass
class Section:
    """One part of the page: its words, its picture, the numbers as tables, the long ones folded."""

    title: str
    lead: str = ""
    legend: Sequence[tuple[str, str]] = ()
    whole: dict[str, Any] | None = None
    pictures: str = ""
    caption: str = ""
    tables: list[Table] = field(default_factory=list)
    folded: list[Table] = field(default_factory=list)


def page(summary: Summary, files: Sequence[str] = ()) -> str:
    """The page as HTML.

    Args:
        summary: What it shows.
        files: Names of the traces.
    """
    here = resources.files(__package__)
    style = here.joinpath("page.css").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    verdict = summary.verdict
    return environment.from_string(
        here.joinpath("page.html.jinja").read_text("utf-8")
    ).render(
        style=Markup(style),  # noqa: S704 - a file of ours
        style_hash=f"sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}",
        headline=f"Bound by {verdict.bound}" if verdict.bound else "Spans by name",
        level=_LEVELS[verdict.level] if verdict.bound else "",
        verdict=verdict,
        files=[_fit(name, _NAME).rstrip() for name in files[:_MOST_FILES]],
        more_files=max(0, len(files) - _MOST_FILES),
        scope=_scope(summary),
        facts=list(_facts(summary)),
        sections=list(_sections(summary)),
        notes=" ".join(_notes(summary)),
        version=__version__,
    )


def _scope(summary: Summary) -> str:
    if summary.ranks > 1:
        return f"{summary.ranks:,} ranks" + ("" if summary.rank is None else f", times of rank {summary.rank}")
    return "" if summary.rank is None else f"rank {summary.rank}"


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    run, table = summary.run, summary.table
    for stage, time_ns in run.stages_ns.items() if run is not None else ():
        yield f"{stage}, in all", _time(time_ns)
    if run is not None and run.first_step_ns is not None:
        yield "to the first step", _time(run.first_step_ns)
    if table is not None:
        yield f"{table.unit}, mean of {table.steps:,}", _time(table.whole.mean_ns)
        yield f"{table.unit}, p95", _time(table.whole.p95_ns)
    for name, spell in (("validation", run.validation), ("checkpoint", run.checkpoint)) if run is not None else ():
        if spell.count:
            yield f"{spell.count:,} {name}{'s' if spell.count > 1 else ''}", _time(spell.total_ns)


def _notes(summary: Summary) -> Iterator[str]:
    if summary.lost_bytes:
        yield f"{summary.lost_bytes:,} bytes could not be read."
    if summary.unordered:
        yield f"{summary.unordered:,} spans stand before the span around them: their phases may be wrong."


def _sections(summary: Summary) -> Iterator[Section]:
    if summary.table is not None:
        yield _step(summary, summary.table)
        if summary.bins:
            yield _run(summary)
        if summary.table.distribution:
            yield _distribution(summary.table)
    if len(summary.stragglers.ranks) > 1:
        yield _ranks(summary.stragglers, summary)
    if any(epoch.steps for epoch in summary.epochs) or summary.validations or summary.checkpoints:
        yield _timeline(summary)
    if summary.callbacks:
        section = Section("Callbacks and hooks", "The dearest hooks, and all callbacks by class.")
        section.tables = [_names("Dearest hooks", "hook", summary.callbacks)]
        section.tables.append(_names("All callbacks by class", "class", summary.callback_classes))
        yield section
    for title, lead, head, rows in (
        ("Loggers", "", "logger", summary.loggers),
        (
            "Spans of your own",
            "On the track of the training loop, each with what is inside it.",
            "span",
            summary.user_spans,
        ),
        ("Beside the loop", "In DataLoader workers and other threads, of all ranks.", "span", summary.beside),
        ("All spans", "Each with what is inside it.", "span", summary.spans),
    ):
        if rows:
            yield Section(title, lead, tables=[_names(title, head, rows)])


# ---- parts ---------------------------------------------------------------------------------------------------------
def _step(summary: Summary, table: StepTable) -> Section:
    unit, units = _units(table)
    numbers = "" if table.first_step is None else f", {table.first_step:,} to {table.last_step:,}"
    whose = f" of rank {summary.rank}" if summary.ranks > 1 else ""
    lead = f"{table.steps:,} {units if table.steps > 1 else unit}{whose}{numbers}; self time by phase."
    if summary.warmup is not None:
        before = summary.warmup.whole
        lead += f" Left out: {summary.warmup.steps} of warm-up, {_time(before.mean_ns)} on average."
    parts, begin = [], 0.0
    for row in table.rows:
        if row.share:
            parts.append({"begin": begin, "length": 100 * row.share, "css": _css(row.phase)})
            begin += 100 * row.share
    largest = max((row.share or 0.0 for row in table.rows), default=0.0) or 1.0
    shares = ", ".join(f"{row.phase} {_percent(row.share)}" for row in table.rows if row.share is not None)
    rows = [Row(unit, _cells(table.whole), css="sum")]
    rows += [
        Row(
            row.phase,
            _cells(row),
            swatch=_css(row.phase),
            share=None if row.share is None else row.share / largest,
            css="" if row.steps else "quiet",
        )
        for row in table.rows
    ]
    heads = ("phase", "", "share", "mean", "p50", "p95", "max", f"at {unit}", "calls")
    return Section(
        f"Where the time of a {unit} goes",
        lead,
        whole={"name": f"A {unit}, by phase", "description": shares, "parts": parts},
        tables=[Table(f"Times of a {unit} by phase", heads, rows, bars=True)],
    )


def _cells(row: Any) -> tuple[str, ...]:
    at = "n/a" if row.max_step is None else f"{row.max_step:,}"
    times = (row.mean_ns, row.p50_ns, row.p95_ns, row.max_ns)
    return (_percent(row.share), *map(_time, times), at, f"{row.calls:,}" if row.calls else "n/a")


def _run(summary: Summary) -> Section:
    bins = summary.bins
    by_column = [charts.columns_ns(each.phases_ns) for each in bins]
    columns = [column for column in COLUMNS if any(own[column] for own in by_column)]
    most = max(each.steps for each in bins)
    caption = "Each column is one step." if most == 1 else f"Each column is the mean of up to {most:,} steps."
    cut = charts.cut_off(bins)
    if cut:
        longest = max(bins, key=lambda each: each.longest_ns)
        caption += f" A triangle marks what is cut off at the top ({cut:,} in all); the longest step took {_time(longest.longest_ns)}"
        caption += "." if longest.first_step is None else f" ({charts.steps_of(longest)})."
    rows = [
        Row(charts.steps_of(each), (_time(each.duration_ns / each.steps), _time(each.longest_ns), *map(_time, own)))
        for each, own in (
            (each, [own[column] / each.steps for column in columns]) for each, own in zip(bins, by_column, strict=True)
        )
    ]
    return Section(
        "Step time over the run",
        "Warm-up included.",
        _legend(columns),
        pictures=_picture(charts.run(summary)),
        caption=caption + _first(summary),
        folded=[Table("Step times as a table", ("steps", "mean", "longest", *columns), rows)],
    )


def _distribution(table: StepTable) -> Section:
    unit, units = _units(table)
    rows = [Row(f"{_time(bar.from_ns)} to {_time(bar.to_ns)}", (f"{bar.count:,}",)) for bar in table.distribution]
    return Section(
        f"How {unit} times are distributed",
        "Without the warm-up. The scale of time is logarithmic.",
        pictures=_picture(charts.distribution(table)),
        folded=[Table("The distribution as a table", (f"time of a {unit}", units), rows)],
    )


def _ranks(stragglers: Stragglers, summary: Summary) -> Section:
    columns = [column for column in COLUMNS if any(rank.columns_ns[column] is not None for rank in stragglers.ranks)]
    kept = sorted(stragglers.ranks, key=lambda rank: rank.wait_ns)[:_MOST_RANKS]
    rows = [
        Row(
            f"rank {rank.rank}",
            (_ms(rank.step_ns), *(_ms(rank.columns_ns[column]) for column in columns)),
            css="named" if rank.rank == stragglers.rank else "",
        )
        for rank in sorted(kept, key=lambda rank: rank.rank)
    ]
    spreads = [stragglers.spreads.get(column) for column in columns]
    rows.append(Row("median", ("", *(_ms(each.median_ns) if each else "" for each in spreads)), css="quiet"))
    rows.append(Row("worst", ("", *(f"rank {each.worst_rank}" if each else "" for each in spreads)), css="quiet"))
    skews = [f"{each.skew:.3g}x" if each and each.skew is not None else "" for each in spreads]
    rows.append(Row("skew", ("", *skews), css="quiet"))
    caption = f"The mean of a step. In {' and '.join(WAITS)}, last in each row, a rank waits for others."
    if len(stragglers.ranks) > charts.MOST_RANKS:
        caption += f" Shown are the {charts.MOST_RANKS} that wait least."
    note = (
        f"{len(stragglers.ranks) - len(kept):,} more ranks, which wait longer."
        if len(kept) < len(stragglers.ranks)
        else ""
    )
    heads = ("ms per step", "step", *columns)
    return Section(
        "Ranks side by side",
        stragglers.why,
        _legend([*(column for column in columns if column not in WAITS), *(each for each in WAITS if each in columns)]),
        pictures=_picture(charts.ranks(summary)),
        caption=caption,
        tables=[Table("Times of the ranks", heads, rows, note=note, tall=len(rows) > 2 * _MOST_OPEN)],
    )


def _timeline(summary: Summary) -> Section:
    section = Section("Epochs and gaps", pictures=_picture(charts.timeline(summary)))
    section.caption = (
        "A gap is the time between the end of the last step, validation or checkpoint and the first step of an epoch."
    )
    section.caption += _first(summary)
    if summary.epochs:
        heads = ("epoch", "time", "steps", "train", "validation", "checkpoint", "longest", "gap before")
        note = f"{summary.epochs_left_out:,} epochs more are not kept apart." if summary.epochs_left_out else ""
        rows = [_epoch(epoch) for epoch in summary.epochs]
        section.tables = [Table("Epochs", heads, rows, note=note, tall=len(rows) > _MOST_OPEN)]
    for name, marks in (("Validations", summary.validations), ("Checkpoints", summary.checkpoints)):
        if marks:
            columns = ["begin", "time", "after step", *(["file"] if any(mark.path for mark in marks) else [])]
            section.folded.append(Table(name, columns, [_mark(mark, len(columns)) for mark in marks]))
    return section


def _first(summary: Summary) -> str:
    """What a picture must say where there were more marks than are kept one by one."""
    run = summary.run
    pairs = ((summary.validations, run.validation), (summary.checkpoints, run.checkpoint)) if run is not None else ()
    if summary.epochs_left_out or any(len(marks) < spell.count for marks, spell in pairs):
        return f" Of more than {MOST_MARKS:,} epochs, validations or checkpoints only the first are marked."
    return ""


def _epoch(epoch: Epoch) -> Row:
    checkpoint = epoch.checkpoint
    cells = (
        _time(epoch.duration_ns),
        f"{epoch.steps:,}",
        _time(epoch.train_ns if epoch.steps else None),
        _counted(epoch.validation),
        _counted(checkpoint),
        _time(checkpoint.longest_ns if checkpoint.count else None),
        _time(epoch.gap_ns),
    )
    return Row("n/a" if epoch.epoch is None else f"{epoch.epoch:,}", cells)


def _mark(mark: Mark, columns: int) -> Row:
    step = "n/a" if mark.step is None else f"{mark.step:,}"
    path = _fit(mark.path or "n/a", _NAME).rstrip() if columns > 3 else None
    return Row(_time(mark.start_ns), (_time(mark.duration_ns), step), path=path)


def _names(name: str, head: str, rows: Sequence[Named]) -> Table:
    shown = rows[:_MOST_NAMES]
    quantiles = any(row.p50_ns is not None for row in shown)
    heads = (head, "", "total", "mean", *(("p50", "p95") if quantiles else ()), "max", "calls")
    dearest_ns = max(row.total_ns for row in shown) or 1
    made = []
    for row in shown:
        middle = (_time(row.p50_ns), _time(row.p95_ns)) if quantiles else ()
        cells = (_time(row.total_ns), _time(row.mean_ns), *middle, _time(row.max_ns), f"{row.calls:,}")
        full = _fit(row.name, _FULL_NAME).rstrip()
        made.append(Row(_fit(row.name, _NAME).rstrip(), cells, full, share=row.total_ns / dearest_ns))
    rest = rows[_MOST_NAMES:]
    note = f"{len(rest):,} more names, {_time(sum(row.total_ns for row in rest))}." if rest else ""
    return Table(name, heads, made, bars=True, note=note, tall=len(made) > 2 * _MOST_OPEN)


def _units(table: StepTable) -> tuple[str, str]:
    return (table.unit, "steps" if table.unit == "step" else "batches")


def _css(phase: str) -> str:
    return charts.css_name(_COLUMN.get(phase, "other"))


def _legend(columns: Iterable[str]) -> list[tuple[str, str]]:
    return [(column, charts.css_name(column)) for column in columns]


def _picture(drawn: str) -> str:
    return Markup(drawn)  # noqa: S704 - matplotlib and ElementTree have escaped it
