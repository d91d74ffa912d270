"""LightningCLI: every argument of both callbacks from YAML, from the command line, and back through the saved file."""

from __future__ import annotations

import inspect
import io
import json
import sys

import pytest
from lightning.pytorch.cli import LightningCLI
from timer_fakes import Model

from lightning_timekeeper import At, Every, TimelineTrace, Timer, Tracer

pytest.importorskip("jsonargparse", reason="jsonargparse is what LightningCLI needs")
yaml = pytest.importorskip("yaml")

AT = {"class_path": "lightning_timekeeper.At", "init_args": {"n": 3, "unit": "epoch"}}
SCHEDULE = {
    "class_path": "torch.profiler.schedule",
    "init_args": {"wait": 1, "warmup": 1, "active": 2, "repeat": 3, "skip_first": 4, "skip_first_wait": 0},
}
TRACER = {"class_path": "lightning_timekeeper.Tracer", "init_args": {"path": None, "max_events": 5}}

TIMERS = [
    {
        "duration": "36h",
        "interval": "epoch",
        "verbose": False,
        "run_duration": {"hours": 12.5, "days": 1},
        "deadline": "2030-01-31T12:00:00+01:00",
        "margin": "00:00:10:00",
        "save_on_limit": "last.ckpt",
        "validate_on_limit": False,
        "log": True,
    },
    {"duration": "10:00:00:00", "run_duration": "1-12", "margin": "PT5M", "save_on_limit": True},
    {"duration": None, "deadline": "slurm", "margin": {"minutes": 10}},
]
TIMELINES = [
    {
        "trigger": [100, "step"],
        "filename": "{stage}-{rank}-{step}.json.gz",
        "enable": 100,
        "disable": AT,
        "writer": "test_lightning_cli.writer",
        "dirpath": "traces",
        "min_duration_us": 2.5,
        "max_events": 1000,
        "log": True,
        "summary": False,
    },
    {"trigger": "test_lightning_cli.trigger", "filename": None, "enable": [2, "epoch"], "disable": None},
    {"schedule": SCHEDULE, "tracer": TRACER},
]
SETS = [(Timer, given) for given in TIMERS] + [(TimelineTrace, given) for given in TIMELINES]


def writer(path):
    return io.BytesIO()


def trigger(trainer):
    return False


def run(monkeypatch, *arguments):
    """The LightningCLI of a program started with these arguments."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    return LightningCLI(Model, run=False, seed_everything_default=False)


def config_with(path, cls, given):
    trainer = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "max_steps": 0}
    callback = {"class_path": f"lightning_timekeeper.{cls.__name__}", "init_args": given}
    path.write_text(yaml.safe_dump({"trainer": {**trainer, "callbacks": [callback]}}))
    return f"--config={path}"


def arguments_in(config):
    """What a parsed or a saved configuration says of the callback's arguments."""
    [callback] = yaml.safe_load(config)["trainer"]["callbacks"]
    return callback["init_args"]


def said_of(given, arguments):
    """What they say of the given ones, without the defaults that were added."""
    if not isinstance(given, dict) or not isinstance(arguments, dict):
        return arguments
    return {name: said_of(value, arguments[name]) for name, value in given.items()}


@pytest.mark.parametrize(("cls", "sets"), [(Timer, TIMERS), (TimelineTrace, TIMELINES)])
def test_no_argument_is_forgotten(cls, sets):
    """The tests below know every argument that the callback has."""
    assert {name for given in sets for name in given} == set(inspect.signature(cls).parameters)


@pytest.mark.parametrize(("cls", "given"), SETS)
def test_from_yaml_and_back_through_the_saved_file(monkeypatch, tmp_path, cls, given):
    """A file's arguments are those of the saved ``config.yaml``, and a run of that saves the same again."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    monkeypatch.chdir(tmp_path)
    cli = run(monkeypatch, config_with(tmp_path / "given.yaml", cls, given))
    assert type(cli.trainer.callbacks[0]) is cls
    cli.trainer.fit(cli.model)
    saved = (tmp_path / "config.yaml").read_text()
    assert said_of(given, arguments_in(saved)) == given
    again = run(monkeypatch, f"--config={tmp_path / 'config.yaml'}")
    assert arguments_in(again.parser.dump(again.config, skip_none=False)) == arguments_in(saved)


@pytest.mark.parametrize(("cls", "given"), SETS)
def test_from_the_command_line(monkeypatch, tmp_path, cls, given):
    """The same arguments written as options mean the same as in a file."""

    def option(name, value):
        return f"--trainer.callbacks.{name}={value if isinstance(value, str) else json.dumps(value)}"

    ours = f"--trainer.callbacks+=lightning_timekeeper.{cls.__name__}"
    options = [option(name, value) for name, value in given.items()]
    cli = run(monkeypatch, "--trainer.accelerator=cpu", "--trainer.logger=false", ours, *options)
    assert type(cli.trainer.callbacks[0]) is cls
    assert said_of(given, arguments_in(cli.parser.dump(cli.config, skip_none=False))) == given


def test_the_timer_that_is_made(monkeypatch, tmp_path):
    """It has what the file says."""
    timer = run(monkeypatch, config_with(tmp_path / "c.yaml", Timer, TIMERS[0])).trainer.callbacks[0]
    limits = timer._limits
    assert (limits.duration_s, limits.run_duration_s, limits.margin_s) == (129_600, 131_400, 600)
    assert limits.deadline_s == 1_896_087_600
    assert (timer._interval, timer._verbose, timer._log) == ("epoch", False, True)
    assert (timer._save_on_limit, timer._validate_on_limit) == ("last.ckpt", False)
    assert (
        run(monkeypatch, config_with(tmp_path / "c.yaml", Timer, TIMERS[1])).trainer.callbacks[0]._save_on_limit is True
    )


def test_the_timelines_that_are_made(monkeypatch, tmp_path):
    """Triggers, callables, schedules and tracers arrive as objects."""
    made = []
    for given in TIMELINES:
        cli = run(monkeypatch, config_with(tmp_path / "c.yaml", TimelineTrace, given))
        made.append(cli.trainer.callbacks[0])
    assert (made[0]._trigger, made[0]._enable, made[0]._disable) == (Every(100), At(100), At(3, "epoch"))
    assert made[0]._writer.__name__ == "writer"
    assert (made[0]._dirpath, made[0]._min_duration_us, made[0]._max_events) == ("traces", 2.5, 1000)
    assert made[1]._trigger.function.__name__ == "trigger"
    assert made[1]._template is None
    assert [made[2]._schedule(step).name for step in (4, 5, 6, 7)] == [
        "NONE",
        "WARMUP",
        "RECORD",
        "RECORD_AND_SAVE",
    ]
    assert isinstance(made[2]._own_tracer, Tracer)


@pytest.mark.parametrize("written", ["10:00:00:00", "5", "1.5"])
@pytest.mark.parametrize("argument", ["duration", "run_duration", "margin"])
def test_an_unquoted_duration_is_refused(monkeypatch, tmp_path, capsys, argument, written):
    """YAML makes a number of it, 25 days of the first for 10: the error says to quote it."""
    line = config_with(tmp_path / "c.yaml", Timer, {"deadline": "slurm", argument: "HERE"})
    (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text().replace("HERE", written))
    with pytest.raises((SystemExit, Exception)) as error:  # which one is jsonargparse's affair
        run(monkeypatch, line)
    assert "quote it: '10:00:00:00'" in str(error.value) + capsys.readouterr().err


def test_a_deadline_may_stand_without_quotes(monkeypatch, tmp_path):
    """YAML has a form for moments, and ISO 8601 with an offset is one."""
    line = config_with(tmp_path / "c.yaml", Timer, {"deadline": "HERE"})
    (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text().replace("HERE", "2030-01-31T12:00:00+01:00"))
    assert run(monkeypatch, line).trainer.callbacks[0]._limits.deadline_s == 1_896_087_600
