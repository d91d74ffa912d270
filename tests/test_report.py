"""``timekeeper report``: one page that shows the summary's figures, runs nothing, and reads well anywhere."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from summaries import Run, training

import lightning_timekeeper
from lightning_timekeeper import summarize
from lightning_timekeeper.__main__ import main

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from lightning_timekeeper.report import report
from lightning_timekeeper.report.page import page
from lightning_timekeeper.report.svg import COLOURS

HOSTILE = (
    "<script>alert(1)</script>",
    "</svg><script>alert(1)</script>",
    "</style></title><img src=x onerror=alert(1)>",
    "\"'><a href='https://example.com'>",
    "{{ 7 * 7 }}",
    "$x^{2}$ & &lt;",
)
CSS = resources.files("lightning_timekeeper.report").joinpath("page.css").read_text("utf-8")


class Parsed(HTMLParser):
    """Tags with their attributes, and the text, of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.rows, self._in_style, self._in_cell = [], "", [], False, False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in_style = tag == "style"
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._in_style = False
        self._in_cell = self._in_cell and tag not in ("th", "td")

    def handle_data(self, data):
        if not self._in_style:
            self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data.strip()

    @property
    def cells(self):
        return [cell for row in self.rows for cell in row]


def a_run(rank=0, epochs=3, steps=30, late_ms=0.0):
    """A fit with all that the page shows, in which every name is hostile."""
    run = Run(rank, pid=10_000 + rank)
    run.add("B", "fit", "loop")
    run.span("setup", "setup", 40)
    for epoch in range(epochs):
        run.add("B", "epoch", "loop", epoch=epoch)
        run.now_ms += 30
        for number in range(steps):
            step = epoch * steps + number
            optimizer = 9 if step == 40 else 1 + step % 7
            run.step(0.5, epoch=epoch, data=2, forward=6 + late_ms, backward=20 - late_ms, optimizer=optimizer)
        for name in HOSTILE:
            run.span(name, "user", 2)
            run.span(name, "callback", 3)
            run.add("X", name, "mine", 4, tid=5)
        run.span("validate", "validation", 80, step=step + 1)
        run.span("save_checkpoint", "checkpoint", 30)
        run.add("i", "checkpoint saved", "checkpoint", path=HOSTILE[epoch % len(HOSTILE)])
        run.add("E")
    run.add("E")
    return run


@pytest.fixture(scope="module")
def summary():
    """Of two ranks; the second is late."""
    return summarize(a_run().events, a_run(1, late_ms=15).events)


@pytest.fixture(scope="module")
def html(summary):
    return page(summary, [HOSTILE[0], "fit-rank1.json"])


# ---- what it shows -------------------------------------------------------------------------------------------------
def test_the_page_says_what_the_summary_says(summary, html):
    """The verdict is its heading, and the figures of the step table stand in its cells."""
    shown = Parsed(html)
    assert "Bound by stragglers" in shown.text
    assert summary.stragglers.why in shown.text
    optimizer = summary.table.row("optimizer")
    p50, p95 = (f"{time_ns / 1e6:.2f} ms" for time_ns in (optimizer.p50_ns, optimizer.p95_ns))
    for row in (
        ["optimizer", "", "12.3 %", "4.00 ms", p50, p95, "9.00 ms", "40", "90"],
        ["step 3", "32.5 ms", "32.5 ms", "2.00 ms", "6.00 ms", "20.0 ms", "4.00 ms", "500 µs"],
        ["rank 1", "32.50", "2.00", "21.00", "5.00", "4.00", "0.50"],
        ["1", "1.15 s", "30", "977 ms", "1: 80.0 ms", "1: 30.0 ms", "30.0 ms", "30.0 ms"],
    ):
        assert row in shown.rows
    assert sum(int(row[1]) for row in shown.rows if re.match(r"[\d.]+ ms to", row[0])) == 90  # the distribution
    for heading in ("Step time over the run", "Ranks side by side", "Epochs and gaps", "Callbacks and hooks"):
        assert heading in shown.text


def heights(html, colour, css_class="wide"):
    """The vertical extents of what is drawn in a colour of the page, one for each run of a path, in pixels."""
    (svg,) = re.findall(rf'<svg class="{css_class}"[^>]*><title>Step time over the run.*?</svg>', html, re.DOTALL)
    for path in re.findall(rf'<path fill="var\(--{colour}\)"[^>]*? d="([^"]*)"', svg):
        ys = [float(y) for _, y in re.findall(r"([MLV])(?:[\d.]+ )?([\d.]+)", path)]
        yield max(ys) - min(ys)


def test_pictures_are_to_scale():
    """Phases of 2, 6 and 4 ms in each step are layers of these heights."""
    html = page(summarize(training(40, data=2, forward=6, optimizer=4).events))
    for css_class in ("wide", "narrow"):
        data, forward, optimizer = (
            next(iter(heights(html, colour, css_class))) for colour in ("data", "forward", "optimizer")
        )
        assert forward == pytest.approx(3 * data, abs=0.4)
        assert optimizer == pytest.approx(2 * data, abs=0.4)


def test_one_long_step_does_not_flatten_the_others():
    """It is cut off, marked, and told."""
    run = training(40, forward=5)
    run.step(forward=5000)
    html = page(summarize(run.events))
    assert max(heights(html, "forward")) > 100
    assert "cut off at the top (1 in all); the longest step took 5.00 s (step 40)." in html


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"ph": "X", "cat": "op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 5, "dur": 7}],
        training(1, forward=5).events,
        training(3).events,  # of no time at all
        Run().events,
    ],
    ids=["empty", "foreign", "one step", "no time", "no span"],
)
def test_there_is_a_page_of_any_trace(events):
    """Of those that are not ours a plain table; what was not measured has no picture."""
    shown = Parsed(page(summarize(events)))
    assert [tag for tag, _ in shown.tags].count("h1") == 1
    if events and events[0]["ph"] == "X":
        assert "aten::add" in shown.cells


def test_other_stages_and_windows_have_a_page():
    """Batches of a validation instead of steps; steps that do not follow on one another, with no number in doubt."""
    run = Run()
    run.add("B", "validate", "loop")
    for batch in range(4):
        run.add("X", "batch", "loop", 30, batch=batch)
        run.span("data", "data", 10)
        run.now_ms += 20
    run.add("E")
    assert "Where the time of a batch goes" in page(summarize(run.events))
    windows = training(20, forward=5)
    windows.steps = itertools.count(100)
    windows.now_ms += 1e6
    for _ in range(20):
        windows.step(forward=5)
    (svg,) = re.findall(r'<svg class="wide"[^>]*><title>Step time.*?</svg>', page(summarize(windows.events)), re.DOTALL)
    labels = re.findall(r"<text[^>]*>([\d,]+)</text>", svg)
    assert {"0", "10", "100", "110"} <= set(labels)
    assert "50" not in labels


# ---- a page that runs nothing --------------------------------------------------------------------------------------
def test_names_stay_text(html):
    """Whatever a span, a callback, a file or a checkpoint is called, none of it becomes markup or a template."""
    shown = Parsed(html)
    kinds = {tag for tag, _ in shown.tags}
    assert not kinds & {
        "script",
        "img",
        "a",
        "link",
        "iframe",
        "object",
        "image",
        "use",
        "foreignobject",
        "form",
        "base",
    }
    assert not {name for _, given in shown.tags for name in given if name.startswith("on") or name in ("src", "href")}
    for name in HOSTILE:
        assert name.split("{")[0] in shown.text  # of a name with a callback's state in it that is left out
    assert "49" not in {cell for cell in shown.cells if "7" in cell}


def test_the_page_needs_nothing_else(html):
    """Its policy allows its own style sheet, by hash, and nothing more; no style elsewhere, no address, no id twice."""
    shown = Parsed(html)
    (policy,) = [given["content"] for _, given in shown.tags if given.get("http-equiv") == "Content-Security-Policy"]
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not any("style" in given for _, given in shown.tags)
    assert "url(" not in html
    assert "@import" not in html
    assert max(Counter(given["id"] for _, given in shown.tags if "id" in given).values(), default=1) == 1


def test_the_page_is_named_for_all(html):
    """Language, viewport, one first heading, and a name for every figure, picture and scrolling box."""
    shown = Parsed(html)
    assert ("html", {"lang": "en"}) in shown.tags
    assert any(given.get("name") == "viewport" for _, given in shown.tags)
    assert [tag for tag, _ in shown.tags].count("h1") == 1
    assert all(given.get("aria-label") for tag, given in shown.tags if tag == "figure" or given.get("role") == "region")
    pictures = [svg for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL) if "aria-hidden" not in svg]
    assert len(pictures) == 9
    assert all(re.match(r'<svg [^>]*role="img"[^>]*><title>[^<]+</title><desc>[^<]+</desc>', svg) for svg in pictures)


def test_the_same_page_whatever_matplotlib_is_set_to(tmp_path):
    """No date, no random id; the user's settings are neither used nor changed, and pyplot is not loaded."""
    trace = a_run().write(tmp_path / "t.json")
    code = f"""
import sys, matplotlib
matplotlib.rcParams.update({{"text.usetex": True, "font.size": 40, "axes.facecolor": "red", "svg.fonttype": "path"}})
before = {{name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}}  # this would load pyplot
from lightning_timekeeper.report import report
report([{str(trace)!r}], {str(tmp_path / "other.html")!r})
assert {{name: matplotlib.rcParams[name] for name in before}} == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    report([trace], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "other.html").read_bytes()


# ---- the command ---------------------------------------------------------------------------------------------------
def test_the_command_makes_a_new_file(tmp_path, capsys):
    """It says where; what is there stays as it is, and a failure leaves nothing."""
    trace, output = a_run().write(tmp_path / "t.json"), tmp_path / "page.html"
    assert main(["report", str(trace), "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"Report: {output}\n"
    before = output.read_bytes()
    assert before.startswith(b"<!DOCTYPE html>")
    assert main(["report", str(trace), "-o", str(output)]) == 1
    error = capsys.readouterr().err
    assert "exists, and is not overwritten" in error
    assert error.count("\n") == 1
    assert output.read_bytes() == before
    assert main(["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "other.html")]) == 1
    assert "none.json" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["page.html", "t.json"]


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_the_extra_there_is_one_line(missing, tmp_path, monkeypatch, capsys):
    """It names the command that installs it."""
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["report", str(tmp_path / "t.json"), "-o", str(tmp_path / "r.html")]) == 1
    error = capsys.readouterr().err
    assert "pip install 'lightning-timekeeper[report]'" in error
    assert error.count("\n") == 1


def test_matplotlib_is_loaded_by_the_report_alone():
    """As is jinja2: nothing else of the package names them."""
    package = Path(lightning_timekeeper.__file__).parent
    names = re.compile(r"^\s*(?:import|from) (?:matplotlib|jinja2|markupsafe)", re.MULTILINE)
    assert {path.parent.name for path in package.rglob("*.py") if names.search(path.read_text())} == {"report"}


@pytest.mark.slow
def test_the_page_of_a_million_spans_is_small(tmp_path):
    """Under 2 MB, also with thousands of epochs, checkpoints and long names, and hundreds of ranks."""
    head = a_run(epochs=0).events[0]
    lines = [
        json.dumps(head, separators=(",", ":")),
        '{"ph":"B","cat":"loop","name":"fit","pid":10000,"tid":1,"ts":0.000}',
    ]
    begin_us, phases = 0, ("data", "transfer", "forward", "backward", "optimizer", "callback", "logger", "sync")
    span = '{{"ph":"X","cat":"{}","name":"{}","pid":10000,"tid":1,"ts":{}.000,"dur":{}.000{}}}'.format
    for step in range(110_000):
        if step % 50 == 0:
            args = f',"args":{{"epoch":{step // 50}}}'
            lines.append(span("loop", "epoch", begin_us, 60_000, args))
            lines.append(span("validation", "validate", begin_us, 90, f',"args":{{"step":{step}}}'))
            lines.append(span("checkpoint", "save_checkpoint", begin_us + 100, 90, ""))
            begin_us += 1000
        lines.append(
            span("loop", "step", begin_us, 1000 + step % 977, f',"args":{{"epoch":{step // 50},"step":{step}}}')
        )
        for at, phase in enumerate(phases):
            name = f"{'<long & name>' * 15} {step}" if phase == "callback" else phase
            category = "mine" if phase == "callback" else phase
            lines.append(span(category, name, begin_us + 110 * at, 50 + (step * (at + 3)) % 59, ""))
        begin_us += 2000
    assert len(lines) > 990_000
    trace = tmp_path / "big.json"
    trace.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    others = [training(20, rank, pid=20_000 + rank, data=1, forward=4, backward=2).events for rank in range(1, 301)]
    html = page(summarize(str(trace), *others), [trace.name])
    assert "Of more than 1,000 epochs, validations or checkpoints only the first are marked." in html
    assert 300_000 < len(html.encode()) < 2_000_000


# ---- colours -------------------------------------------------------------------------------------------------------
SCHEMES = [
    dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})\b", part))
    for part in CSS.split("@media (prefers-color-scheme: dark)")
]
# severity 1 of Machado, Oliveira, Fernandes: "A Physiologically-based Model for Simulation of Color Vision Deficiency"
SIGHTS = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour):
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(first, second):
    """As WCAG defines it."""
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (first, second))
    return (light + 0.05) / (dark + 0.05)


def oklab(rgb):
    cones = [
        [0.41222147, 0.53633254, 0.05144599],
        [0.2119035, 0.68069955, 0.10739696],
        [0.08830246, 0.28171884, 0.6299787],
    ]
    axes = [
        [0.21045426, 0.79361779, -0.00407205],
        [1.9779985, -2.4285922, 0.45059371],
        [0.0259040, 0.78277177, -0.80867577],
    ]
    return np.array(axes) @ np.cbrt(np.array(cones) @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark"])
def test_text_stands_out(scheme):
    """At 4.5:1 or more on what it stands on, and what is drawn at 3:1 on the page."""
    assert set(COLOURS) <= set(scheme)
    for text in ("text", "muted", "accent", "warning", "good"):
        assert contrast(scheme[text], scheme["paper"]) >= 4.5, text
    assert contrast(scheme["text"], scheme["epoch"]) >= 4.5
    for colour in (*COLOURS[:9], "bar", "accent"):
        assert contrast(scheme[colour], scheme["paper"]) >= 2.99, colour


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=["light", "dark"])
def test_phases_are_told_apart_by_all(scheme, sight):
    """Layers that touch differ by a tenth of the range from black to white and more, any two by a thirteenth."""
    seen = {name: oklab(np.array(SIGHTS[sight]) @ linear(scheme[name])) for name in COLOURS[:9]}
    for (at, first), (to, second) in itertools.combinations(enumerate(seen), 2):
        distance = float(np.linalg.norm(seen[first] - seen[second]))
        assert distance > (0.1 if to == at + 1 else 0.075), (first, second, distance)


# ---- in a browser --------------------------------------------------------------------------------------------------
LOOK = """() => {
  const linear = part => { const v = part / 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const luminance = rgb => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const pale = [], small = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, box = element.getBoundingClientRect();
    if (!walker.currentNode.data.trim() || !box.width || element.closest('title, desc')) continue;
    texts += 1;
    const inPicture = element instanceof SVGElement, style = getComputedStyle(element);
    let behind = element;
    while (behind && (parts(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const both = [parts(inPicture ? style.fill : style.color), parts(getComputedStyle(behind).backgroundColor)];
    const [dark, light] = both.map(luminance).sort((a, b) => a - b);
    if ((light + 0.05) / (dark + 0.05) < 4.5) pale.push(walker.currentNode.data);
    const scale = inPicture ? element.getScreenCTM().a : 1;
    if (parseFloat(style.fontSize) * scale < 9.5) small.push(walker.currentNode.data);
  }
  const pictures = [...document.querySelectorAll('svg[role=img]')].filter(svg => svg.getBoundingClientRect().width);
  const outside = pictures.flatMap(svg => [...svg.querySelectorAll('text')]).filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < 0 || box.right > innerWidth;
  });
  return {
    texts, pale, small, outside: outside.map(text => text.textContent), pictures: pictures.length,
    unnamed: pictures.filter(svg => !svg.querySelector('title').textContent).length,
    wide: document.documentElement.scrollWidth - innerWidth, scripts: document.scripts.length,
    background: getComputedStyle(document.body).backgroundColor,
  };
}"""


@pytest.mark.slow
def test_in_a_browser(chromium, html, tmp_path):
    """On a desktop and a phone, light and dark: no error, no request, nothing too wide, too pale, too small or cut.

    The pages are that of the hostile names, of a real run of two ranks, and of another tool's trace.
    """
    code = Path(__file__).with_name("timeline_ranks.py")
    command = [sys.executable, str(code), str(tmp_path), "ddp", "{stage}-rank{rank}.json"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "MASTER_PORT": "29531"})
    (tmp_path / "hostile.html").write_text(html)
    report(sorted(tmp_path.glob("fit-rank*.json")), tmp_path / "real.html")
    foreign = [{"ph": "X", "name": f"{name} {'long ' * 80}", "ts": 1, "dur": 2} for name in HOSTILE]
    (tmp_path / "foreign.html").write_text(page(summarize(foreign)))
    backgrounds, heard = set(), []
    for width, scheme in itertools.product((1280, 768, 360), ("light", "dark")):
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        tab = context.new_page()
        tab.on("console", lambda message: heard.append(message.text))
        tab.on("pageerror", lambda error: heard.append(str(error)))
        tab.on("dialog", lambda dialog: heard.append(dialog.message))
        for name, pictures in (("hostile", 5), ("real", 5), ("foreign", 0)):
            address = (tmp_path / f"{name}.html").as_uri()
            asked = []
            tab.on("request", lambda request, asked=asked: asked.append(request.url))
            tab.goto(address)
            for folded in tab.locator("summary").all():
                folded.click()
            seen = tab.evaluate(LOOK)
            where = (name, width, scheme, seen)
            assert asked == [address], where
            assert seen["pictures"] == pictures, where
            assert seen["texts"] > 10, where
            assert not any(seen[each] for each in ("pale", "small", "outside", "unnamed", "scripts")), where
            assert seen["wide"] <= 0, where
            backgrounds.add((scheme, seen["background"]))
        context.close()
    assert not heard
    assert len(backgrounds) == 2
