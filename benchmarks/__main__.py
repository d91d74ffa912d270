"""Runs all benchmarks and prints every target with the figure that was reached.

Each is a script of its own and says in its docstring what it measures and why. Nothing runs beside them; keep the machine
otherwise idle. The last line is JSON: the environment, the targets, and what each benchmark printed as its own last line.

Usage: python -m benchmarks [--quick]
    --quick    a few repeats and small sizes, under two minutes: that all runs, not what it costs
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("recording", "actions", "writing", "saving", "workers", "timer", "fit", "merge", "summary", "startup")


def run(name):
    """A benchmark's last line; what it prints before goes to stdout as it comes."""
    print(f"\n======== {name}.py", flush=True)
    command = [sys.executable, HERE / f"{name}.py", *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        last = ""
        for line in process.stdout:
            if last:
                print(last, end="", flush=True)
            last = line
    if process.returncode:
        print(last, end="")
        sys.exit(f"{name}.py failed with status {process.returncode}: python benchmarks/{name}.py tells why")
    return json.loads(last)


def main():
    if set(sys.argv[1:]) - {"--quick"}:
        sys.exit(__doc__)
    begin_s = time.perf_counter()
    results = {name: run(name) for name in SCRIPTS}
    targets = [target for result in results.values() for target in result["targets"]]
    width = max(len(target["target"]) for target in targets)
    print(f"\n======== all, {time.perf_counter() - begin_s:.0f} s\n{'target':{width}}   reached    wanted")
    for target in targets:
        met = "" if target["met"] else "   MISSED"
        print(f"{target['target']:{width}}  {target['reached']:8.4g}    {target['wanted']}{met}")
    environment = results["recording"]["environment"]
    details = {name: {**result, "environment": None, "targets": None} for name, result in results.items()}
    print(json.dumps({"environment": environment, "targets": targets, "details": details}))


if __name__ == "__main__":
    main()
