"""Flags of a command in a test: those of the test itself replace what it shares with others."""

from __future__ import annotations

from collections.abc import Iterable

#: Flags that a command takes several times.
REPEATED = ("--config", "--only", "--reward", "--callback", "--registry", "--tag", "--tracker")


def last_of_each(words: Iterable[str]) -> list[str]:
    """Return the words with the last value of each flag, which a command takes once.

    >>> last_of_each(["--steps", "2", "--sp", "--steps", "3"])
    ['--sp', '--steps', '3']
    """
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([word])
        else:
            flags[-1].append(word)
    names = [flag[0].partition("=")[0] for flag in flags]
    kept = [flag for k, flag in enumerate(flags) if names[k] in REPEATED or names[k] not in names[k + 1 :]]
    return [word for flag in kept for word in flag]
