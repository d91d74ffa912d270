"""Where the time went, from exact events."""

from __future__ import annotations

import itertools
import json
import unicodedata

import pytest
from summaries import Run, training

from lightning_timekeeper import Tracer, span, summarize
from lightning_timekeeper.trace.summary.step_bins import MOST_BINS

MS = 1_000_000  # ns


def rows(table):
    return {row.phase: row for row in table.rows}


# ---- the step table --------------------------------------------------------------------------------------------------
def test_a_phase_is_what_is_in_no_other():
    """Rows are self times by phase; with ``other`` they are all of the step, and the longest names its step."""
    run = Run()
    run.add("B", "fit", "loop")
    for number, late_ms in enumerate((0, 4, 0)):
        run.add("B", "step", "loop")
        run.span("train_dataloader_next", "data", 2)
        run.add("B", "run_training_batch", "loop")
        run.add("X", "optimizer_step", "optimizer", 11 + late_ms)
        run.span("training_step", "forward", 3 + late_ms)
        run.span("backward", "backward", 5)
        run.add("X", "optimizer", "optimizer", 2)
        run.now_ms += 4
        run.add("E")
        run.add("E", epoch=0, batch=number, step=10 + number)
    run.add("E")
    table = summarize(run.events).table
    assert (table.unit, table.steps, table.first_step, table.last_step) == ("step", 3, 10, 12)
    assert {row.phase: row.total_ns / MS for row in table.rows} == {
        "data": 6,
        "forward": 13,
        "backward": 15,
        "optimizer": 9,
        "other": 3,
    }
    forward = rows(table)["forward"]
    assert (forward.max_ns, forward.max_step, forward.calls) == (7 * MS, 11, 3)
    assert forward.p50_ns == pytest.approx(3 * MS, rel=0.01)
    assert rows(table)["optimizer"].calls == 3  # the optimizer's own work is a part of its step
    assert sum(row.share for row in table.rows) == pytest.approx(1)
    assert table.whole.total_ns == sum(row.total_ns for row in table.rows) == 46 * MS


def test_nothing_unmeasured_is_zero():
    """A phase that was not recorded is n/a, in the table and in the run's lines."""
    summary = summarize(training(forward=5).events)
    backward = rows(summary.table)["backward"]
    assert (backward.share, backward.mean_ns, backward.max_step) == (None, None, None)
    (line,) = [line for line in str(summary).splitlines() if line.startswith("backward")]
    assert line.split() == ["backward"] + ["n/a"] * 7
    assert summary.run.first_step_ns is None  # no set-up was recorded
    assert summary.run.sanity_check_ns is None
    assert "sanity check n/a; validation n/a; checkpoints n/a" in " ".join(str(summary).split())


def test_a_rare_phase_has_the_times_of_its_own_steps():
    """Mean and quantiles are over the steps in which a phase occurs, the share over all."""
    run = Run()
    run.add("B", "fit", "loop")
    for number in range(20):
        run.step(forward=9, **({"checkpoint": 20} if number == 7 else {}))
    row = rows(summarize(run.events).table)["checkpoint"]
    assert (row.steps, row.mean_ns, row.max_step, row.share) == (1, 20 * MS, 7, pytest.approx(20 / 200))


@pytest.mark.parametrize(("slow", "apart"), [((500, 90, 30), 3), ((500, 15, 90), 1), ((), 0), ((30,) * 30, 0)])
def test_warm_up(slow, apart):
    """The first steps that take more than twice the median are apart; a run that has none has no warm-up."""
    run = Run()
    run.add("B", "fit", "loop")
    for ms in [*slow, *(10,) * (40 - len(slow))]:
        run.step(forward=ms)
    summary = summarize(run.events)
    assert (summary.warmup.steps if summary.warmup else 0) == apart
    assert summary.table.steps == 40 - apart
    assert (f"{apart} of warm-up" in str(summary)) == (apart > 0)


@pytest.mark.parametrize(
    "bad", [{"unfinished": True}, {"error": "ValueError"}, {"batch": "none"}], ids=["unfinished", "error", "no batch"]
)
def test_only_whole_steps_count(bad):
    """A step that an exception ended, or the fetch that found no more batch, is none; nor is one that was cut off."""
    run = training(forward=5)
    del run.events[-1]
    run.add("X", "step", "loop", 300, **{"epoch": 0, "batch": 20, "step": 20, **bad})
    run.now_ms += 400
    run.add("B", "step", "loop")
    run.span("training_step", "forward", 70)
    summary = summarize(run.events)
    assert (summary.table.steps, summary.table.whole.max_ns) == (20, 5 * MS)
    assert summary.run.phases_ns["forward"] == 170 * MS  # the time is in the run all the same


def test_spans_beside_the_loop_are_not_in_the_table():
    """What DataLoader workers and other threads do is shown apart."""
    run = training(data=1, forward=4)
    for tid in (2, 1_000_001):
        run.add("X", "collate", "user", 70, tid=tid, at_ms=5000)
    summary = summarize(run.events)
    assert summary.table.whole.total_ns == 100 * MS
    assert [(each.name, each.calls, each.total_ns) for each in summary.beside] == [("collate", 2, 140 * MS)]
    assert summary.user_spans == ()


def test_a_loop_in_another_thread():
    """With a tracer of the user's own, the training may run on any track."""
    run = training(forward=5)
    for event in run.events[1:]:
        event["tid"] = 3
    assert summarize(run.events).table.steps == 20


def test_batches_of_an_evaluation():
    """Of a test, the batches are the steps; a validation in a fit is no part of its step table."""
    run = Run()
    run.add("B", "test", "loop")
    for number in range(4):
        run.add("X", "batch", "loop", 3, epoch=0, batch=number, step=0)
        run.span("test_next", "data", 1)
        run.span("test_step", "forward", 2)
    run.add("E")
    table = summarize(run.events).table
    assert (table.unit, table.steps, rows(table)["data"].share) == ("batch", 4, pytest.approx(1 / 3))
    run.add("B", "fit", "loop")
    run.add("X", "validate", "validation", 50, step=0)
    run.add("X", "batch", "loop", 50, epoch=0, batch=0, step=0)
    run.now_ms += 50
    run.step(forward=5)
    run.add("E")
    assert (summarize(run.events).table.unit, summarize(run.events).table.steps) == ("step", 1)


# ---- the run ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def two_epochs():
    """Set-up 40 ms, sanity check 7, then two epochs of three steps, a validation and a checkpoint; 30 ms between them."""
    run = Run()
    run.add("B", "fit", "loop")
    run.span("setup", "setup", 40)
    run.span("sanity check", "validation", 7, step=0)
    for epoch in range(2):
        run.add("B", "epoch", "loop", epoch=epoch)
        run.now_ms += 30 * epoch
        for _ in range(3):
            run.step(data=1, forward=4, epoch=epoch)
        run.span("validate", "validation", 20 + epoch, step=3 * epoch + 3)
        run.add("X", "Saver{'monitor': 'x'}.on_validation_end", "callback", 10)
        run.span("save_checkpoint", "checkpoint", 8)
        run.add("i", "checkpoint saved", "checkpoint", path=f"/tmp/{epoch}.ckpt")
        run.now_ms += 2
        run.add("E")
    run.add("E")
    return run


def test_the_run_and_its_epochs(two_epochs):
    """Time to the first step, sanity check, and for each epoch what its parts took and the gap before it."""
    summary = summarize(two_epochs.events)
    run = summary.run
    assert (run.first_step_ns, run.sanity_check_ns) == (47 * MS, 7 * MS)
    assert (run.validation.count, run.validation.total_ns, run.validation.longest_ns) == (2, 41 * MS, 21 * MS)
    assert run.stages_ns == {"fit": 168 * MS}
    assert run.training_ns == 121 * MS
    first, second = summary.epochs
    assert (first.epoch, first.steps, first.train_ns, first.gap_ns) == (0, 3, 15 * MS, None)
    assert (second.duration_ns, second.validation.total_ns, second.checkpoint.count) == (76 * MS, 21 * MS, 1)
    assert (first.first_step_ns, second.first_step_ns, second.gap_ns) == (47 * MS, 122 * MS, 32 * MS)
    assert [(mark.start_ns, mark.duration_ns, mark.path) for mark in summary.checkpoints] == [
        (82 * MS, 8 * MS, "/tmp/0.ckpt"),
        (158 * MS, 8 * MS, "/tmp/1.ckpt"),
    ]
    assert [(mark.start_ns, mark.step) for mark in summary.validations] == [(62 * MS, 3), (137 * MS, 6)]
    assert sum(run.phases_ns.values()) == 168 * MS


def test_callbacks_by_name_and_hook(two_epochs):
    """The dearest five, with what they call, and all of them by class; never a whole state key."""
    for number in range(8):
        two_epochs.add("X", f"C{number}.on_fit_end", "callback", number + 1)
        two_epochs.now_ms += 10
    summary = summarize(two_epochs.events)
    assert [(each.name[:5], each.total_ns // MS) for each in summary.callbacks] == [
        ("Saver", 20),
        *((f"C{number}.on"[:5], number + 1) for number in (7, 6, 5, 4)),
    ]
    assert "monitor" not in str(summary)
    assert "Saver" in str(summary)


def test_files_of_a_rotation_are_one_run(tmp_path, two_epochs):
    """Spans that were open at a switch go on in the next file, whatever order the files are given in."""
    whole = summarize(two_epochs.events)
    begin = next(at for at, event in enumerate(two_epochs.events) if event.get("args") == {"epoch": 1})
    first, second = Run(), Run()
    at_us = two_epochs.events[begin]["ts"]
    first.events = [*two_epochs.events[:begin]]
    first.add("E", at_ms=at_us / 1000, continued=True)
    second.add("B", "fit", "loop", at_ms=at_us / 1000)
    second.events += two_epochs.events[begin:]
    parts = summarize(second.write(tmp_path / "a.json"), first.write(tmp_path / "b.json"))
    assert parts.files == 2
    assert parts.run.stages_ns == whole.run.stages_ns
    assert parts.table == whole.table
    assert parts.epochs[1].steps == 3


def test_bins_of_a_long_run():
    """Any number of steps are at most 500 bins, which keep the sums, the longest and the order."""
    run = Run()
    run.add("B", "fit", "loop")
    for number in range(3 * MOST_BINS + 17):
        run.step(1, data=1, forward=5 if number != 1000 else 50)
    bins = summarize(run.events).bins
    assert MOST_BINS // 2 <= len(bins) <= MOST_BINS
    assert sum(each.steps for each in bins) == 3 * MOST_BINS + 17
    assert sum(each.duration_ns for each in bins) == (7 * (3 * MOST_BINS + 17) + 45) * MS
    assert all(sum(each.phases_ns.values()) == each.duration_ns for each in bins)
    assert [each.first_step for each in bins if each.longest_ns == 52 * MS] == [1000]
    assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(bins))


# ---- the verdict -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("phases", "bound", "level"),
    [
        ({"data": 1, "forward": 4, "backward": 7}, "compute", "ok"),
        ({"data": 1.3, "forward": 4, "backward": 7}, "input", "warning"),
        ({"data": 4, "forward": 4, "backward": 7}, "input", "critical"),
        ({"data": 1, "forward": 4, "callback": 2}, "callbacks", "critical"),
        ({"forward": 4, "other_ms": 4}, "overhead", "critical"),
    ],
)
def test_what_bounds_a_run(phases, bound, level):
    """One line on top: what, why with the threshold, and what to try."""
    summary = summarize(training(**phases).events)
    assert (summary.verdict.bound, summary.verdict.level) == (bound, level)
    assert f"ound by {bound}. " in str(summary).splitlines()[0]
    assert "To try: " in str(summary)


@pytest.mark.parametrize("bound", ["validation", "checkpoint"])
def test_what_stands_between_the_steps(bound):
    """Validation and checkpoints are judged by the whole training."""
    run = training(forward=5)
    del run.events[-1]
    run.span("validate" if bound == "validation" else "save_checkpoint", bound, 60)
    run.add("E")
    assert summarize(run.events).verdict.bound == bound


def test_spans_of_the_users_own_in_the_fetch_are_input():
    """A collate function with a span of its own makes the wait for data no shorter."""
    run = Run()
    run.add("B", "fit", "loop")
    for _ in range(20):
        run.add("X", "step", "loop", 10, epoch=0, batch=0, step=0)
        run.add("X", "train_dataloader_next", "data", 5)
        run.add("X", "collate", "user", 5)
        run.now_ms += 10
    run.add("E")
    summary = summarize(run.events)
    assert summary.table.input_share == pytest.approx(0.5)
    assert summary.verdict.bound == "input"


# ---- any trace -------------------------------------------------------------------------------------------------------
FOREIGN = [
    {"ph": "X", "name": "inner", "pid": 1, "tid": 1, "ts": 20, "dur": 5},  # before the span around it
    {"ph": "X", "name": "outer", "pid": 1, "tid": 1, "ts": 10, "dur": 30},
    {"ph": "X", "name": "outer", "cat": "kernel", "pid": "GPU", "tid": "stream 7", "ts": "10", "dur": "1.5"},
    {"ph": "B", "name": "pair", "pid": 1, "tid": 2, "ts": 100.5},
    {"ph": "E", "pid": 1, "tid": 2, "ts": 101.75},
    {"ph": "E", "pid": 1, "tid": 2, "ts": 101.75},
    {"ph": "i", "name": "mark", "pid": 1, "tid": 2, "ts": 101.75},
    {"ph": "C", "name": "memory", "pid": 1, "tid": 2, "ts": 101.75, "args": {"used": 1}},
]


def test_any_other_trace_is_a_table_of_spans():
    """Whole spans by name and category, in whatever order they stand."""
    summary = summarize(FOREIGN)
    assert (summary.table, summary.run, summary.verdict.bound) == (None, None, None)
    assert [(each.name, each.category, each.calls, each.total_ns) for each in summary.spans] == [
        ("outer", "", 1, 30_000),
        ("inner", "", 1, 5_000),
        ("outer", "kernel", 1, 1_500),
        ("pair", "", 1, 1_250),
    ]
    assert str(summary).startswith("span ")


@pytest.mark.parametrize(
    "bad",
    [
        {"ts": "soon"},
        {"ts": None},
        {"ts": float("nan")},
        {"ts": 1e999},
        {"tid": [1]},
        {"dur": {}},
        {"cat": 3},
        {"name": 5},
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_foreign_events_do_no_harm(bad, ours):
    """A time that is none is passed over; any track, name and category is taken."""
    events = training(forward=5).events if ours else [*FOREIGN]
    events += [{"ph": "X", "name": "x", "pid": 7, "tid": 1, "ts": 20, "dur": 5, **bad}]
    summary = summarize(events)
    assert str(summary)
    json.loads(summary.json())


def test_nothing_at_all(tmp_path):
    """A trace without spans says so; no trace at all is an error that shows the call."""
    assert str(summarize([])) == "There are no spans in it."
    with pytest.raises(ValueError, match=r"`summarize\(\)`: expected one or more traces"):
        summarize()
    (tmp_path / "x.json").write_text("hello")
    with pytest.raises(ValueError, match=r"x\.json: no Chrome trace"):
        summarize(tmp_path / "x.json")


def test_so_many_names_are_kept_apart():
    """Spans with a number in each name do not fill the memory."""
    events = [{"ph": "X", "name": f"n{number}", "pid": 1, "tid": 1, "ts": number, "dur": 1} for number in range(5000)]
    summary = summarize(events)
    assert len(summary.spans) < 2100
    assert sum(each.total_ns for each in summary.spans) == 5_000_000
    assert summary.spans[0].name == "(more names)"


# ---- files -----------------------------------------------------------------------------------------------------------
def test_the_fast_way_and_the_general_one_agree(tmp_path, two_epochs):
    """Lines as we write them are taken apart without JSON; with blanks in them they are not, and say the same."""
    two_epochs.add("X", 'quo"ted, {"ph":"X"}', "user", 1)
    two_epochs.add("X", "snow ☃", "user", 0.001)
    fast = summarize(two_epochs.write(tmp_path / "fast.json"))
    slow = summarize(two_epochs.write(tmp_path / "slow.json", separators=(", ", ": ")))
    assert fast == slow == summarize(two_epochs.events)
    assert fast.lost_bytes == 0


@pytest.mark.parametrize("cut", [1, 30, 200, 500])
def test_a_cut_file(tmp_path, cut):
    """All steps but the last are in the table, and what was lost is said."""
    path = training(forward=5, backward=5).write(tmp_path / "t.json")
    path.write_bytes(path.read_bytes()[:-cut])
    summary = summarize(path)
    assert 16 <= summary.table.steps <= 20
    assert summary.table.row("forward").mean_ns == 5 * MS
    assert (summary.lost_bytes > 0) == ("could not be read" in str(summary))


def test_from_a_tracer(tmp_path):
    """A tracer without Lightning gives the user's spans."""
    with Tracer(tmp_path / "t.json"), span("x"):
        pass
    (row,) = summarize(tmp_path / "t.json").user_spans
    assert (row.name, row.calls) == ("x", 1)


# ---- the text --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_the_terminal(width, two_epochs):
    """No line is wider, whatever is named how and whatever the numbers are; wide letters count twice."""
    two_epochs.add("X", "長" * 90, "user", 1e8)
    two_epochs.add("X", "module." * 30 + "layer", "user", 1e-3)
    two_epochs.add("X", "Very" * 30 + ".on_train_batch_end", "callback", 1e-3)
    events = [
        event
        for rank in range(12)
        for event in training(
            rank=rank, pid=rank + 10, data=1, transfer=1, forward=1e4, user=1, callback=2, sync=1, optimizer=1
        ).events
    ]
    text = summarize([*two_epochs.events, *events]).text(width)
    for line in text.splitlines():
        assert sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in line) <= width, line
    assert "…" in text
    assert "on_train_batch_end" in text


@pytest.mark.parametrize("steering", ["\x1b[2J\x1b]0;title\x07", "a\rb\nc\x00", "\u202egpj", "\x9b31m", "\ud800"])
def test_names_cannot_steer_the_terminal(steering):
    """Escape sequences and control characters in names are replaced, in text and in JSON."""
    run = training(forward=5)
    for category in ("user", "callback"):
        run.add("X", f"{steering}.on_fit_end", category, 1)
        run.now_ms += 10
    run.add("X", steering, "user", 1, tid=2)
    summary = summarize([*run.events, {"ph": "X", "name": steering, "pid": 99, "tid": 1, "ts": 1, "dur": 1}])
    for text in (str(summary), summary.json()):
        assert all(letter.isprintable() for line in text.split("\n") for letter in line)


def test_json_is_for_machines(two_epochs):
    """Every figure under the name of its attribute."""
    summary = summarize(two_epochs.events)
    read = json.loads(summary.json())
    assert read["table"]["rows"][0]["total_ns"] == summary.table.rows[0].total_ns
    assert read["run"]["validation"]["count"] == 2
    assert read["bins"][0]["phases_ns"]["forward"] == 4 * MS
    assert read["epochs"][1]["gap_ns"] == 32 * MS
