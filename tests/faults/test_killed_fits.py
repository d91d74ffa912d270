"""Fits that are killed in every way at any moment: every file opens, and nothing is lost that had closed before.

``TIMEKEEPER_KILLS=500 pytest tests/faults/test_killed_fits.py -s`` is the long run; the suite makes sixteen.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runs import assert_nested, spans_in
from traces import parse

from lightning_timekeeper import Tracer, merge, read_events, span

KILLS = int(os.environ.get("TIMEKEEPER_KILLS", "16"))
SEED = int(os.environ.get("TIMEKEEPER_SEED", "0"))
AT_ONCE = 2
LOSS_S = 0.5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120 + 6 * KILLS),
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc"),
]

STATUS = {
    "SIGKILL": {-9},
    "SIGTERM": {0, -15},  # -15 before and after Lightning handles it
    "SIGTERM twice": {0, -15},
    "SIGINT": {0, 1, -2},  # 1 is Lightning's own; -2 before and after the fit; 0 at the very end
    "SIGINT twice": {0, 1, -2},
    "os._exit": {9},
    "abort": {-6},
    "segfault": {-11},
    "memory": {0, 1},
    "SIGSTOP": {0},  # and SIGCONT a second later
}
MOMENTS = {
    "any": (1.2, 0),  # the longest delay, s; the last time that it may be
    "training step": (0.003, 60),
    "validation": (0.003, 20),
    "checkpoint": (0.004, 5),
    "setup": (0.004, 0),
    "flush": (0.002, 10),
    "write": (0.001, 8),
    "rotation": (0.004, 5),
    "close": (0.006, 0),
    "compression": (0.002, 0),
}
FILES = ["{stage}-rank{rank}.json", "{epoch}.json", "{epoch}.json.gz", "{stage}.json.gz"]


class Server:
    """``killed_fits.py``, one job at a time."""

    def __init__(self):
        script = Path(__file__).with_name("killed_fits.py")
        # numpy's libraries of linear algebra start threads when they are loaded
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **one},
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def run(self, job):
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline().strip()
        return status if status == "hung" else int(status)

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def servers():
    started = []

    def run(jobs):
        idle = list(started)

        def one(job):
            server = idle.pop() if idle else Server()
            if server not in started:
                started.append(server)
            try:
                return server.run(job)
            finally:
                idle.append(server)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, jobs))

    yield run
    for server in started:
        server.close()


def jobs_of(tmp_path):
    """Each kind at each moment in turn, with all that remains chosen at random."""
    choose = random.Random(SEED)
    pairs = list(itertools.product(STATUS, MOMENTS))
    choose.shuffle(pairs)
    for number, (kind, moment) in enumerate(itertools.islice(itertools.cycle(pairs), KILLS)):
        directory = tmp_path / str(number)
        directory.mkdir()
        longest_s, last = MOMENTS[moment]
        rotates = {"rotation": FILES[1:3], "compression": FILES[2:]}.get(moment, FILES)
        yield {
            "kind_of": "fit",
            "directory": str(directory),
            "kind": kind,
            "moment": moment,
            "delay_s": choose.uniform(0, longest_s),
            "nth": choose.randint(0, last),
            "gap_s": choose.choice([0.0, choose.uniform(0, 0.03)]),
            "filename": choose.choice(rotates),
            "epochs": choose.choice([8, 16]),
        }


def said_in(directory):
    """What was said: (name, number, when)."""
    text = (directory / "said").read_text()
    lines = [line.rsplit(" ", 2) for line in text[: text.rindex("\n")].split("\n")]
    return [(name, int(number), int(when_ns)) for name, number, when_ns in lines]


def found_in(path, *, whole):
    """The user's spans of a file that have ended, each counted; the file is strict JSON where it has to be."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    if whole:
        parse(raw)
        events = json.loads(raw)
        assert_nested(spans_in(events))
    else:
        end = raw.rindex(b"}") + 1 if raw.endswith((b"}", b"\n]\n")) else raw.rindex(b",\n")
        events = parse(raw[:end] + b"]")
    found, begun = Counter(), defaultdict(list)
    for event in events:
        if event["ph"] == "B":
            begun[event["tid"]].append(event)
        elif event["ph"] == "E":
            begin = begun[event["tid"]].pop()
            if not event.get("args", {}).get("continued"):
                found[begin["name"], begin.get("args", {}).get("number")] += 1
        elif event["ph"] == "X":
            found[event["name"], event.get("args", {}).get("number")] += 1
    return found


def test_killed_fits(tmp_path, servers, perfetto):
    """Every kind of end in every moment: the status is the run's own, no hang, no warning, no file that does not open."""
    jobs = list(jobs_of(tmp_path))
    ends = servers(jobs)
    paths, table, required, late_s = [], Counter(), 0, 0.0
    for job, status in zip(jobs, ends, strict=True):
        directory = Path(job["directory"])
        told = {**job, "status": status, "stderr": (directory / "stderr").read_text()[-2000:]}
        said = said_in(directory)
        killed = [when_ns for name, _, when_ns in said if name == "kill"]
        assert status in (STATUS[job["kind"]] if killed else {0}), told
        warned = [name for name, _, _ in said if name.startswith("warning")]
        # where there is no memory we may give up, with one word, and one for what children do
        assert len(warned) <= 2 * (job["kind"] == "memory"), (told, warned)
        orderly = isinstance(status, int) and status in (0, 1) and not warned
        files = [path for path in directory.iterdir() if path.name.endswith((".json", ".json.gz"))]
        # killed between the opening of a file and its first write, some ms later: it is no trace yet, and nothing is lost
        files = [path for path in files if path.stat().st_size or orderly]
        if orderly:
            assert not list(directory.glob("*.part")), told
        found = Counter()
        for path in files:
            try:
                found += found_in(path, whole=orderly)
            except Exception as error:
                raise AssertionError(f"{path}: {error!r} {told}") from error
        due_ns = 2**63
        if killed and not orderly:
            late_us = max((n for name, n, when_ns in said if name == "late" and when_ns > killed[0] - 2e9), default=0)
            late_s = max(late_s, late_us / 1e6)
            due_ns = killed[0] - LOSS_S * 1e9 - late_us * 1e3
        due = {(name, n) for name, n, when_ns in said if name in ("train", "val") and when_ns < due_ns}
        assert not due - set(found), (told, sorted(due - set(found))[:5])
        twice = {key: count for key, count in found.items() if key[0] in ("train", "val") and count > 1}
        assert not twice, (told, twice)
        required += len(due)
        table[job["kind"], "killed" if killed else "ended before"] += 1
        table[job["kind"], "whole" if orderly else "cut"] += 1
        paths += files
    for path, report in zip(paths, perfetto.open_traces(paths, timeout_s=60 + KILLS), strict=True):
        assert report.ok, (path, report)
    assert table.total() == 2 * KILLS
    print(
        f"\n{KILLS} fits: {len(paths)} files opened, {required} spans required, none lost; late {late_s:.3f} s at most"
    )
    for kind in STATUS:
        print(f"  {kind:<14} { ({what: n for (which, what), n in sorted(table.items()) if which == kind}) }")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two traces of 20,000 spans, one of them cut, and what their merge and repair are."""
    directory = tmp_path_factory.mktemp("inputs")
    paths = []
    for rank in range(2):
        paths.append(directory / f"rank{rank}.json")
        with Tracer(paths[-1], metadata={"rank": rank}, process_name=f"rank {rank}"):
            for number in range(20_000):
                with span("work", number=number):
                    pass
    paths[1].write_bytes(paths[1].read_bytes()[:-40_001])
    expected = directory / "expected.json"
    merge(paths, expected)
    return [str(path) for path in paths], expected.read_bytes()


def test_killed_merges_and_repairs(tmp_path, servers, inputs):
    """There is no output or a whole one, the inputs stay, Ctrl-C leaves nothing else, and a second try succeeds."""
    paths, expected = inputs
    before = [Path(path).read_bytes() for path in paths]
    choose = random.Random(SEED)
    kinds = ["SIGKILL", "SIGTERM", "SIGINT", "SIGINT twice", "os._exit", "abort"]
    jobs = []
    for number in range(max(6, KILLS // 5)):
        directory = tmp_path / str(number)
        directory.mkdir()
        name = choose.choice(["merge", "merge", "repair"])
        output = str(directory / choose.choice(["out.json", "out.json.gz"]))
        jobs.append(
            {
                "kind_of": "tool",
                "directory": str(directory),
                "kind": kinds[number % len(kinds)],
                "moment": "any",
                "delay_s": choose.uniform(0, 0.6),
                "nth": 0,
                "gap_s": choose.uniform(0, 0.003),
                "command": ["merge", *paths, "-o", output] if name == "merge" else ["repair", paths[1], "-o", output],
            }
        )
    allowed = {"SIGKILL": -9, "SIGTERM": -15, "SIGINT": 130, "SIGINT twice": 130, "os._exit": 9, "abort": -6}
    done = 0
    for job, status in zip(jobs, servers(jobs), strict=True):
        assert status in (0, allowed[job["kind"]], -2), (job, status)
        output = Path(job["command"][-1])
        left = [path.name for path in output.parent.iterdir() if path.name != "stderr" and path != output]
        if job["kind"] != "SIGINT twice":
            assert left == [] or status < 0 or status == 9, (job, status, left)
        if output.exists():
            done += 1
        else:
            assert status != 0
            assert _command(job["command"]) == 0
        raw = gzip.decompress(output.read_bytes()) if output.suffix == ".gz" else output.read_bytes()
        if job["command"][0] == "merge":
            assert raw == expected
        else:
            assert parse(raw)
        assert list(read_events(output))
    assert [Path(path).read_bytes() for path in paths] == before
    print(
        f"\n{len(jobs)} merges and repairs: {done} were done before, {len(jobs) - done} left no output and were repeated"
    )


def _command(arguments):
    from lightning_timekeeper.__main__ import main

    return main(arguments)
