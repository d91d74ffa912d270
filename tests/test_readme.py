"""The README tells the truth: its code runs, its commands exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_timekeeper.__main__ import _parser

README = (Path(__file__).parents[1] / "README.md").read_text()
FENCES = re.findall(
    r"^```(.*?)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE
)  # what stands behind the first, and the text
BLOCKS = [text for kind, text in FENCES if kind == "python"]


@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed")  # where there is no TensorBoard
@pytest.mark.filterwarnings("ignore:`Timer\\(deadline='slurm'\\)`")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_blocks_run(block, tmp_path, monkeypatch):
    """Each is a program by itself."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.slow
def test_the_slurm_job(tmp_path):
    """The batch script queues itself again until the training is done, and each attempt goes on where the last ended."""
    files = dict(re.findall(r'```(?:python|bash) title="(.*?)"\n(.*?)```', README, re.DOTALL))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bin").mkdir()
    for name, code in (
        ("srun", 'exec "$@"'),
        ("scontrol", f'echo "$@" >> {tmp_path}/queue'),
        ("python", f'exec {sys.executable} "$@"'),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for attempt, end_s in enumerate((0, time.time() + 7200)):  # the first has no time at all
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_END_TIME": str(int(end_s)),
            "SLURM_RESTART_COUNT": str(attempt),
        }
        done = subprocess.run(
            ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "queue").read_text() == "requeue 4711\n"
    names = {path.name for path in tmp_path.rglob("*.json")}
    assert names == {"fit-rank0-attempt0.json", "fit-rank0-attempt1.json"}


def test_commands_exist():
    """What stands behind ``timekeeper`` is what the command line takes."""
    mentioned = set(re.findall(r"`timekeeper (\w+)", README))
    (action,) = (action for action in _parser()._actions if action.dest == "command")
    assert mentioned == set(action.choices)
    lines = [line for kind, text in FENCES if not kind for line in text.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("timekeeper ")]
    assert commands
    for command in commands:
        _parser().parse_args(command)


def test_the_two_commands():
    """CI takes the set-up commands from here."""
    assert "\npip install . && timekeeper demo\n" in README
    assert "\npip install -e '.[test]' && pytest\n" in README
