"""Any bytes to the tools, and any state in a checkpoint: no exception but the documented ones, and the run goes on.

Names, arguments and the reader have tests of their own (test_span, test_encode, test_reader, test_merge, test_duration);
``tests/faults/fuzz.py`` goes on from the examples here, guided by coverage.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import Model, named, quiet, spans_of, trainer

from lightning_timekeeper import Timer, merge, read_events, summarize
from lightning_timekeeper.trace.reader import TraceError
from lightning_timekeeper.trace.repair import repair

EXAMPLES = int(os.environ.get("TIMEKEEPER_EXAMPLES", "120"))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["step", "fit", "epoch", "validate", "run_training_epoch", "loop", "data", "X", "1e3", "-1", ""]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from("XBEiIMCsftbenPNOD") | SCALARS},
    optional={
        "name": st.sampled_from(["step", "fit", "epoch", "process_name", "thread_name", "validate"]) | VALUES,
        "cat": st.sampled_from(["loop", "data", "forward", "callback", "user"]) | VALUES,
        "pid": st.integers(0, 3) | VALUES,
        "tid": st.integers(0, 3) | VALUES,
        "ts": st.integers(0, 1000) | st.floats() | VALUES,
        "dur": st.integers(0, 1000) | st.floats() | VALUES,
        "args": st.fixed_dictionaries(
            {},
            optional={
                "name": VALUES,
                **dict.fromkeys(("rank", "step", "epoch", "batch", "base_unix_s", "unix_ns", "clock_ns"), VALUES),
                **dict.fromkeys(("schema_version", "world_size", "continued", "error", "boot", "host"), VALUES),
            },
        )
        | VALUES,
        "id": VALUES,
    },
)


def tools(text, directory):
    """Every tool on one trace; only what is documented may be raised."""
    for name in ("t.json", "merged.json", "repaired.json"):
        (directory / name).unlink(missing_ok=True)
    path = directory / "t.json"
    path.write_bytes(text)
    with contextlib.suppress(TraceError):
        for _ in read_events(io.BytesIO(text)):
            pass
    with contextlib.suppress(ValueError, OSError):
        summary = summarize(path)
        assert all(line.isprintable() for line in summary.text(80).splitlines())
        json.loads(summary.json())
    with contextlib.suppress(TraceError):
        merge([path], directory / "merged.json")
        json.loads((directory / "merged.json").read_bytes())
    with contextlib.suppress(TraceError):
        repair(path, directory / "repaired.json")
        json.loads((directory / "repaired.json").read_bytes())


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.lists(EVENTS, max_size=12), st.booleans(), st.data())
def test_any_events(tmp_path_factory, events, whole, data):
    """Of any keys and values, whole or cut anywhere, through every tool."""
    text = json.dumps(events).encode()
    if not whole:
        text = text[: data.draw(st.integers(0, len(text)))]
    directory = tmp_path_factory.getbasetemp() / "any-events"
    directory.mkdir(exist_ok=True)
    tools(text, directory)


BAD_STATES = [
    7,
    "text",
    [1],
    {},
    {"recording": None},
    {"recording": "yes"},
    {"recording": [True]},
    {7: {}},
    {"time_elapsed": None},
    {"time_elapsed": {"train": "soon"}},
    {"time_elapsed": {"train": float("nan"), "nonsense": 3}},
    {"time_elapsed": {"train": -5.0}},
    {"time_elapsed": {"train": torch.tensor(3.0)}},
    {"time_elapsed": [1, 2]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A real checkpoint of a fit with both callbacks, after 8 steps."""
    directory = tmp_path_factory.mktemp("checkpoint")
    keeps = ModelCheckpoint(directory, filename="mid")
    runner = trainer(
        directory, keeps, Timer("1h"), quiet(enable=2, disable=1000), max_epochs=1, enable_checkpointing=True
    )
    runner.fit(Model())
    return torch.load(directory / "mid.ckpt", weights_only=False)


@pytest.mark.parametrize("bad", BAD_STATES, ids=repr)
def test_a_damaged_checkpoint(tmp_path, checkpoint, bad):
    """Whatever it holds in place of both callbacks' states: the resume trains on, records, and the limit is there."""
    ours = {key: bad for key in checkpoint["callbacks"] if key.startswith(("Timer", "TimelineTrace"))}
    assert len(ours) == 2
    torch.save({**checkpoint, "callbacks": {**checkpoint["callbacks"], **ours}}, tmp_path / "bad.ckpt")
    timer = Timer("1h")
    runner = trainer(tmp_path, timer, quiet(enable=2, disable=1000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.fit(Model(), ckpt_path=tmp_path / "bad.ckpt", weights_only=False)
    assert runner.global_step == 16
    assert timer.time_elapsed() >= 0
    assert timer.time_remaining() <= 3600
    if (tmp_path / "fit-rank0.json").exists():
        steps = [one["args"]["step"] for one in named(spans_of(tmp_path / "fit-rank0.json"), "step")]
        assert steps == list(range(8, 16))
