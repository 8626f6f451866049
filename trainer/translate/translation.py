"""Translates a trainer's settings: their names by `OTHER_TRAINERS`, their values by the trainer's dialect."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envs.config.commands import flag_words
from envs.config.files import text_of
from envs.config.settings import FieldPath, Setting, Settings, changed, flag_of, is_tuple, leaves, validate
from envs.errors import UserError, first_line, shortened
from envs.safe_text import escape_controls
from trainer.config.other_trainers import OTHER_TRAINERS
from trainer.config.run import RunConfig
from trainer.translate.dialect import Dialect, Given, NoCounterpart, Result, SameHere, Value
from trainer.translate.rlinf import RLINF
from trainer.translate.slime import SLIME
from trainer.translate.trl import TRL
from trainer.translate.verl import VERL

DIALECTS: Mapping[str, Dialect] = {"slime": SLIME, "verl": VERL, "trl": TRL, "rlinf": RLINF}

_PATHS: Mapping[str, FieldPath] = {path[-1]: path for path, _ in leaves(RunConfig)}
_SECRET = re.compile(r"(wandb|api|access|hub|hf)[-_.]?(key|token)|password|secret", re.IGNORECASE)
#: A variable or a command of the shell, or a reference, that has no value here.
_UNRESOLVED = re.compile(r"\$[({]|\$[A-Z_]{2}")
#: The longest value that a line about a setting shows.
_SHOWN = 60


@dataclass(frozen=True)
class Translation:
    """A run's configuration, and what could not be said in it.

    Args:
        trainer: whose settings they were.
        config: the same run here.
        lost: the settings without a counterpart, with the reasons.
        same: the settings that ask for what happens here anyway, with what that is.

    Example: of `--lr 1e-6 --balance-data --moe-foo 3`, `lost` is `[("--moe-foo", "3", "no setting here does this")]`.
    """

    trainer: str
    config: RunConfig
    lost: tuple[tuple[str, Value, str], ...]
    same: tuple[tuple[str, Value, str], ...]

    def command(self) -> str:
        """Return the command, one flag a line, with only what differs from the defaults."""
        return " \\\n    ".join(["python -m trainer.run", *_flags(self.config)])

    def yaml(self) -> str:
        """Return a `--config` file with only what differs from the defaults."""
        sections: dict[str, list[str]] = {}
        for path, (_, value) in changed(self.config, RunConfig()).items():
            sections.setdefault(".".join(path[:-1]), []).append(f"{path[-1]}: {text_of(value)}")
        top = sections.pop("", [])
        return "\n".join([*top, *(f"{name}:\n  " + "\n  ".join(lines) for name, lines in sections.items())])

    def notes(self) -> Iterator[str]:
        """Yield the lines about settings that the configuration does not hold, those with one reason together."""
        for title, found in (("no counterpart:", self.lost), ("the same here, without a setting:", self.same)):
            if found:
                yield title
            for reason in dict.fromkeys(reason for _, _, reason in found):
                yield f"  {', '.join(_shown(name, value) for name, value, why in found if why == reason)}: {reason}"


def translate(given: Given, trainer: str = "") -> Translation:
    """Return the configuration that the settings of another trainer ask for; without `trainer` it is recognized.

    Raises:
        UserError: no known trainer has such settings, or a value is one that a run here cannot have.
    """
    dialect = DIALECTS[trainer] if trainer else _recognized(given)
    table, everything = OTHER_TRAINERS[dialect.trainer], {**dialect.defaults, **given}
    fields: dict[str, tuple[Value, str]] = {name: (value, "") for name, value in dialect.always.items()}
    lost: list[tuple[str, Value, str]] = []
    same: list[tuple[str, Value, str]] = []
    for name, value in everything.items():
        match _result(dialect, table.get(name), name, value, everything):
            case NoCounterpart(reason=reason):
                lost.append((f"{dialect.spelt(name)}{'' if name in given else ' (its default)'}", value, reason))
            case SameHere(reason=reason) if name in given:
                same.append((dialect.spelt(name), value, reason))
            case dict() as found:
                for field, each in found.items():
                    fields[field] = (_joined(field, fields.get(field), each), name)
    return Translation(dialect.trainer, _validated(fields, dialect), tuple(lost), tuple(same))


def _recognized(given: Given) -> Dialect:
    """Return the trainer that knows most of the settings."""

    def num_known(dialect: Dialect) -> int:
        known = OTHER_TRAINERS[dialect.trainer].keys() | dialect.conversions.keys() | dialect.defaults.keys()
        return len(given.keys() & known)

    best = max(DIALECTS.values(), key=num_known)
    if not num_known(best):
        names = ", ".join(list(given)[:8])
        raise UserError("SOURCE", f"must have settings of {', '.join(DIALECTS)}", names, "name it with --trainer")
    return best


def _result(dialect: Dialect, own: str | None, name: str, value: Value, given: Given) -> Result:
    """Return what one setting becomes: values by field, or why there are none."""
    try:
        result = dialect.convert(name, own, value, given)
    except (KeyError, ValueError, OverflowError, ZeroDivisionError) as error:
        result = NoCounterpart(f"could not be converted ({first_line(error)})")
    if isinstance(result, str | list):
        assert own is not None, f"the conversion of {name} gives a value, but {name} has no name here"
        result = {own: result}
    shown = value if isinstance(result, NoCounterpart) else result
    if not isinstance(result, SameHere) and _UNRESOLVED.search(str(shown)):
        return NoCounterpart("only the running script knows the value")
    return result


def _joined(field: str, before: tuple[Value, str] | None, value: Value) -> Value:
    """Return a value with what other settings gave the same field: trackers and arguments of servers add up."""
    if before is None or not before[1]:
        return value
    if field == "engine_args":
        return f"{before[0]} {value}"
    if field == "tracker" and isinstance(before[0], list) and isinstance(value, list):
        return [*dict.fromkeys([*before[0], *value])]
    return value


def _validated(fields: Mapping[str, tuple[Value, str]], dialect: Dialect) -> RunConfig:
    """Return the configuration; errors name the trainer's own setting."""
    settings: Settings = {}
    types = dict(leaves(RunConfig))
    for name, (value, source) in fields.items():
        path = _PATHS[name]
        if is_tuple(types[path]) != isinstance(value, list):
            value = [value] if is_tuple(types[path]) else value
        settings[path] = Setting(
            value, f"{dialect.trainer}'s {dialect.spelt(source)}" if source else flag_of(name, types[path])
        )
    if _PATHS["context_length"] not in settings:  # prompt and response
        lengths = (settings.get(_PATHS[name]) for name in ("max_prompt_tokens", "max_new_tokens"))
        known = [int(str(length.value)) for length in lengths if length and str(length.value).isdigit()]
        longest = max(sum(known), RunConfig().model.context_length)
        settings[_PATHS["context_length"]] = Setting(str(longest), "--context-length")
    return validate(RunConfig, settings)


def _flags(config: RunConfig) -> Iterator[str]:
    """Yield the flags, quoted for a shell, of what differs from the defaults; the environment is always named."""
    differing: dict[FieldPath, object] = {_PATHS["env"]: config.env.env}
    differing |= {path: value for path, (_, value) in changed(config, RunConfig()).items()}
    for path, value in differing.items():
        yield shlex.join(flag_words(path[-1], value))


def _shown(name: str, value: Value) -> str:
    """Return a setting as a line shows it: short, and without secrets."""
    text = "..." if _SECRET.search(name) else " ".join(value) if isinstance(value, list) else value
    return escape_controls(shortened(f"{name} {text}", _SHOWN))  # on one line it cannot leave a comment of the shell
