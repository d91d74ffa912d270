"""The summary as a page: one file with pictures, which needs no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_timekeeper.trace.summary import summarize
from lightning_timekeeper.trace.whole import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable


def report(paths: Iterable[str | os.PathLike[str]], output: str | os.PathLike[str]) -> Path:
    """Make a page of what :func:`~lightning_timekeeper.summarize` returns.

    Args:
        paths: The traces of a run's ranks, or any Chrome trace.
        output: The new HTML file; with a name in ``.gz`` it is compressed.

    Returns:
        Its path.

    Raises:
        FileExistsError: There is such a file.
        ImportError: The extra ``report`` is not installed.
        OSError: A trace cannot be read, or the file cannot be written.
        ValueError: No trace is given, or one that is none.
    """
    try:
        import jinja2  # noqa: F401, PLC0415 - the two of the extra
        import matplotlib as mpl  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError(
            f"`report()` needs matplotlib and jinja2 ({error}): pip install 'lightning-timekeeper[report]'"
        ) from error
    from lightning_timekeeper.report.page import page  # noqa: PLC0415

    output, given = Path(output), list(paths)
    with whole_file(output, f"`report(..., {str(output)!r})`") as file:
        file.write(page(summarize(*given), [os.path.basename(os.fspath(path)) for path in given]).encode())
    return output
