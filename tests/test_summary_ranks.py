"""Ranks side by side, and who is named a straggler: from exact events, and in real runs of two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from summaries import training

from lightning_timekeeper import merge, summarize


def ranks(*phases, steps=20):
    """A summary of ranks with these phases in each step."""
    runs = [training(steps, rank, rank + 10, **times) for rank, times in enumerate(phases)]
    return summarize([event for run in runs for event in run.events])


EVEN = {"data": 0.2, "forward": 5.5, "backward": 2, "sync": 1}


@pytest.mark.parametrize(
    ("phases", "rank", "cause"),
    [
        # measured, 20 ms injected on rank 1: into forward, data, backward
        (
            ({"data": 0.2, "forward": 5.6, "backward": 22.3}, {"data": 0.1, "forward": 26.3, "backward": 1.8}),
            1,
            "forward",
        ),
        (({"data": 0.2, "forward": 5.8, "backward": 22.1}, {"data": 20.5, "forward": 5.8, "backward": 1.9}), 1, "data"),
        (
            ({"data": 0.1, "forward": 5.4, "backward": 21.5}, {"data": 0.1, "forward": 5.5, "backward": 21.6}),
            None,
            None,
        ),
        # a callback's delay is waited for in Lightning's broadcast
        (({**EVEN, "sync": 21.6}, {**EVEN, "callback": 20}), 1, "callbacks"),
        # of three, one waits and works no longer than the others: nothing explains it
        (({**EVEN, "backward": 22}, {**EVEN, "backward": 22}, {**EVEN, "other_ms": 1}), None, None),
        (({**EVEN, "backward": 22}, {**EVEN, "backward": 22}, {**EVEN, "user": 20}), 2, "own spans"),
        # half of it is explained
        (({**EVEN, "backward": 22}, {**EVEN, "forward": 15}), None, None),
        ((EVEN, EVEN), None, None),
    ],
)
def test_who_is_waited_for(phases, rank, cause):
    """The rank that waits least, if what it does by itself explains 80 % of the others' wait; else nobody."""
    summary = ranks(*phases)
    stragglers = summary.stragglers
    assert (stragglers.rank, stragglers.cause) == (rank, cause)
    assert (summary.verdict.bound == "stragglers") == (rank is not None)
    assert (f"for rank {rank}, whose {cause} takes" in str(summary).replace("\n  ", " ")) == (rank is not None)


@pytest.mark.parametrize(("late", "rank"), [(range(7, 8), None), (range(0, 40, 3), 1)])
def test_one_mishap_names_nobody(late, rank):
    """A rank that was held up once, for all of 200 ms, is none to be waited for; one that is in each third step is."""
    runs = [training(0, number, number + 10) for number in range(2)]
    for run in runs:
        del run.events[-1]
    for step in range(40):
        extra = 200 if step in late else 0
        runs[0].step(forward=5, backward=2 + extra)
        runs[1].step(forward=5 + extra, backward=2)
    for run in runs:
        run.add("E")
    assert summarize([event for run in runs for event in run.events]).stragglers.rank == rank


def test_it_takes_twenty_steps():
    """With fewer nobody is named."""
    late = {**EVEN, "backward": 22}, {**EVEN, "forward": 25.5}
    assert ranks(*late, steps=19).stragglers.rank is None
    assert "19 steps are too few" in str(ranks(*late, steps=19))
    assert ranks(*late, steps=20).stragglers.rank == 1


def test_the_table_of_ranks():
    """Own work with median, worst and skew; what may be a wait has none."""
    summary = ranks(*({**EVEN, "forward": ms} for ms in (4, 5, 10)))
    forward = summary.stragglers.spreads["forward"]
    assert (forward.median_ns, forward.worst_ns, forward.worst_rank, forward.skew) == (5e6, 10e6, 2, 2)
    assert not summary.stragglers.spreads.keys() & {"backward", "sync"}
    lines = str(summary).splitlines()
    (header,) = [line.split() for line in lines if line.startswith("ms/step")]
    (second,) = [line.split() for line in lines if line.startswith("rank 2")]
    assert dict(zip(header[1:], second[2:], strict=True))["forward"] == "10.00"


def test_many_ranks():
    """Of a hundred, those that wait least are shown."""
    text = str(ranks(*({**EVEN, "backward": 2 + rank} for rank in range(100)), steps=2))
    assert [f"rank {rank}" in text for rank in (0, 7, 8, 99)] == [True, True, False, False]
    assert "92 more" in text


def test_one_rank_has_no_table():
    """There is nobody to wait for."""
    assert ranks(EVEN).stragglers.rank is None
    assert "rank 0" not in str(ranks(EVEN))


@pytest.mark.slow
def test_injected_stragglers(tmp_path):
    """20 ms late in forward and in data, rank 1 is named, from its files and from the merged one; in backward nobody is.

    It starts two real processes that talk over gloo.
    """
    script = Path(__file__).with_name("straggler_ranks.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for where, rank, cause in (("forward", 1, "forward"), ("data", 1, "data"), ("backward", None, None)):
        files = [tmp_path / f"{where}-rank{number}.json" for number in range(2)]
        merge(files, tmp_path / f"{where}.json")
        for sources in (files, [tmp_path / f"{where}.json"]):
            summary = summarize(*sources)
            assert summary.ranks == 2
            stragglers = summary.stragglers
            assert (stragglers.rank, stragglers.cause) == (rank, cause), str(summary)
            assert sum(row.share or 0 for row in summary.table.rows) == pytest.approx(1)
