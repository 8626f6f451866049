"""Arithmetic with a calculator: text only, one tool, problems made from code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from envs.tool_env import ToolEnv
from envs.tools import ToolError, tool
from envs.types import Sample

SYSTEM_PROMPT = "Solve the problem with the tool calculate. Write the final answer as \\boxed{}."
MAX_CHARS = 200
MAX_DIGITS = 30

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"sqrt": math.sqrt, "abs": abs, "round": round, "min": min, "max": max}


def evaluate(expression: str) -> float:
    """Return the value of an arithmetic expression; only numbers, + - * / // % **, parentheses and a few functions.

    >>> evaluate("(37 + 12) * 5"), evaluate("sqrt(2 ** 4) / 8")
    (245, 0.5)

    Raises:
        ValueError: it is something else, or a number would have more than 30 digits.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has more than {MAX_CHARS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except ValueError:
        raise
    except SyntaxError as error:
        raise ValueError("it is no expression") from error
    except (ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=bool() | complex()):
            raise ValueError("only real numbers are known")
        case ast.Constant(value=int() | float() as value):
            result = value
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            first, second = _value(left), _value(right)
            is_power = isinstance(op, ast.Pow) and abs(first) > 1
            if is_power and abs(second) * math.log10(abs(first)) > MAX_DIGITS:
                raise ValueError("the number is too large")
            result = _OPERATORS[type(op)](first, second)
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_value(operand))
        case ast.Call(ast.Name(name), args, []) if name in _FUNCTIONS:
            result = _FUNCTIONS[name](*map(_value, args))
        case _:
            raise ValueError(f"only numbers, + - * / // % **, parentheses and {', '.join(_FUNCTIONS)} are known")
    if isinstance(result, complex) or not math.isfinite(result) or abs(result) >= 10**MAX_DIGITS:
        raise ValueError("the result is no real number, or too large")
    return result


class CalculatorEnv(ToolEnv):
    """One arithmetic problem; each call is answered with a value or with what is wrong."""

    @tool
    def calculate(self, expression: str) -> str:
        """Return the value of an expression.

        Args:
            expression: such as (37 + 12) * 5
        """
        try:
            value = evaluate(expression)
        except ValueError as error:
            raise ToolError(f"Cannot be calculated: {error}.") from error
        return str(int(value)) if value == int(value) else f"{value:.10g}"

    def solution(self) -> Sequence[str]:
        """Return the answer."""
        return [f"\\boxed{{{self.sample.label}}}"]


def samples(split: str, size: int, seed: int) -> list[Sample]:
    """Return problems such as "What is (37 + 12) * 5?"; no two splits or seeds share a random stream."""
    return [_sample(split, seed, index) for index in range(size)]


def _sample(split: str, seed: int, index: int) -> Sample:
    rng = Random(f"calculator/{split}/{seed}/{index}")
    expression = str(rng.randint(10, 99))
    for _ in range(rng.randint(1, 3)):
        sign, number = rng.choice("+-*"), rng.randint(2, 99)
        expression = (
            f"({expression}) {sign} {number}" if sign == "*" and " " in expression else f"{expression} {sign} {number}"
        )
    question = {"role": "user", "content": f"What is {expression}?"}
    return Sample(f"calculator-{split}-{seed}-{index}", (question,), label=str(evaluate(expression)))
