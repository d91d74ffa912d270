"""Where the bytes go: files that open at any moment, compressed ones, URLs, any writable file."""

from __future__ import annotations

import gzip
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from traces import make_tracer, parse, read, slices

from lightning_timekeeper.trace import writer
from lightning_timekeeper.trace.tracer import Tracer, span
from lightning_timekeeper.trace.writer import FileSink, Memory, open_sink


def record(path, **arguments):
    with make_tracer(path, **arguments) as tracer:
        with span("a"):
            pass
        tracer.flush()
        with span("b", x=1):
            pass
    return tracer


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_existing_file_is_not_touched(tmp_path, name):
    """A path that is taken is refused at construction and stays as it is; for .gz also the .json it grows as."""
    for taken in {name, "trace.json"}:
        (tmp_path / taken).write_text("mine")
        with pytest.raises(FileExistsError, match=taken):
            Tracer(tmp_path / name)
        assert (tmp_path / taken).read_text() == "mine"
        (tmp_path / taken).unlink()
    assert not list(tmp_path.iterdir())


def test_directories_are_made(tmp_path):
    """The directories of a path are made where they are missing."""
    record(tmp_path / "a" / "b" / "trace.json")
    assert len(slices(read(tmp_path / "a" / "b" / "trace.json"))) == 2


def test_directory_that_cannot_be_made(tmp_path):
    """A path through a file is refused at construction."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Tracer(tmp_path / "file" / "trace.json")


def test_the_file_is_whole_events_at_any_time(tmp_path):
    """After each flush the file is whole but for its closing bracket, and opens as it is."""
    path = tmp_path / "trace.json"
    with make_tracer(path) as tracer:
        for number in range(1, 4):
            with span("a", number=number):
                pass
            assert tracer.flush()
            assert len(slices(parse(path.read_bytes() + b"]"))) == number


def test_gzip(tmp_path):
    """A .json.gz grows as a plain file, and is one gzip member with the same permissions once it is closed."""
    path, plain = tmp_path / "trace.json.gz", tmp_path / "trace.json"
    with make_tracer(path) as tracer:
        with span("a"):
            pass
        assert tracer.flush()
        assert len(slices(parse(plain.read_bytes() + b"]"))) == 1
        assert not path.exists()
        plain.chmod(0o640)
        assert tracer.path == str(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json.gz"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(slices(parse(gzip.decompress(path.read_bytes())))) == 1


def test_gzip_is_opened_by_perfetto(tmp_path, perfetto):
    """Perfetto opens the compressed file."""
    record(tmp_path / "trace.json.gz")
    report = perfetto.open_trace(tmp_path / "trace.json.gz", ["select count(*) from slice"])
    assert report.ok
    assert report.rows == [[[2]]]


def test_gzip_that_fails_leaves_the_plain_file(tmp_path):
    """Where the compressed file cannot be made, the plain one stays, with a warning that names it; nothing is lost."""
    path, plain = tmp_path / "trace.json.gz", tmp_path / "trace.json"
    with (  # noqa: PT031
        pytest.warns(RuntimeWarning, match=r"could not be compressed .*; the trace is .*trace\.json\.") as warned,
        make_tracer(path) as tracer,
    ):
        with span("a"):
            pass
        path.write_text("somebody else's")
    assert len(warned) == 1
    assert path.read_text() == "somebody else's"
    assert len(slices(read(plain))) == 1
    assert tracer.path == str(plain)
    assert len(list(tmp_path.iterdir())) == 2


def test_gzip_without_links(tmp_path, monkeypatch):
    """A file system that has no links gets the compressed file too, and no file is replaced there either."""

    def link(source, target):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", link)
    record(tmp_path / "trace.json.gz")
    assert len(slices(parse(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())))) == 2
    (tmp_path / "source").write_text("new")
    (tmp_path / "target").write_text("old")
    with pytest.raises(FileExistsError):
        writer._rename(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "old"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_gzip_killed(tmp_path, perfetto):
    """A process killed while it records leaves the plain file of what would have been compressed."""
    code = """
        import os, signal, sys
        from lightning_timekeeper.trace.tracer import Tracer, span
        tracer = Tracer(sys.argv[1])
        tracer.enable()
        with span("done"):
            pass
        with span("open"):
            tracer.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """

    path = tmp_path / "trace.json.gz"
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code), path], check=False).returncode == -9
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    report = perfetto.open_trace(tmp_path / "trace.json", ["select name from slice order by ts"])
    assert report.ok
    assert report.rows == [[["done"], ["open"]]]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_url(name):
    """A URL that fsspec knows is written, compressed where it says so; an existing file there is refused too."""
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://somewhere/{os.getpid()}/{name}"
    record(url)
    with fsspec.open(url, "rb", compression="infer") as file:
        assert len(slices(parse(file.read()))) == 2
    with pytest.raises(FileExistsError):
        Tracer(url)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_opener(tmp_path, name):
    """An opener's file is written in place of ours; what is flushed is there though the file is buffered."""
    asked = []

    def opener(path):
        asked.append(path)
        return open(tmp_path / "mine", "wb")

    with make_tracer(name, opener=opener) as tracer:
        with span("a"):
            pass
        assert tracer.flush()
        if name.endswith("json"):
            assert len(slices(parse((tmp_path / "mine").read_bytes() + b"]"))) == 1
    data = (tmp_path / "mine").read_bytes()
    assert len(slices(parse(gzip.decompress(data) if name.endswith("gz") else data))) == 1
    assert asked == [name]


@pytest.mark.parametrize("rubbish", [None, 3, object(), "path"])
def test_opener_returns_rubbish(rubbish):
    """An opener that returns no writable file is told so at construction."""
    with pytest.raises(TypeError, match=r"the writer returned .*; expected a writable binary file"):
        Tracer("trace.json", opener=lambda path: rubbish)


def test_opener_raises():
    """What an opener raises is raised at construction."""
    with pytest.raises(ZeroDivisionError):
        Tracer("trace.json", opener=lambda path: 1 / 0)


def test_opener_hangs():
    """A file that does not open in time is a TimeoutError, and its thread waits for nothing more."""
    release = threading.Event()
    sink = FileSink("trace.json", lambda path: release.wait(10))
    with pytest.raises(TimeoutError, match=r"trace\.json: not open after 0\.01 s"):
        sink.opened(0.01)
    assert not sink.wait(0)
    release.set()


@pytest.mark.parametrize("takes", [1, 7, 100])
def test_partial_writes(takes):
    """A raw file that takes a part of what it is given gets the rest too."""
    got = bytearray()

    class File:
        def write(self, data):
            got.extend(data[:takes])
            return min(takes, len(data))

        def close(self):
            pass

    record("trace.json", opener=lambda path: File())
    assert len(slices(parse(bytes(got)))) == 2


@pytest.mark.parametrize("answer", [None, -1, 10**9, "all", 2.5])
def test_odd_counts(answer):
    """A file whose write returns no count, or a wrong one, is taken to have taken all."""
    got = bytearray()

    class File:
        def write(self, data):
            got.extend(data)
            return answer

        def close(self):
            pass

    record("trace.json", opener=lambda path: File())
    assert len(slices(parse(bytes(got)))) == 2


def test_memory_sink():
    """Memory holds what it was given, readable at any time, and takes nothing after its end."""
    sink = open_sink(None)
    assert isinstance(sink, Memory)
    sink.write(b'[\n{"ph":"i","name":"a","pid":1,"tid":1,"ts":0,"s":"t"}')
    assert [event["name"] for event in sink.events()] == ["a"]
    sink.end()
    sink.end()
    sink.write(b"more")
    sink.abandon()
    assert sink.wait()
    assert gzip.decompress(b"".join(sink._parts)).endswith(b"}\n]\n")


def test_memory_is_compressed():
    """An event in memory takes some fifteen bytes, not a hundred."""
    tracer = make_tracer(None, time.perf_counter_ns)
    for _ in range(10_000):
        with tracer.span("a"):
            pass
    tracer.close()
    assert sum(map(len, tracer._drain.sink._parts)) < 20 * 10_000


def test_warning_that_is_an_error(capsys):
    """Where warnings are errors ours is printed: it must not end the thread that says it, nor the training."""
    writer.trouble("the disk is full")
    assert "RuntimeWarning: the disk is full" in capsys.readouterr().err
