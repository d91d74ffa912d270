"""Records with a worker of each kind until it is killed, or until it is told to close: ``killed_workers.py TRACE KILL``.

All processes say on stdout, each line in one write, what has closed and when. Where ``KILL`` is ``worker``, one worker is
killed so many seconds after it began, and the trace closed at once; where it is ``rank``, a test kills this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

from lightning_timekeeper.trace.tracer import Tracer, span


def say(name, number):
    os.write(1, f"{name} {number} {time.perf_counter_ns()}\n".encode())


def work(name, pause_s):
    """Until somebody kills it, or nobody is left who would: a number of its own for each span."""
    rank = multiprocessing.parent_process()
    say(f"pid-{name}", os.getpid())
    number = 0
    while rank is None or rank.is_alive():
        with span(f"{name} outer", number=number):
            for _ in range(3):
                number += 1
                begin_ns = time.perf_counter_ns()
                with span(f"{name} inner", number=number):
                    time.sleep(pause_s)
                say(f"{name} inner", number)
                say("late", max(0, time.perf_counter_ns() - begin_ns - int(pause_s * 1e9)) // 1000)


def main(path, kill, after_s):
    tracer = Tracer(path)
    tracer.enable()
    workers = []
    for method in ("fork", "forkserver"):
        worker = multiprocessing.get_context(method).Process(target=work, args=(method, 0.0005), daemon=True)
        worker.start()
        workers.append(worker)
    until_s = time.monotonic() + 60
    while sum(worker.is_alive() for worker in workers) < 2 and time.monotonic() < until_s:
        time.sleep(0.001)
    say("ready", 0)
    if kill == "rank":
        work("rank", 0.0005)
    victim = workers[int(after_s * 1e6) % 2]
    time.sleep(after_s)
    say("killed", victim.pid)
    os.kill(victim.pid, signal.SIGKILL)
    begin_s = time.monotonic()
    whole = tracer.close(30)
    say("closed" if whole else "not-whole", int((time.monotonic() - begin_s) * 1e6))
    for worker in workers:
        worker.kill()
        worker.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
