"""Hands a trace to the Perfetto UI: serves it on this machine to that page alone, and opens the browser.

The UI runs in the browser and fetches the trace itself; nothing is uploaded. Its content security policy lets it fetch
from ``http://127.0.0.1:9001`` and from no other port of this machine.

Source: "Deep linking to the Perfetto UI", the Perfetto project's documentation.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import webbrowser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from lightning_timekeeper.trace.merge import merge
from lightning_timekeeper.trace.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOST = "127.0.0.1"
PORT = 9001
UI = "https://ui.perfetto.dev"

_SLOWEST_S = 60.0  # a client that says nothing for so long is left, or it would keep the next one waiting


def view(
    paths: Sequence[str | os.PathLike[str]],
    *,
    port: int = PORT,
    ui: str = UI,
    open_browser: Callable[[str], Any] | None = None,
    say: Callable[[str], Any] = print,
) -> None:
    """Show a trace in the Perfetto UI; returns when the UI has it.

    Args:
        paths: The trace, or several, which are merged first.
        port: To serve it on, 1 to 65535, or 0 for any free one; the public UI fetches from 9001 only.
        ui: Address of the UI, for a copy of one's own.
        open_browser: Is given the address to open; by default the desktop's browser is. Where there is none, the address
            is told, and served to whoever opens it, as over ``ssh -L 9001:127.0.0.1:9001``.
        say: Is given each line to tell.

    Raises:
        ValueError: No trace is given, or one that is none.
        OSError: It cannot be read, or the port is taken.
    """
    with tempfile.TemporaryDirectory(prefix="timekeeper-") as directory:
        if len(paths) == 1:
            trace = Path(paths[0])
        else:
            trace = Path(directory, "merged.json")
            say(str(merge(paths, trace)))
        with trace.open("rb"), _Server(port, trace, ui.rstrip("/")) as server:
            address = f"{server.ui}/#!/?url={quote(server.address, safe='')}"
            say(
                (open_browser or _open)(address)
                or f"Serving {printable(str(trace))} to {server.ui} until it is fetched; Ctrl-C ends it."
            )
            while not server.fetched:
                server.handle_request()
            say(f"The Perfetto UI has {printable(trace.name)}.")


class _Server(HTTPServer):
    """Serves one file, to one page."""

    allow_reuse_address = os.name == "posix"  # elsewhere it would let two listen on one port

    def __init__(self, port: int, trace: Path, ui: str) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except OverflowError:
            raise ValueError(f"`view(port={port!r})`: expected 0 to 65535") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(
                error.errno, f"port {port} of {HOST} is taken, perhaps by another `timekeeper view`: end that first"
            ) from None
        self.trace, self.ui, self.fetched = trace, ui, False
        parts = urlsplit(ui)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.host = f"{HOST}:{self.server_address[1]}"
        self.page = f"/{quote(os.fsencode(trace.name))}"
        self.address = f"http://{self.host}{self.page}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle: it may come again."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SLOWEST_S

    def do_GET(self) -> None:
        """The trace."""
        if not self._allowed():
            return
        with self.server.trace.open("rb") as file:
            self.send_response(200)
            self._allow()
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.send_header("Cache-Control", "no-cache")
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, 1 << 20)
        self.server.fetched = True

    def do_OPTIONS(self) -> None:
        """Chromium asks before a public page reads from this machine."""
        if self._allowed():
            self.send_response(204)
            self._allow()
            self.send_header("Access-Control-Allow-Methods", "GET")
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self.end_headers()

    def _allowed(self) -> bool:
        """Only the UI may read, and only this file; the host is looked at because a name may be bound to this address."""
        server, headers = self.server, self.headers
        if headers.get("Host") == server.host and headers.get("Origin") == server.origin:
            if self.path == server.page:
                return True
            self.send_error(404)
        else:
            self.send_error(403)
        return False

    def _allow(self) -> None:
        self.send_header("Access-Control-Allow-Origin", self.server.origin)
        self.send_header("Vary", "Origin")

    def log_message(self, *args: Any) -> None:
        """Nothing on the terminal."""


def _open(address: str) -> str | None:
    """Open the desktop's browser; returns what to tell where there is none."""
    # without a display a browser for the terminal would be found, and take it over
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    shown = not sys.platform.startswith(("linux", "freebsd")) or any(os.environ.get(name) for name in displays)
    if shown and webbrowser.open(address):
        return None
    why = "No browser was found" if shown else "There is no display"
    return f"{why}: open {address} in one (from elsewhere, after `ssh -L {PORT}:{HOST}:{PORT} …`); Ctrl-C ends this."
