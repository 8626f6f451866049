r"""Decides which pairs of answers go to math-verify.

math-verify guesses when it cannot read a text: it reads "angle 3 is congruent to angle Z" as 3, ``2 3`` as 5 and
``3y=2x`` as ``2x``. Texts that it would misread never reach it, nor do towers of powers, which would use up its time.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from envs.grading.normal_form import Reading

MAX_DEPTH = 8

_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega"
_GREEK_LETTERS = frozenset(f"\\{name}" for name in _GREEK.split("|"))
_COMMAND = re.compile(
    r"\\(?:frac|sqrt|binom|pi|cdot|times|div|pm|mp|infty|emptyset|cup|cap|setminus|in|leq?|geq?|neq?|mathbb"
    rf"|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|sinh|cosh|tanh|exp|log|ln|lfloor|rfloor|lceil|rceil|{_GREEK}|[{{}}])"
)
_INFINITY = re.compile(r"(?:^|[(\[,])[-+]?\\infty(?=[)\],]|$)")  # alone, or the end of an interval
_SET_COMMANDS = {"\\cup", "\\cap", "\\setminus", "\\mathbb", "\\emptyset", "\\in"}
_PROSE = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|or|is)(?![A-Za-z])|[^\w\\+\-*/^(){}\[\],=<>!|. ]")


def is_readable(reading: Reading) -> bool:
    """Return whether math-verify reads the whole text as mathematics: no prose, unknown commands or stray numbers."""
    form = reading.form
    tokens = reading.tokens
    is_name = form.isalpha() and len(form) > 1
    if not form.isascii() or is_name or _PROSE.search(form) or "." in tokens:
        return False
    if any(token[0] == "\\" and not _COMMAND.fullmatch(token) for token in tokens):
        return False
    # "2 3" is read as 2 + 3 and "2_3" as 2; in `\log_2 8` the first number is an index
    triples = zip(("", *tokens), tokens, tokens[1:], strict=False)
    if any(_is_number(a) and (_is_number(b) or b == "_") and before != "_" for before, a, b in triples):
        return False
    if len(_INFINITY.findall(form)) != form.count("\\infty"):
        return False
    depth = deepest = 0
    for token in tokens:
        depth += (token in "({[") - (token in ")}]")
        deepest = max(deepest, depth if depth >= 0 else 99)
    return depth == 0 and deepest <= MAX_DEPTH


def are_comparable(left: Reading, right: Reading) -> bool:
    """Return whether the two can be equal: both are a number, a list, an equation, or neither is."""
    for number, other in ((left, right), (right, left)):
        if number.number is not None and _has_unknown_or_relation(other) and not _may_be_constant(other):
            return False
    if ("=" in left.tokens) != ("=" in right.tokens):
        return False
    left_letters = _letters(left)
    right_letters = _letters(right)
    if left_letters != right_letters and {a.lower() for a in left_letters} == {a.lower() for a in right_letters}:
        return False  # math-verify reads X as x
    if "," in left.tokens and "," in right.tokens and not _SET_COMMANDS.intersection(left.tokens + right.tokens):
        return _brackets(left) == _brackets(right)
    return True


def _has_unknown_or_relation(reading: Reading) -> bool:
    """Return whether the reading is certainly not a number; math-verify would read ``5=68`` as 68."""
    if _letters(reading) - {"e", "i"} or not {"=", "<", ">", ","}.isdisjoint(reading.tokens):
        return True
    pairs = zip(("", *reading.tokens), reading.tokens, strict=False)
    return any(token == "_" and before != "\\log" for before, token in pairs)


def _may_be_constant(reading: Reading) -> bool:
    r"""Return whether the unknowns may cancel: a sum in which each stands twice or more, as in ``\sin^2x+\cos^2x``."""
    if not {"=", "<", ">", ",", "_"}.isdisjoint(reading.tokens) or {"+", "-"}.isdisjoint(reading.tokens):
        return False
    unknowns = Counter(token for token in reading.tokens if token.isalpha() or token in _GREEK_LETTERS)
    return bool(unknowns) and min(unknowns.values()) >= 2


def _letters(reading: Reading) -> set[str]:
    return {token for token in reading.tokens if token.isalpha()}


def _is_number(token: str) -> bool:
    return token[-1].isdigit()


def _brackets(reading: Reading) -> str:
    r"""Return the outer brackets: "(]" for ``(a,b]``, "" for ``a,b``, for ``\{a,b\}`` and ``(a),(b)``."""
    first = reading.tokens[0]
    last = reading.tokens[-1]
    if first not in ("(", "[") or last not in (")", "]"):
        return ""
    depth = 0
    for token in reading.tokens[:-1]:
        depth += (token in "([") - (token in ")]")
        if depth == 0:
            return ""
    return first + last


# Towers --------------------------------------------------------------------------------------------------------------

_EXPONENT = re.compile(r"\^(?:\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|(\d+|[A-Za-z]|\\[A-Za-z]+))")
_SECOND_EXPONENT = re.compile(_EXPONENT.pattern + r"\^")
_HUGE_FACTORIAL = re.compile(r"\d{4}!|!!|\([^()A-Za-z]*[!^][^()A-Za-z]*\)!")
_ROOT_DEGREE = re.compile(r"\\sqrt\[(?:\d{1,2}|[a-z])\]")
_UNKNOWN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")


def is_tower(reading: Reading) -> bool:
    """Return whether it has a tower of powers, a huge power or factorial, or too many terms when expanded.

    The time limit stops an expensive text that passes; one that is found here costs nothing.
    """
    form = reading.form
    tokens = reading.tokens
    if _HUGE_FACTORIAL.search(form) or len(_ROOT_DEGREE.findall(form)) != form.count("\\sqrt["):
        return True
    if "^" in _EXPONENT.sub("", form) or _SECOND_EXPONENT.search(form):
        return True
    exponents = [braced or bare for braced, bare in _EXPONENT.findall(form)]
    if any("!" in exponent or ("^" in exponent and not _UNKNOWN.search(exponent)) for exponent in exponents):
        return True
    # An upper bound of the degree after expansion, and with it of the number of terms.
    degree = 1.0 + sum(token in ("(", "/") or token[0] == "\\" for token in tokens)
    for exponent in exponents:
        degree *= math.prod(max(1.0, float(numeral)) for numeral in re.findall(r"\d+(?:\.\d+)?", exponent))
    num_letters = len(_letters(reading))
    return degree > 1000 or math.comb(num_letters + int(degree), num_letters) > 20_000
