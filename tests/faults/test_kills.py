"""A recording process that is killed at any moment leaves a file that opens, with all up to half a second before.

``TIMEKEEPER_KILLS=200 pytest tests/faults/test_kills.py -s`` is the long run; the suite makes ten.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from traces import parse, slices

KILLS = int(os.environ.get("TIMEKEEPER_KILLS", "10"))
AT_ONCE = 2
LOSS_S = 0.5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60 + 5 * KILLS),
    pytest.mark.skipif(sys.platform != "linux", reason="compares the monotonic clocks of two processes"),
]


@dataclass
class Killed:
    path: Path
    at_ns: int
    closed: Counter  # (name, number) that had closed half a second before
    said: int
    last_loss_s: float = 0.0


def kill(path: Path, after_s: float) -> Killed:
    """Start a recorder, kill it so many seconds after it began to record, and read what it said."""
    command = [sys.executable, str(Path(__file__).with_name("killed_recorder.py")), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        said = [child.stdout.readline()]
        assert said[0].startswith(b"ready")

        def listen():
            said.extend(child.stdout)

        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(listen)
            time.sleep(after_s)
            at_ns = time.perf_counter_ns()
            os.kill(child.pid, signal.SIGKILL)
            listening.result(30)
    lines = [line.decode().rsplit(" ", 2) for line in said[1:] if line.endswith(b"\n")]
    late = [int(n) / 1e6 for name, n, end_ns in lines if name == "late" and int(end_ns) > at_ns - 2e9]
    loss_ns = (LOSS_S + max(late, default=0.0)) * 1e9
    closed = [(name, int(n)) for name, n, end_ns in lines if name != "late" and int(end_ns) < at_ns - loss_ns]
    return Killed(path, at_ns, Counter(closed), len(lines))


def test_kills(tmp_path, perfetto):
    """Whenever it is killed, every file opens in Perfetto, and no span is lost that had closed half a second before."""
    choose = random.Random(KILLS)
    moments = [choose.uniform(0, 2.5) for _ in range(KILLS)]
    moments[:3] = [0.0, 0.002, 0.02]
    paths = [tmp_path / f"{number}.json" for number in range(KILLS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        killed = list(pool.map(kill, paths, moments))
    sql = ["select count(*) from slice", "select count(*) from slice where dur = -1"]
    reports = perfetto.open_traces(paths, sql)
    found = opened = 0
    losses_s = []
    for one, report in zip(killed, reports, strict=True):
        assert report.ok, (one.path, report)
        events = parse(_closed(one.path.read_bytes()))
        there = Counter()
        latest_ns = 0
        depth: dict[int, list] = {}
        for event in events:
            if event["ph"] == "X":
                there[event["name"], event.get("args", {}).get("number", 0)] += 1
            elif event["ph"] == "B":
                depth.setdefault(event["tid"], []).append(event)
            elif event["ph"] == "E":
                begin = depth[event["tid"]].pop()
                if not event.get("args", {}).get("continued"):
                    there[begin["name"], begin.get("args", {}).get("number", 0)] += 1
            if event["ph"] in "XE":
                latest_ns = max(latest_ns, event["ts_ns"] + event.get("dur_ns", 0))
        missing = one.closed - there
        assert not missing, (one.path, list(missing.items())[:5])
        still_open = [event for events in depth.values() for event in events]
        slices([*events, *({"ph": "E", "tid": event["tid"], "ts_ns": latest_ns} for event in reversed(still_open))])
        found += report.rows[0][0][0]
        opened += report.rows[1][0][0]
        head = events[0]["args"]
        shift_ns = int(head["unix_ns"]) - head["base_unix_s"] * 10**9 - int(head["clock_ns"])
        if latest_ns:
            losses_s.append((one.at_ns + shift_ns - latest_ns) / 1e9)
    required = sum(one.closed.total() for one in killed)
    assert required > 100 * KILLS
    assert opened
    print(
        f"\n{KILLS} kills: every file opened; {found} slices found, {opened} open, of {sum(one.said for one in killed)} "
        f"closed; {required} had closed {LOSS_S} s before, none lost; the last {max(losses_s):.3f} s lost at most, "
        f"{sorted(losses_s)[len(losses_s) // 2]:.3f} s in the median"
    )


def _closed(data: bytes) -> bytes:
    """A cut array, without its cut last event, closed."""
    return data[: data.rindex(b"}") + 1] + b"]" if data.endswith(b"}") else data[: data.rindex(b",\n")] + b"]"
