"""``timekeeper view``: the trace is served to the Perfetto UI, to nobody else, once, and the UI shows it."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import unquote, urlsplit

import browser
import pytest

from lightning_timekeeper import Tracer, span
from lightning_timekeeper.__main__ import main
from lightning_timekeeper.view import PORT, UI, view


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "a trace.json"
    with Tracer(path), span("load"), span("read"):
        pass
    return path


class Viewing:
    """``view`` in a thread, with a browser that only notes what it is to open."""

    def __init__(self, *paths, **arguments):
        self.lines, self.error, self._opened, self._address = [], None, threading.Event(), ""
        self._thread = threading.Thread(target=self._run, args=(paths, arguments), daemon=True)
        self._thread.start()

    def _run(self, paths, arguments):
        arguments = {"port": 0, "open_browser": self._open, **arguments}
        try:
            view(paths, say=self._say, **arguments)
        except Exception as error:  # noqa: BLE001
            self.error = error
        self._opened.set()

    def _say(self, line):
        self.lines.append(line)
        if not self._address and (told := re.search(r"https://\S+url=\S+", line)):
            self._open(told[0])

    def _open(self, address):
        self._address = address
        self._opened.set()

    @property
    def address(self):
        assert self._opened.wait(30)
        assert self.error is None
        return self._address

    @property
    def served(self):
        return urlsplit(unquote(self.address.partition("url=")[2]).replace(" ", "%20"))

    def ask(self, method="GET", path=None, **headers):
        connection = http.client.HTTPConnection(self.served.hostname, self.served.port, timeout=10)
        headers = {"Origin": UI, "Host": self.served.netloc, **headers}
        connection.putrequest(method, path or self.served.path, skip_host=True)
        for name, value in headers.items():
            if value is not None:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    @property
    def over(self):
        self._thread.join(10)
        return not self._thread.is_alive()


def test_the_ui_gets_the_trace_and_view_ends(trace):
    """To the byte, from this machine's loopback address, with the UI's origin allowed and no other."""
    viewing = Viewing(trace)
    assert viewing.address.startswith("https://ui.perfetto.dev/#!/?url=http%3A%2F%2F127.0.0.1%3A")
    answer, body = viewing.ask()
    assert (answer.status, body) == (200, trace.read_bytes())
    assert answer.headers["Access-Control-Allow-Origin"] == UI
    assert viewing.over
    assert "until it is fetched" in viewing.lines[0]
    assert viewing.lines[1] == "The Perfetto UI has a trace.json."


def test_nobody_else_gets_anything(trace, tmp_path):
    """Other origins, names bound to this address, other paths and methods are refused, and view goes on."""
    (tmp_path / "other.json").write_text("[]")
    viewing = Viewing(trace)
    for status, ask in [
        (403, {"Origin": "https://evil.example"}),
        (403, {"Origin": None}),
        (403, {"Origin": "null"}),
        (403, {"Host": "evil.example"}),
        (403, {"method": "OPTIONS", "Origin": "https://evil.example"}),
        (404, {"path": "/"}),
        (404, {"path": "/other.json"}),
        (404, {"path": f"{viewing.served.path}/../other.json"}),
        (404, {"path": "/../../etc/passwd"}),
        (501, {"method": "POST"}),
        (501, {"method": "HEAD"}),
    ]:
        answer, body = viewing.ask(**ask)
        assert answer.status == status, ask
        assert b"load" not in body
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert viewing.ask()[0].status == 200
    assert viewing.over


def test_chromiums_question_before_it_reads_from_this_machine(trace):
    """A preflight of the UI's is answered with yes, and does not count as the fetch."""
    viewing = Viewing(trace)
    answer, _ = viewing.ask("OPTIONS", Access_Control_Request_Private_Network="true")
    assert answer.status == 204
    assert answer.headers["Access-Control-Allow-Private-Network"] == "true"
    assert viewing.ask()[0].status == 200


def test_a_browser_that_goes_away_may_come_again(tmp_path):
    """A connection that is reset in the middle does not count."""
    path = tmp_path / "big.json"
    path.write_bytes(b"[\n" + b" " * 30_000_000 + b"]\n")
    viewing = Viewing(path)
    with socket.create_connection((viewing.served.hostname, viewing.served.port)) as half:
        half.sendall(f"GET /big.json HTTP/1.1\r\nHost: {viewing.served.netloc}\r\nOrigin: {UI}\r\n\r\n".encode())
        half.recv(100)
    assert len(viewing.ask()[1]) == path.stat().st_size
    assert viewing.over


def test_several_traces_are_merged_first(trace, tmp_path):
    """The UI gets one file, and what became of each trace is said."""
    other = tmp_path / "other.json.gz"
    with Tracer(other), span("elsewhere"):
        pass
    viewing = Viewing(trace, other)
    _, body = viewing.ask()
    assert {"load", "elsewhere"} <= {event["name"] for event in json.loads(body)}
    assert viewing.over
    assert "2 traces" in viewing.lines[0]


def test_a_gzip_file_goes_as_it_is(tmp_path):
    """The UI unpacks it itself."""
    path = tmp_path / "t.json.gz"
    with Tracer(path), span("load"):
        pass
    _, body = Viewing(path).ask()
    assert b"load" in gzip.decompress(body)


def test_a_port_that_is_taken_is_one_line(trace, capsys, monkeypatch):
    """It names the port and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 is taken"):
            view([trace], port=port)
        monkeypatch.setattr("lightning_timekeeper.view.view.__kwdefaults__", {**view.__kwdefaults__, "port": port})
        assert main(["view", str(trace)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "is taken" in captured.err


@pytest.mark.parametrize(("display", "line"), [("", "There is no display: open"), (":0", "No browser was found: open")])
def test_without_a_browser_the_address_is_told(trace, monkeypatch, display, line):
    """One line with the address to open, and the trace is served to whoever does."""
    for name in ("WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    viewing = Viewing(trace, open_browser=None)
    assert viewing.ask()[0].status == 200
    assert viewing.over
    assert viewing.lines[0].startswith(f"{line} {viewing.address}")


@pytest.mark.slow
def test_the_perfetto_ui_shows_it(trace, chromium):
    """The UI itself, in a real browser, fetches the trace from the default port and shows its track."""
    with browser.perfetto_ui() as ui:
        viewing = Viewing(trace, ui=ui, port=PORT)
        page = chromium.new_page()
        page.goto(viewing.address)
        assert "MainThread 1" in browser.wait_for_trace(page)
        assert viewing.over
        page.close()


@pytest.mark.slow
def test_ctrl_c_ends_it(trace):
    """Without a word but the first."""
    code = f"""
import lightning_timekeeper.view as module
from lightning_timekeeper.__main__ import main
module.view.__kwdefaults__["port"] = 0
raise SystemExit(main(["view", {str(trace)!r}]))
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "DISPLAY": "", "WAYLAND_DISPLAY": "", "BROWSER": "", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert b"There is no display" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=20) == (b"", b"")
    assert child.returncode == 130


def test_what_is_no_trace_or_not_there(tmp_path):
    """One error, before anything is served."""
    with pytest.raises(FileNotFoundError):
        view([tmp_path / "missing.json"], port=0)
    with pytest.raises(ValueError, match="at least one trace"):
        view([], port=0)
