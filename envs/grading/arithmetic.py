r"""Evaluates short LaTeX arithmetic exactly, to rationals; roots and pi give floats, i complex numbers.

Sines and other functions have no value here: math-verify compares what holds one.
"""

from __future__ import annotations

import cmath
import math
from fractions import Fraction

Number = Fraction | float | complex

MAX_DEPTH = 24
BRACKETS = {"(": ")", "[": "]", "\\{": "\\}"}
#: Floats cannot tell 1 from the square root of 1 + 1e-17. A computed number has no value here where its terms differ
#: by more than this ratio.
TOO_NEAR = 1e-6
#: The largest error of a computed number, relative to its terms.
ROUNDING = 1e-12
#: Of the numerator and the denominator of what a root or a power takes as a float.
MAX_BITS = 28


def evaluate(tokens: tuple[str, ...]) -> tuple[tuple[Number, ...] | None, str]:
    r"""Return (values, shape) of a number or of a list of numbers; (None, "") for anything else.

    The shape is a list's brackets, or "," for a set or a list without brackets (sorted, because order has no meaning).
    A number with a plus-minus sign is the list of both numbers.

    >>> evaluate(("1", "/", "2"))
    ((Fraction(1, 2),), '')
    """
    try:
        items = [tokens]
        shape = ""
        if "," in tokens:
            inner = tokens
            if tokens[-1] in BRACKETS.values() and tokens[0] in BRACKETS:
                inner = tokens[1:-1]
                shape = tokens[0] + tokens[-1]
            items = _split(inner)
        elif tokens.count("\\pm") == 1:
            items = [tuple(sign if token == "\\pm" else token for token in tokens) for sign in "+-"]
        values = [_Evaluator(item).value() for item in items]
    except (ArithmeticError, ValueError):
        return None, ""
    if len(values) > 1 and shape in ("", "\\{\\}"):
        values = sorted(values, key=lambda value: (value.real, value.imag))
        shape = ","
    return tuple(values), shape


def _split(tokens: tuple[str, ...]) -> list[tuple[str, ...]]:
    items: list[tuple[str, ...]] = []
    start = 0
    for index, token in enumerate((*tokens, ",")):
        if token == ",":
            items.append(tokens[start:index])
            start = index + 1
    return items


class _Evaluator:
    r"""Recursive descent over tokens: numbers, + - * / ^, brackets, `\frac`, `\sqrt`, `\pi`, `i`.

    ``_Evaluator(("8", "\\sqrt", "{", "2", "}")).value()`` is 11.3137...; rationals stay exact. Raises ValueError for
    unknown syntax, ArithmeticError for division by zero and overflow.
    """

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self.tokens = (*tokens, "")
        self.index = 0
        self.depth = 0

    def value(self) -> Number:
        result = self._sum()
        if self._peek():
            raise ValueError(f"trailing {self._peek()!r}")
        if isinstance(result, complex) and abs(result.imag) <= 1e-12 * abs(result):
            result = result.real
        if isinstance(result, Fraction) or cmath.isfinite(result):
            return result
        return self._fail()

    def _fail(self) -> Number:
        raise ValueError(f"cannot read {self._peek()!r}")

    def _peek(self) -> str:
        return self.tokens[self.index]

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        if token not in wanted or not token:
            return ""
        self.index += 1
        return token

    def _expect(self, wanted: str) -> None:
        if not self._take(wanted):
            self._fail()

    def _sum(self) -> Number:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail()
        total = self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            total = self._plus(total, term if sign == "+" else -term)
        self.depth -= 1
        return total

    def _plus(self, a: Number, b: Number) -> Number:
        """Add; what rounding leaves of a difference is 0, and a term that rounding swallows has no sum."""
        total = a + b
        if isinstance(total, Fraction):
            return total
        small, large = sorted((abs(a), abs(b)))
        if 0 < small < TOO_NEAR * large:
            return self._fail()
        if abs(total) <= ROUNDING * large:
            return Fraction(0)
        return total

    def _product(self) -> Number:
        sign = 1
        while taken := self._take("+", "-"):
            sign = -sign if taken == "-" else sign
        result = self._power()
        while True:
            if self._take("*", "\\cdot", "\\times"):
                result = result * self._signed_power()
            elif self._take("/", "\\div"):
                result = result / self._signed_power()
            elif self._peek() in _FACTORS or self._starts_number_after_bracket():
                result = result * self._power()
            else:
                return sign * result

    def _starts_number_after_bracket(self) -> bool:
        return self._peek()[:1].isdecimal() and self.tokens[self.index - 1] in (")", "}", "\\pi", "i")

    def _signed_power(self) -> Number:
        if self._take("-"):
            return -self._power()
        return self._power()

    def _power(self) -> Number:
        base = self._atom()
        if not self._take("^"):
            return base
        exponent = self._argument(signed=True)
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            bits = 0
            if isinstance(base, Fraction):
                bits = (base.numerator.bit_length() + base.denominator.bit_length()) * abs(int(exponent))
            # Larger powers would take seconds and megabytes.
            if abs(exponent) <= 512 and bits <= 4096:
                return base ** int(exponent)
            return self._fail()
        if _real(base) > 0:
            return _real(base) ** _real(exponent)
        return self._fail()

    def _atom(self) -> Number:
        token = self._peek()
        if token[:1].isdecimal() or (token[:1] == "." and len(token) > 1):
            self.index += 1
            return self._mixed(Fraction(token))
        if self._take("\\pi"):
            return math.pi
        if self._take("i"):
            return 1j
        if self._take("\\frac"):
            numerator = self._argument()
            return numerator / self._argument()
        if self._take("\\sqrt"):
            return self._root()
        return self._bracketed()

    def _mixed(self, whole: Fraction) -> Fraction:
        r"""Read ``4 \frac { 4 } { 11 }`` as 4 + 4/11, the meaning of a proper fraction right after an integer."""
        frac, _, top, _, _, bottom, close = (*self.tokens[self.index : self.index + 7], *[""] * 7)[:7]
        proper = frac == "\\frac" and close == "}" and top.isdecimal() and bottom.isdecimal()
        if proper and whole.denominator == 1 and int(top) < int(bottom):
            self.index += 7
            return whole + Fraction(int(top), int(bottom))
        return whole

    def _root(self) -> Number:
        degree: Number = Fraction(2)
        if self._take("["):
            degree = self._sum()
            self._expect("]")
        radicand = self._argument()
        if isinstance(radicand, complex) or isinstance(degree, complex) or degree <= 0:
            return self._fail()
        if radicand < 0:
            if degree == 2:
                return 1j * self._root_of(-radicand, degree)
            return self._fail()
        return self._root_of(radicand, degree)

    def _root_of(self, radicand: Fraction | float, degree: Fraction | float) -> Fraction | float:
        if degree == 2 and isinstance(radicand, Fraction):
            exact = Fraction(math.isqrt(radicand.numerator), math.isqrt(radicand.denominator))
            if exact * exact == radicand:
                return exact
        return _real(radicand) ** (1 / _real(degree))

    def _argument(self, signed: bool = False) -> Number:
        """Read the argument of a command or `^`: a bracketed value, or one number."""
        if self._peek() in ("{", "("):
            return self._bracketed()
        # `2^-3` is read, although LaTeX would raise the minus alone.
        sign = -1 if signed and self._take("-") else 1
        token = self._peek()
        # `\frac12` is a half, but `2^3^2` has no agreed meaning.
        if not token.isdecimal() or self.tokens[self.index + 1] == "^":
            return self._fail()
        self.index += 1
        return Fraction(sign * int(token))

    def _bracketed(self) -> Number:
        bracket = self._take("{", "(")
        if not bracket:
            return self._fail()
        result = self._sum()
        self._expect("}" if bracket == "{" else ")")
        return result


_FACTORS = frozenset({"(", "{", "\\frac", "\\sqrt", "\\pi", "i"})


def _real(value: Number) -> float:
    if isinstance(value, complex):
        raise ValueError("a complex number")
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("a float rounds it")
    return float(value)
