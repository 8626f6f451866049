"""Translates the settings of another trainer into a run's configuration, by the table of `trainer.config`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envs.config.commands import flag_words
from envs.config.files import text_of
from envs.config.settings import (
    FieldPath,
    Setting,
    Settings,
    changed,
    flag_of,
    has_flag,
    is_tuple,
    leaves,
    validate,
)
from envs.config.sources import PREFIX
from envs.errors import UserError, first_line, shortened
from envs.safe_text import escape_controls
from trainer.config.other_trainers import Trainer, other_trainers
from trainer.config.run import RunConfig
from trainer.translate.conversion import Given, NoCounterpart, Result, SameHere, Value, convert

#: The trainers whose commands are translated, by the values of --trainer.
TRAINERS: Mapping[str, str] = {"slime": "slime", "verl": "verl", "trl": "TRL", "rlinf": "RLinf"}

_PATHS: Mapping[str, FieldPath] = {path[-1]: path for path, _ in leaves(RunConfig)}
_FIELDS = {path[-1]: field for path, field in leaves(RunConfig)}
_SECRET = re.compile(r"(wandb|api|access|hub|hf)[-_.]?(key|token)|password|secret", re.IGNORECASE)
#: A variable or a command of the shell, or a reference, that has no value here.
_UNRESOLVED = re.compile(r"\$[({]|\$[A-Z_]{2}")
#: A number of tokens; what is none is refused with the other values.
_COUNT = re.compile(r"[0-9]{1,9}")
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
        """Return the command, one flag a line, with only what differs from the defaults.

        Variables of the environment before it hold the settings that have no flag.
        """
        words = list(_words(self.config))
        variables = [word for word in words if word.startswith(PREFIX)]
        flags = [word for word in words if not word.startswith(PREFIX)]
        return " \\\n    ".join([" ".join([*variables, "python -m trainer.run"]), *flags])

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
    if trainer:
        title = TRAINERS[trainer]
    else:
        title = _recognized(given)
    theirs = other_trainers()[title]
    everything = {**theirs.defaults, **given}
    fields: dict[str, tuple[Value, str]] = {name: (value, "") for name, value in theirs.always.items()}
    lost: list[tuple[str, Value, str]] = []
    same: list[tuple[str, Value, str]] = []
    for name, value in everything.items():
        spelt = theirs.spelt(name)
        match _result(theirs, name, value, everything):
            case NoCounterpart(reason=reason):
                lost.append((spelt if name in given else f"{spelt} (its default)", value, reason))
            case SameHere(reason=reason) if name in given:
                same.append((spelt, value, reason))
            case dict() as found:
                for field, each in found.items():
                    fields[field] = (_joined(field, fields.get(field), each), name)
    return Translation(title, _validated(fields, title), tuple(lost), tuple(same))


def _recognized(given: Given) -> str:
    """Return the trainer that knows most of the settings."""
    known = {title: given.keys() & other_trainers()[title].settings.keys() for title in TRAINERS.values()}
    best = max(known, key=lambda title: len(known[title]))
    if not known[best]:
        names = ", ".join(list(given)[:8])
        raise UserError("SOURCE", f"must have settings of {', '.join(TRAINERS)}", names, "name it with --trainer")
    return best


def _result(theirs: Trainer, name: str, value: Value, given: Given) -> Result:
    """Return what one setting becomes: values of ours by name, or why there are none."""
    try:
        result = convert(theirs, name, value, given)
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        return NoCounterpart(f"could not be converted ({first_line(error)})")
    if isinstance(result, SameHere):
        return result
    if _UNRESOLVED.search(str(value if isinstance(result, NoCounterpart) else result)):
        return NoCounterpart("only the running script knows the value")
    if isinstance(result, NoCounterpart):
        return result
    return _fitting(result)


def _fitting(found: Mapping[str, Value]) -> Result:
    """Return the values, or why our settings cannot have them: a part of a thing, or several things for one."""
    for name, value in found.items():
        annotation = _FIELDS[name].annotation
        if isinstance(value, list) and not is_tuple(_FIELDS[name]) and len(value) != 1:
            return NoCounterpart("several are one file, folder or column here")
        if annotation in (int, int | None) and re.fullmatch(r"[\d.]+", str(value)) and "." in value:
            return NoCounterpart(f"{value} is no whole number of at least 1")
    return {name: _single(name, value) for name, value in found.items()}


def _single(name: str, value: Value) -> Value:
    """Return the only item of a list where ours is no list."""
    if isinstance(value, list) and not is_tuple(_FIELDS[name]):
        return value[0]
    return value


def _joined(field: str, before: tuple[Value, str] | None, value: Value) -> Value:
    """Return a value with what other settings gave the same field: trackers and arguments of servers add up."""
    if before is None or not before[1]:
        return value
    if field == "engine_args":
        return f"{before[0]} {value}"
    if field == "tracker" and isinstance(before[0], list) and isinstance(value, list):
        return [*dict.fromkeys([*before[0], *value])]
    return value


def _validated(fields: Mapping[str, tuple[Value, str]], title: str) -> RunConfig:
    """Return the configuration; errors name the trainer's own setting."""
    settings: Settings = {}
    theirs = other_trainers()[title]
    for name, (value, source) in fields.items():
        if is_tuple(_FIELDS[name]) and not isinstance(value, list):
            value = [value]
        if source:
            place = f"{title}'s {theirs.spelt(source)}"
        else:
            place = flag_of(name, _FIELDS[name])
        settings[_PATHS[name]] = Setting(value, place)
    if _PATHS["context_length"] not in settings:  # prompt and response
        lengths = (settings.get(_PATHS[name]) for name in ("max_prompt_tokens", "max_new_tokens"))
        known = [int(length.value) for length in lengths if length and _COUNT.fullmatch(str(length.value))]
        longest = max(sum(known), RunConfig().model.context_length)
        settings[_PATHS["context_length"]] = Setting(str(longest), "--context-length")
    return validate(RunConfig, settings)


def _words(config: RunConfig) -> Iterator[str]:
    """Yield the flags and variables, quoted for a shell, that differ from the defaults; `--env` always."""
    differing: dict[FieldPath, object] = {_PATHS["env"]: config.env.env}
    differing |= {path: value for path, (_, value) in changed(config, RunConfig()).items()}
    for path, value in differing.items():
        if has_flag(_FIELDS[path[-1]]):
            yield shlex.join(flag_words(path[-1], value))
        else:
            yield f"{PREFIX}{path[-1].upper()}={shlex.quote(str(value))}"


def _shown(name: str, value: Value) -> str:
    """Return a setting as a line shows it: short, and without secrets."""
    if _SECRET.search(name):
        text = "..."
    elif isinstance(value, list):
        text = " ".join(value)
    else:
        text = value
    return escape_controls(shortened(f"{name} {text}", _SHOWN))  # on one line it cannot leave a comment of the shell
