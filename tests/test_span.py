"""What user code calls: span, iterate, instant, counter, and the decorators."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading

import pytest
from traces import Clock, make_tracer, read, slices

from lightning_timekeeper.trace import tracer as tracer_module
from lightning_timekeeper.trace.tracer import counter, get_tracer, instant, iterate, span


class Recording:
    """A tracer that records, and what it wrote once it is read."""

    def __init__(self, path):
        self.path = path
        self.clock = Clock()
        self.start_ns = self.clock.ts_ns
        self.tracer = make_tracer(path, self.clock)
        self.tracer.enable()

    def go(self, ns):
        self.clock.go(ns)

    def events(self):
        self.tracer.close()
        return read(self.path)

    def slices(self):
        return slices(self.events())

    def spans(self):
        """Name, begin and length of each span, the times counted from the beginning of the recording."""
        return sorted((one.name, one.start_ns - self.start_ns, one.end_ns - one.start_ns) for one in self.slices())


@pytest.fixture
def recording(tmp_path):
    recording = Recording(tmp_path / "trace.json")
    yield recording
    recording.tracer.close()


def test_block(recording):
    """A block's span begins and ends with it, to the nanosecond."""
    recording.go(5)
    with span("load"):
        recording.go(1_234_567)
    assert recording.spans() == [("load", 5, 1_234_567)]


def test_nested(recording):
    """Spans nest, and a span of the same name may lie in itself."""
    with span("a"):
        recording.go(1)
        with span("a"):
            recording.go(2)
            with span("b"):
                recording.go(3)
        recording.go(4)
    assert recording.spans() == [("a", 0, 10), ("a", 1, 5), ("b", 3, 3)]


def test_recursion(recording):
    """A recursive function has a span for each call, each in that of its caller."""

    @span("down")
    def down(depth):
        recording.go(1)
        if depth:
            down(depth - 1)
        recording.go(1)

    down(50)
    assert recording.spans() == [("down", depth, 2 * (51 - depth)) for depth in range(51)]


def test_arguments(recording):
    """A span's arguments are in the trace."""
    with span("read", rows=3, path="a.csv"):
        recording.go(7)
    (one,) = recording.slices()
    assert (one.name, one.args) == ("read", {"rows": 3, "path": "a.csv"})


def test_argument_called_name(recording):
    """An argument may have any name, also that of a parameter of ours."""
    with span("read", name="x", args=1, self=2):
        pass
    instant("mark", name="y")
    assert [event["args"] for event in recording.events() if event["ph"] in "Xi"] == [
        {"name": "x", "args": 1, "self": 2},
        {"name": "y"},
    ]


@pytest.mark.parametrize("args", [{}, {"rows": 1}])
def test_exception(recording, args):
    """An exception closes the span, marks it with its type, and goes on to the caller."""
    with pytest.raises(ZeroDivisionError), span("outer", **args):  # noqa: PT012
        recording.go(1)
        with span("inner"):
            recording.go(2)
            1 / 0  # noqa: B018
    with span("outer", **args):
        recording.go(4)
    first, inner, second = recording.slices()
    assert (first.end_ns - first.start_ns, first.args) == (3, {**args, "error": "ZeroDivisionError"})
    assert inner.args == {"error": "ZeroDivisionError"}
    assert (second.end_ns - second.start_ns, second.args) == (4, args)


def test_kept_span(recording):
    """A span object may be kept and entered again and again, also inside itself."""
    kept = span("step")
    for ns in (1, 2):
        with kept:
            recording.go(ns)
            with kept:
                recording.go(10)
    assert recording.spans() == [("step", 0, 11), ("step", 1, 10), ("step", 11, 12), ("step", 13, 10)]


def test_handles_are_reused(recording):
    """Spans of a name in turn take one handle, whatever is kept besides: memory does not grow."""
    kept, other = span("step"), span("step")
    for _ in range(100):
        with kept:
            pass
        with other:
            pass
        with span("step"), span("step"):
            pass

        @span("step")
        def function():
            pass

        function()
    assert len(recording.tracer.track.names) == 2


def test_names_built_per_step(recording):
    """Names without end are all recorded, and take handles for the first thousand only."""
    for step in range(3000):
        with span(f"step {step}"):
            recording.go(1)
    assert len(recording.tracer.track.names) == tracer_module.MOST_HANDLES
    assert recording.spans() == sorted((f"step {step}", step, 1) for step in range(3000))


def test_odd_names(recording, perfetto):
    """Any name is recorded, as text that both viewers take; what is no text becomes its type's name."""
    names = ["", '"', "\\", "a\\", "a\nb", "\x00", "\ud800", "\N{FIRE}", "é", "x" * 5000, "</script>", "%s", "null"]
    names += [None, 3, ("a", 1), ["unhashable"]]
    for name in names:
        for args in ({}, {"a": 1}):
            with span(name, **args):
                recording.go(2)
    long = "x" * 255 + "…"
    shown = ["(empty)", '"', "/", "a/", "a�b", "�", "�", "\N{FIRE}", "é", long, "</script>", "%s", "null"]
    shown += ["NoneType", "int", "tuple", "list"]
    assert [one.name for one in recording.slices()] == [name for name in shown for _ in range(2)]
    report = perfetto.open_trace(recording.path, ["select name from slice order by ts"])
    assert report.ok
    assert [row[0] for row in report.rows[0]] == [name for name in shown for _ in range(2)]


def test_odd_arguments(recording, perfetto):
    """Any argument leaves the file readable, and is shown as far as it can be."""

    class Sly(dict):
        def items(self):
            raise RuntimeError

    class Shout(str):
        __slots__ = ()

        def __str__(self):
            raise RuntimeError

    loop = []
    loop.append(loop)
    given = {
        "nan": float("nan"),
        "infinity": float("-inf"),
        "none": None,
        "big": 2**63,
        "huge": 10**10_000,
        "bytes": b"abc",
        "loop": loop,
        "deep": [[[[[1]]]]],
        "object": object(),
        "class": int,
        "surrogate": "\udfff\\",
        "empty": {},
        "no": [],
        "set": {1},
        "": "nameless",
        "text": Shout("abc"),
        "bool": True,
    }
    with span("odd", **given):
        recording.go(1)
    with span("sly", sly=Sly(a=1)):
        recording.go(1)
    odd, sly = recording.slices()
    assert odd.args == {
        "nan": "nan",
        "infinity": "-inf",
        "none": "None",
        "big": "9223372036854775808",
        "huge": "int of 33220 bits",
        "bytes": "bytes[3]",
        "loop": [[[["list[1]"]]]],
        "deep": [[[["list[1]"]]]],
        "object": "<object>",
        "class": "<type>",
        "surrogate": "�/",
        "empty": {},
        "no": [],
        "set": [1],
        "(empty)": "nameless",
        "text": "abc",
        "bool": True,
    }
    assert sly.args == {}
    report = perfetto.open_trace(recording.path, ["select count(*) from slice"])
    assert report.ok
    assert report.rows == [[[2]]]


# ---- decorators ------------------------------------------------------------------------------------------------------
def test_plain_function(recording):
    """A decorated function is recorded at each call, and is itself in all else."""

    @span("add", kind="plain")
    def add(a, b=2, *, c=3):
        """Adds."""
        recording.go(5)
        return a + b + c

    assert add(1, c=10) == 13
    assert (add.__name__, add.__doc__, add.__module__) == ("add", "Adds.", __name__)
    assert str(inspect.signature(add)) == "(a, b=2, *, c=3)"
    (one,) = recording.slices()
    assert (one.name, one.end_ns - one.start_ns, one.args) == ("add", 5, {"kind": "plain"})


def test_methods(recording):
    """Methods of every kind can be decorated, static and class methods on either side."""

    class Model:
        @span("m")
        def method(self):
            return self

        @span("s")
        @staticmethod
        def outside():
            return "static"

        @span("c")
        @classmethod
        def make(cls):
            return cls

        @staticmethod
        @span("i")
        def inside():
            return "inside"

    model = Model()
    assert (model.method(), model.outside(), model.make(), model.inside()) == (model, "static", Model, "inside")
    assert [name for name, _, _ in recording.spans()] == ["c", "i", "m", "s"]


@pytest.mark.parametrize("wrong", [int, 3, None])
def test_decorates_functions_only(wrong):
    """What is no function is refused where it is decorated."""
    with pytest.raises(TypeError, match=r"`@span\('x'\)` decorates a function"):
        span("x")(wrong)


def test_decorator_asks_at_each_call(recording):
    """A function that was decorated while nothing recorded is recorded later, and not afterwards."""
    recording.tracer.disable()

    @span("f")
    def f():
        recording.go(1)

    f()
    recording.tracer.enable()
    f()
    recording.tracer.disable()
    f()
    assert recording.spans() == [("f", 1, 1)]


def test_async_function(recording):
    """The span of a coroutine is its own running time, from the first step to the return; it stays a coroutine."""

    @span("fetch")
    async def fetch(ns):
        recording.go(ns)
        await asyncio.sleep(0)
        recording.go(ns)
        return ns

    assert inspect.iscoroutinefunction(fetch)
    made = fetch(3)
    recording.go(100)
    assert asyncio.run(_await(made)) == 3
    assert recording.spans() == [("fetch", 100, 6)]


async def _await(awaitable):
    return await awaitable


def test_async_exception(recording):
    """A coroutine that raises or is cancelled closes its span, marked with why."""

    @span("fail")
    async def fail():
        await asyncio.sleep(0)
        raise OSError

    @span("wait")
    async def wait():
        await asyncio.sleep(3600)

    async def main():
        task = asyncio.ensure_future(wait())
        with pytest.raises(OSError):  # noqa: PT011 - it has no text
            await fail()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert {one.name: one.args for one in recording.slices()} == {
        "fail": {"error": "OSError"},
        "wait": {"error": "CancelledError"},
    }


def test_generator(recording):
    """A generator's span lasts from the first next to the end; values go in and out, and it stays a generator."""

    @span("count")
    def count():
        got = []
        for number in range(3):
            recording.go(1)
            got.append((yield number))
        return got

    assert inspect.isgeneratorfunction(count)
    running = count()
    recording.go(10)
    assert [next(running), running.send("a"), running.send("b")] == [0, 1, 2]
    with pytest.raises(StopIteration) as stop:
        running.send("c")
    assert stop.value.value == ["a", "b", "c"]
    (one,) = recording.slices()
    assert (one.start_ns - recording.start_ns, one.end_ns - one.start_ns, one.args) == (10, 3, {})


def test_generator_throw(recording):
    """What is thrown into a generator arrives there, and what it does not catch marks the span."""

    @span("g")
    def g():
        try:
            yield 1
        except KeyError:
            yield 2
        yield 3

    running = g()
    assert [next(running), running.throw(KeyError("k")), next(running)] == [1, 2, 3]
    with pytest.raises(ValueError, match="v"):
        running.throw(ValueError("v"))
    (one,) = recording.slices()
    assert one.args == {"error": "ValueError"}


@pytest.mark.parametrize("how", ["close", "del", "cycle"])
def test_generator_left_early(recording, how):
    """A generator that is closed or forgotten half-way ends its span then, in good order."""

    @span("g")
    def g(me):
        try:
            yield from range(5)
        finally:
            recording.go(100)

    holder = []
    running = g(holder)
    next(running)
    recording.go(1)
    with span("other"):
        recording.go(2)
    if how == "close":
        running.close()
    elif how == "cycle":
        holder.append(running)
    del running
    holder = None
    gc.collect()
    assert recording.spans() == [("g", 0, 103), ("other", 1, 2)]
    assert all(one.args == {} for one in recording.slices())


def test_interleaved_generators(recording):
    """Spans of generators that take turns, and of one that is abandoned, are all kept, crossing or not."""

    @span("g")
    def g(number):
        for each in range(number):
            recording.go(1)
            yield each

    first, second, third = g(2), g(4), g(9)
    assert [next(first), next(second), next(third)] == [0, 0, 0]
    assert list(first) == [1]
    third.close()
    assert list(second) == [1, 2, 3]
    assert recording.spans() == [("g", 0, 4), ("g", 1, 6), ("g", 2, 2)]
    assert len({one.tid for one in recording.slices()}) == 2


def test_async_generator(recording):
    """An async generator takes what is sent and thrown, and its span lasts until it is exhausted."""

    @span("stream")
    async def stream():
        got = yield 1
        try:
            yield got
        except KeyError:
            yield "caught"
        await asyncio.sleep(0)
        recording.go(5)

    async def main():
        running = stream()
        seen = [await running.__anext__(), await running.asend("sent"), await running.athrow(KeyError("k"))]
        return seen + [item async for item in running]

    assert inspect.isasyncgenfunction(stream)
    assert asyncio.run(main()) == [1, "sent", "caught"]
    assert recording.spans() == [("stream", 0, 5)]


@pytest.mark.parametrize("how", ["aclose", "forgotten", "raises"])
def test_async_generator_left_early(recording, how):
    """An async generator that is closed, forgotten or fails is closed itself, and so is its span."""
    closed = []

    @span("stream")
    async def stream():
        try:
            yield 1
            raise OSError
        finally:
            await asyncio.sleep(0)
            closed.append(True)
            recording.go(5)

    async def main():
        running = stream()
        assert await running.__anext__() == 1
        if how == "aclose":
            await running.aclose()
        elif how == "raises":
            with pytest.raises(OSError):  # noqa: PT011
                await running.__anext__()
        else:
            del running
            gc.collect()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(main())
    assert closed == [True]
    (one,) = recording.slices()
    assert (one.end_ns - one.start_ns, one.args) == (5, {"error": "OSError"} if how == "raises" else {})


# ---- asyncio and threads -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("names", [["task"] * 5, [f"task {number}" for number in range(5)]])
@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("kind", ["block", "arguments", "decorator"])
def test_interleaved_tasks(recording, names, drains, kind):
    """Tasks that take turns keep each their own times, of one name or several, whenever the drain looks."""

    async def turns(number):
        for _ in range(number + 1):
            recording.go(1)
            await asyncio.sleep(0)
            if drains:
                recording.tracer.flush()

    async def work(number, name):
        if kind == "decorator":
            await span(name)(turns)(number)
        else:
            with span(name, **({"n": number} if kind == "arguments" else {})):
                await turns(number)

    async def main():
        await asyncio.gather(*(work(number, name) for number, name in enumerate(names)))

    asyncio.run(main())
    # the tasks take turns of 1 ns in order; that of number n has n + 1 of them
    begins = range(5)
    ends = [5, 9, 12, 14, 15]
    assert recording.spans() == sorted(
        (name, begin, end - begin) for name, begin, end in zip(names, begins, ends, strict=True)
    )


def test_threads(recording):
    """Each thread has a track of its own, under its name."""
    barrier = threading.Barrier(3)

    def work():
        with span("outer"):
            barrier.wait(10)
            with span("inner"):
                pass

    threads = [threading.Thread(target=work, name=f"worker {number}") for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = recording.events()
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert sorted(names) == ["MainThread", "worker 0", "worker 1", "worker 2"]
    assert names["MainThread"] == 1
    by_tid = sorted((one.tid, one.name) for one in slices(events))
    assert by_tid == [(tid, name) for tid in (2, 3, 4) for name in ("inner", "outer")]


def test_ended_in_another_thread(recording):
    """A generator that another thread finishes keeps its span on the track where it began."""

    @span("g")
    def g():
        yield 1
        recording.go(7)

    running = g()
    next(running)
    recording.tracer.flush()
    thread = threading.Thread(target=lambda: list(running))
    thread.start()
    thread.join()
    assert recording.spans() == [("g", 0, 7)]


# ---- iterate, instants, counters ---------------------------------------------------------------------------------------
def test_iterate(recording):
    """Iterate records each wait and not the body; its length is the iterable's, and it can be passed over again."""

    class Loader:
        def __iter__(self):
            recording.go(100)
            for number in range(3):
                recording.go(number)
                yield number

        def __len__(self):
            return 3

    waits = iterate(Loader(), "load")
    assert len(waits) == 3
    for _ in range(2):
        seen = []
        for number in waits:
            seen.append(number)
            recording.go(1000)
        assert seen == [0, 1, 2]
    lengths = [length for _, _, length in recording.spans()]
    assert lengths == [0, 100, 1, 2, 0] * 2
    assert all(one.args == {} for one in recording.slices())


def test_iterate_left_early(recording):
    """A loop that is left half-way leaves no span open."""
    for number in iterate(range(10), "load"):
        if number == 2:
            break
    with span("after"):
        recording.go(1)
    assert [name for name, _, _ in recording.spans()] == ["after"] + ["load"] * 4
    assert {one.tid for one in recording.slices()} == {1}


def test_iterate_has_no_length_of_its_own():
    """Where the iterable has no length, neither has iterate."""
    waits = iterate(iter([1, 2]))
    with pytest.raises(TypeError):
        len(waits)
    assert list(waits) == [1, 2]


def test_instant(recording):
    """An instant stands at its time, with its arguments, on its thread's track."""
    recording.go(3)
    instant("spike", loss=3.5)
    (one,) = [event for event in recording.events() if event["ph"] == "i"]
    assert (one["name"], one["ts_ns"] - recording.start_ns, one["s"], one["tid"]) == ("spike", 3, "t", 1)
    assert one["args"] == {"loss": 3.5}


def test_counter(recording, perfetto):
    """A counter records a number, or several; what is not finite is left out."""
    torch = pytest.importorskip("torch")
    counter("queue", 4)
    counter("memory", used=2.5, cached=1)
    counter("loss", float("nan"))
    counter("losses", a=float("inf"), b=2)
    counter("scalar", torch.tensor(1.5))
    counter("flag", True)
    counter("big", 10**20)
    found = [(event["name"], event["args"]) for event in recording.events() if event["ph"] == "C"]
    assert found == [
        ("queue", {"value": 4}),
        ("memory", {"used": 2.5, "cached": 1}),
        ("losses", {"b": 2}),
        ("scalar", {"value": 1.5}),
        ("flag", {"value": 1}),
        ("big", {"value": 10**20}),
    ]
    report = perfetto.open_trace(recording.path, ["select count(*) from counter"])
    assert report.ok
    assert report.rows == [[[7]]]


@pytest.mark.parametrize("value", ["3", [1, 2], object(), 1j])
def test_counter_takes_numbers(recording, value):
    """What is no number is left out, with a warning that shows its type."""
    with pytest.warns(UserWarning, match=rf"`counter\('queue', ...\)`: value is a {type(value).__name__}"):
        counter("queue", value)
    assert not [event for event in recording.events() if event["ph"] == "C"]


def test_counter_never_waits_for_a_device(recording):
    """A tensor whose value only a device knows is left out: reading it would wait for the device."""
    torch = pytest.importorskip("torch")
    with pytest.warns(UserWarning, match="value is a Tensor on meta"):
        counter("loss", torch.empty((), device="meta"))


# ---- no tracer, and several ------------------------------------------------------------------------------------------
def test_nothing_records():
    """Without a tracer everything runs as without us; an exception passes."""
    assert get_tracer() is None
    with pytest.raises(KeyError), span("a"), span("b", x=1):
        raise KeyError
    instant("i")
    counter("c", 1)
    assert list(iterate([1, 2])) == [1, 2]
    assert span("f")(len)("abc") == 3
    assert span("a") is span("a")


def test_idle_names_are_bounded():
    """Names built per step take no memory while nothing records."""
    for step in range(5000):
        span(f"idle {step}")
    assert len(tracer_module._idle) <= tracer_module.MOST_HANDLES


def test_two_tracers(tmp_path):
    """Two tracers that record at once both get every span, instant and counter."""
    first, second = Recording(tmp_path / "1.json"), Recording(tmp_path / "2.json")
    assert get_tracer() is second.tracer
    with pytest.raises(OSError), span("a", x=1), span("b"):  # noqa: PT011, PT012
        instant("i")
        counter("c", 1)
        first.go(3)
        second.go(4)
        raise OSError

    @span("f")
    def f():
        first.go(1)

    f()
    second.tracer.disable()
    f()
    assert get_tracer() is first.tracer
    assert [event["ph"] for event in first.events() if event["ph"] in "iC"] == ["i", "C"]
    assert [event["ph"] for event in second.events() if event["ph"] in "iC"] == ["i", "C"]
    assert first.spans() == [("a", 0, 3), ("b", 0, 3), ("f", 3, 1), ("f", 4, 1)]
    assert second.spans() == [("a", 0, 4), ("b", 0, 4), ("f", 4, 0)]


def test_disabled_in_mid_span(recording):
    """A span that is open when the recording pauses gets its end; one that begins meanwhile is not recorded."""
    with span("a"):
        recording.go(1)
        recording.tracer.disable()
        with span("b"):
            recording.go(1)
    with span("c"):
        recording.tracer.enable()
        recording.go(1)
    with span("d"):
        recording.go(1)
    assert recording.spans() == [("a", 0, 2), ("d", 3, 1)]
