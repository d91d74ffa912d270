"""Workers and ranks that are killed at any moment: nothing hangs, and nothing recorded half a second before is lost.

``TIMEKEEPER_KILLS=20 pytest tests/faults/test_worker_kills.py -s`` is the long run, of so many each; the suite makes two.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from traces import parse, read, slices

from lightning_timekeeper import merge

KILLS = int(os.environ.get("TIMEKEEPER_KILLS", "2"))
AT_ONCE = 2
LOSS_S = 0.5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90 + 10 * KILLS),
    pytest.mark.skipif(sys.platform != "linux", reason="compares the monotonic clocks of two processes"),
]


def moments():
    choose = random.Random(KILLS)
    return [0.0, *(choose.uniform(0, 1.5) for _ in range(KILLS - 1))]


def run(path, kill, after_s):
    """What was said: (name, number, when), and when the rank was killed, where it was."""
    command = [sys.executable, str(Path(__file__).with_name("killed_workers.py")), str(path), kill, str(after_s)]
    said = []
    at_ns = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        watchdog = threading.Timer(60, child.kill)
        watchdog.start()
        while not (line := child.stdout.readline()).startswith(b"ready"):
            assert line, "it did not begin"
            said.append(line)
        if kill == "rank":

            def end():
                nonlocal at_ns
                time.sleep(after_s)
                at_ns = time.perf_counter_ns()
                os.kill(child.pid, signal.SIGKILL)

            threading.Thread(target=end).start()
        said += child.stdout  # ends when the last of the processes has
        child.wait()
        watchdog.cancel()
        assert child.returncode == (-signal.SIGKILL if kill == "rank" else 0)
    words = [line.decode().rsplit(" ", 2) for line in said if line.endswith(b"\n")]
    return [(name, int(number), int(when_ns)) for name, number, when_ns in words], at_ns


def due(said, at_ns, *, of=""):
    """The spans that had closed half a second before, or more where the machine held somebody up."""
    late_ns = max(
        (number * 1000 for name, number, when_ns in said if name == "late" and when_ns > at_ns - 2e9), default=0
    )
    return {
        (name, number)
        for name, number, when_ns in said
        if name.endswith("inner") and name.startswith(of) and when_ns < at_ns - LOSS_S * 1e9 - late_ns
    }


def found_in(events):
    return Counter((one.name, one.args["number"]) for one in slices(events) if one.name.endswith("inner"))


def test_killed_workers(tmp_path, perfetto):
    """The rank's trace closes in time, and has all that the workers had closed, the killed one's too, each once."""
    paths = [tmp_path / f"{number}.json" for number in range(KILLS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(run, paths, ["worker"] * KILLS, moments()))
    required = longest_us = 0
    for path, (said, _) in zip(paths, results, strict=True):
        ((_, pid, killed_ns),) = [one for one in said if one[0] == "killed"]
        ((_, closed_us, _),) = [one for one in said if one[0] == "closed"]
        (victim,) = [
            name.removeprefix("pid-") for name, number, _ in said if name.startswith("pid-") and number == pid
        ] or ["?"]
        found = found_in(read(path))
        assert set(found.values()) <= {1}
        # more than is promised: of the killed one nothing at all is lost
        missing = {(name, number) for name, number, _ in said if name == f"{victim} inner"} | due(said, killed_ns)
        assert not missing - set(found), (path, sorted(missing - set(found))[:5])
        required += len(missing)
        longest_us = max(longest_us, closed_us)
    assert longest_us < 10e6
    assert all(report.ok for report in perfetto.open_traces(paths))
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    print(
        f"\n{KILLS} workers killed: {required} spans required, none lost; the close took {longest_us / 1e3:.0f} ms at most"
    )


def test_killed_ranks(tmp_path, perfetto):
    """Its trace has all up to half a second before; merged with the workers' files, all that they recorded, each once."""
    paths = [tmp_path / f"{number}.json" for number in range(KILLS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(run, paths, ["rank"] * KILLS, moments()))
    required = 0
    merged = []
    for path, (said, at_ns) in zip(paths, results, strict=True):
        alone = found_in(closed(path))
        missing = due(said, at_ns) - set(alone)
        assert not missing, (path, sorted(missing)[:5])
        workers = sorted(tmp_path.glob(f"{path.stem}.worker-*.json"))
        merged.append(merge([*workers, path], tmp_path / f"merged-{path.name}").output)
        found = found_in(read(merged[-1]))
        assert set(found.values()) <= {1}
        lost = {
            (name, number) for name, number, _ in said if name.endswith("inner") and not name.startswith("rank")
        } - set(found)
        assert not lost, (path, sorted(lost)[:5])
        required += len(due(said, at_ns)) + found.total()
    files = [*paths, *tmp_path.glob("*.worker-*.json"), *merged]
    for file, report in zip(files, perfetto.open_traces(files), strict=True):
        assert report.ok, (file, report)
    print(f"\n{KILLS} ranks killed: {required} spans required, none lost; {len(files)} files opened")


def closed(path):
    """The events of a cut file, with the ends that are missing."""
    data = path.read_bytes()
    end = data.rindex(b"}") + 1 if data.endswith(b"}") else data.rindex(b",\n")
    events = parse(data[:end] + b"]")
    latest_ns = max((event["ts_ns"] + event.get("dur_ns", 0) for event in events if "ts" in event), default=0)
    opened = [event for event in events if event["ph"] == "B"]
    depth = Counter(event["tid"] for event in opened) - Counter(event["tid"] for event in events if event["ph"] == "E")
    return [
        *events,
        *({"ph": "E", "tid": tid, "ts_ns": latest_ns, "args": {}} for tid, n in depth.items() for _ in range(n)),
    ]
