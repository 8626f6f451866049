"""Converts one setting of another trainer, by its row in `trainer/config/other_trainers.yaml`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from trainer.config.other_trainers import Row, Trainer

Value = str | list[str]
#: A trainer's settings by their names, spelt with underscores.
Given = Mapping[str, Value]


@dataclass(frozen=True)
class NoCounterpart:
    """Nothing here does what the setting says; the reason, and what to do instead if there is something."""

    reason: str


@dataclass(frozen=True)
class SameHere:
    """The setting asks for what happens here anyway."""

    reason: str


#: How a switch may be written in a command or YAML.
_SWITCHES: dict[str, str] = {
    **dict.fromkeys(("1", "yes", "on"), "true"),
    **dict.fromkeys(("0", "no", "off", "none", "null"), "false"),
}
_NOT_SHARED = SameHere("not shared there and here")
#: Values of ours by their names; none if other settings of theirs already say it.
Result = Mapping[str, Value] | NoCounterpart | SameHere


def convert(trainer: Trainer, name: str, value: Value, given: Given) -> Result:
    """Return what a setting becomes, beside all settings of the same trainer, its defaults included.

    Raises:
        KeyError, TypeError, ValueError, ZeroDivisionError: a value that a formula reads is no number, or not there.
    """
    row = _row_of(trainer, name)
    if isinstance(row, str):
        return {row: value}
    names = _Names(trainer, given, value)
    if "only_if" in row and not names.computed(row["only_if"]):
        return {}
    if "used" in row:
        return {}
    if "server" in row:
        return {"engine_args": f"--{row['server']} {value}"}
    if "ranks" in row:
        if _is_megatron(trainer, given):
            return _ranks(row["ranks"], value, names)
        return _NOT_SHARED
    if "words" in row:
        return _word(row, value)
    if "is" in row:
        found = {own: names.computed(formula) for own, formula in row["is"].items()}
        fields = {own: _text(result) for own, result in found.items() if result is not None}
        if fields or not row.keys() & {"same", "lost"}:
            return fields
    elif "if" in row:
        if _is_in(value, row["if"]):
            return SameHere(row["same"])
        return NoCounterpart(row["lost"])
    if "same" in row:
        return SameHere(row["same"])
    return NoCounterpart(row["lost"])


def _row_of(trainer: Trainer, name: str) -> Row:
    rows = trainer.settings
    patterns = (pattern for pattern in rows if "*" in pattern and fnmatchcase(name, pattern))
    return rows.get(name) or rows.get(next(patterns, "")) or {"lost": "no setting here does this"}


def _word(row: Mapping[str, Any], value: Value) -> Result:
    """Return what a word becomes: a value of `to`, several of ours, or that it is the same here."""
    words = {str(word).lower(): result for word, result in row["words"].items()}
    text = str(value).lower()
    result = words.get(text, words.get(_SWITCHES.get(text, "")))
    if result is None:
        return NoCounterpart(f"known here: {', '.join(words)}")
    if not isinstance(result, dict):
        return {row["to"]: str(result)}
    if "lost" in result:
        return NoCounterpart(result["lost"])
    if "same" in result:
        return SameHere(result["same"])
    return result


def _is_megatron(trainer: Trainer, given: Given) -> bool:
    return str(given.get(trainer.backend, "megatron")).lower() == "megatron"


def _ranks(own: str, value: Value, names: _Names) -> Result:
    """Return what ranks of Megatron share: a number of them, or tokens."""
    shares_matrices = names["matrix_ranks"] not in (1, None)
    switches = {"sp": names["x"] == 1 and shares_matrices}
    if not switches.get(own, not _is_in(value, "1 none null")):
        return _NOT_SHARED
    return {"backend": "megatron", own: "true" if own in switches else value}


# Formulas -------------------------------------------------------------------------------------------------------------


class _Names(dict[str, Any]):
    """What a formula of the table may read: the trainer's values by the ends of their names, and functions."""

    def __init__(self, trainer: Trainer, given: Given, value: Value) -> None:
        super().__init__(FUNCTIONS, x=_number_of(value), text=value, v=self.__getitem__)
        self.update(has=self._has, either=self._either)
        self._trainer = trainer
        self._given = given

    def __missing__(self, name: str) -> Any:
        if name in self._trainer.formulas:
            return self.computed(self._trainer.formulas[name])
        return _number_of(self._given[self._whole(name)])

    def computed(self, formula: object) -> Any:
        """Return the value of a formula. It is the table's own: no text of a user is one."""
        try:
            return eval(str(formula), {"__builtins__": {}}, self)
        except NameError as error:  # how Python reports a missing name of its own mapping
            raise KeyError(error.name) from None

    def _whole(self, name: str) -> str:
        """Return a setting's whole name. Only rows of the table count: other sections have settings of the same end."""
        rows = (row for row in self._trainer.settings if row.endswith(f".{name}"))
        return next(rows, name)

    def _has(self, name: str) -> bool:
        return self._whole(name) in self._given

    def _either(self, name: str, default: Any) -> Any:
        if self._has(name):
            return self[name]
        return default


def _number_of(value: Value) -> Any:
    """Return a switch as a bool, a number as a float, null as None, and anything else as it is."""
    if isinstance(value, str) and value.lower() in ("none", "null"):
        return None
    switches = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in switches:
        return switches[value.lower()]
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return value


def _text(result: Any) -> Value:
    """Return a result as it is written in a command."""
    if isinstance(result, list):
        return [str(item) for item in result]
    if isinstance(result, bool):
        return str(result).lower()
    if isinstance(result, int | float):
        return f"{result:.10g}"
    return str(result)


def _is_in(value: Value, values: str) -> bool:
    """Return whether a value is one of those in a text, numbers compared as numbers.

    >>> _is_in("0.00", "0 none"), _is_in("1e-3", "0 none")
    (True, False)
    """
    known = [_number_of(word) for word in values.lower().split()]
    own = value if isinstance(value, list) else [value]
    return all(_number_of(each.lower()) in known for each in own)


def trackers(value: Value) -> list[str] | None:
    """Return the trackers, None if one is not here; the console always shows the run."""
    names = value if isinstance(value, list) else [value]
    named = [name for name in names if name not in ("console", "none", "all")]
    if {*named} <= {"tensorboard", "wandb", "trackio"}:
        return named
    return None


def image_column(value: str) -> str | None:
    """Return the column of `{"image": COLUMN}`; None for other media, or several."""
    try:
        columns = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return None
    if isinstance(columns, dict) and len(columns) == 1:
        return columns.get("image")
    return None


def rows(value: str) -> tuple[str | None, str | None]:
    """Return file and number of `path@[0:64]`, which takes the first rows; no file where it takes others."""
    match = re.fullmatch(r"(.*?)(?:@\[0?:(\d+)\])?", str(value))
    if match and "@[" not in match[1]:
        return (match[1], match[2])
    return (None, None)


def urls(value: Value) -> list[str]:
    """Return addresses of servers as URLs."""
    return [f"http://{each}" for each in (value if isinstance(value, list) else [value])]


def gpus(value: object) -> int | None:
    """Return how many GPUs a range such as 0-7 has; None for `all`, which depends on the cluster."""
    bounds = re.fullmatch(r"(\d+)-(\d+)", str(value))
    if bounds:
        return int(bounds[2]) - int(bounds[1]) + 1
    return None


#: What a formula may call.
FUNCTIONS: dict[str, Any] = {function.__name__: function for function in (trackers, image_column, rows, urls, gpus)}
FUNCTIONS |= {"max": max, "round": round, "ceil": math.ceil, "len": len, "isinstance": isinstance, "list": list}
