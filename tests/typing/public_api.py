"""The public names as users write them, for type checkers: mypy --strict and pyright check it, nothing runs it.

A call that must be an error to them stands beside an ignore: a checker that finds none there complains of the ignore.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import Timer as LightningTimer
from pytorch_lightning.callbacks import Timer as PytorchLightningTimer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import lightning_timekeeper
from lightning_timekeeper import (
    At,
    Every,
    TimelineTrace,
    Timer,
    Tracer,
    Trigger,
    counter,
    get_tracer,
    instant,
    iterate,
    read_events,
    span,
    summarize,
)

lightning_timekeeper.nonsense  # type: ignore[attr-defined]  # pyright: ignore

# ---- Timer

timer = Timer()
Timer("36h")
Timer(timedelta(hours=1), "epoch", False)
Timer({"hours": 1}, interval="step", verbose=True)
Timer(
    {"days": 1, "hours": 1.5},
    run_duration="12h",
    deadline=datetime.now(timezone.utc),
    margin=timedelta(minutes=5),
    save_on_limit=Path("timer.ckpt"),
    validate_on_limit=False,
    log=True,
)
Timer(deadline="slurm", margin="10m", save_on_limit=True)
Timer(5)  # type: ignore[arg-type]  # pyright: ignore
Timer(run_duration=5.0)  # type: ignore[arg-type]  # pyright: ignore
Timer("1h", log_it=True)  # type: ignore[call-arg]  # pyright: ignore
assert_type(timer.time_elapsed(), float)
assert_type(timer.time_elapsed("validate"), float)
assert_type(timer.time_remaining(), float | None)
assert_type(timer.start_time(), float | None)
assert_type(timer.end_time("test"), float | None)
assert_type(timer.stop_reason, str | None)
as_lightnings: LightningTimer = timer
as_the_others: PytorchLightningTimer = timer


class Own(Timer):
    """A user's subclass overrides a hook as one of Lightning's."""

    def on_train_start(self, trainer: pl.Trainer | pytorch_lightning.Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)


# ---- TimelineTrace


def wanted(trainer: pl.Trainer) -> bool:
    return trainer.global_step > 5


def write_to(path: str) -> Any:
    return Path(path).open("wb")


timeline = TimelineTrace()
TimelineTrace((1, "epoch"), "{stage}-{step}.json", 100, 120, None, write_to)
TimelineTrace(trigger=Every(100), enable=At(3, "epoch"), disable=wanted, dirpath=Path("traces"))
TimelineTrace(tracer=Tracer(), filename=None, min_duration_us=0, max_events=1000, summary=False)
TimelineTrace(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2))
TimelineTrace(trigger="epoch")  # type: ignore[arg-type]  # pyright: ignore
TimelineTrace(enable=(1, 2))  # type: ignore[arg-type]  # pyright: ignore
assert_type(timeline.path, str | None)
assert_type(timeline.tracer, Tracer | None)
pl.Trainer(callbacks=[timer, timeline])
pytorch_lightning.Trainer(callbacks=[timer, timeline])


class WhenLossIsHigh(Trigger):
    """A user's trigger."""

    def fires(self, before: Any, after: Any, trainer: pl.Trainer) -> bool:
        return bool(trainer.callback_metrics["loss"] > 3)


TimelineTrace(WhenLossIsHigh())

# ---- spans in the user's code

with span("tokenize"), span("pad", length=5):
    pass


@span("collate")
def collate(rows: list[int], *, pad: int = 0) -> torch.Tensor:
    return torch.tensor([*rows, pad])


@span("answer")
async def answer(question: str) -> int:
    return len(question)


@span("numbers")
def numbers() -> Iterator[int]:
    yield 1


@span("later")
async def later() -> AsyncIterator[str]:
    yield "a"


assert_type(collate([1], pad=2), torch.Tensor)
collate("a")  # type: ignore[arg-type]  # pyright: ignore


async def use() -> None:
    assert_type(await answer("?"), int)
    async for text in later():
        assert_type(text, str)


for number in numbers():
    assert_type(number, int)
loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.zeros(1)))
for index, _batch in enumerate(iterate(loader, "load")):
    assert_type(index, int)
assert_type(iterate([1, 2]), Iterable[int])
instant("spike", loss=3.2, where="here")
counter("queue", 4)
counter("memory", used=3.5e9, cached=1e9)
counter("memory", used="much")  # type: ignore[arg-type]  # pyright: ignore
assert_type(get_tracer(), Tracer | None)

# ---- the trace library

with Tracer("trace.json.gz", max_events=10) as tracer:
    assert_type(tracer, Tracer)
    assert_type(tracer.path, str | None)
for event in read_events("trace.json"):
    assert_type(event, dict[str, Any])
summary = summarize("rank0.json", Path("rank1.json"), [{"ph": "X", "name": "a", "ts": 0, "dur": 1}])
assert_type(summary.verdict.bound, str | None)
assert_type(summary.text(80), str)
if summary.table is not None:
    assert_type(summary.table.row("data").share, float | None)
summarize(1)  # type: ignore[arg-type]  # pyright: ignore
assert_type(lightning_timekeeper.__version__, str)
