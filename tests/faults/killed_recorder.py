"""Records with threads and asyncio until it is killed, and says on stdout what has closed, and when."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

from lightning_timekeeper.trace.tracer import Tracer, instant, iterate, span


def say(name: str, number: int) -> None:
    os.write(1, f"{name} {number} {time.perf_counter_ns()}\n".encode())  # a line is written whole: no lock, no buffer


def beat() -> None:
    """Say how many µs late this thread gets to run: what the machine withholds is no fault of the recorder."""
    while True:
        begin_ns = time.perf_counter_ns()
        time.sleep(0.02)
        say("late", (time.perf_counter_ns() - begin_ns) // 1000 - 20_000)


def work(name: str, pause_s: float) -> None:
    for number in iterate(range(10**9), f"{name} next"):
        with span(f"{name} outer", number=number):
            for _ in range(3):
                with span(f"{name} inner"):
                    time.sleep(pause_s)
                say(f"{name} inner", 0)
            instant("mark", number=number)
        say(f"{name} outer", number)


@span("task")
async def task(name: str, number: int) -> None:
    with span(f"{name} waits", number=number):
        await asyncio.sleep(0.001 * (number % 7))
    say(f"{name} waits", number)


async def tasks(name: str) -> None:
    for number in range(10**9):
        await task(name, number)


async def main() -> None:
    await asyncio.gather(*(tasks(f"task {number}") for number in range(3)))


if __name__ == "__main__":
    Tracer(sys.argv[1]).enable()
    say("ready", 0)
    threading.Thread(target=beat, daemon=True).start()
    for number in range(2):
        threading.Thread(target=work, args=(f"thread {number}", 0.0005 * (number + 1)), daemon=True).start()
    threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
    with span("whole"):
        work("main", 0.0005)
