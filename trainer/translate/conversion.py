"""Converts one setting of another trainer, by its row in `trainer/config/other_trainers.yaml`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.other_trainers import Trainer

Value = str | list[str]
#: A trainer's settings by their names, spelt with underscores.
Given = Mapping[str, Value]


@dataclass(frozen=True)
class Note:
    """Why a setting sets nothing: it has no counterpart, or asks for what `is_same` here anyway."""

    reason: str
    is_same: bool = False


#: Values of ours by their names; none if other settings of theirs already say it.
Result = Mapping[str, Value] | Note


def convert(trainer: Trainer, name: str, value: Value, given: Given) -> Result:
    """Return what a setting becomes, beside all settings of the same trainer, its defaults included.

    Raises:
        KeyError, TypeError, ValueError, ZeroDivisionError: a value that a formula reads is no number, or not there.
    """
    row = trainer.row(name)
    if isinstance(row, str):
        return {row: value}
    names = _Names(trainer, given, value)
    # Some settings matter only where another one does not win over them.
    if "only_if" in row and not names.computed(row["only_if"]):
        return {}
    if "ranks" in row:
        return _ranks(row["ranks"], value, names)
    if "words" in row:
        return _word(row, value)
    computed = {own: names.computed(formula) for own, formula in row.get("is", {}).items()}
    fields = {own: _text(result) for own, result in computed.items() if result is not None}
    if fields or not row.keys() & {"same", "lost"}:
        return fields
    if "same" in row and ("if" not in row or _is_in(value, row["if"])):
        return Note(row["same"], is_same=True)
    return Note(row["lost"])


def _word(row: Mapping[str, Any], value: Value) -> Result:
    """Return what a word becomes: a value of `to`, several of ours, or a note."""
    words = {parsed(str(word).lower()): result for word, result in row["words"].items()}
    result = words.get(parsed(str(value).lower()))
    if result is None:
        return Note(f"known here: {', '.join(str(word).lower() for word in row['words'])}")
    if not isinstance(result, dict):
        return {row["to"]: str(result)}
    if note := result.get("same") or result.get("lost"):
        return Note(note, is_same="same" in result)
    return result


def _ranks(own: str, value: Value, names: _Names) -> Result:
    """Return what ranks of Megatron share: a number of them, or tokens."""
    shares_matrices = names["matrix_ranks"] not in (1, None)
    # Megatron ignores it where no matrices are shared.
    switches = {"sp": names["x"] == 1 and shares_matrices}
    if not names.is_megatron or not switches.get(own, not _is_in(value, "1 none null")):
        return Note("not shared there and here", is_same=True)
    return {"backend": "megatron", own: "true" if own in switches else value}


class _Names(dict[str, Any]):
    """What a formula of the table may read: the trainer's values by the ends of their names, and functions."""

    def __init__(self, trainer: Trainer, given: Given, value: Value) -> None:
        super().__init__(FUNCTIONS, x=parsed(value), text=value, v=self.__getitem__)
        self.update(has=self._has, either=self._either)
        self._trainer = trainer
        self._given = given

    def __missing__(self, name: str) -> Any:
        if name in self._trainer.formulas:
            return self.computed(self._trainer.formulas[name])
        return parsed(self._given[self._whole(name)])

    def computed(self, formula: object) -> Any:
        """Return the value of a formula. It is the table's own: no text of a user is one."""
        try:
            return eval(str(formula), {"__builtins__": {}}, self)
        except NameError as error:  # how Python reports a missing name of its own mapping
            raise KeyError(error.name) from None

    @property
    def is_megatron(self) -> bool:
        """Whether Megatron trains, as it does unless a setting names another backend."""
        return str(self._given.get(self._trainer.backend, "megatron")).lower() == "megatron"

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


#: Words of a command or YAML that stand for a value.
_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null"), None),
}


def parsed(value: Value) -> Any:
    """Return a switch as a bool, a number as a float, null as None, and anything else as it is.

    >>> parsed("Yes"), parsed("1e-3"), parsed("null"), parsed("grpo")
    (True, 0.001, None, 'grpo')
    """
    if isinstance(value, list):
        return value
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        return float(value)
    except ValueError:
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
    # "0", "0.0" and "0.00" are the same setting.
    known = [parsed(word) for word in values.lower().split()]
    own = value if isinstance(value, list) else [value]
    return all(parsed(each.lower()) in known for each in own)


def trackers(value: Value) -> list[str] | None:
    """Return the trackers, None if one is not here; the console always shows the run."""
    names = value if isinstance(value, list) else [value]
    named = [name for name in names if name not in ("console", "none", "all")]
    if {*named} <= {"tensorboard", "wandb"}:
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


def gpus(value: object) -> int | None:
    """Return how many GPUs a range such as 0-7 has; None for `all`, which depends on the cluster."""
    bounds = re.fullmatch(r"(\d+)-(\d+)", str(value))
    if bounds:
        return int(bounds[2]) - int(bounds[1]) + 1
    return None


#: What a formula may call.
FUNCTIONS: dict[str, Any] = {function.__name__: function for function in (trackers, image_column, gpus)}
FUNCTIONS |= {"max": max, "round": round, "ceil": math.ceil, "len": len, "isinstance": isinstance, "list": list}
