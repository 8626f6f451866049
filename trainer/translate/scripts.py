"""Finds the training command in a shell or Python script, without running it.

Variables are replaced by their values. Conditions are not evaluated: the last value that a script gives a variable
counts, as in the last branch. What only a running script knows stays in the words as `$...`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from envs.errors import UserError

#: Variables of the environment that scripts are configured with; others may be secrets.
ENVIRONMENT = ("SLIME_SCRIPT_", "HOME")
UNKNOWN = "$COMPUTED"
#: The most characters that the variables of a script may become.
MAX_CHARS = 2**22

_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_SCALAR = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_BASENAME = re.compile(r"\$\(basename \"?([^()\"]+)\"?\)")
#: A whole line; a command after variables, `X=1 python train.py`, is none. A list or a text may end on a later line.
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?(\w+)=(\(.*|\"[^\"]*\"?|'[^']*'|\$\(.*\)|\S*)\s*", re.DOTALL)
_COMMENT = re.compile(r"(^|\s)#.*$")
_SETTING = re.compile(r"--\w|[+~]*\w[\w.]*=")
_DOWNLOAD = re.compile(r"hf download (?:--repo-type dataset )?(\S+) --local-dir (\S+)")


def command_words(text: str) -> list[str]:
    """Return the words of the training command in a script, or in a text that is the command itself.

    Example: `ARGS=(--lr 1e-6)` and `python train.py ${ARGS[@]}` give `["python", "train.py", "--lr", "1e-6"]`.

    Raises:
        UserError: a Python script has a command with open quotation marks.
    """
    try:
        return _python_words(text) if _is_python(text) else _shell_words(text)
    except RecursionError:
        raise UserError("SOURCE", "must be a script", "expressions that nest too deeply", "give the command") from None


def downloads(text: str) -> dict[str, str]:
    """Return the hub id of each folder that a script downloads: `{"/root/models/X": "Qwen/X"}`."""
    if _is_python(text):
        script = _PythonScript.read(text)
        found = [match for command in script.commands for match in _DOWNLOAD.findall(command)]
    else:
        shell = _ShellScript.read(text)
        found = [match for line in shell.lines for match in _DOWNLOAD.findall(shell.expanded(line))]
    return {folder: name for name, folder in found if "$" not in name + folder}


def _is_python(text: str) -> bool:
    try:
        return any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


@dataclass
class _Budget:
    """Bounds the characters that variables are replaced by: a script can double a text in every line."""

    left: int = MAX_CHARS

    def take(self, text: str) -> str:
        self.left -= len(text)
        if self.left < 0:
            raise UserError(
                "SOURCE", f"must expand to at most {MAX_CHARS} characters", "more", "give the command itself"
            )
        return text


# Shell ----------------------------------------------------------------------------------------------------------------


@dataclass
class _ShellScript:
    """The commands of a script, one a line, and the raw values of its variables; arrays as one text."""

    lines: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    budget: _Budget = field(default_factory=_Budget)

    @classmethod
    def read(cls, text: str) -> _ShellScript:
        script = cls()
        rest = iter(text.replace("\\\n", " ").split("\n"))
        for line in rest:
            line = _COMMENT.sub("", line)
            match = _ASSIGNMENT.fullmatch(line)
            if not match:
                script.lines.append(line)
                continue
            name, value = match[1], match[2].strip()
            if value.startswith("("):
                while not value.endswith(")") and (more := next(rest, None)) is not None:
                    value = f"{value} {_COMMENT.sub('', more).strip()}"
                script.values[name] = value.strip("() ")
            else:
                while value.count('"') % 2 and (more := next(rest, None)) is not None:
                    value = f"{value} {more}"
                script.values[name] = value
        return script

    def expanded(self, text: str, depth: int = 0) -> str:
        """Return a text with the variables replaced that the script sets."""
        if depth > 8:
            return text
        replaced = _SCALAR.sub(lambda match: self._scalar(match, depth), text)
        return _BASENAME.sub(lambda match: PurePosixPath(match[1]).name, replaced).replace("$(pwd)", ".")

    def _scalar(self, match: re.Match[str], depth: int) -> str:
        name, default = match[1] or match[3], match[2]
        if name.startswith(ENVIRONMENT) and name in os.environ:
            return os.environ[name]
        raw = self.values.get(name, default)
        if raw is None:
            return match[0]
        single = len(raw) > 1 and raw[0] == raw[-1] == "'"
        return self.budget.take(raw[1:-1] if single else self.expanded(raw.strip('"'), depth + 1))


def _shell_words(text: str) -> list[str]:
    script = _ShellScript.read(text)
    found: list[str] = []
    for line in script.lines:
        line = _ARRAY.sub(
            lambda match: script.budget.take(script.values.get(match[1], f"--{match[1]}={UNKNOWN}")), line
        )
        try:
            raw = shlex.split(line)
        except ValueError:  # an open quotation mark: no command of one line
            continue
        words = [each for word in raw for each in _split_again(word, script.expanded(word))]
        found = max(found, words, key=_num_settings)
    return found


def _num_settings(words: Sequence[str]) -> tuple[int, bool]:
    return sum(bool(_SETTING.match(word)) for word in words), bool(words)


def _split_again(word: str, expanded: str) -> list[str]:
    """Return the words of a variable that holds several flags; anything else is one word."""
    return expanded.split() if _SCALAR.fullmatch(word) and expanded.startswith("--") else [expanded]


# Python ---------------------------------------------------------------------------------------------------------------


@dataclass
class _PythonScript:
    """The texts that a script gives its variables, and the commands in its calls."""

    values: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    budget: _Budget = field(default_factory=_Budget)

    @classmethod
    def read(cls, text: str) -> _PythonScript:
        script = cls()
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign | ast.Call)]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                script.values[node.targets[0].id] = script.text_of(node.value)
            elif isinstance(node, ast.Call) and node.args:
                script.commands.append(script.text_of(node.args[0]))
        return script

    def text_of(self, node: ast.expr) -> str:
        """Return the text of an expression; `UNKNOWN` where only the running script knows it."""
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.Name(id=name):
                return self.budget.take(self.values.get(name, UNKNOWN))
            case ast.JoinedStr(values=parts):
                return "".join(map(self.text_of, parts))
            case ast.FormattedValue(value=value):
                return self.text_of(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text_of(left) + self.text_of(right)
            case ast.IfExp(orelse=orelse):
                return self.text_of(orelse)
            case ast.Call(func=function, args=args):
                return self._call(ast.unparse(function), args)
            case _:
                return UNKNOWN

    def _call(self, function: str, args: list[ast.expr]) -> str:
        texts = [self.text_of(arg) for arg in args]
        if function in ("os.environ.get", "os.getenv") and texts:
            is_ours = texts[0].startswith(ENVIRONMENT)
            return os.environ.get(texts[0], texts[-1]) if is_ours and len(texts) == 2 else UNKNOWN
        if function in ("int", "str", "float") and len(texts) == 1:
            return texts[0]
        return "/".join(texts) if function == "os.path.join" else UNKNOWN


def _python_words(text: str) -> list[str]:
    values: Mapping[str, str] = _PythonScript.read(text).values
    longest = max(values.values(), key=lambda value: value.count("--"), default="")
    try:
        return shlex.split(longest)
    except ValueError as error:
        raise UserError("SOURCE", "must hold a command with closed quotation marks", longest, str(error)) from error
