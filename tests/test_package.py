"""The package itself: what importing it loads, what it offers, and which way its imports point."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_timekeeper

HEAVY = ("torch", "lightning", "pytorch_lightning", "numpy", "fsspec", "matplotlib")
PACKAGE = Path(lightning_timekeeper.__file__).parent


def loaded_by(code):
    """Which heavy packages a new interpreter has loaded after running the code."""
    code += f"\nimport sys\nprint('LOADED', *[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "code",
    [
        "import lightning_timekeeper",
        "from lightning_timekeeper.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from lightning_timekeeper import span, iterate, instant, counter, get_tracer",
        "from lightning_timekeeper import Every, At, Trigger",
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code):
    """The package, the command's help, spans in user code and triggers load neither torch nor Lightning nor numpy."""
    assert loaded_by(code) == set()


def test_the_trace_library_loads_neither_torch_nor_lightning():
    """Recording, writing and reading a trace works without them."""
    code = """
import os, tempfile
from lightning_timekeeper import Tracer, read_events, span
path = os.path.join(tempfile.mkdtemp(), "t.json")
with Tracer(path), span("a"):
    pass
assert [event["name"] for event in read_events(path) if event["ph"] == "X"] == ["a"]
"""
    assert loaded_by(code) == {"numpy"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", sorted((PACKAGE / "trace").rglob("*.py")), ids=str)
def test_the_trace_library_stands_alone(path):
    """Its modules import nothing above them, neither at the top nor inside a function."""
    for name in imports_of(path):
        assert name.split(".")[0] not in ("torch", "lightning", "pytorch_lightning")
        assert not name.startswith("lightning_timekeeper") or name.startswith("lightning_timekeeper.trace")


def test_every_public_name_is_there():
    """Each name of ``__all__`` resolves, is listed by ``dir``, and documents itself."""
    assert sorted(lightning_timekeeper.__all__) == lightning_timekeeper.__all__
    assert set(lightning_timekeeper.__all__) == set(lightning_timekeeper._HOMES)
    for name in lightning_timekeeper.__all__:
        assert getattr(lightning_timekeeper, name).__doc__
        assert name in dir(lightning_timekeeper)


def test_an_unknown_name_is_an_attribute_error():
    """As of any module, so that ``hasattr`` and star imports work."""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lightning_timekeeper.nonsense


def test_the_version_is_in_one_place():
    """The installed metadata takes it from the package."""
    assert importlib.metadata.version("lightning-timekeeper") == lightning_timekeeper.__version__


def test_the_map_of_the_code_is_whole():
    """CONTRIBUTING.md says of each module where it belongs, and of none that is not there."""
    screen = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text().split("```")[1]
    assert set(re.findall(r"\w+\.py", screen)) == {path.name for path in PACKAGE.rglob("*.py")}


def test_lightning_is_imported_through_names_alone():
    """Else a class of ours would be at home under one of its names only. The demo is a program of its own."""
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("names.py", "demo.py"):
            assert not {name.split(".")[0] for name in imports_of(path)} & {"lightning", "pytorch_lightning"}, path


def test_the_types_are_marked():
    """Type checkers look for py.typed."""
    assert (PACKAGE / "py.typed").exists()
