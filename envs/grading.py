r"""Grading of short mathematical answers: a model's text and a gold label come in, 1.0 or 0.0 goes out.

`extract_answer` finds the answer in the text, `grade` compares it with the label. Nearly every pair is settled by a
small exact evaluator in microseconds; what it cannot read goes to math-verify, unless that could take long.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from envs.arithmetic import Number, evaluate

MAX_CHARS = 200
RELATIVE_TOLERANCE = 1e-6

_BOX_OR_BRACE = re.compile(r"\\boxed\s*+\{|\\.|[{}]", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|\S")


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` whose braces balance, or None; linear time.

    >>> extract_boxed(r"\boxed{3}, no: \boxed{\frac{1}{2}} and \boxed{cut o")
    '\\frac{1}{2}'
    """
    first = text.find("\\boxed")
    if first < 0:
        return None
    opened: list[int] = []  # content start of a box, or -1 for a plain brace
    last_start, last_end = -1, -1
    for match in _BOX_OR_BRACE.finditer(text, first):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else -1
            if start > last_start:
                last_start, last_end = start, match.start()
        elif token[-1] == "{" and token != "\\{":
            opened.append(-1 if token == "{" else match.end())
    return text[last_start:last_end].strip() if last_start >= 0 else None


def extract_answer(text: str) -> str | None:
    r"""Return the answer that a text states: the last `\boxed{...}`, else what follows the last `Answer:` on its line.

    None when there is neither (or nothing follows `Answer:`); an empty box is the empty string. Linear time.

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


def grade(answer: str, label: str) -> float:
    r"""Return 1.0 where `answer` means the same as `label`, else 0.0; never raises, and needs no main thread.

    Policy: degree and percent signs, units of length and area, `$`, `x =` and thousands commas carry no value, so
    ``37.5\%`` equals ``37.5`` and ``12 cm`` equals ``12``. Two rationals must be equal exactly; where one side is
    irrational a relative difference of 1e-6 is allowed. ``(1,2)`` and ``[1,2]`` differ. An answer of more than
    200 characters, or one that a computer algebra system could hang on, counts only if it is the label's own text.

    >>> grade(r"\frac{1}{2}", "0.5"), grade(r"\sqrt{50}", r"5 \sqrt { 2 }"), grade("3", "300")
    (1.0, 1.0, 0.0)
    """
    if len(answer) > MAX_CHARS or len(label) > MAX_CHARS:
        return float(bool(label.strip()) and answer.split() == label.split())
    left, right = _read(answer), _read(label)
    if not left.form or not right.form:
        return 0.0
    if left.form == right.form:
        return 1.0
    if left.values is not None and right.values is not None:
        return float(left.shape == right.shape and _same_numbers(left.values, right.values))
    if "," in left.tokens and "," in right.tokens and _ends(left) != _ends(right):
        return 0.0
    if _number_against_relation(left, right) or not (_safe_for_algebra(left) and _safe_for_algebra(right)):
        return 0.0
    return float(_equal_by_algebra(left.form, right.form))


@dataclass(frozen=True)
class _Reading:
    r"""A text, normalised: ``8 \sqrt { 2 }`` has form ``8\sqrt{2}``, values (11.3137...,) and shape "".

    A list has one value per item, its brackets as shape ("," for none); values is None where it is not numeric.
    """

    form: str
    tokens: tuple[str, ...]
    values: tuple[Number, ...] | None
    shape: str


def _ends(reading: _Reading) -> str:
    return reading.tokens[0] + reading.tokens[-1]


def _number_against_relation(left: _Reading, right: _Reading) -> bool:
    """Tell whether one side is a number and the other has unknowns or relations.

    They differ, but math-verify reads the 3 of ``3 or 68`` and the 68 of ``5=68``.
    """
    number, other = (left, right) if left.values is not None else (right, left)
    if number.values is None or number.shape:
        return False
    return any(
        token in "=<>_," or (len(token) == 1 and token.isalpha() and token not in "ei") for token in other.tokens
    )


def _same_numbers(left: tuple[Number, ...], right: tuple[Number, ...]) -> bool:
    return len(left) == len(right) and all(_same_number(a, b) for a, b in zip(left, right, strict=True))


def _same_number(a: Number, b: Number) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    try:
        return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)
    except OverflowError:  # a Fraction beyond the range of a float
        return False


# Normalisation -------------------------------------------------------------------------------------------------------

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
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:!$ ]|[$~]|\\?%", " "),
        (r"\\[dt]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
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
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"^\s*(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)\s*$", r"\1(\2+\3/\4)"),
    )
)
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\{,\})\s?\d{3})+(?![\d,])")
_NAME_BEFORE_EQUALS = re.compile(
    r"^(?=[^=]*[A-Za-z])(?:m?\\(?!frac)[A-Za-z]+ ?)?\{?[A-Za-z]{0,4}\d?\}?(?:_\{?\w{1,3}\}?)?(?:=|\\approx)"
)


@lru_cache(maxsize=16_384)
def _read(text: str) -> _Reading:
    text = " ".join(text.translate(_UNICODE).split())
    # "(1,234)" is a pair, "1,234" a number, and a list has a space after its comma
    if "," in text and not any(bracket in text for bracket in "([") and "\\{" not in text:
        text = _THOUSANDS.sub(lambda match: re.sub(r",|[{}]", "", match.group()), text.replace("\\!", ""))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    form = _join(_TOKEN.findall(text))
    if form.count("=") + form.count("\\approx") == 1:
        form = _NAME_BEFORE_EQUALS.sub("", form)
    tokens = tuple(_TOKEN.findall(form))
    values, shape = evaluate(tokens)
    return _Reading(form, tokens, values, shape)


def _join(tokens: list[str]) -> str:
    r"""Join tokens without spaces, save where that would make other tokens (``1 2``, ``\cdot x``)."""
    parts: list[str] = []
    for previous, token in zip(["", *tokens], tokens, strict=False):
        numbers = previous[-1:].isdigit() and (token[0].isdigit() or token[0] == ".")
        command = len(previous) > 1 and previous[0] == "\\" and previous[-1].isalpha() and token[0].isalpha()
        parts.append(" " + token if numbers or command else token)
    return "".join(parts)


# Computer algebra ----------------------------------------------------------------------------------------------------

_ALGEBRA_COMMAND = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|div|pm|mp|sin|cos|tan|cot|sec|csc|log|ln|infty|cup|cap|in|leq?|geq?"
    r"|alpha|beta|gamma|theta|phi|lambda|[{}])"
)
_EXPONENT = re.compile(
    r"\^(?:\d|[a-z]|\{-?(?:\d{1,3}|\d{1,2}\.\d{1,2}|\d{1,2}/\d{1,2}|\\frac\{\d{1,2}\}\{\d{1,2}\}"
    r"|\d?[a-z](?:[+-]\d{1,2})?)\})(?!\^)"
)
_ROOT_DEGREE = re.compile(r"\\sqrt\[\d{1,2}\]")
_FACTORIAL = re.compile(r"(?<!\d)(?:1?\d|20)!(?!!)")
_PROSE = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|or|is)(?![A-Za-z])|[^\w\\+\-*/^(){}\[\],=<>!|. ]")


def _safe_for_algebra(reading: _Reading) -> bool:
    """Tell whether sympy surely ends soon on it: no tower of powers, deep nesting or huge expansion, and no prose.

    Prose is left out since math-verify reads a number out of it: the 3 of "angle 3 is congruent to angle Z".
    """
    form, tokens = reading.form, reading.tokens
    if not form.isascii() or form.isalpha() or _PROSE.search(form):
        return False
    if any(token[0] == "\\" and not _ALGEBRA_COMMAND.fullmatch(token) for token in tokens):
        return False
    exponents = [match.group() for match in _EXPONENT.finditer(form)]
    if len(exponents) != form.count("^") or len(_FACTORIAL.findall(form)) != form.count("!"):
        return False
    if len(_ROOT_DEGREE.findall(form)) != form.count("\\sqrt["):
        return False
    depth = deepest = 0
    for token in tokens:
        depth += (token in "({[") - (token in ")}]")
        deepest = max(deepest, depth if depth >= 0 else 99)
    if depth or deepest > 6:
        return False
    # An upper bound of the degree after expansion, and with it of the number of terms.
    num_factors = sum(token in ("(", "/") or token[0] == "\\" for token in tokens)
    degree = 1 + num_factors
    for exponent in exponents:
        degree *= math.prod(max(1, int(digits)) for digits in re.findall(r"\d+", exponent))
    num_letters = len({token for token in tokens if token.isalpha()})
    return degree <= 1000 and math.comb(num_letters + degree, num_letters) <= 20_000


@lru_cache(maxsize=16_384)
def _equal_by_algebra(answer: str, label: str) -> bool:
    """Compare two normalised forms with math-verify; False where it cannot read one of them.

    Both are boxed, for a bare ``8\\sqrt{2}`` is read as 2; its time limits are off, for they use signals, which only
    the main thread may.
    """
    # It imports sympy, which takes half a second.
    from math_verify import parse, verify

    # It warns at each call that its time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        gold = parse(f"\\boxed{{{label}}}", parsing_timeout=0)
        given = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
        return bool(gold) and bool(given) and bool(verify(gold, given, timeout_seconds=0))
    except Exception:  # whatever a parser or sympy raises on a model's text: not shown equal
        return False
