r"""Parses an answer in LaTeX or plain text into a normal form, `Reading`, that can be compared.

The normal form drops what carries no value: spacing, `$`, the signs of degrees, percent and dollars, units of length
and area, thousands commas, and a name before a single equals sign (``x = 5``, ``m\angle A = 40``).
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass, replace
from functools import lru_cache

from envs.grading.arithmetic import Number, evaluate

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|\S")


@dataclass(frozen=True)
class Reading:
    r"""A normalised text: ``8 \sqrt { 2 }`` has form ``8\sqrt{2}``, values (11.3137...,), shape "" and choice "".

    A list has one value per item, its brackets as shape ("," for a set or none); values is None where it is not
    numeric. The choice is the letter of a choice: "B" for ``B``, ``(B)``, ``\text{(B)}`` and ``(B) 12 cm``. The first
    three also have the form ``B``. The full form keeps the name that the form drops: ``y=2x+1`` for ``2x+1``.
    """

    form: str
    full_form: str
    tokens: tuple[str, ...]
    values: tuple[Number, ...] | None
    shape: str
    choice: str

    @property
    def number(self) -> Number | None:
        """The value of a single number; None for a list or a text."""
        return self.values[0] if self.values is not None and not self.shape else None

    def in_full(self) -> Reading:
        """Return the reading of the full form, as an expression."""
        if self.form == self.full_form:
            return self
        return replace(self, form=self.full_form, tokens=tuple(_TOKEN.findall(self.full_form)), values=None, shape="")


_UNICODE = str.maketrans(
    {"π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "·": r"\cdot ", "−": "-", "°": r"^\circ", "²": "^2"}
)
_UNITS = (
    r"units?|cm|mm|km|in|inch(?:es)?|ft|foot|feet|yd|yards?|mi|miles?|m|(?:centi|milli|kilo)?met(?:er|re)s?"
    r"|deg(?:rees?)?"
)
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)\\[,;:! ]\s*(?=\d{3}(?!\d))", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|q?quad)(?![A-Za-z])|\\[,;:!$ ]|[$~]|\\?%", " "),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\\([lg]eq)slant(?![A-Za-z])", r"\\\1"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\[dt](frac|binom)(?![A-Za-z])", r"\\\1"),
        (r"\\(?:text|mathrm|textrm|textbf|mathbf|textit|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^?\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\deg(?:rees?)?(?![A-Za-z])", " "),
        (r"[\s.]+$", ""),
        (
            rf"(?:(?<=[\d}})])|(?<=\\pi))\s*(?:(?:square|sq|cubic)\b\.?)?\s*(?:{_UNITS})"
            r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?\s*\.?$",
            "",
        ),
        (r"(?<![\\A-Za-z])(sqrt|pi)(?![A-Za-z])", r"\\\1 "),
        (r"\\sqrt\s*(\d+(?:\.\d+)?|\\pi(?![A-Za-z])|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\(frac|binom)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}"),
        (r"^\s*(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1(\2+\3/\4)"),
        (r"^\s*([-+]?(?:\d+(?:\.\d+)?|\.\d+))[eE]([-+]?\d{1,3})\s*$", r"\1\\times 10^{\2}"),
    )
)
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\{,\})\s?\d{3})+(?![\d,])")
_NAME_BEFORE_EQUALS = re.compile(
    r"^(?=[^=]*[A-Za-z])(?:m?\\(?!frac)[A-Za-z]+ ?)?\{?[A-Za-z]{0,4}\d?\}?(?:_\{?\w{1,3}\}?)?(?:\([a-z]\))?"
    r"(?:=|\\approx)"
)
_SAME_NAME = re.compile(r"^(?P<name>[A-Za-z])=[^=,]+(?:,(?P=name)=[^=,]+)+$")
_LONE_CHOICE = re.compile(r"^\s*(?:([A-Z])\s*[.):]*|\(\s*([A-Z])\s*\)[.:]*)\s*$")
# One marker, then a text without an operator on it or a second letter: not `(A) + 1`, not `(A) or (B)`.
_CHOICE_WITH_TEXT = re.compile(
    r"^\s*(?:([A-Z])[.):]|\(\s*([A-Z])\s*\))\s+(?=-?(?:[\w.({]|\\(?:frac|sqrt|pi|angle|triangle|overline)(?![A-Za-z])))"
    r"(?!.*(?<![A-Za-z\\])[A-Z](?![A-Za-z]))"
)


@lru_cache(maxsize=16_384)
def read(text: str) -> Reading:
    """Return the reading of a text. The time is quadratic in the length, so callers limit the length."""
    text = " ".join(text.translate(_UNICODE).split())
    # "(1,234)" is a pair, "1,234" a number, and a list has a space after its comma
    if "," in text and not any(bracket in text for bracket in "([") and "\\{" not in text:
        text = _THOUSANDS.sub(lambda match: re.sub(r",|[{}]", "", match.group()), text.replace("\\!", ""))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _LONE_CHOICE.sub(r"\1\2", text)
    form = full_form = _join(_TOKEN.findall(text))
    if form.count("=") + form.count("\\approx") == 1:
        form = _NAME_BEFORE_EQUALS.sub("", form)
    elif named := _SAME_NAME.match(form):
        form = form.replace(named["name"] + "=", "")
    tokens = tuple(_TOKEN.findall(form))
    values, shape = evaluate(tokens)
    return Reading(form, full_form, tokens, values, shape, _choice(form, text))


def _choice(form: str, text: str) -> str:
    if len(form) == 1 and form in string.ascii_uppercase:
        return form
    marked = _CHOICE_WITH_TEXT.match(text)
    return (marked[1] or marked[2]) if marked else ""


def _join(tokens: list[str]) -> str:
    r"""Join tokens without spaces, except where that would change the tokens (``1 2``, ``\cdot x``)."""
    parts: list[str] = []
    for previous, token in zip(["", *tokens], tokens, strict=False):
        numbers = previous[-1:].isdigit() and (token[0].isdigit() or token[0] == ".")
        command = len(previous) > 1 and previous[0] == "\\" and previous[-1].isalpha() and token[0].isalpha()
        parts.append(" " + token if numbers or command else token)
    return "".join(parts)
