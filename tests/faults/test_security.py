"""Hostile names and files: nothing steers a terminal, leaves a directory, or is run."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import string
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lightning_timekeeper
from lightning_timekeeper.__main__ import main
from lightning_timekeeper.files import join
from lightning_timekeeper.template import KEYS, Template
from lightning_timekeeper.view import UI, view

STEERING = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egpj\r"
PACKAGE = Path(lightning_timekeeper.__file__).parent


def events_named(name):
    """A trace in which everything that can have a name has this one."""
    common = {"pid": 1, "tid": 1, "name": name, "cat": name}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name, name: name, "host": name, "stage": name}}
    yield {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": name}}
    yield {**common, "ph": "X", "ts": 1, "dur": 5, "args": {name: name}}
    yield {**common, "ph": "B", "ts": 2, "id": name}
    yield {**common, "ph": "i", "ts": 3, "s": "t"}
    yield {**common, "ph": name, "ts": 3}
    yield {"ph": "X", "pid": name, "tid": name, "ts": name, "dur": name, "name": name}


@pytest.fixture
def hostile(tmp_path):
    """Traces whose names, files and all, are hostile."""
    there = []
    for number, odd in enumerate(
        [STEERING, "<script>alert(1)</script>"[:8], b"\xff\xfe".decode(errors="surrogateescape")]
    ):
        path = tmp_path / f"{number}{odd}.json"
        body = json.dumps({"traceEvents": list(events_named(STEERING)), STEERING: STEERING})
        path.write_text(body[: -number or None])  # the second and third are cut
        there.append(str(path))
    return there


def steered(text):
    return [letter for letter in text if not (letter.isprintable() or letter == "\n")]


def test_no_command_steers_the_terminal(hostile, tmp_path, capsys):
    """Whatever spans, tracks, processes, keys and files are called: summary, merge, repair and every error."""
    not_one = tmp_path / f"none{STEERING}.json"
    not_one.write_text(json.dumps({STEERING: 1}))
    missing = str(tmp_path / f"missing{STEERING}.json")
    for number, (status, command) in enumerate(
        [
            (0, ["summary", *hostile]),
            (0, ["summary", "--json", *hostile]),
            (0, ["merge", *hostile, "-o", str(tmp_path / f"out{STEERING}.json")]),
            (1, ["merge", *hostile, "-o", str(tmp_path / f"out{STEERING}.json")]),
            (1, ["merge", hostile[0], hostile[0], "-o", str(tmp_path / "new.json")]),
            *((0, ["repair", path]) for path in hostile),
            (1, ["repair", hostile[0]]),
            *((1, [command, str(path)]) for command in ("summary", "repair") for path in (not_one, missing)),
            (1, ["merge", str(not_one), "-o", str(tmp_path / "new.json")]),
            (1, ["view", missing]),
        ]
    ):
        assert main(command) == status, (number, command, capsys.readouterr())
        said = capsys.readouterr()
        assert not steered(said.out + said.err), (command, said)
        assert said.err.count("\n") == status
        assert said.out or status


def test_a_terminal_that_takes_ascii_only(hostile, tmp_path):
    """What it cannot show is a question mark, and no error."""
    command = [sys.executable, "-m", "lightning_timekeeper", "merge", *hostile, "-o", tmp_path / "out.json"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert not steered(done.stdout)


def test_view_of_a_file_that_is_called_anything(hostile):
    """It is served, and its name is shown as text."""
    for path in hostile:
        said, opened, got = [], threading.Event(), []

        def fetch(address, said=said, opened=opened, got=got):
            def get():
                url = urllib.parse.unquote_to_bytes(address.partition("url=")[2]).decode()
                request = urllib.request.Request(url, headers={"Origin": UI})
                got.append(urllib.request.urlopen(request, timeout=10).read())

            thread = threading.Thread(target=get)
            thread.start()
            opened.set()

        view([path], port=0, open_browser=fetch, say=said.append)
        assert got in ([], [Path(path).read_bytes()])  # view ends as soon as all is sent
        assert said
        assert not steered("".join(map(str, said)))


def test_a_template_that_leaves_the_directory():
    """Refused at construction, however it is written."""
    for bad in [
        "/etc/a.json",
        "\\\\server\\a.json",
        "a/../../a.json",
        "{{/../../a}}.json",
        ".{stage:.0}./a.json",
        "{stage:.0}/a.json",
        "{rank:/>4}.json",
        "{val_loss:/>9.3f}.json",
        "{rank:c}{rank:c}/a.json",
        "{epoch:9999999999}.json",
    ]:
        with pytest.raises(ValueError, match=r"`TimelineTrace\(filename="):
            Template(bad)


PIECES = st.lists(
    st.one_of(
        st.sampled_from(["/", ".", "..", "\\", "{{", "}}", "a", "~", ":", "//", "{{/"]),
        st.builds(
            "{{{}{}{}{}{}}}".format,
            st.sampled_from([*KEYS, "val_loss", ""]),
            st.sampled_from(["", ":", "!s:", "!r:"]),
            st.sampled_from(["", "/>", ".<", ".^", "\\=", "0"]),
            st.sampled_from(["", "1", "4", ".0", ".1", "5.2", "1000"]),
            st.sampled_from(["", "c", "d", "f", "s", "n", "%", "x", "e"]),
        ),
        st.text(max_size=6),
    ),
    max_size=6,
).map(lambda pieces: "".join(pieces) + ".json")


@settings(max_examples=400, deadline=None)
@given(
    PIECES,
    st.sampled_from(["fit", "validate", "test", "predict"]),
    st.integers(0, 2**31),
    st.one_of(st.floats(), st.none(), st.just("../../x")),
)
@example("{val_loss:/>4.3f}.json", "fit", 47, float("nan"))
@example("{rank:c}{epoch:c}/a.json", "fit", 46, 1.0)
def test_no_template_leaves_the_directory(template, stage, number, metric):
    """Any template is one ValueError, or names a file inside, for any values; and never an error later on."""
    try:
        made = Template(template)
    except ValueError as error:
        assert "`TimelineTrace(filename=" in str(error)  # noqa: PT017
        return
    name = made.fill({**dict.fromkeys(KEYS, number), "stage": stage}, {"val_loss": metric})
    for directory in ("/some/where", "where", "."):
        inside = os.path.abspath(directory) + "/"
        assert os.path.normpath(join(os.path.abspath(directory), name)).startswith(inside), name
    assert join("s3://bucket/some", name).startswith("s3://bucket/some/")
    assert ".." not in name.split("/")
    assert not set(name) & set(map(chr, range(32)))


FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "mktemp", "system", "popen", "unpack_archive", "extractall"),
    *("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "tarfile", "zipfile"),
    *("subprocess", "broadcast_object_list", "all_gather_object", "gather_object", "allow_pickle"),
}
"""Names that no module of ours uses, as function, attribute, module or keyword: what runs, unpacks or unpickles."""


def test_nothing_is_evaluated_or_unpickled():
    """No module of the package evaluates text, unpickles, unpacks an archive or starts a command."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Name):
                names = [node.id]
            elif isinstance(node, ast.Attribute):
                # a compiled regular expression is no code
                names = [] if isinstance(node.value, ast.Name) and node.value.id == "re" else [node.attr]
            elif isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
            elif isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.keyword):
                names = [node.arg]
            found += [(path.name, node.lineno, name) for name in names if name in FORBIDDEN]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                found.append((path.name, node.lineno, ast.unparse(node.func)))
    assert found == []


def test_a_directory_of_ours_is_nobody_elses(tmp_path):
    """What is written outside the user's directory, for children, only the user reads."""
    from lightning_timekeeper import Tracer
    from lightning_timekeeper.trace import tracer as module

    with Tracer(tmp_path / "t.json"):
        board = module._board
        if board is not None:
            assert os.stat(board.path).st_mode & 0o077 == 0


def test_templates_of_ascii_are_what_they_say():
    """The checks above refuse no plain name."""
    for name in ("{stage}-rank{rank}.json", "{epoch:03d}/{step}.json.gz", "a..b.json", "..a/b...json", ".hidden.json"):
        Template(name)
    for letter in string.ascii_letters + string.digits + " !#$%&'()+,-.;=@[]^_`~":
        with contextlib.suppress(OSError):
            Template(f"{letter}.json")
