"""What tests/test_names.py runs in processes of their own, in which no Lightning is loaded yet."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import logging
import os
import sys
import warnings

LIGHTNING, PYTORCH_LIGHTNING, OURS = "lightning.pytorch", "pytorch_lightning", "lightning_timekeeper.timer"
NAMES = (LIGHTNING, PYTORCH_LIGHTNING)
# ours alone loads lightning.pytorch, if no name is loaded
ORDERS = [order for order in itertools.permutations((LIGHTNING, PYTORCH_LIGHTNING, OURS)) if order[0] != OURS]
ORDERS.append((OURS, PYTORCH_LIGHTNING))


def is_loaded(name):
    return sys.modules.get(name) is not None


def import_in(order):
    """Import in this order; ours brings no second name along, and makes a Timer at once."""
    timer = None
    for name in order:
        before = [each for each in NAMES if is_loaded(each)]
        importlib.import_module(name)
        if name == OURS:
            from lightning_timekeeper import Timer

            timer = Timer("1h")
            assert [each for each in NAMES if is_loaded(each)] == (before or [LIGHTNING])
    return timer


def work(order, directory):
    """All that a user does, under both names, after importing in this order."""
    warnings.simplefilter("ignore")
    timer = import_in(order)
    for name in NAMES:
        is_at_home(name, timer)
        trains(name, os.path.join(directory, name))
        takes_a_command_line(name, os.path.join(directory, name))


def is_at_home(name, timer):
    """Ours are what the name's code asks for, also a Timer made before the name was imported."""
    from lightning_timekeeper import TimelineTrace, Timer
    from lightning_timekeeper.limit_checkpoint import LimitCheckpoint

    pl = importlib.import_module(name)
    exceptions = importlib.import_module(f"{name}.utilities.exceptions")
    callbacks = importlib.import_module(f"{name}.callbacks")

    class Own(Timer):
        pass

    for ours in (timer, Timer(), Own()):
        assert isinstance(ours, callbacks.Timer)
        assert isinstance(ours, pl.Callback)
    assert issubclass(TimelineTrace, pl.Callback)
    assert issubclass(LimitCheckpoint, callbacks.Checkpoint)
    for wrong in (lambda: Timer("nonsense"), lambda: Timer(deadline="x"), lambda: TimelineTrace(trigger="x")):
        try:
            wrong()
        except exceptions.MisconfigurationException:
            continue
        raise AssertionError("no MisconfigurationException")
    pl.Trainer(callbacks=[timer], logger=False, accelerator="cpu")
    # a Timer of theirs beside ours would warn of max_time, and its limit would hold; without max_epochs, 1000 is set
    trainer = pl.Trainer(callbacks=[Timer()], max_time="00:00:00:00", logger=False, accelerator="cpu")
    assert sum(isinstance(each, callbacks.Timer) for each in trainer.callbacks) == 1
    assert trainer.max_epochs is None


def model_of(name):
    return importlib.import_module(f"{name}.demos.boring_classes").BoringModel


def trains(name, directory):
    """A fit under the name stops for our limit, is traced, and its checkpoint resumes with the time."""
    from lightning_timekeeper import TimelineTrace, Timer

    pl = importlib.import_module(name)
    checkpoints = importlib.import_module(f"{name}.callbacks").ModelCheckpoint(os.path.join(directory, "checkpoints"))

    def fit(*callbacks, **arguments):
        trainer = pl.Trainer(
            callbacks=list(callbacks),
            default_root_dir=directory,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(model_of(name)(), **arguments)
        return trainer

    timer, timeline = Timer("0.02s", save_on_limit=True, verbose=False), TimelineTrace(summary=False)
    trainer = fit(timer, timeline, checkpoints)
    assert timer.stop_reason == "duration"
    assert trainer.global_step > 0
    assert os.path.getsize(timeline.path) > 1000
    path = os.path.join(directory, "checkpoints", "timer.ckpt")
    resumed = Timer("0.02s", verbose=False)
    assert fit(resumed, ckpt_path=path).global_step == trainer.global_step
    assert 0.02 <= resumed.time_elapsed() <= timer.time_elapsed()
    theirs = importlib.import_module(f"{name}.callbacks").Timer("00:00:00:00", verbose=False)
    assert fit(theirs, ckpt_path=path).global_step <= trainer.global_step + 1


def takes_a_command_line(name, directory):
    """The name's LightningCLI makes ours from their class paths."""
    from lightning_timekeeper import TimelineTrace, Timer

    try:
        import jsonargparse  # noqa: F401
    except ImportError:
        return
    arguments = ["--trainer.logger=false", "--trainer.accelerator=cpu"]
    arguments += ["--trainer.callbacks+=lightning_timekeeper.Timer", "--trainer.callbacks.duration=2h"]
    arguments += ["--trainer.callbacks+=lightning_timekeeper.TimelineTrace"]
    cli = importlib.import_module(f"{name}.cli").LightningCLI(model_of(name), run=False, args=arguments)
    assert [type(each) for each in cli.trainer.callbacks[:2]] == [Timer, TimelineTrace]
    assert cli.trainer.callbacks[0].time_remaining() == 7200


def console_of(name):
    """What a new Trainer prints before we are imported, what the import and another one print, and then if silenced."""
    sys.stdout = sys.stderr = console = io.StringIO()  # before the loggers take hold of it
    pl = importlib.import_module(name)

    def printed():
        pl.Trainer(accelerator="cpu", logger=False)
        text = console.getvalue()
        console.seek(0)
        console.truncate()
        return text

    printed()
    before = printed()
    importlib.import_module("lightning_timekeeper.timeline")
    importlib.import_module(OURS)
    after = printed()
    logging.getLogger(name).setLevel(logging.ERROR)
    return before, after, printed()


def stand_in(directory, name, text):
    """Put a package of this name, with this text, before the real one."""
    os.makedirs(os.path.join(directory, name, "callbacks"))
    with open(os.path.join(directory, name, "__init__.py"), "w") as file:
        file.write(text)
    with open(os.path.join(directory, name, "callbacks", "__init__.py"), "w") as file:
        file.write("")
    with open(os.path.join(directory, name, "callbacks", "timer.py"), "w") as file:
        file.write("Timer = 'not a class'")
    sys.path.insert(0, directory)


def without_the_second(kind, directory):
    """Ours do their work under the first name when the second one is not there, raises, or holds something else."""
    warnings.simplefilter("ignore")
    if kind == "missing":
        sys.modules[PYTORCH_LIGHTNING] = None
    else:
        text = "from pytorch_lightning.callbacks import timer\n"
        stand_in(directory, PYTORCH_LIGHTNING, text + ("raise RuntimeError('broken')" if kind == "broken" else ""))
    from lightning_timekeeper import Timer

    imported = False
    with contextlib.suppress(ImportError, RuntimeError):
        importlib.import_module(PYTORCH_LIGHTNING)
        imported = True
    assert imported == (kind == "foreign")
    is_at_home(LIGHTNING, Timer())
    trains(LIGHTNING, directory)
    assert [base.__module__ for base in Timer.__bases__] == ["lightning.pytorch.callbacks.timer"]


def without_the_first(directory):
    """Where only the second name works, ours are born under it."""
    warnings.simplefilter("ignore")
    stand_in(directory, "lightning", "raise RuntimeError('broken')")
    from lightning_timekeeper import Timer

    is_at_home(PYTORCH_LIGHTNING, Timer())
    trains(PYTORCH_LIGHTNING, directory)


def without_any(directory):
    """Where no name works, the error is that of the first."""
    stand_in(directory, "lightning", "raise RuntimeError('the first is broken')")
    stand_in(directory, "pytorch_lightning", "raise RuntimeError('the second is broken')")
    try:
        importlib.import_module(OURS)
    except RuntimeError as error:
        return str(error)
