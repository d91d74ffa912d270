"""Ctrl-C at every line of ours: what was recorded is in a whole file, and no thread is left behind."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
import time
from pathlib import Path

import pytest
from traces import read, slices

import lightning_timekeeper
from lightning_timekeeper import Tracer

PACKAGE = str(Path(lightning_timekeeper.__file__).parent)


class CtrlC:
    """Raises KeyboardInterrupt at a line of ours, of the thread that enters it: the n-th that this thread comes to.

    But not where a block of ``with`` is left: there Python looks for signals only once ``__exit__`` has been called.
    """

    def __init__(self, line):
        self.left, self.where = line, None
        self._entered = set()

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            here = id(frame), frame.f_lineno
            if linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
                if here in self._entered:
                    self._entered.remove(here)
                    return self._trace
                self._entered.add(here)
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


def threads_of_ours():
    return [each for each in threading.enumerate() if each.name.startswith("timekeeper")]


def record(directory, interrupt):
    """A recording with a rotation; returns the tracer as far as it came, and how many spans had closed."""
    tracer, closed = None, 0
    try:
        with interrupt:
            tracer = Tracer(directory / "0.json", drain_interval_s=0.05)
            tracer.enable()
            with tracer.span("outer", number=1):
                with tracer.span("inner"):
                    pass
                closed += 1
                tracer.flush()
                tracer.switch(str(directory / "1.json"))
                with tracer.span("inner"):
                    pass
                closed += 1
            closed += 1
            tracer.close()
    except KeyboardInterrupt:
        pass
    else:
        assert interrupt.left > 0
    return tracer, closed


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctrl_c_at_every_line(tmp_path):
    """In the making of a tracer, in a span, a flush, a rotation, a close; a close after it finds all in order."""
    line = 0
    while True:
        line += 1
        directory = tmp_path / str(line)
        directory.mkdir()
        interrupt = CtrlC(line)
        tracer, closed = record(directory, interrupt)
        if interrupt.left > 0:
            break
        if tracer is not None:
            assert tracer.close(), interrupt.where
        del tracer
        until_s = time.monotonic() + 20
        while threads_of_ours() and time.monotonic() < until_s:
            time.sleep(0.002)
            if until_s - time.monotonic() < 19:
                gc.collect()
        assert not threads_of_ours(), interrupt.where
        files = sorted(directory.iterdir())
        assert {path.name for path in files} <= {"0.json", "1.json"}, interrupt.where
        try:
            found = [one for path in files for one in slices(read(path))]
        except ValueError as error:
            raise AssertionError((interrupt.where, [path.read_bytes()[-100:] for path in files])) from error
        ended = [one for one in found if not one.args.get("continued")]
        assert len(ended) >= closed, (interrupt.where, found)
    assert line > 100
    assert closed == 3
