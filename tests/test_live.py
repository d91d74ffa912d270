"""``TimelineTrace(log=True)``: mean times per step in the user's loggers, as the trace has them."""

from __future__ import annotations

import csv

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from runs import Model, inside, named, quiet, spans_of, trainer

NAMES = ("data", "forward", "backward", "optimizer", "step", "data_share")


class Flush(Callback):
    """Has all spans taken before each batch, as the background thread does four times a second."""

    def __init__(self, trace):
        self.trace = trace

    def on_train_batch_start(self, *_):
        if self.trace.tracer is not None:
            self.trace.tracer.flush()


def fit(directory, *, logger, trace=None, **arguments):
    trace = trace or quiet(log=True)
    trainer(directory, trace, Flush(trace), logger=logger, log_every_n_steps=3, **arguments).fit(Model())
    return trace


def rows_of_csv(directory):
    """Step -> name -> value."""
    with open(directory / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("time/step")]
    return {int(row["step"]): {name: float(row[f"time/{name}"]) for name in NAMES} for row in rows}


def rows_of_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, found = EventAccumulator(str(directory)).Reload(), {}
    for name in NAMES:
        for event in events.Scalars(f"time/{name}"):
            found.setdefault(event.step, {})[name] = event.value
    return found


def means(spans, steps):
    """The same figures, from the spans of a trace."""

    def seconds(spans):
        return sum(span["end"] - span["start"] for span in spans) / 1e9 / len(steps)

    within = [span for step in steps for span in inside(spans, step)]
    forward, backward = (seconds(named(within, name)) for name in ("training_step", "backward"))
    data, step = seconds(named(within, "train_dataloader_next")), seconds(steps)
    around = seconds(named(within, "optimizer_step"))
    others = seconds([span for span in within if span["cat"] in ("zero_grad", "clip")])
    return {
        "data": data,
        "forward": forward,
        "backward": backward,
        "optimizer": around - forward - backward - others,
        "step": step,
        "data_share": data / step,
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of protobuf, by tensorboard
@pytest.mark.parametrize("kind", ["TensorBoard", "CSV"])
def test_a_logger_is_given_what_the_trace_has(tmp_path, kind):
    """At the Trainer's interval the means since the last time, and what is left at the end."""
    if kind == "TensorBoard":
        pytest.importorskip("tensorboard")
    make, rows = {"TensorBoard": (TensorBoardLogger, rows_of_tensorboard), "CSV": (CSVLogger, rows_of_csv)}[kind]
    # hooks of the module lie in the optimizer's span: with all of them the sum can be done by hand
    trace = fit(tmp_path, logger=make(tmp_path, name="run"), trace=quiet(log=True, min_duration_us=1e9))
    spans = spans_of(trace.path)
    steps = named(spans, "step")
    assert len(steps) == 16
    logged = rows(tmp_path / "run" / "version_0")
    # the open step is not yet known when it is time to log
    edges = {2: (0, 2), 5: (2, 5), 8: (5, 8), 11: (8, 11), 14: (11, 14), 15: (14, 16)}
    assert logged.keys() == edges.keys()
    for at, (begin, end) in edges.items():
        assert logged[at] == pytest.approx(means(spans, steps[begin:end]), rel=1e-4, abs=2e-6)  # floats of 32 bits


@pytest.mark.parametrize(
    ("trace", "steps"),
    [(quiet(), []), (quiet(log=True, enable=1000), []), (quiet(log=True, enable=6, disable=12), [8, 11, 15])],
    ids=["log=False", "recording off", "a window"],
)
def test_what_is_not_recorded_is_not_logged(tmp_path, trace, steps):
    """Only the steps of a window are."""
    fit(tmp_path, logger=CSVLogger(tmp_path, name="run"), trace=trace)
    path = tmp_path / "run" / "version_0" / "metrics.csv"
    assert (list(rows_of_csv(path.parent)) if path.exists() else []) == steps


def test_accumulated_batches_are_logged_once(tmp_path):
    """At the last batch of a window, as the Trainer's own metrics."""
    fit(tmp_path, logger=CSVLogger(tmp_path, name="run"), accumulate_grad_batches=2)
    assert list(rows_of_csv(tmp_path / "run" / "version_0")) == [2, 5, 7]


def test_a_logger_that_raises(tmp_path):
    """One warning; the training and the trace go on."""

    class Full(DummyLogger):
        def log_metrics(self, metrics, step=None):
            if "time/step" in metrics:
                raise OSError("no space")

    with pytest.warns(RuntimeWarning, match=r"`TimelineTrace\(log=True\)` stopped logging: OSError: no space") as told:
        trace = fit(tmp_path, logger=Full())
    assert sum(each.category is RuntimeWarning for each in told) == 1
    assert len(named(spans_of(trace.path), "step")) == 16


def test_no_logger(tmp_path):
    """Nothing is asked for."""
    assert len(named(spans_of(fit(tmp_path, logger=False).path), "step")) == 16
