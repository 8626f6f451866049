"""Makes text of models, environments, files and servers safe to print and to write.

Printed, it cannot control a terminal or hide a part.

Everything that a command prints passes `escape_lines`: `guard_streams` puts it in front of stdout and stderr, and
`envs.console.Console` in front of tables, progress bars and log lines, whose own colours a guarded stream would escape.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

# Control characters, halves of surrogate pairs, overrides of writing direction, and what Unicode calls default
# ignorable: characters that show nothing. Three of those stay where people write them: the joiners of emoji and of
# scripts other than Latin, and one variation selector after a character.
_SELECTORS = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_FOREIGN = "[^\x00-\x7f\u200c\u200d]"
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e00ff\U000e01f0-\U000e0fff]"
    f"|(?<!{_FOREIGN})[\u200c\u200d]|[\u200c\u200d](?!{_FOREIGN})|(?<=[{_SELECTORS}])[{_SELECTORS}]"
)

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Return the text on one line, with escapes for characters that are invisible or change the line.

    >>> escape_controls("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def escape_lines(text: str) -> str:
    r"""Return the text with the escapes of `escape_controls`, but with its line breaks and tabs.

    >>> escape_lines("\x1b]0;title\x07\n\u202egnp.exe caf\xe9")
    '\\x1b]0;title\\x07\n\\u202egnp.exe café'
    """
    return _UNSAFE.sub(lambda found: found[0] if found[0] in "\n\t" else escape_controls(found[0]), text)


def well_formed(text: str) -> str:
    """Replace each half of a surrogate pair by U+FFFD, because no tokenizer and no file accepts one.

    A model can write one as the JSON escape of half an emoji.
    """
    return _HALF_PAIR.sub("\ufffd", text)


def write_text(path: Path, text: str) -> None:
    """Write a text file. Half of a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD."""
    path.write_text(well_formed(text), encoding="utf-8")


class _SafeWrite:
    """Takes the place of a stream's `write`; `raw` is the one that it replaces."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream.write
        self._redraws = True

    def __call__(self, text: str) -> int:
        # A progress bar of a library draws its line again. At the start of a line that overwrites nothing else.
        if text.startswith("\r") and self._redraws:
            returns = "\r"
        else:
            returns = ""
        self._redraws = text.endswith("\n") or bool(returns) or (self._redraws and not text)
        self.raw(returns + escape_lines(text.removeprefix(returns)))
        return len(text)


class RawStream:
    """A stream as `envs.console.Console` writes to it, which has escaped all but its own colours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.write = getattr(stream.write, "raw", stream.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_streams() -> None:
    """Escape, to the end of this process, what anyone prints to stdout and stderr: also warnings and tracebacks."""
    os.environ["PYTHON_COLORS"] = "0"  # else Python 3.13 and later colour tracebacks and help by themselves
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not is_guarded(stream):
            stream.write = _SafeWrite(stream)


def is_guarded(stream: TextIO) -> bool:
    """Return whether what is printed to a stream is escaped."""
    return isinstance(stream.write, _SafeWrite)
