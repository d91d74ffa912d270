"""What the package adds to the start of a program, each in a new interpreter: wall time, median and spread.

`import lightning_timekeeper` loads neither torch nor Lightning; a script that trains has Lightning loaded anyway, and
then it is counted what importing both callbacks adds to `import lightning.pytorch`. The floor is `python -c pass`.

Usage: python benchmarks/startup.py [--quick]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from _harness import Figures, environment, finish, quick

PROGRAMS = {
    "nothing": "pass",
    "import lightning_timekeeper": "import lightning_timekeeper",
    "timekeeper --help": "import sys; sys.argv = ['timekeeper', '--help']; from lightning_timekeeper.__main__ import main; main()",
    "import lightning.pytorch": "import lightning.pytorch",
    "and both callbacks": "import lightning.pytorch; from lightning_timekeeper import TimelineTrace, Timer",
}


def main():
    about = environment()
    figures = Figures()
    for at in range(2 if quick() else 9):
        for name, code in PROGRAMS.items():
            begin_s = time.perf_counter()
            with_help = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run([sys.executable, "-c", code], check=False, **with_help)
            if at:  # the first fills the caches
                figures.add(name, (time.perf_counter() - begin_s) * 1000)
    print(f"\n{'ms':34} median    least      p95")
    for name in PROGRAMS:
        print(f"{name:32}{figures.median(name):9.0f}{figures.least(name):9.0f}{figures.p95(name):9.0f}")
    added = statistics.median(
        after - before
        for after, before in zip(
            figures.samples["and both callbacks"], figures.samples["import lightning.pytorch"], strict=True
        )
    )
    rows = [
        (
            "import, ms over python's own start",
            figures.median("import lightning_timekeeper") - figures.median("nothing"),
            "<=",
            30,
        ),
        ("both callbacks, share of Lightning's import", added / figures.median("import lightning.pytorch"), "<=", 0.05),
    ]
    finish(about, rows, ms={name: round(figures.median(name), 1) for name in PROGRAMS})


if __name__ == "__main__":
    sys.exit(main())
