"""Time in the user's loggers: by name in the trace and in the summary, and the loggers left as they were."""

from __future__ import annotations

import threading

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from runs import Model, inside, named, quiet, spans_of, trainer

from lightning_timekeeper import summarize


class Logs(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_loggers_by_name(tmp_path):
    """Each call of Lightning's is a span of phase ``logger``, within its step; afterwards nothing is left of us."""
    logger, trace = CSVLogger(tmp_path, name="run"), quiet()
    trainer(tmp_path, trace, logger=logger, log_every_n_steps=4).fit(Logs())
    assert "log_metrics" not in vars(logger)
    spans = spans_of(trace.path)
    metrics = named(spans, "CSVLogger.log_metrics")
    assert sum(metric in inside(spans, step) for step in named(spans, "step") for metric in metrics) == 4
    assert {span["cat"] for span in spans if span["name"].startswith("CSVLogger.")} == {"logger"}
    summary = summarize(trace.path)
    assert {each.name for each in summary.loggers} == {"CSVLogger.log_metrics", "CSVLogger.save"}
    assert summary.table.row("logger").steps > 0
    assert "CSVLogger.save" in str(summary)


def test_a_window(tmp_path):
    """While recording is off the loggers are untouched."""
    seen = []

    class Watched(DummyLogger):
        def log_metrics(self, *args, **kwargs):
            seen.append("log_metrics" in vars(self))

    trainer(tmp_path, quiet(enable=4, disable=8), logger=Watched(), log_every_n_steps=1).fit(Logs())
    assert seen[:3] == [False] * 3
    assert any(seen)
    assert seen[-3:] == [False] * 3


def test_a_logger_that_raises_or_is_called_by_a_thread(tmp_path):
    """An exception passes, marks its span, and leaves the logger as it was; other threads' calls are not recorded."""

    class Breaks(DummyLogger):
        def log_metrics(self, metrics, step=None):
            if step == 3:
                thread = threading.Thread(target=self.save)
                thread.start()
                thread.join()
                raise ValueError("full")

    logger, trace = Breaks(), quiet()
    with pytest.raises(ValueError, match="full"):
        trainer(tmp_path, trace, logger=logger, log_every_n_steps=4).fit(Logs())
    assert not vars(logger).keys() & {"log_metrics", "save"}
    spans = spans_of(trace.path)
    (broken,) = named(spans, "Breaks.log_metrics")
    assert broken["args"] == {"error": "ValueError"}
    assert not inside(spans, broken)
