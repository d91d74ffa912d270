"""A matplotlib figure -> an SVG that takes its colours, its font and its width from the page around it.

Only paths and texts are taken over, with attributes in place of styles, so that the page needs no inline style; without
ids, so that any number of them stand in one page; and without clipping: what is drawn lies within its axes.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.path import Path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matplotlib.axes import Axes

COLOURS = (
    *("data", "transfer", "forward", "backward", "optimizer", "callbacks", "own-spans", "sync", "other"),
    *("text", "muted", "line", "paper", "bar", "epoch", "accent"),
)
"""What the page's style sheet has colours for."""

DPI = 72  # a point is a pixel
TEXT = 12  # pixels

_KEPT = {
    *("fill", "fill-opacity", "opacity", "stroke", "stroke-dasharray", "stroke-linecap", "stroke-linejoin"),
    *("stroke-opacity", "stroke-width", "text-anchor", "font-weight"),
}
_NUMBER = r"-?\d+(?:\.\d*)?(?:e-?\d+)?"
_POINT = re.compile(rf"([ML]) ({_NUMBER}) ({_NUMBER})|(z)|(\S+)")
_UNTURNED = re.compile(r"rotate\(-?0(?:\.0*)? ")


def colour(name: str) -> str:
    """What matplotlib is given in place of a colour of the page."""
    return f"#0000{COLOURS.index(name) + 1:02x}"


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Figures are made and rendered with matplotlib's own defaults and these, whatever the user has set."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "svg.fonttype": "none",  # text stays text: small, sharp, in the page's font
                "svg.hashsalt": "lightning_timekeeper",
                "text.parse_math": False,
                "font.size": TEXT,
                "path.simplify": False,
                **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), colour("muted")),
                **dict.fromkeys(("axes.edgecolor", "grid.color"), colour("line")),
                **dict.fromkeys(("xtick.major.size", "ytick.major.size", "xtick.minor.size", "ytick.minor.size"), 0),
                "axes.linewidth": 1,
                "grid.linewidth": 1,
                "hatch.linewidth": 1,
                "axes.axisbelow": True,
            }
        )
        yield


def axes(width: int, height: int, left: int, right: int, top: int, bottom: int) -> Axes:
    """A figure of one plot.

    Args:
        width: Of the figure, pixels.
        height: Likewise.
        left: Margin around the plot, pixels.
        right: Likewise.
        top: Likewise.
        bottom: Likewise.
    """
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    plot = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    )
    plot.patch.set_visible(False)
    for side in ("top", "left", "right"):
        plot.spines[side].set_visible(False)
    return plot


def boxes(spans: Iterable[tuple[float, float]], bottom: float, top: float) -> Path:
    """Rectangles side by side, as one path: a thousand of them cost no more than a line of a thousand points."""
    vertices: list[tuple[float, float]] = []
    codes: list[Any] = []
    for begin, end in spans:
        vertices += [(begin, bottom), (begin, top), (end, top), (end, bottom), (begin, bottom)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(vertices, codes)


def render(plot: Axes, css_class: str, title: str, description: str) -> str:
    """The figure as an ``<svg>`` element with its text alternative.

    Args:
        plot: Of the figure.
        css_class: Of the element.
        title: What it shows.
        description: What there is to see, with the numbers that matter.
    """
    figure, file = plot.figure, io.BytesIO()
    assert isinstance(figure, Figure)  # noqa: S101 - not a subfigure
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = ET.fromstring(file.getvalue())  # noqa: S314 - just written by matplotlib
    view = drawn.attrib["viewBox"]
    made = ET.Element("svg", {"class": css_class, "viewBox": view, "role": "img"})
    ET.SubElement(made, "title").text = title
    ET.SubElement(made, "desc").text = description
    for element in drawn.iter():
        tag = element.tag.rpartition("}")[2]
        if tag == "path":
            path = _shortened(element.attrib["d"])
            if path:
                ET.SubElement(made, "path", {**_attributes(element), "d": path})
        elif tag == "text":
            place = {each: f"{float(element.attrib[each]):.1f}" for each in ("x", "y")}
            turn = element.attrib.get("transform", "")
            if turn and not _UNTURNED.match(turn):
                raise ValueError(f"expected no turned text, got {turn!r}")
            ET.SubElement(made, "text", {**_attributes(element), **place}).text = element.text
        elif tag not in ("svg", "g", "defs", "style", "clipPath", "rect", "metadata"):
            raise ValueError(f"expected paths and texts only, got {tag!r}")
    return ET.tostring(made, "unicode")


def _attributes(element: ET.Element) -> dict[str, str]:
    style = (each.partition(":") for each in element.attrib.get("style", "").split(";"))
    found = {name.strip(): value.strip() for name, _, value in style}
    found = {name: _themed(value) for name, value in found.items() if name in _KEPT}
    for name in ("stroke-linejoin", "stroke-linecap"):
        found.pop(name, None)  # the style sheet's
    return found


def _themed(value: str) -> str:
    if not value.startswith("#"):
        return value
    index = int(value[1:], 16) - 1
    if not 0 <= index < len(COLOURS):
        raise ValueError(f"expected a colour of the page, got {value!r}")
    return f"var(--{COLOURS[index]})"


def _shortened(path: str) -> str:
    """Tenths of a pixel, and only the coordinate that changes: a third of what matplotlib writes."""
    parts: list[str] = []
    last = ("", "")
    for command, x, y, close, other in _POINT.findall(path):
        if other:
            raise ValueError(f"expected straight lines only, got {other!r}")
        if close:
            parts.append("z")
            continue
        point = (f"{float(x):.1f}".removesuffix(".0"), f"{float(y):.1f}".removesuffix(".0"))
        if command == "M" or (point[0] != last[0] and point[1] != last[1]):
            parts.append(f"{command}{point[0]} {point[1]}")
        elif point != last:
            parts.append(f"H{point[0]}" if point[1] == last[1] else f"V{point[1]}")
        last = point
    return "".join(parts)
