"""Fixtures that several test files share."""

from __future__ import annotations

import signal

import browser
import perfetto as engine
import pytest


@pytest.fixture(autouse=True)
def _signal_handlers():
    """A Trainer that a test cuts short leaves its handler behind, and a pool's workers would outlive their SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def _own_forkserver():
    """Without the one that an earlier test started, which knows of no tracer."""
    from multiprocessing import forkserver

    forkserver._forkserver._stop()


@pytest.fixture(scope="session")
def perfetto():
    """Perfetto's engine: ``perfetto.open_trace(path, sql)``; the test is skipped where it cannot run."""
    engine.require()
    return engine


@pytest.fixture
def chromium():
    """A headless Chromium, as playwright's ``Browser``; the test is skipped where there is none."""
    browser.require()
    with browser.chromium() as started:
        yield started
