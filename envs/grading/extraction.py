r"""Finds the answer in a model's text: the content of a `\boxed{...}`, or the text after `Answer:`."""

from __future__ import annotations

import re

_BOX_OR_BRACE = re.compile(r"\\boxed\s*+\{|\\.|[{}]", re.DOTALL)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` whose braces balance, or None; linear time.

    >>> extract_boxed(r"\boxed{3}, no: \boxed{\frac{1}{2}} and \boxed{cut o")
    '\\frac{1}{2}'
    """
    first = text.find("\\boxed")
    if first < 0:
        return None
    opened: list[int] = []  # content start of a box, or -1 for a plain brace
    last_start = -1
    last_end = -1
    for match in _BOX_OR_BRACE.finditer(text, first):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else -1
            if start > last_start:
                last_start = start
                last_end = match.start()
        elif token[-1] == "{" and token != "\\{":
            opened.append(-1 if token == "{" else match.end())
    if last_start >= 0:
        return text[last_start:last_end].strip()
    return None


def extract_answer(text: str) -> str | None:
    r"""Return the answer in a text: the last `\boxed{...}`, else the text after the last `Answer:` on its line.

    None if there is neither, or no text after `Answer:`; an empty box gives the empty string. Linear time.

    >>> extract_answer("Answer: 7\nso \\boxed{68}."), extract_answer("**Answer:** 7 cm\nDone."), extract_answer("68")
    ('68', '7 cm', None)
    """
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    start = max(text.rfind("Answer:"), text.rfind("answer:"))
    if start < 0:
        return None
    start += len("Answer:")
    end = text.find("\n", start)
    return text[start : end if end >= 0 else len(text)].strip(" \t\r*") or None
