r"""Parses an answer in LaTeX or plain text into a normal form, `Reading`, that can be compared.

The normal form drops what carries no value: spacing, quotes, `$` and other delimiters, the signs of degrees, percent
and dollars, units of length and area, thousands commas, the capital of a word, and a name before a single equals sign
(``x = 5``, ``(x,y)=(1,2)``). A repeating decimal becomes its fraction.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from envs.grading.arithmetic import Number, evaluate

_MATRIX_FORM = re.compile(r"\\begin\{pmatrix\}((?:(?!\\begin|\\end).)*)\\end\{pmatrix\}")
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
        if self.values is not None and not self.shape:
            return self.values[0]
        return None

    @property
    def matrix(self) -> list[list[str]] | None:
        """The texts of the cells, row by row; None where it is no matrix."""
        inner = _MATRIX_FORM.fullmatch(self.form)
        if inner:
            return [row.split("&") for row in inner[1].removesuffix("\\\\").split("\\\\")]
        return None

    def in_full(self) -> Reading:
        """Return the reading of the full form, as an expression."""
        if self.form == self.full_form:
            return self
        return replace(self, form=self.full_form, tokens=tuple(_TOKEN.findall(self.full_form)), values=None, shape="")


_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),  # hyphens, dashes and the minus
        **dict.fromkeys("°º˚", r"^\circ"),
        **dict.fromkeys("“”„‟", '"'),
        **dict.fromkeys("‘’‚‛", "'"),
        **{chr(0xFF01 + place): chr(0x21 + place) for place in range(94)},  # full width
        "π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "±": r"\pm ",
        "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "∠": r"\angle ", "△": r"\triangle ",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    }
)  # fmt: skip
_UNITS = (
    r"units?|cm|mm|km|in|inch(?:es)?|ft|foot|feet|yd|yards?|mi|miles?|m|(?:centi|milli|kilo)?met(?:er|re)s?"
    r"|deg(?:rees?)?|dollars?|percent"
)
_FUNCTIONS = "sin|cos|tan|cot|sec|csc"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_DEGREES = _NUMBER.pattern + r"\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z]))"
_MATRIX = r"\\begin{pmatrix}\1\\end{pmatrix}"


def _superscript(match: re.Match[str]) -> str:
    digits = "".join(_SUPERSCRIPTS[sign] for sign in match.group())
    if len(digits) == 1:
        return f"^{digits}"
    return f"^{{{digits}}}"


def _repeating(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: 0.1666... as (15/90)."""
    whole = match[1] or "0"
    fixed = match[2]
    cycle = match[3] or match[4]
    digits = whole + fixed
    return f"({int(digits + cycle) - int(digits)}/{(10 ** len(cycle) - 1) * 10 ** len(fixed)})"


_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (f"[{''.join(_SUPERSCRIPTS)}]+", _superscript),
        (r"(?<![\d.])(\d*)\.(\d*)\s*\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\s*[\d.])", _repeating),
        (r"(?<=\d)\\[,;:! ]\s*(?=\d{3}(?!\d))", ""),
        (
            r"(?:(?:\\left\s*)?[(\[]\s*)?\\begin\{array\}\{[lcr| ]*\}(.*)\\end\{array\}(?:\s*(?:\\right\s*)?[)\]])?",
            _MATRIX,
        ),
        (r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", _MATRIX),
        (r"\\(?:left|right)\s*\.", " "),
        (
            r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|q?quad)(?![A-Za-z])|(?<!\\)\\[,;:!$ ]|[$~]|\\?%",
            " ",
        ),
        (r"(?:\\\\)+\s*$", ""),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\\([lg]eq)slant(?![A-Za-z])|\\([lgn]e)(?![A-Za-z])", lambda match: f"\\{match[1] or match[2] + 'q'}"),
        (r"([<>])=", lambda match: r"\leq " if match[1] == "<" else r"\geq "),
        (r"\\([lg])t(?![A-Za-z])", lambda match: "<" if match[1] == "l" else ">"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\[cdt](frac|binom)(?![A-Za-z])", r"\\\1"),
        (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        (r"\\(?:(?:text|math)(?:rm|bf|it|sf)?|mbox|fbox|boxed)\s*\{([^{}]*)\}", r" \1 "),
        (r"^\s*(\"|'+|`+|\*\*)(.*?)(?:\"|'+|`+|\*\*)\s*\.?\s*$", r"\2"),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (
            rf"(\\(?:{_FUNCTIONS})\s*(?:\^\s*\{{?\s*\d\s*\}}?)?)\s*"
            rf"(?:\(\s*({_DEGREES})\s*\)|\{{\s*({_DEGREES})\s*\}}|({_DEGREES}))",
            lambda match: (
                f"{match[1]}({_NUMBER.findall(match[2] or match[3] or match[4])[0]}\\cdot\\frac{{\\pi}}{{180}})"
            ),
        ),
        (r"\\log\s*_\s*\{?\s*e\s*\}?(?![A-Za-z])", r"\\ln "),
        (r"_\{\s*(\w)\s*\}", r"_\1"),
        (r"\\(angle|triangle)\s*\{\s*([A-Z]+)\s*\}", r"\\\1 \2"),
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
    r"^(?:(?=[^=]*[A-Za-z])(?:m?\\(?!frac)[A-Za-z]+ ?)?\{?[A-Za-z]{0,4}\d?\}?(?:_\{?\w{1,3}\}?)?(?:\([a-z\d]\))?"
    r"|\((?:x,y(?:,z)?|a,b(?:,c)?|m,n|p,q|u,v)\)|)(?:=|\\approx)"
)
_SAME_NAME = re.compile(r"^(?P<name>[A-Za-z])=[^=,]+(?:,(?P=name)=[^=,]+)+$")
# The items of a list that is written in words: numbers, each perhaps with the same name before it.
_WORD = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*")
_ITEM = re.compile(
    r"(?=.*(?:\d|\\pi))(?:(?P<name>[A-Za-z])\s*=)?(?:[\d\s.,+\-*/^(){}i]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z]))+"
)
_MATH_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]")
# A word, or several, whose first letter tells nothing; two letters may be a product of A and b.
_CAPITALISED = re.compile(r"No|[A-Z][a-z]{2,}")
_LONE_CHOICE = re.compile(r"^\s*(?:([A-Z])\s*[.):]*|\(\s*([A-Z])\s*\)[.:]*)\s*$")
# One marker, then a text without an operator on it or a second letter: not `(A) + 1`, not `(A) or (B)`.
_CHOICE_WITH_TEXT = re.compile(
    r"^\s*(?:([A-Z])[.):]|\(\s*([A-Z])\s*\))\s+(?=-?(?:[\w.({]|\\(?:frac|sqrt|pi|angle|triangle|overline)(?![A-Za-z])))"
    r"(?!.*(?<![A-Za-z\\])[A-Z](?![A-Za-z]))"
)


@lru_cache(maxsize=16_384)
def read(text: str) -> Reading:
    """Return the reading of a text. The time is quadratic in the length, so callers limit the length."""
    text = _MATH_DELIMITER.sub(" ", " ".join(text.translate(_UNICODE).split()))
    # "(1,234)" is a pair, "1,234" a number, and a list has a space after its comma
    if "," in text and not any(bracket in text for bracket in "([") and "\\{" not in text:
        text = _THOUSANDS.sub(lambda match: re.sub(r",|[{}]", "", match.group()), text.replace("\\!", ""))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    items = [_ITEM.fullmatch(item) for item in _WORD.split(text)]
    if len(items) > 1 and all(items) and len({item["name"] for item in items if item} - {None}) <= 1:
        text = _WORD.sub(", ", text)
    text = _LONE_CHOICE.sub(r"\1\2", text)
    form = full_form = _join(_TOKEN.findall(text))
    if form.count("=") + form.count("\\approx") == 1:
        form = _NAME_BEFORE_EQUALS.sub("", form)
    elif named := _SAME_NAME.match(form):
        form = form.replace(named["name"] + "=", "")
    if _CAPITALISED.fullmatch(form):
        form = form.lower()
    tokens = tuple(_TOKEN.findall(form))
    values, shape = evaluate(tokens)
    return Reading(form, full_form, tokens, values, shape, _choice(form, text))


def _choice(form: str, text: str) -> str:
    if len(form) == 1 and form in string.ascii_uppercase:
        return form
    marked = _CHOICE_WITH_TEXT.match(text)
    if marked:
        return marked[1] or marked[2]
    return ""


def _join(tokens: list[str]) -> str:
    r"""Join tokens without spaces, except where that would change the tokens (``1 2``, ``\cdot x``)."""
    parts: list[str] = []
    for previous, token in zip(["", *tokens], tokens, strict=False):
        numbers = previous[-1:].isdigit() and (token[0].isdigit() or token[0] == ".")
        command = len(previous) > 1 and previous[0] == "\\" and previous[-1].isalpha() and token[0].isalpha()
        parts.append(" " + token if numbers or command else token)
    return "".join(parts)
