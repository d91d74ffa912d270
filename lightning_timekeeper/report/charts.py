"""The pictures of the page, each drawn for a wide and for a narrow screen, so that its text keeps its size.

They show figures of the summary as they are. Colours are those of the columns of the ranks' table, everywhere.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

from matplotlib.patches import PathPatch
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from lightning_timekeeper.report import svg
from lightning_timekeeper.trace.summary.stragglers import COLUMNS, WAITS
from lightning_timekeeper.trace.summary.text import _percent, _time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.axes import Axes

    from lightning_timekeeper.trace.summary import Summary
    from lightning_timekeeper.trace.summary.rank_times import Epoch, Mark
    from lightning_timekeeper.trace.summary.step_bins import Bin
    from lightning_timekeeper.trace.summary.step_table import StepTable
    from lightning_timekeeper.trace.summary.stragglers import Rank

WIDE, NARROW = 960, 360  # pixels
MOST_RANKS = 48
_MOST_JUMPS = 40
_ROW = 30
_SPIKE = 2.5  # times the median of the steps in a bin: what is longer is cut off, or all others would be flat
_ORDER = (*(column for column in COLUMNS if column not in WAITS), *WAITS)


def both(draw: Callable[[int], Axes], title: str, description: str) -> str:
    """A picture in both widths, of which the style sheet shows one."""
    with svg.drawing():
        return "\n".join(
            svg.render(draw(width), css_class, title, description)
            for width, css_class in ((WIDE, "wide"), (NARROW, "narrow"))
        )


def columns_ns(phases_ns: dict[str, int]) -> dict[str, int]:
    """Times by phase -> by column of the ranks' table."""
    return {column: sum(phases_ns.get(phase, 0) for phase in phases) for column, phases in COLUMNS.items()}


def css_name(column: str) -> str:
    """Of a column's colour."""
    return column.replace(" ", "-")


# ---- the run -------------------------------------------------------------------------------------------------------
def run(summary: Summary) -> str:
    """Step time over the run, stacked by phase; below it, where validations and checkpoints were."""
    bins = summary.bins
    means_ns = sorted(each.duration_ns / each.steps for each in bins)
    limit_ns = max(1.0, min(means_ns[-1], _SPIKE * means_ns[len(means_ns) // 2]))
    longest = max(bins, key=lambda each: each.longest_ns)
    at = "" if longest.first_step is None else f", at {steps_of(longest)}"
    description = f"{sum(each.steps for each in bins):,} steps; the longest took {_time(longest.longest_ns)}{at}."
    if summary.table is not None:
        parts = [f"{row.phase} {_percent(row.share)}" for row in summary.table.rows[:3] if row.share is not None]
        description = f"{description} The largest parts: {', '.join(parts)}."
    return both(lambda width: _run(summary, width, limit_ns), "Step time over the run, by phase", description)


def cut_off(bins: Sequence[Bin]) -> int:
    """How many bins the picture of the run cuts off at its top."""
    means_ns = sorted(each.duration_ns / each.steps for each in bins)
    return sum(mean_ns > _SPIKE * means_ns[len(means_ns) // 2] for mean_ns in means_ns)


def _run(summary: Summary, width: int, limit_ns: float) -> Axes:
    bins = summary.bins
    rails = [(name, marks) for name, marks in _marks(summary) if marks]
    margin = 44 if not rails else 82 if width > 500 else 74
    plot = svg.axes(width, 264 + 18 * len(rails), margin, 8, 30, 30 + 18 * len(rails))
    edges = [0]
    for each in bins:
        edges.append(edges[-1] + each.steps)
    divisor_ns, unit = _unit(limit_ns)
    floor = [0.0] * len(bins)
    by_column = [columns_ns(each.phases_ns) for each in bins]
    for column in COLUMNS:
        top = [
            below + own[column] / each.steps / divisor_ns
            for below, own, each in zip(floor, by_column, bins, strict=True)
        ]
        if any(own[column] for own in by_column):
            limited = [[min(value, limit_ns / divisor_ns) for value in values] for values in (top, floor)]
            plot.stairs(
                limited[0], edges, baseline=limited[1], fill=True, facecolor=svg.colour(css_name(column)), linewidth=0
            )
        floor = top
    plot.set_xlim(0, edges[-1])
    plot.set_ylim(0, 1.08 * limit_ns / divisor_ns)
    _height_axis(plot, f"{unit} per step")
    pixel_x, pixel_y = _pixel(plot)
    cut = [
        left + each.steps / 2
        for left, each in zip(edges, bins, strict=False)
        if each.duration_ns / each.steps > limit_ns
    ]
    foot, half = limit_ns / divisor_ns + 2 * pixel_y, 4 * pixel_x
    for middle in cut:
        at = min(max(middle, half), edges[-1] - half)
        corners_y = [foot, foot, foot + 7 * pixel_y]
        plot.fill([at - half, at + half, at], corners_y, facecolor=svg.colour("accent"), linewidth=0)
    _step_axis(plot, bins, edges, width)
    plot.tick_params("x", pad=4 + 20 * len(rails))
    for row, (name, marks) in enumerate(rails):
        y = -(18 * row + 18) * pixel_y
        spans = sorted({round(_place(bins, edges, mark.start_ns) / pixel_x) for mark in marks})
        path = svg.boxes(((at * pixel_x - pixel_x, at * pixel_x + pixel_x) for at in spans), y, y + 9 * pixel_y)
        plot.add_patch(PathPatch(path, facecolor=svg.colour("text"), linewidth=0, clip_on=False))
        plot.text(-6 * pixel_x, y + 4.5 * pixel_y, name, ha="right", va="center")
    return plot


def _place(bins: Sequence[Bin], edges: Sequence[int], time_ns: int) -> float:
    """Where on the axis of counted steps a moment is; what lies between two steps is at the border of both."""
    at = bisect.bisect_right(bins, time_ns, key=lambda each: each.end_ns)
    if at == len(bins) or time_ns <= bins[at].start_ns:
        return edges[at]
    return edges[at] + bins[at].steps * (time_ns - bins[at].start_ns) / (bins[at].end_ns - bins[at].start_ns)


def _step_axis(plot: Axes, bins: Sequence[Bin], edges: Sequence[int], width: int) -> None:
    """Numbers of steps below the steps that were recorded, which need not follow on one another."""
    first, last = bins[0].first_step, bins[-1].last_step
    ticks = [int(tick) for tick in _ticks(9 if width > 500 else 4, integer=True).tick_values(0, edges[-1])]
    if first is None or last is None:
        plot.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if 0 <= tick <= edges[-1]]))
    elif last - first + 1 == edges[-1]:
        wanted = _ticks(9 if width > 500 else 4, integer=True).tick_values(first, last)
        shown = [int(tick) for tick in wanted if first <= tick <= last]
        plot.set_xticks([tick - first + 0.5 for tick in shown], [f"{tick:,}" for tick in shown])
    else:
        at = [index for index, left in enumerate(edges[:-1]) if any(left <= tick < edges[index + 1] for tick in ticks)]
        plot.set_xticks([edges[index] for index in at], [f"{bins[index].first_step:,}" for index in at])
    jumps = [
        left
        for left, before, after in zip(edges[1:], bins, bins[1:], strict=False)
        if None not in (before.last_step, after.first_step) and after.first_step != before.last_step + 1  # type: ignore[operator]
    ]
    for left in jumps[:_MOST_JUMPS]:
        plot.axvline(left, color=svg.colour("paper"), linewidth=2, clip_on=False)


def steps_of(each: Bin) -> str:
    """Which steps a bin holds."""
    if each.first_step is None:
        return f"{each.steps:,} steps"
    if each.steps == 1:
        return f"step {each.first_step:,}"
    return f"steps {each.first_step:,} to {each.last_step:,}"


# ---- their distribution --------------------------------------------------------------------------------------------
def distribution(table: StepTable) -> str:
    """How many steps took how long."""
    whole = table.whole
    description = (
        f"Half of the {table.steps:,} {table.unit} times are below {_time(whole.p50_ns)}, 95 % below "
        f"{_time(whole.p95_ns)}; the longest is {_time(whole.max_ns)}."
    )
    return both(lambda width: _distribution(table, width), f"Distribution of {table.unit} times", description)


def _distribution(table: StepTable, width: int) -> Axes:
    bars = table.distribution
    plot = svg.axes(width, 258, 44, 16, 70, 30)
    divisor_ns, unit = _unit(bars[-1].to_ns)
    low, high = bars[0].from_ns / divisor_ns, bars[-1].to_ns / divisor_ns
    low, high = (low * 0.97, high * 1.03) if high / low > 1.1 else (low * 0.9, high * 1.1)
    low = max(low, high / 1e9)
    plot.set_xscale("log")
    plot.set_xlim(low, high)
    tallest = max(bar.count for bar in bars)
    plot.set_ylim(0, tallest)
    gap = (high / low) ** (0.5 / width)  # half a pixel
    for bar in bars:
        left, right = max(low, bar.from_ns / divisor_ns), bar.to_ns / divisor_ns
        path = svg.boxes([(left * gap, right / gap) if right / left > gap**3 else (left, right)], 0, bar.count)
        plot.add_patch(PathPatch(path, facecolor=svg.colour("bar"), linewidth=0))
    _height_axis(plot, f"{table.unit}s" if table.unit == "step" else "batches")
    plot.yaxis.set_major_locator(_ticks(4, integer=True))
    ticks = _log_ticks(low, high, width)
    plot.xaxis.set_major_locator(FixedLocator(ticks))
    plot.xaxis.set_minor_locator(NullLocator())
    plot.set_xticklabels([f"{tick:,.6g} {unit}" for tick in ticks])
    _, pixel_y = _pixel(plot)
    for row, (name, time_ns, left) in enumerate(_labels(table, low * divisor_ns, high * divisor_ns, width)):
        at = min(max(time_ns / divisor_ns, low), high)
        y = tallest + (50 - 18 * row) * pixel_y
        plot.plot([at, at], [0, y + 6 * pixel_y], color=svg.colour("text"), linewidth=1, clip_on=False)
        beside = at * (high / low) ** ((-7 if left else 7) / width)
        label, align = f"{name} {_time(time_ns)}", "right" if left else "left"
        plot.text(beside, y, label, ha=align, va="center", color=svg.colour("text"))
    return plot


def _labels(table: StepTable, low_ns: float, high_ns: float, width: int) -> list[tuple[str, float, bool]]:
    """Name, time, and whether it stands left of its line, in rows from the top so that no line crosses a label."""
    row = table.whole
    times_ns = [(name, ns) for name, ns in (("p50", row.p50_ns), ("p95", row.p95_ns), ("max", row.max_ns)) if ns]
    room = (high_ns / low_ns) ** (120 / width)
    right = [(name, time_ns, False) for name, time_ns in times_ns if time_ns < low_ns * room]
    return right + [(name, time_ns, True) for name, time_ns in reversed(times_ns) if time_ns >= low_ns * room]


def _log_ticks(low: float, high: float, width: int) -> list[float]:
    """Round numbers, 64 pixels apart or more."""
    if high / low < 8:
        ticks = list(_ticks(12).tick_values(low, high))
    else:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(powers) < 5 else (1,)
        ticks = [factor * 10.0**power for power in powers for factor in factors]
    apart, kept = (high / low) ** (64 / (width - 60)), [0.0]
    for tick in ticks:
        if low <= tick <= high and tick >= kept[-1] * apart:
            kept.append(tick)
    return kept[1:]


# ---- ranks ---------------------------------------------------------------------------------------------------------
def shown_ranks(ranks: Sequence[Rank]) -> list[Rank]:
    """Those of the picture: where there are many, the ones that wait least."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    return sorted(sorted(ranks, key=lambda rank: rank.wait_ns)[:MOST_RANKS], key=lambda rank: rank.rank)


def ranks(summary: Summary) -> str:
    """A step of each rank: first what it does by itself, then where it waits for others."""
    return both(lambda width: _ranks(summary, width), "A step of each rank, by phase", summary.stragglers.why)


def _ranks(summary: Summary, width: int) -> Axes:
    shown = shown_ranks(summary.stragglers.ranks)
    plot = svg.axes(width, 26 + _ROW * len(shown), 60, 64, 0, 26)
    widest_ns = max(1.0, *(rank.step_ns for rank in shown))
    divisor_ns, unit = _unit(widest_ns)
    plot.set_xlim(0, widest_ns / divisor_ns)
    plot.set_ylim(_ROW * len(shown), 0)
    pixel_x, _ = _pixel(plot)
    for row, rank in enumerate(shown):
        left = 0.0
        for column in _ORDER:
            length = (rank.columns_ns[column] or 0.0) / divisor_ns
            end = min(left + length, widest_ns / divisor_ns)
            if end - left > 0.2 * pixel_x:
                path = svg.boxes([(left, max(left + pixel_x, end - pixel_x))], _ROW * row + 5, _ROW * (row + 1) - 5)
                plot.add_patch(PathPatch(path, facecolor=svg.colour(css_name(column)), linewidth=0, clip_on=False))
            left = end
        middle = _ROW * (row + 0.5)
        named = rank.rank == summary.stragglers.rank
        colour, weight = svg.colour("text" if named else "muted"), "bold" if named else "normal"
        for at, align, label in (
            (-8 * pixel_x, "right", f"rank {rank.rank}"),
            (rank.step_ns / divisor_ns + 8 * pixel_x, "left", _time(rank.step_ns)),
        ):
            plot.text(at, middle, label, ha=align, va="center", color=colour, weight=weight)
    plot.set_yticks([])
    plot.xaxis.set_major_locator(_ticks(8 if width > 500 else 4))
    plot.grid(visible=True, axis="x")
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g} {unit}")
    plot.spines["bottom"].set_visible(False)
    return plot


# ---- the time line -------------------------------------------------------------------------------------------------
def timeline(summary: Summary) -> str:
    """Epochs, the gaps between them, validations and checkpoints, in the time of the run."""
    counts = [f"{len(summary.epochs):,} epochs" if len(summary.epochs) != 1 else "1 epoch"]
    run = summary.run
    for name, spell in (("validations", run.validation), ("checkpoints", run.checkpoint)) if run else ():
        counts.append(f"{spell.count:,} {name} in {_time(spell.total_ns)}" if spell.count else f"no {name}")
    gaps_ns = [epoch.gap_ns for epoch in summary.epochs if epoch.gap_ns is not None]
    if gaps_ns:
        counts.append(f"gaps between epochs up to {_time(max(gaps_ns))}")
    return both(
        lambda width: _timeline(summary, width), "Epochs, gaps, validations and checkpoints", "; ".join(counts) + "."
    )


def _timeline(summary: Summary, width: int) -> Axes:
    start_up = []
    if summary.run is not None and summary.run.first_step_ns is not None and summary.bins:
        first_ns = summary.bins[0].start_ns
        start_up = [(first_ns - summary.run.first_step_ns, first_ns)]
    gaps = [
        (epoch.first_step_ns - epoch.gap_ns, epoch.first_step_ns)
        for epoch in summary.epochs
        if epoch.gap_ns is not None and epoch.first_step_ns is not None
    ]
    marks = [
        (name, [(mark.start_ns, mark.start_ns + mark.duration_ns) for mark in each]) for name, each in _marks(summary)
    ]
    lanes = [(name, spans) for name, spans in (("start-up", start_up), *marks, ("gap", gaps)) if spans]
    epochs = _epochs(summary.epochs)
    ends = [end for _, spans in lanes for _, end in spans] + [end for _, _, end in epochs]
    ends += [each.end_ns for each in summary.bins]
    end_ns = max(ends, default=1) or 1
    divisor_ns, unit = _clock(end_ns)
    rows = len(lanes) + bool(epochs)
    plot = svg.axes(width, 26 + _ROW * rows, 82, 12, 0, 26)
    plot.set_xlim(0, end_ns / divisor_ns)
    plot.set_ylim(_ROW * rows, 0)
    pixel_x, _ = _pixel(plot)
    if epochs:
        _epoch_lane(plot, epochs, divisor_ns, pixel_x)
    for row, (name, spans) in enumerate(lanes, start=bool(epochs)):
        top, bottom = _ROW * row + 7, _ROW * (row + 1) - 7
        at_least = [
            (begin / divisor_ns, min(max(end / divisor_ns, begin / divisor_ns + 2 * pixel_x), end_ns / divisor_ns))
            for begin, end in spans
        ]
        path = svg.boxes(at_least, bottom, top)
        colour = svg.colour("accent" if name == "gap" else "bar" if name == "start-up" else "text")
        plot.add_patch(PathPatch(path, facecolor=colour, linewidth=0, clip_on=False))
        plot.text(-8 * pixel_x, (top + bottom) / 2, name, ha="right", va="center")
    plot.set_yticks([])
    plot.grid(visible=True, axis="x")
    plot.xaxis.set_major_locator(_ticks(8 if width > 500 else 4))
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g} {unit}")
    plot.spines["bottom"].set_visible(False)
    return plot


def _epochs(epochs: Iterable[Epoch]) -> list[tuple[str, int, int]]:
    """Label, begin and end of each; none reaches into the next one, as one that was resumed would."""
    known = sorted((epoch for epoch in epochs), key=lambda epoch: epoch.start_ns)
    followed = [*(epoch.start_ns for epoch in known[1:]), math.inf]
    return [
        (
            "" if epoch.epoch is None else str(epoch.epoch),
            epoch.start_ns,
            int(min(epoch.start_ns + epoch.duration_ns, after)),
        )
        for epoch, after in zip(known, followed, strict=True)
    ]


def _epoch_lane(plot: Axes, epochs: Sequence[tuple[str, int, int]], divisor_ns: float, pixel_x: float) -> None:
    gap_ns = 1.5 * pixel_x * divisor_ns
    spans = [
        (begin / divisor_ns, (end - gap_ns if end - begin > 3 * gap_ns else end) / divisor_ns)
        for _, begin, end in epochs
    ]
    path = svg.boxes(spans, _ROW - 4, 4)
    plot.add_patch(PathPatch(path, facecolor=svg.colour("epoch"), linewidth=0, clip_on=False))
    plot.text(-8 * pixel_x, _ROW / 2, "epoch", ha="right", va="center")
    for (begin, end), (label, _, _) in zip(spans, epochs, strict=True):
        if end - begin > (10 + 8 * len(label)) * pixel_x:
            plot.text((begin + end) / 2, _ROW / 2, label, ha="center", va="center", color=svg.colour("text"))


# ---- axes ----------------------------------------------------------------------------------------------------------
def _marks(summary: Summary) -> Sequence[tuple[str, Sequence[Mark]]]:
    return (("validation", summary.validations), ("checkpoint", summary.checkpoints))


def _ticks(most: int, *, integer: bool = False) -> MaxNLocator:
    return MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=integer)


def _pixel(plot: Axes) -> tuple[float, float]:
    """How much one pixel is on either linear axis."""
    box = plot.get_window_extent()
    (left, right), (bottom, top) = plot.get_xlim(), plot.get_ylim()
    return (right - left) / box.width, abs(top - bottom) / box.height


def _height_axis(plot: Axes, label: str) -> None:
    plot.yaxis.set_major_locator(_ticks(4))
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    plot.grid(visible=True, axis="y")
    plot.tick_params("y", pad=6)
    plot.annotate(label, (0, 1), (0, -12), "figure fraction", "offset pixels", ha="left", va="center")


def _unit(time_ns: float) -> tuple[float, str]:
    """The unit in which a time has one to three digits before its point, and its ns."""
    return next(((ns, unit) for ns, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")) if time_ns >= ns), (1.0, "ns"))


def _clock(time_ns: float) -> tuple[float, str]:
    """The unit for the time of a run."""
    return next(((ns, unit) for ns, unit in ((3.6e12, "h"), (6e10, "min")) if time_ns >= 2 * ns), _unit(time_ns))
