"""Serves fits, and merges and repairs, that come to a bad end: a job a line on stdin, its exit status a line on stdout.

Lightning takes seconds to import, and a kill takes one: so each job is a fork of a process that has imported all and has
started no thread. A job's child says what it recorded in a file ``said``, a line for each span once it has closed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from runs import Model, quiet, trainer

from lightning_timekeeper import get_tracer, span
from lightning_timekeeper.__main__ import main as command
from lightning_timekeeper.trace.tracer import Tracer
from lightning_timekeeper.trace.writer import FileSink

LONGEST_S = 60.0
STOPPED_S = 1.0  # longer than anything of ours waits between two looks at its clock


class Killer:
    """Ends this process in the way that the job says, so long after the moment that it says."""

    def __init__(self, job, said):
        self.kind, self.moment, self.delay_s, self.left = job["kind"], job["moment"], job["delay_s"], job["nth"]
        self.gap_s = job["gap_s"]
        self._said = said
        self._now = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def at(self, moment):
        """It is this moment: the training, a validation, a write, a rotation, an end."""
        if moment == self.moment and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                self._now.set()

    def watch(self, owner, method, moment):
        """It is this moment whenever a method is called."""
        inner = getattr(owner, method)

        def watched(*args, **kwargs):
            self.at(moment)
            return inner(*args, **kwargs)

        setattr(owner, method, watched)

    def _run(self):
        self._now.wait()
        time.sleep(self.delay_s)
        self._said("kill", 0)
        if self.kind == "os._exit":
            os._exit(9)
        elif self.kind == "abort":
            os.abort()
        elif self.kind == "segfault":
            faulthandler._sigsegv()
        elif self.kind == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
        else:
            signum, *twice = self.kind.split()
            for _ in (signum, *twice):
                os.kill(os.getpid(), signal.Signals[signum])
                time.sleep(self.gap_s)


class Says(Model):
    """Says each training and validation step once it has closed; its steps take memory."""

    def __init__(self, said, killer):
        super().__init__()
        self._said, self._killer, self._trained, self._validated = said, killer, 0, 0

    def training_step(self, batch, batch_idx):
        self._killer.at("training step")
        self._trained += 1
        with span("train", number=self._trained):
            time.sleep(0.0005)
            torch.empty(2**24)  # 64 MB that are not touched: under a memory limit this is what fails
        self._said("train", self._trained)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._killer.at("validation")
        self._validated += 1
        with span("val", number=self._validated):
            loss = super().validation_step(batch, batch_idx)
        self._said("val", self._validated)
        return loss


class Flushes(Callback):
    """A user's own flush now and then."""

    def on_train_batch_end(self, runner, module, outputs, batch, batch_idx):
        if batch_idx == 5 and get_tracer() is not None:
            get_tracer().flush()


def fit(job):
    directory = Path(job["directory"])
    torch.set_num_threads(1)
    said_fd = os.open(directory / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def said(name, number):
        os.write(said_fd, f"{name} {number} {time.perf_counter_ns()}\n".encode())

    def beat():
        while True:
            begin_ns = time.perf_counter_ns()
            time.sleep(0.02)
            said("late", (time.perf_counter_ns() - begin_ns) // 1000 - 20_000)

    def warned(message, category, *_, **__):
        if category is RuntimeWarning:
            said(f"warning {str(message)!r}", 0)

    warnings.simplefilter("ignore")
    warnings.simplefilter("always", RuntimeWarning)
    warnings.showwarning = warned
    killer = Killer(job, said)
    threading.Thread(target=beat, daemon=True).start()
    for owner, method, moment in [
        (Tracer, "__init__", "setup"),
        (Tracer, "flush", "flush"),
        (Tracer, "switch", "rotation"),
        (Tracer, "close", "close"),
        (FileSink, "write", "write"),
        (FileSink, "_final_gzip", "compression"),
    ]:
        killer.watch(owner, method, moment)
    keeps = ModelCheckpoint(directory / "ckpt", every_n_epochs=2)
    timeline = quiet(dirpath=directory, filename=job["filename"], min_duration_us=0)
    runner = trainer(
        directory,
        timeline,
        keeps,
        Flushes(),
        max_epochs=job["epochs"],
        enable_checkpointing=True,
        num_sanity_val_steps=1,
    )
    killer.watch(runner, "save_checkpoint", "checkpoint")
    killer.at("any")
    runner.fit(Says(said, killer))
    said("ended", runner.global_step)


def tool(job):
    """A merge or a repair, as from the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    killer = Killer(job, lambda name, number: None)
    killer.at("any")
    sys.exit(command(job["command"]))


def serve():
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("a thread has started: no fork is safe")
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            errors = os.open(Path(job["directory"]) / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number, to in enumerate((null, null, errors)):
                os.dup2(to, number)
            random.seed(job["nth"])
            return (fit if job["kind_of"] == "fit" else tool)(job)
        until_s = time.monotonic() + LONGEST_S
        while time.monotonic() < until_s:
            ended = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if ended[0] and os.WIFSTOPPED(ended[1]):
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
            elif ended[0]:
                break
            time.sleep(0.005)
        if ended[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            print("hung", flush=True)
        else:
            print(os.waitstatus_to_exitcode(ended[1]), flush=True)
    return None


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve()
