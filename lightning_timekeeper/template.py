"""The name of a trace file: a template, filled in, and kept off files that exist."""

from __future__ import annotations

import os
import re
import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEYS = ("stage", "rank", "node", "world_size", "epoch", "step", "attempt")
SUFFIXES = (".json", ".json.gz")

_UNSAFE = re.compile(r"[\x00-\x1f\x7f]")
# what makes separators of a value, any character of a number (47 is a slash), or a name of a gigabyte
_ODD_FORMAT = re.compile(r"[/\\]|c$|[1-9]\d{3}")


class Template:
    """A file name with ``{stage} {rank} {node} {world_size} {epoch} {step} {attempt}`` and logged metrics.

    Args:
        text: The template; a metric has a format, ``{val_loss:.3f}``, which tells it from a misspelt key.
        argument: How the user wrote it, for the errors.

    Raises:
        ValueError: For a template that cannot be filled in.
    """

    def __init__(self, text: str, argument: str = "TimelineTrace(filename") -> None:
        self.text = text
        self.metrics: set[str] = set()
        self.keys: set[str] = set()
        accepted = f"a name that ends in .json or .json.gz, of text, {', '.join(f'{{{key}}}' for key in KEYS)} and "
        accepted += "metrics with a format, such as {val_loss:.3f}"
        self._error = f"`{argument}={text!r})`: expected {accepted}."
        if not isinstance(text, str) or not text.endswith(SUFFIXES) or _UNSAFE.search(text):
            raise ValueError(self._error)
        try:
            fields = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"{self._error} {error}") from None
        for _, field, spec, conversion in fields:
            if field is None:
                continue
            if _ODD_FORMAT.search(spec or ""):
                raise ValueError(f"{self._error} {field!r} may not have the format {spec!r}.")
            if field in KEYS and not conversion:
                self.keys.add(field)
            elif field and spec and not conversion and not set(field) & set("[]"):
                self.metrics.add(field)
            else:
                raise ValueError(f"{self._error} {field!r} is not one of them.")
        for _, field, spec, _ in fields:
            if field is not None:
                try:
                    format("fit" if field == "stage" else 1.0 if field in self.metrics else 1, spec or "")
                except ValueError as error:
                    raise ValueError(f"{self._error} {field}: {error}.") from None
        name = self.fill({**dict.fromkeys(KEYS, 1), "stage": "fit"}, dict.fromkeys(self.metrics, 1.0))
        if name[0] in "/\\" or os.path.splitdrive(name)[0] or ".." in re.split(r"[/\\]", name):
            raise ValueError(f"{self._error} It may not leave the directory: `dirpath` says which that is.")

    def fill(self, values: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
        """The file's name.

        Args:
            values: One for each of the keys.
            metrics: What was logged; one that is missing is ``nan``.
        """
        parts = []
        for text, field, spec, _ in string.Formatter().parse(self.text):
            parts.append(text)
            if field is None:
                continue
            if field in KEYS:
                parts.append(format(values[field], spec or ""))
                continue
            try:
                parts.append(format(float(metrics[field]), spec or ""))
            except (KeyError, TypeError, ValueError, RuntimeError):
                parts.append("nan")
        return "".join(parts)


def with_rank(name: str) -> str:
    """The template with the rank added before its suffix."""
    stem, suffix = split(name)
    return f"{stem}-rank{{rank}}{suffix}"


def split(path: str) -> tuple[str, str]:
    """Stem and suffix, ``.json`` or ``.json.gz``."""
    suffix = next(suffix for suffix in reversed(SUFFIXES) if path.endswith(suffix))
    return path[: -len(suffix)], suffix


def versioned(path: str, version: int) -> str:
    """The path of a version: 0 is the path itself, then ``-v1``, ``-v2`` ..."""
    stem, suffix = split(path)
    return f"{stem}-v{version}{suffix}" if version else path


def free_version(paths: list[str], exists: Callable[[str], bool], version: int = 0) -> int:
    """The first version, from one on, of which no file exists, neither as ``.json`` nor as ``.json.gz``."""
    while any(exists(split(versioned(path, version))[0] + suffix) for path in paths for suffix in SUFFIXES):
        version += 1
    return version


def join(dirpath: str, name: str) -> str:
    """Directory or URL, and name."""
    return f"{dirpath.rstrip('/')}/{name}" if "://" in dirpath else os.path.join(dirpath, name)
