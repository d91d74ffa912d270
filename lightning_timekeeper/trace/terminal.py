"""Text that a terminal shows and does not obey."""

from __future__ import annotations


def printable(text: str) -> str:
    """A name or a path with every character that is not to be seen, of an escape sequence say, replaced by U+FFFD.

    Args:
        text: Of anybody: a span may be called anything, and so may a file. It may hold bytes that are no UTF-8.
    """
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
