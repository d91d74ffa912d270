"""Threads, tasks, rotations and spans in great numbers: none is lost, memory is flat, nothing is left behind.

``TIMEKEEPER_LOAD_S=60 pytest tests/faults/test_load.py -s`` is the long run: a minute of threads and tasks, 200 rotations,
10 million spans, and a soak of that many seconds times five; the suite does a hundredth of it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from lightning_timekeeper import Tracer, read_events, span

LOAD_S = float(os.environ.get("TIMEKEEPER_LOAD_S", "1"))
LONG = LOAD_S >= 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 60 * LOAD_S)]


def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def fds():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_left():
    """No thread and no file descriptor is left when all is closed."""
    with Tracer():  # the board for child processes stays for as long as the process
        pass
    before = threading.active_count(), fds()
    yield
    until_s = time.monotonic() + 10
    while (threading.active_count(), fds()) != before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert (threading.active_count(), fds()) == before


def counted(*paths):
    """How often each span is in the files, whole or in pieces; and how many were dropped."""
    found, dropped = Counter(), 0
    for path in paths:
        begun = {}
        with read_events(path) as events:
            for event in events:
                if event["ph"] == "X":
                    found[event["name"]] += 1
                elif event["ph"] == "B":
                    begun.setdefault(event["tid"], []).append(event["name"])
                elif event["ph"] == "E":
                    name = begun[event["tid"]].pop()
                    found[name] += not event.get("args", {}).get("continued")
                elif event.get("name") == "spans dropped":
                    dropped += event["args"]["dropped"]
            assert events.complete
        path.unlink()
    return found, dropped


def test_threads_and_tasks_at_full_rate(tmp_path):
    """16 threads and 8 tasks that do nothing but record: every span is in the trace, or counted as dropped."""
    stop = threading.Event()
    done = Counter()

    def work(name):
        count = 0
        while not stop.is_set() and (LONG or count < 10_000):
            for _ in range(500):
                with span(name):
                    pass
            count += 500
        done[name] = count

    async def task(name):
        count = 0
        while not stop.is_set() and (LONG or count < 1000):
            for _ in range(50):
                with span(name):
                    await asyncio.sleep(0)
            count += 50
        done[name] = count

    async def tasks():
        await asyncio.gather(*(task(f"task {number}") for number in range(8)))

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(16)]
    threads.append(threading.Thread(target=lambda: asyncio.run(tasks())))
    paths = [tmp_path / "0.json"]
    memory = []
    tracer = Tracer(paths[0], max_events=10**12)
    tracer.enable()
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + LOAD_S
    while time.monotonic() < until_s:
        time.sleep(min(1.0, LOAD_S / 10))
        memory.append(rss_mb())
        paths.append(tmp_path / f"{len(paths)}.json")
        tracer.switch(str(paths[-1]))
    stop.set()
    for thread in threads:
        thread.join()
    assert tracer.close(240)
    found, dropped = counted(*paths)
    assert not found - done
    assert found.total() + dropped == done.total()
    for name in done:
        assert found[name] or dropped
    print(
        f"\n{LOAD_S:.0f} s: {done.total():,} spans of 24, {dropped:,} dropped and counted, none lost; {len(paths)} files; "
        f"memory {memory[0]:.0f} MB first, {memory[-1]:.0f} MB last, {max(memory):.0f} MB at most"
    )
    if LONG:
        assert max(memory[len(memory) // 2 :]) < max(memory[: len(memory) // 2]) + 100


def test_rotations(tmp_path):
    """200 files, each whole; a span that is open over all of them ends once."""
    count = 200 if LONG else 40
    paths = [tmp_path / f"{number}.json" for number in range(count + 1)]
    with Tracer(paths[0]) as tracer, span("all"):
        before_mb = 0.0
        for number, path in enumerate(paths[1:]):
            for _ in range(100):
                with span("work"):
                    pass
            tracer.switch(str(path))
            if number == 20:
                before_mb = rss_mb()
        grown_mb = rss_mb() - before_mb
    found, dropped = counted(*paths)
    assert found == {"work": 100 * count, "all": 1}
    assert dropped == 0
    assert grown_mb < 16
    print(f"\n{count} rotations: memory grew by {grown_mb:.1f} MB")


def test_a_trace_of_many_spans(tmp_path):
    """10 million in one file: all are there, and memory is flat."""
    count = 10_000_000 if LONG else 200_000
    path = tmp_path / "many.json"
    tracer = Tracer(path, max_events=10**12)
    tracer.enable()
    memory = []
    for number in range(count // 10_000):
        for _ in range(10_000):
            with span("work"):
                pass
        if number % 10 == 9:
            assert tracer.flush(120)
            memory.append(rss_mb())
    assert tracer.close(240)
    size_mb = path.stat().st_size / 1e6
    found, dropped = counted(path)
    assert found == {"work": count}
    assert dropped == 0
    assert memory[-1] - memory[0] < 32
    print(f"\n{count:,} spans, {size_mb:,.0f} MB: memory {memory[0]:.0f} MB first, {memory[-1]:.0f} MB last")


def test_a_soak(tmp_path):
    """Hours in small: windows, rotations, threads that come and go, flushes; memory, threads and files stay as many."""
    soak_s = LOAD_S * 5 if LONG else LOAD_S
    done, memory, opened = Counter(), [], []
    number = 0
    until_s = time.monotonic() + soak_s
    found, dropped = Counter(), 0
    while time.monotonic() < until_s:
        number += 1
        paths = [tmp_path / f"{number}-{part}.json.gz" for part in range(2)]
        tracer = Tracer(paths[0])
        tracer.enable()

        def work(name=f"thread {number % 7}"):
            for _ in range(300):
                with span(name, number=1):
                    pass
            done[name] += 300

        threads = [threading.Thread(target=work) for _ in range(1)]
        for thread in threads:
            thread.start()
        for part in range(2):
            with span("main"):
                for _ in range(1000):
                    with span("work"):
                        pass
            done["main"] += 1
            done["work"] += 1000
            if part == 0:
                tracer.disable()
                with span("unseen"):
                    pass
                tracer.enable()
                tracer.switch(str(paths[1]))
        for thread in threads:
            thread.join()
        assert tracer.close()
        here, lost = counted(*paths)
        found += here
        dropped += lost
        if number % 10 == 0:
            gc.collect()
            memory.append(rss_mb())
            opened.append(fds())
    # a thread whose spans begin while recording is off for a moment records none of those
    assert found["work"] == done["work"]
    assert found["main"] == done["main"]
    assert not found["unseen"]
    assert dropped == 0
    if LONG:
        assert max(memory[-5:]) - max(memory[5:10]) < 16
        assert max(opened) - min(opened) <= 2
        print(
            f"\n{soak_s:.0f} s: {number} recordings, {found.total():,} spans; memory {memory[5]:.0f} -> {memory[-1]:.0f} MB"
        )
