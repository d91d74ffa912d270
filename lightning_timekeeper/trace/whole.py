"""Writes a file that is there whole or not at all, and takes nobody's place."""

from __future__ import annotations

import contextlib
import gzip
import os
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def whole_file(output: Path, call: str, level: int = 6) -> Iterator[IO[bytes]]:
    """A binary file that appears under its name when the block ends without an exception.

    Args:
        output: The new file; with a name in ``.gz`` it is compressed.
        call: As the user wrote it, for the message.
        level: Of the compression, 1 to 9.

    Raises:
        FileExistsError: There is such a file, or there is one when the block ends.
        OSError: It cannot be written.
    """
    if output.exists():
        raise FileExistsError(f"{call}: {str(output)!r} exists, and is not overwritten")
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(part.open("xb"))
            file = stack.enter_context(gzip.GzipFile("", "wb", level, raw, 0)) if output.suffix == ".gz" else raw
            yield cast("IO[bytes]", file)
        try:
            os.link(part, output)  # unlike a rename it never replaces what has come there since
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            part.rename(output)
    finally:
        part.unlink(missing_ok=True)
