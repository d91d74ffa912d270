"""The command line ``timekeeper``: arguments in, one call, one line for an error."""

from __future__ import annotations

import argparse
import io
import sys

from lightning_timekeeper import __version__
from lightning_timekeeper.trace.terminal import printable


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments, by default those of the process.

    Returns:
        The exit status: 0, or 1 after an error, 130 after Ctrl-C.
    """
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or a file may not take every character of a name
    try:
        if args.command == "demo":
            from lightning_timekeeper.demo import demo

            demo(args.dir, args.seconds)
        elif args.command == "summary":
            from lightning_timekeeper.trace.summary import summarize
            from lightning_timekeeper.trace.summary.text import terminal_width

            summary = summarize(*args.trace)
            print(summary.json() if args.json else summary.text(terminal_width()))
        elif args.command == "merge":
            from lightning_timekeeper.trace.merge import merge

            print(merge(args.trace, args.output, progress=sys.stderr.isatty()))
        elif args.command == "report":
            from lightning_timekeeper.report import report

            print(f"Report: {printable(str(report(args.trace, args.output)))}")
        elif args.command == "view":
            from lightning_timekeeper.view import view

            view(args.trace)
        else:
            from lightning_timekeeper.trace.repair import repair

            print(repair(args.trace, args.output))
    except (ImportError, OSError, ValueError) as error:
        print(f"timekeeper: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="timekeeper", description="Time budgets and timelines of Lightning runs.")
    parser.add_argument("--version", action="version", version=f"timekeeper {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="train a small net with both callbacks, stop at a limit, resume, and show where the time went",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--dir", default="timekeeper-demo", help="where checkpoints and traces go")
    demo.add_argument("--seconds", type=_seconds, default=4.0, help="the time limit of the first run, 0.1 to 3600")

    summary = commands.add_parser("summary", help="print what bounds a run, and where the time of its steps went")
    summary.add_argument("trace", metavar="TRACE", nargs="+", help="the traces of a run's ranks, or any Chrome trace")
    summary.add_argument("--json", action="store_true", help="all figures as one JSON object; times are in ns")

    merge = commands.add_parser("merge", help="put the traces of several ranks, nodes or attempts on one timeline")
    merge.add_argument("trace", metavar="TRACE", nargs="+", help="Chrome traces, .json or .json.gz; none is changed")
    merge.add_argument("-o", "--output", metavar="OUT", required=True, help="the new trace, .json or .json.gz")

    report = commands.add_parser("report", help="make a page of the summary, with pictures: one file, no network")
    report.add_argument("trace", metavar="TRACE", nargs="+", help="the traces of a run's ranks, or any Chrome trace")
    report.add_argument("-o", "--output", metavar="OUT", default="report.html", help="the page (default: report.html)")

    view = commands.add_parser("view", help="show a trace, or several on one timeline, in the Perfetto UI")
    view.add_argument("trace", metavar="TRACE", nargs="+", help="a Chrome trace, .json or .json.gz")

    repair = commands.add_parser("repair", help="make a whole file of a trace that was cut")
    repair.add_argument("trace", metavar="TRACE", help="a Chrome trace, .json or .json.gz; it is not changed")
    repair.add_argument("-o", "--output", metavar="OUT", help="the whole file (default: TRACE with -repaired)")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 0.1 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
