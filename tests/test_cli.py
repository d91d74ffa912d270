"""The command line: what it prints, what it returns, and that its errors are one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lightning_timekeeper import Tracer, __version__, span
from lightning_timekeeper.__main__ import main


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.json"
    with Tracer(path), span("load"), span("read"):
        pass
    return path


def test_version(capsys):
    """The package's."""
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"timekeeper {__version__}\n"


def test_python_m_is_the_same_command():
    """``python -m lightning_timekeeper`` shows the same help."""
    done = subprocess.run(
        [sys.executable, "-m", "lightning_timekeeper", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: timekeeper")
    for command in ("demo", "summary", "merge", "view", "repair"):
        assert command in done.stdout


def test_summary(trace, capsys):
    """Several traces are summed up together, as tables or as JSON."""
    assert main(["summary", str(trace), str(trace)]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("load")]
    assert row[-1] == "2"
    assert main(["summary", "--json", str(trace)]) == 0
    spans = json.loads(capsys.readouterr().out)["user_spans"]
    assert [(span["name"], span["calls"]) for span in spans] == [("load", 1), ("read", 1)]


def test_repair_makes_a_whole_file_of_a_cut_one(trace, tmp_path, capsys):
    """The input stays as it is, the output is strict JSON, and what was lost is said."""
    cut = tmp_path / "cut.json"
    cut.write_bytes(trace.read_bytes()[:-30])
    before = cut.read_bytes()
    assert main(["repair", str(cut), "-o", str(tmp_path / "whole.json")]) == 0
    assert cut.read_bytes() == before
    names = [event.get("name") for event in json.loads((tmp_path / "whole.json").read_bytes())]
    assert "load" in names
    assert "bytes" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["summary", "repair"])
def test_a_missing_file_is_one_line(command, tmp_path, capsys):
    """It names the file; no traceback, and status 1."""
    assert main([command, str(tmp_path / "none.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("timekeeper: ")
    assert error.count("\n") == 1
    assert "none.json" in error


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "abc", "1e9"])
def test_bad_seconds(seconds, capsys):
    """The demo's limit is checked before anything is loaded."""
    with pytest.raises(SystemExit):
        main(["demo", "--seconds", seconds])
    assert "expected seconds from 0.1 to 3600" in capsys.readouterr().err


@pytest.mark.slow
def test_demo(tmp_path, perfetto):
    """It stops at its limit, resumes with the time restored, prints the phases; Perfetto takes both traces.

    It really trains, in a process of its own as a user starts it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "lightning_timekeeper", "demo", "--dir", tmp_path, "--seconds", "1.5"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Stopped by its duration limit" in done.stdout
    assert "it/s" in done.stdout  # the progress bar
    for word in ("train", "validate", "forward", "backward", "data", "Trace: ", "ui.perfetto.dev"):
        assert word in done.stdout
    traces = sorted(tmp_path.glob("*.json"))
    assert [path.name for path in traces] == ["fit-rank0-v1.json", "fit-rank0.json"]
    for report in perfetto.open_traces(traces, ["select distinct category from slice"]):
        assert report.ok, (report.error, report.bad_stats)
        phases = {row[0] for row in report.rows[0]}
        assert phases >= {"data", "forward", "backward", "optimizer", "validation", "checkpoint", "callback"}
