"""Disks that are full, read-only, gone or slow, and paths that nobody should use: the training ends as without us."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from runs import Model, named, quiet, spans_in, trainer

from lightning_timekeeper import read_events

sys_linux = pytest.mark.skipif(sys.platform != "linux", reason="mounts, limits and users of Linux")


@pytest.fixture
def mount(tmp_path):
    """``mount(options)``: a small file system of its own, taken away after the test."""
    mounted = []

    def make(options):
        path = tmp_path / "mounted"
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


class At(Callback):
    """Does something when a training step begins, and counts the steps."""

    def __init__(self, step=-1, what=None):
        self.step, self.what, self.steps = step, what, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.steps == self.step:
            self.what()
        self.steps += 1


def fit(tmp_path, timeline, *callbacks, epochs=2):
    """A fit that has to end as without us: 8 steps an epoch."""
    steps = At()
    trainer(tmp_path, timeline, steps, *callbacks, max_epochs=epochs).fit(Model())
    assert steps.steps == 8 * epochs


def ours(warned):
    """Our warnings; Lightning has some of its own."""
    return [str(each.message) for each in warned if each.category is RuntimeWarning]


def steps_in(path):
    """The steps of a file that may be cut."""
    events = [event for event in read_events(path) if event["ph"] in "XB"]
    return [event["args"]["step"] for event in events if event["name"] == "step" and event["ph"] == "X"]


@sys_linux
def test_a_full_disk(tmp_path, mount):
    """One warning; what fitted is there and opens."""
    small = mount("size=64k")
    with pytest.warns(RuntimeWarning, match="No space left on device") as warned:
        fit(tmp_path, quiet(dirpath=small, min_duration_us=0), epochs=20)
    assert len(ours(warned)) == 1
    steps = steps_in(small / "fit-rank0.json")
    assert len(steps) > 10
    assert steps == list(range(len(steps)))


@sys_linux
def test_a_full_disk_that_has_room_again(tmp_path, mount):
    """The recording has ended with one warning, nothing is written after the gap, and the next run is recorded whole."""
    small = mount("size=256k")
    filler = small / "filler"
    filler.write_bytes(b"x" * 150_000)
    timeline = quiet(dirpath=small, min_duration_us=0)
    with pytest.warns(RuntimeWarning, match="No space left on device") as warned:
        fit(tmp_path, timeline, At(8 * 35, filler.unlink), epochs=40)
    assert len(ours(warned)) == 1
    steps = steps_in(small / "fit-rank0.json")
    assert steps == list(range(len(steps)))
    (small / "fit-rank0.json").unlink()
    fit(tmp_path, timeline)
    assert len(named(spans_in(read_events(timeline.path)), "step")) == 16


@sys_linux
@pytest.mark.slow
def test_a_quota(tmp_path):
    """A file that may not grow any more, as under a quota: one warning."""
    code = f"""
import resource, signal, sys, warnings
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from runs import Model, quiet, trainer
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
warnings.simplefilter("ignore")
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always", RuntimeWarning)
    fit = trainer({str(tmp_path)!r}, quiet(min_duration_us=0), max_epochs=20)
    fit.fit(Model())
print(fit.global_step, [str(w.message) for w in warned if "could not be written" in str(w.message)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    steps, _, told = done.stdout.strip().splitlines()[-1].partition(" ")
    assert steps == "160"
    assert told.count("File too large") == 1
    assert (tmp_path / "fit-rank0.json").stat().st_size <= 20_000
    assert steps_in(tmp_path / "fit-rank0.json")


@sys_linux
def test_a_read_only_disk(tmp_path, mount):
    """The user hears of it before the training, with the path."""
    locked = mount("size=64k,ro")
    with pytest.raises(OSError, match="Read-only file system") as error:
        fit(tmp_path, quiet(dirpath=locked))
    assert str(locked) in str(error.value)


@sys_linux
def test_a_disk_that_is_taken_away(tmp_path, mount):
    """Unmounted in mid-run, or its directory removed: the training ends, also where new files were to begin there."""
    away = mount("size=1m")
    remove = lambda: shutil.rmtree(away / "traces")  # noqa: E731
    timeline = quiet(dirpath=away / "traces", filename="{epoch}.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a new file may find its directory gone while it is made
        fit(tmp_path, timeline, At(12, remove), epochs=4)
    later = sorted((away / "traces").glob("*.json"))
    assert [path.name for path in later] == ["2.json", "3.json"]
    for path in later:
        assert len(named(spans_in(read_events(path)), "step")) == 8


def test_a_file_system_that_blocks(tmp_path, monkeypatch):
    """A write that hangs for ever: the run waits for it as long as it says, warns once, and ends."""
    monkeypatch.setattr("lightning_timekeeper.recording.CLOSE_S", 0.3)
    release = threading.Event()

    class Blocking:
        def write(self, data):
            release.wait(60)
            return len(data)

        def close(self):
            pass

    begin_s = time.monotonic()
    with pytest.warns(RuntimeWarning, match="could not be written") as warned:
        fit(tmp_path, quiet(writer=lambda path: Blocking()))
    release.set()
    assert len(ours(warned)) == 1
    assert time.monotonic() - begin_s < 20


@sys_linux
def test_no_file_descriptor_is_left(tmp_path):
    """None to open the file with: an error before the training; none to rotate with: one warning, and it goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    taken = []

    def exhaust():
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))

    timeline = quiet(filename="{epoch}.json")
    try:
        with pytest.warns(RuntimeWarning, match="Too many open files") as warned:
            fit(tmp_path, timeline, At(4, exhaust), epochs=3)
        assert len(ours(warned)) == 1
        exhaust()
        with pytest.raises(OSError, match="Too many open files"):
            fit(tmp_path, quiet())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)
    assert len(steps_in(tmp_path / "0.json")) == 8


@sys_linux
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="to give up root's rights, be root")
@pytest.mark.slow
def test_a_path_without_permission(tmp_path):
    """The user hears of it before the training."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from runs import Model, quiet, trainer
os.setegid(65534), os.seteuid(65534)
try:
    trainer("/", quiet(dirpath={str(tmp_path / "locked")!r})).fit(Model())
except OSError as error:
    print(error)
"""
    (tmp_path / "locked").mkdir(mode=0o700)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Permission denied: '/" in done.stdout


@pytest.mark.parametrize("window", [{}, {"enable": 3}])
def test_a_loop_of_links(tmp_path, window):
    """The user hears of it before the training, also where recording is to begin later."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=f"{os.strerror(errno.ELOOP)}|Not a directory|File exists"):
        fit(tmp_path, quiet(dirpath=tmp_path / "a" / "traces", **window))


NAMES = [" a b ", "äöü €", "\N{FIRE}", "a'b\"c", "#%?&", "-o", "a\\b", "\u202eabc", "x" * 250]


def test_odd_file_names(tmp_path, perfetto):
    """Spaces, unicode, quotes, 255 bytes: the file has exactly that name."""
    for name in NAMES:
        fit(tmp_path, quiet(filename=f"{name}.json"), epochs=1)
    paths = [tmp_path / f"{name}.json" for name in NAMES]
    assert sorted(paths) == sorted(tmp_path.glob("*.json"))
    for report in perfetto.open_traces(paths, ["select count(*) from slice where name = 'step'"]):
        assert report.ok
        assert report.rows == [[[8]]]


def test_a_newline_in_a_file_name():
    """Is refused at construction: a terminal would show it as two."""
    with pytest.raises(MisconfigurationException, match=r"filename='a\\nb.json'"):
        quiet(filename="a\nb.json")


@pytest.mark.parametrize("window", [{}, {"enable": 3}])
def test_a_name_that_is_too_long(tmp_path, window):
    """256 bytes: the user hears of it before the training, also where recording is to begin later."""
    with pytest.raises(OSError, match="File name too long"):
        fit(tmp_path, quiet(filename=f"{'x' * 251}.json", **window))
