"""Fuzzes what reads and parses, guided by coverage: ``python tests/faults/fuzz.py [SECONDS]``, needs atheris.

``read_events``, ``summarize``, ``merge``, ``repair``, the duration grammar and the template take any bytes for so many
seconds in all; an exception that is not documented, or an input that takes longer than ten seconds, ends it with the
input in a file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

TARGETS = ("trace", "duration", "template")


def trace(directory):
    with atheris.instrument_imports(include=["lightning_timekeeper.trace"]):
        from test_inputs import tools

    return lambda data: tools(data, directory)


def duration(directory):
    with atheris.instrument_imports(include=["lightning_timekeeper.duration"]):
        from lightning_timekeeper.duration import format_duration, parse_duration
    from lightning_timekeeper.names import MisconfigurationException

    def one(data):
        try:
            read = parse_duration(data.decode(errors="surrogateescape"))
        except MisconfigurationException:
            return
        assert parse_duration(format_duration(read)) == read

    return one


def template(directory):
    with atheris.instrument_imports(include=["lightning_timekeeper.template"]):
        from lightning_timekeeper.template import KEYS, Template

    def one(data):
        try:
            made = Template(data.decode(errors="surrogateescape") + ".json")
        except ValueError:
            return
        name = made.fill({**dict.fromkeys(KEYS, 47), "stage": "fit"}, dict.fromkeys(made.metrics, float("nan")))
        assert name[0] not in "/\\"
        assert ".." not in name.split("/")

    return one


def main():
    if len(sys.argv) > 2 and sys.argv[1] in TARGETS:
        # what the test modules import is not the target's
        sys.path.insert(0, str(Path(__file__).parent))
        with tempfile.TemporaryDirectory() as directory:
            target = globals()[sys.argv[1]](Path(directory))
            atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
            atheris.Fuzz()
        return 0
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    seeds = {
        "trace": [
            (
                b'[\n{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"rank 0","rank":0,"base_unix_s":0}},\n'
                b'{"ph":"X","name":"step","cat":"loop","pid":1,"tid":1,"ts":1.000,"dur":2.000,"args":{"step":1}}\n]\n'
            ),
            b'{"traceEvents":[{"ph":"B","name":"a","pid":1,"tid":1,"ts":1},{"ph":"E","pid":1,"tid":1,"ts":2}],"x":1}',
        ],
        "duration": [b"1d12h30m", b"00:00:01:30", b"PT12H", b"1-02:03:04", b"1.5s"],
        "template": [b"{stage}-rank{rank}", b"{val_loss:.3f}/{epoch:03d}", b"{{a}}/../b"],
    }
    for name in TARGETS:
        with tempfile.TemporaryDirectory() as corpus:
            for number, seed in enumerate(seeds[name]):
                Path(corpus, str(number)).write_bytes(seed)
            command = [sys.executable, __file__, name, corpus, f"-max_total_time={seconds // 3}", "-timeout=10"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stderr.splitlines()
        runs = next((line for line in reversed(lines) if line.startswith("Done")), "")
        print(f"{name}: {runs or 'failed'}", flush=True)
        if done.returncode:
            print("\n".join(lines[-40:]))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
