"""Command lines that a person can copy from a message: settings become flags, quoted for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def command_line(module: str, words: Iterable[object]) -> str:
    """Return the command that runs a module.

    >>> command_line("trainer.run", flag_words("resume", "runs/a first try"))
    "python -m trainer.run --resume 'runs/a first try'"
    """
    return shlex.join(["python", "-m", module, *map(str, words)])


def flag_words(name: str, value: object) -> list[str]:
    """Return a setting as the words that give it on a command line.

    >>> flag_words("max_turns", 3), flag_words("sp", False), flag_words("files", ("a", "b"))
    (['--max-turns', '3'], ['--no-sp'], ['--files', 'a', '--files', 'b'])
    """
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    words: list[str] = []
    for item in (value or ("",)) if isinstance(value, tuple) else (value,):
        text = "" if item is None else str(item)
        # A value that begins with a dash would be read as a flag.
        words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words
