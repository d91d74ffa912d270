"""The README tells the truth: its code runs, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_timekeeper.__main__ import _parser

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed")  # where there is no TensorBoard
@pytest.mark.filterwarnings("ignore:`Timer\\(deadline='slurm'\\)`")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_blocks_run(block, tmp_path, monkeypatch):
    """Each is a program by itself."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_commands_exist():
    """What stands behind ``timekeeper`` is what the command line takes."""
    mentioned = set(re.findall(r"`timekeeper (\w+)", README))
    (action,) = (action for action in _parser()._actions if action.dest == "command")
    assert mentioned == set(action.choices)


def test_the_two_commands():
    """CI takes the set-up commands from here."""
    assert "\npip install . && timekeeper demo\n" in README
    assert "\npip install -e '.[test]' && pytest\n" in README
