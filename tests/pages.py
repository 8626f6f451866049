"""What tests read of pages of documentation: their code blocks, and the commands and outputs of a console."""

from __future__ import annotations

import re


def code_block(page: str, language: str, word: str) -> str:
    """Return the code block of a language that holds a word."""
    return next(text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if word in text)


def session(page: str, word: str) -> tuple[list[str], str]:
    """Return the arguments after `python -m` and the output of a console block that holds a word."""
    first, _, output = code_block(page, "console", word).partition("\n")
    program, flag, *argv = first.removeprefix("$ ").split("#")[0].split()
    assert (program, flag) == ("python", "-m"), first
    return argv, output


def is_shown(page: str, printed: str) -> bool:
    """Return whether a page shows what was printed, line for line but for figures; its `...` stands for any lines."""
    lines = (r"(.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in _shapes(page))
    return re.fullmatch("".join(lines), "".join(f"{line}\n" for line in _shapes(printed))) is not None


def _shapes(text: str) -> list[str]:
    """Return the lines of an output without figures, waits, and the widths of its tables."""
    lines = (re.sub(r"[-+]?\d[\d.]*(e-?\d+)?", "0", line) for line in text.splitlines())
    shown = (line for line in lines if line.strip() and not line.startswith("waiting for "))  # on a busy machine alone
    return [" ".join(re.sub("─+", "─", line).split()) for line in shown]
