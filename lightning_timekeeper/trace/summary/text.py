"""A summary as text for a terminal, 80 columns wide or more."""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from typing import TYPE_CHECKING

from lightning_timekeeper.trace.summary.stragglers import COLUMNS, WAITS
from lightning_timekeeper.trace.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_timekeeper.trace.summary import Run, Summary
    from lightning_timekeeper.trace.summary.by_name import Named
    from lightning_timekeeper.trace.summary.rank_times import Epoch, Spell
    from lightning_timekeeper.trace.summary.step_table import Row, StepTable
    from lightning_timekeeper.trace.summary.stragglers import Rank, Stragglers

NARROWEST, WIDEST = 80, 100
_MOST_ROWS = 20  # of names
_MOST_EPOCHS = 10
_RANK = 9
_EPOCH_CELLS = (8, 8, 8, 12, 12, 8, 8)
_MOST_RANKS = 8
_UNIT = re.compile(r" (%|(s|ms|µs|ns)\b)")
_STATE = re.compile(r"\{.*", re.DOTALL)


def terminal_width() -> int:
    """Columns to use: the terminal's, from 80 to 100; 100 where the output is none."""
    if not sys.stdout.isatty():
        return WIDEST
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def text(summary: Summary, width: int) -> str:
    """The report, of lines that are at most so wide; no byte of a name can steer the terminal."""
    width = max(width, NARROWEST)
    return "\n".join(line.rstrip() for part in _parts(summary, width) for line in part).removeprefix("\n")


def _parts(summary: Summary, width: int) -> Iterator[list[str]]:
    verdict, table, run = summary.verdict, summary.table, summary.run
    if verdict.bound is not None:
        level = {"ok": "Bound", "warning": "Warning: bound", "critical": "Critical: bound"}[verdict.level]
        yield _wrapped(f"{level} by {verdict.bound}. {verdict.why}", width)
        yield _wrapped(f"To try: {verdict.advice}", width)
    if table is not None:
        yield ["", *_step_table(summary, table, width)]
    if run is not None and run.stages_ns:
        yield ["", *_run_lines(run, summary, width)]
    if any(epoch.steps for epoch in summary.epochs):
        yield ["", *_epochs(summary.epochs, summary.epochs_left_out, width)]
    if len(summary.stragglers.ranks) > 1:
        yield ["", *_ranks(summary.stragglers, width)]
    if summary.callbacks:
        classes = ", ".join(
            f"{_safe(each.name)} {_time(each.total_ns)}" for each in summary.callback_classes[:_MOST_ROWS]
        )
        yield ["", *_names("dearest callback hooks", summary.callbacks, width)]
        yield _wrapped(f"All callbacks: {classes}", width)
    for title, rows in (
        ("logger", summary.loggers),
        ("span of your own", summary.user_spans),
        ("beside the loop", summary.beside),
        ("span", summary.spans),
    ):
        if rows:
            yield ["", *_names(title, rows, width)]
    notes = []
    if summary.lost_bytes:
        notes.append(f"{summary.lost_bytes:,} bytes could not be read.")
    if summary.unordered:
        notes.append(f"{summary.unordered:,} spans stand before the span around them: their phases may be wrong.")
    if table is None and not (summary.spans or summary.user_spans or summary.beside):
        notes.append("There are no spans in it.")
    if notes:
        yield ["", *_wrapped(" ".join(notes), width)]


# ---- parts ---------------------------------------------------------------------------------------------------------
def _step_table(summary: Summary, table: StepTable, width: int) -> list[str]:
    name_width = width - 70
    whose = f" of rank {summary.rank}" if summary.ranks > 1 else ""
    numbers = "" if table.first_step is None else f" {table.first_step} to {table.last_step}"
    units = "steps" if table.unit == "step" else "batches"
    count = f"{table.steps:,} {units if table.steps > 1 else table.unit}{whose}"
    title = f"{count}:{numbers}" if numbers else count
    if summary.warmup is not None:
        before = summary.warmup
        title += (
            f"; before: {before.steps} of warm-up, {_time(before.whole.total_ns)}, mean {_time(before.whole.mean_ns)}"
        )
    heads = ("share", "mean", "p50", "p95", "max", f"at {table.unit}", "calls")
    lines = [title, _line("phase", heads, name_width)]
    return lines + [_line(row.phase, _step_cells(row), name_width) for row in (table.whole, *table.rows)]


def _step_cells(row: Row) -> tuple[str, ...]:
    at = "n/a" if row.max_step is None else str(row.max_step)
    times = (row.mean_ns, row.p50_ns, row.p95_ns, row.max_ns)
    return (_percent(row.share), *map(_time, times), at, f"{row.calls:,}" if row.calls else "n/a")


def _run_lines(run: Run, summary: Summary, width: int) -> list[str]:
    stages = ", ".join(f"{name} {_time(time_ns)}" for name, time_ns in run.stages_ns.items())
    parts = [stages]
    if "fit" in run.stages_ns:
        parts.append(f"to the first step {_time(run.first_step_ns)}")
        parts.append(f"sanity check {_time(run.sanity_check_ns)}")
        parts.append(f"validation {_spell(run.validation)}")
        parts.append(f"checkpoints {_spell(run.checkpoint)}")
        if not summary.loggers:
            parts.append("loggers n/a")
    return _wrapped("Run: " + "; ".join(parts), width)


def _epochs(epochs: Sequence[Epoch], left_out: int, width: int) -> list[str]:
    shown = [*epochs[:3], *epochs[3 - _MOST_EPOCHS :]] if len(epochs) > _MOST_EPOCHS else list(epochs)
    heads = ("time", "steps", "train", "validation", "checkpoint", "longest", "gap")
    lines = [_line("epoch", heads, width - 71, _EPOCH_CELLS)]
    for at, epoch in enumerate(shown):
        if len(shown) < len(epochs) and at == 3:
            lines.append(f"... {len(epochs) - len(shown):,} more")
        validation, checkpoint = epoch.validation, epoch.checkpoint
        cells = (
            _time(epoch.duration_ns),
            f"{epoch.steps:,}",
            _time(epoch.train_ns if epoch.steps else None),
            _counted(validation),
            _counted(checkpoint),
            _time(checkpoint.longest_ns if checkpoint.count else None),
            _time(epoch.gap_ns),
        )
        lines.append(_line("n/a" if epoch.epoch is None else str(epoch.epoch), cells, width - 71, _EPOCH_CELLS))
    return lines + ([f"{left_out:,} epochs more are not kept apart"] if left_out else [])


def _ranks(stragglers: Stragglers, width: int) -> list[str]:
    columns = [column for column in COLUMNS if any(rank.columns_ns[column] is not None for rank in stragglers.ranks)]
    for column in ("own spans", "transfer", "other", "optimizer"):  # what does not fit goes, the least telling first
        if 10 * (len(columns) + 1) + _RANK > width and column in columns and column != stragglers.cause:
            columns.remove(column)
    # the ones to look at, where there are many: those that wait least
    ranks: Sequence[Rank] = stragglers.ranks
    if len(ranks) > _MOST_RANKS:
        ranks = sorted(sorted(ranks, key=lambda rank: rank.wait_ns)[:_MOST_RANKS], key=lambda rank: rank.rank)
    lines = [_line("ms/step", ("step", *columns), _RANK)]
    for rank in ranks:
        cells = (_ms(rank.step_ns), *(_ms(rank.columns_ns[column]) for column in columns))
        lines.append(_line(f"rank {rank.rank}", cells, _RANK))
    if len(ranks) < len(stragglers.ranks):
        lines.append(f"... {len(stragglers.ranks) - len(ranks):,} more, which wait longer")
    spreads = [stragglers.spreads.get(column) for column in columns]
    lines.append(_line("median", ("", *(_ms(each.median_ns) if each else "" for each in spreads)), _RANK))
    worst = [f"rank {each.worst_rank}" if each else "" for each in spreads]
    lines.append(_line("worst", ("", *worst), _RANK))
    skews = [f"{each.skew:.3g}x" if each and each.skew is not None else "" for each in spreads]
    lines.append(_line("skew", ("", *skews), _RANK))
    waits = " and ".join(WAITS)
    return [*lines, *_wrapped(f"{stragglers.why} (In {waits} a rank waits for others.)", width)]


def _names(title: str, rows: Sequence[Named], width: int) -> list[str]:
    name_width = width - 6 * 10
    if any(row.p50_ns is not None for row in rows):
        heads: tuple[str, ...] = ("total", "mean", "p50", "p95", "max", "calls")
    else:
        heads, name_width = ("total", "mean", "max", "calls"), name_width + 20
    lines = [_line(title, heads, name_width)]
    for row in rows[:_MOST_ROWS]:
        quantiles = () if len(heads) == 4 else (_time(row.p50_ns), _time(row.p95_ns))
        cells = (_time(row.total_ns), _time(row.mean_ns), *quantiles, _time(row.max_ns), f"{row.calls:,}")
        lines.append(_line(row.name, cells, name_width))
    if len(rows) > _MOST_ROWS:
        rest = rows[_MOST_ROWS:]
        lines.append(f"... {len(rest):,} more names, {_time(sum(row.total_ns for row in rest))}")
    return lines


# ---- cells ---------------------------------------------------------------------------------------------------------
def _line(name: str, cells: Sequence[str], name_width: int, cell_widths: int | Sequence[int] = 9) -> str:
    widths = [cell_widths] * len(cells) if isinstance(cell_widths, int) else cell_widths
    return _fit(name, name_width) + "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _safe(name: str) -> str:
    """A name without what a terminal would obey, and without a callback's whole state key."""
    name = _STATE.sub("", name) or name
    return printable(name)


def _fit(name: str, width: int) -> str:
    """As wide as that, cut in the middle where it is longer: both the class and the hook can be told."""
    name = _safe(name)
    if _columns(name) > width:
        head, tail = name, name
        while _columns(head) > (width - 1) // 2:
            head = head[:-1]
        while _columns(tail) > width - 1 - _columns(head):
            tail = tail[1:]
        name = f"{head}…{tail}"
    return name + " " * (width - _columns(name))


def _columns(name: str) -> int:
    if name.isascii():
        return len(name)
    marks = sum(unicodedata.combining(letter) > 0 for letter in name)
    return len(name) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in name) - marks


def _wrapped(line: str, width: int) -> list[str]:
    lines, rest = [], line
    while _columns(rest) > width:
        cut = rest.rfind(" ", 0, width)
        if _UNIT.match(rest, cut):  # stays with its number
            cut = rest.rfind(" ", 0, cut)
        cut = max(width // 2, cut)
        lines.append(rest[:cut].rstrip())
        rest = "  " + rest[cut:].lstrip()
    return [*lines, rest]


def _time(time_ns: float | None) -> str:
    """Three digits and a unit."""
    if time_ns is None:
        return "n/a"
    for unit_ns, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if time_ns >= 0.9995 * unit_ns:
            value = time_ns / unit_ns
            return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    return f"{time_ns:.0f} ns"


def _ms(time_ns: float | None) -> str:
    if time_ns is None:
        return "n/a"
    if 0 < time_ns < 5000:
        return "<0.01"
    return f"{time_ns / 1e6:,.{2 if time_ns < 99.995e6 else 0}f}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"


def _counted(spell: Spell) -> str:
    return f"{spell.count}: {_time(spell.total_ns)}" if spell.count else "n/a"


def _spell(spell: Spell) -> str:
    if not spell.count:
        return "n/a"
    longest = f", longest {_time(spell.longest_ns)}" if spell.count > 1 else ""
    return f"{spell.count} in {_time(spell.total_ns)}{longest}"
