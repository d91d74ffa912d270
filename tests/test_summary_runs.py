"""The summary of real trainings: what is printed at their end, and that Perfetto comes to the same figures."""

from __future__ import annotations

import pytest
from runs import Model, quiet, trainer

from lightning_timekeeper import TimelineTrace, merge, span, summarize
from lightning_timekeeper.trace.summary.selftime import PHASES
from lightning_timekeeper.trace.summary.step_bins import OTHER

# self time of each slice on the loop's track: its duration without its children's
SELF = """
  select s.category as category, s.ts as ts, s.dur as dur, s.name as name,
         s.dur - coalesce((select sum(c.dur) from slice c where c.parent_id = s.id), 0) as own
  from slice s
"""


@pytest.fixture
def told(caplog):
    """Fits, and returns what was printed that names a trace."""

    def fit(directory, trace, **arguments):
        with caplog.at_level("INFO"):
            trainer(directory, trace, **arguments).fit(Model())
        return [record.message for record in caplog.records if "Trace" in record.message]

    return fit


def test_the_summary_at_the_end_is_of_all_files(tmp_path, told):
    """Those of a rotation together: 3 epochs of 8 steps."""
    (text,) = told(tmp_path, TimelineTrace(filename="{epoch}.json"), max_epochs=3)
    assert " to 23" in text
    assert f"Trace: {tmp_path / '2.json'} and 2 before it" in text


@pytest.mark.parametrize("filename", ["t.json.gz", None])
def test_the_summary_of_gzip_and_of_memory(tmp_path, told, filename):
    """Wherever the events are."""
    (text,) = told(tmp_path, TimelineTrace(filename=filename), max_epochs=3)
    assert " to 23" in text


def test_a_long_run_is_not_kept_waiting(tmp_path, told, monkeypatch):
    """Where the summary would take seconds, the command is named instead."""
    monkeypatch.setattr("lightning_timekeeper.timeline.SUMMED_UP_BYTES", 1000)
    (text,) = told(tmp_path, TimelineTrace())
    assert text == f"TimelineTrace: to see where the time went, call `timekeeper summary {tmp_path / 'fit-rank0.json'}`"
    (text,) = [each for each in told(tmp_path, TimelineTrace(filename=None)) if "tracer" in each]
    assert "`summarize(trace.tracer.events())`" in text


@pytest.mark.slow
def test_perfetto_comes_to_the_same_figures(tmp_path, perfetto):
    """Self times by phase of the whole run and of its steps, and times by name: to the ns, by SQL in the real engine.

    It trains, and starts the engine.
    """

    class Spans(Model):
        def training_step(self, batch, batch_idx):
            with span("augment"):
                return super().training_step(batch, batch_idx)

    trace = quiet()
    trainer(tmp_path, trace, max_epochs=4, enable_checkpointing=True, num_sanity_val_steps=2).fit(Spans())
    merged = tmp_path / "merged.json"
    merge([trace.path], merged)
    in_steps = "select category, sum(own) from own join (select ts as begin, dur as length from slice where name = 'step') on ts >= begin and ts + dur <= begin + length group by category"
    reports = perfetto.open_traces(
        [trace.path, merged],
        [
            f"with own as ({SELF}) select category, sum(own) from own group by category",
            f"with own as ({SELF}) {in_steps}",
            "select name, count(1), sum(dur), max(dur) from slice where category = 'callback' group by name order by 3 desc limit 5",
            "select max(dur) from slice where name = 'step'",
        ],
    )
    for path, report in zip((trace.path, merged), reports, strict=True):
        assert report.ok, (report.error, report.bad_stats)
        summary = summarize(path)
        whole, steps, callbacks, longest = report.rows
        assert summary.run.phases_ns == {phase: own for phase, own in whole if own}
        found = {PHASES.index(phase): own for phase, own in steps}
        tables = [table for table in (summary.warmup, summary.table) if table is not None]
        assert sum(table.steps for table in tables) == 32
        for phase in {row.phase for table in tables for row in table.rows} - {"other"}:
            assert sum(table.row(phase).total_ns or 0 for table in tables) == found[PHASES.index(phase)]
        others = sum(own for phase, own in found.items() if phase in OTHER)
        assert sum(table.row("other").total_ns for table in tables) == others
        assert [[each.name, each.calls, each.total_ns, each.max_ns] for each in summary.callbacks] == callbacks
        assert [[max(table.whole.max_ns for table in tables)]] == longest
