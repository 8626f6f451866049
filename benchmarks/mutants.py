"""Mutants of a source file: its text in, one changed text per small fault out.

The operators are mutmut's, over libcst, and five of ours for what its operators leave alone: conditions, values of a
dict, results, statements, and the tests of comprehensions. Not changed: annotations, docstrings, imports, decorators,
assertions, f-strings and the arguments of what is raised, which are text for people.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

import libcst as cst
from libcst import matchers
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

Operator = Callable[[Any], Iterable[cst.CSTNode]]


@dataclass(frozen=True)
class Mutant:
    """One fault: lines `first` to `last` of `path` change, so that the file reads `code`.

    `change` is the same whatever else stands in the file: ``warm = min(1.0, x) -> warm = min(2.0, x)``.
    """

    path: str
    first: int
    last: int
    change: str
    code: str


def mutants(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a file that can be compiled, in the order of the text, each once."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor()
    wrapper.visit(visitor)
    starts = list(itertools.accumulate((len(line) for line in source.splitlines(keepends=True)), initial=0))
    found: dict[str, Mutant] = {}
    for node, new, place in visitor.found:
        if getattr(node, "lpar", ()):  # brackets around it are not in its place
            new = new.with_changes(lpar=(), rpar=())
        start = starts[place.start.line - 1] + place.start.column
        end = starts[place.end.line - 1] + place.end.column
        code = source[:start] + wrapper.module.code_for_node(new) + source[end:]
        if code == source or code in found or not _compiles(code, path):
            continue
        found[code] = Mutant(path, place.start.line, place.end.line, _change(source, code), code)
    return sorted(found.values(), key=lambda mutant: mutant.first)


def _compiles(code: str, path: str) -> bool:
    try:
        compile(code, path, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _change(source: str, code: str) -> str:
    lines = list(unified_diff(source.splitlines(), code.splitlines(), lineterm="", n=0))[2:]
    old = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    new = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return f"{old} -> {new}"


def _negated(test: cst.BaseExpression) -> cst.BaseExpression:
    return cst.UnaryOperation(cst.Not(), test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))


def _is_negated_elsewhere(test: cst.BaseExpression) -> bool:
    """Tell whether another operator turns a condition round: it drops a `not`, or makes `!=` of `==`."""
    single = isinstance(test, cst.Comparison) and len(test.comparisons) == 1
    turned = (cst.Equal, cst.NotEqual, cst.In, cst.NotIn, cst.Is, cst.IsNot)
    is_turned = single and isinstance(test.comparisons[0].operator, turned)
    return is_turned or (isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not))


def _result(node: cst.Return) -> Iterable[cst.CSTNode]:
    if node.value is not None and not matchers.matches(node.value, matchers.Name("None")):
        yield node.with_changes(value=cst.Name("None"))


def _statement(node: cst.Expr | cst.Raise) -> Iterable[cst.CSTNode]:
    if isinstance(node, cst.Raise) or not isinstance(node.value, cst.Yield):
        yield cst.Pass()


def _argument(node: cst.Call) -> Iterable[cst.CSTNode]:
    """Leave a named argument out; make a positional one None, as mutmut does."""
    for index, argument in enumerate(node.args):
        if argument.keyword is not None:
            yield node.with_changes(args=[*node.args[:index], *node.args[index + 1 :]])
        elif argument.star == "" and not matchers.matches(argument.value, matchers.Name("None")):
            changed = argument.with_changes(value=cst.Name("None"))
            yield node.with_changes(args=[*node.args[:index], changed, *node.args[index + 1 :]])


def _string(node: cst.SimpleString) -> Iterable[cst.CSTNode]:
    """Only the first of mutmut's three changes, which puts XX around the text."""
    yield from list(mutators.operator_string(node))[:1]


#: (type of node, what changes it).
OPERATORS: Sequence[tuple[Any, Operator]] = (
    (cst.BaseNumber, mutators.operator_number),
    (cst.SimpleString, _string),
    (cst.Name, mutators.operator_name),
    ((cst.Assign, cst.AnnAssign), mutators.operator_assignment),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.Call, _argument),
    (cst.Call, mutators.operator_symmetric_string_methods_swap),
    (cst.Lambda, mutators.operator_lambda),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.Return, _result),
    ((cst.Expr, cst.Raise), _statement),
)
_SKIPPED = (cst.Annotation, cst.Import, cst.ImportFrom, cst.Decorator, cst.Assert, cst.FormattedString)


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        #: (node, what stands in its place, where that is)
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, CodeRange]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _SKIPPED) or _is_docstring(node) or _is_for_types(node):
            return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for new in operator(node):
                    self._add(node, new)
        if isinstance(node, (cst.If, cst.While, cst.CompIf)) and not _is_negated_elsewhere(node.test):
            self._add(node.test, _negated(node.test))
        if isinstance(node, cst.DictElement) and not matchers.matches(node.value, matchers.Name("None")):
            self._add(node.value, cst.Name("None"))
        return not isinstance(node, cst.Raise)

    def _add(self, node: cst.CSTNode, new: cst.CSTNode) -> None:
        self.found.append((node, new, self.get_metadata(PositionProvider, node)))


def _is_docstring(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Expr) and isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString))


def _is_for_types(node: cst.CSTNode) -> bool:
    """Tell whether a statement names a type (`T = TypeVar("T")`, `Rewards = Sequence[float]`) or what is exported."""
    if not isinstance(node, cst.Assign):
        return False
    value = node.value
    if isinstance(value, cst.Call) and isinstance(value.func, cst.Name) and value.func.value == "TypeVar":
        return True
    names = [target.target.value for target in node.targets if isinstance(target.target, cst.Name)]
    is_type = isinstance(value, cst.Subscript) and any(name[:1].isupper() and not name.isupper() for name in names)
    return is_type or "__all__" in names
