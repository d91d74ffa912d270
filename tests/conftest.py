"""Fixtures that several test files share."""

from __future__ import annotations

import browser
import perfetto as engine
import pytest


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
