"""Translates the settings of another trainer into a run's configuration, by the table of `trainer.config`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envs.config.commands import flag_words
from envs.config.settings import (
    FieldPath,
    Setting,
    changed,
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
from trainer.translate.conversion import Given, Note, Result, Value, convert

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
    """A run's configuration, and the settings that could not be said in it, each with why: name, value and `Note`.

    Example: of `--lr 1e-6 --moe-foo 3`, `unsaid` is `[("--moe-foo", "3", Note("no setting here does this"))]`.
    """

    trainer: str
    config: RunConfig
    unsaid: tuple[tuple[str, Value, Note], ...]

    def command(self) -> str:
        """Return the command, one flag a line, with only what differs from the defaults.

        Variables of the environment before it hold the settings that have no flag.
        """
        differing: dict[FieldPath, object] = {_PATHS["env"]: self.config.env.env}
        differing |= {path: value for path, (_, value) in changed(self.config, RunConfig()).items()}
        start: list[str] = []
        flags: list[str] = []
        for path, value in differing.items():
            if has_flag(_FIELDS[path[-1]]):
                flags.append(shlex.join(flag_words(path[-1], value)))
            else:
                start.append(f"{PREFIX}{path[-1].upper()}={shlex.quote(str(value))}")
        return " \\\n    ".join([" ".join([*start, "python -m trainer.run"]), *flags])

    def notes(self) -> Iterator[str]:
        """Yield the lines about settings that the configuration does not hold, those with one reason together."""
        for title, is_same in (("no counterpart:", False), ("the same here, without a setting:", True)):
            by_reason: dict[str, list[str]] = {}
            for name, value, note in self.unsaid:
                if note.is_same == is_same:
                    by_reason.setdefault(note.reason, []).append(_shown(name, value))
            if by_reason:
                yield title
            for reason, shown in by_reason.items():
                yield f"  {', '.join(shown)}: {reason}"


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
    # What a command leaves out is so there too, and may not be so here.
    everything = {**theirs.defaults, **given}
    settings = {name: Setting(value, f"--{name}") for name, value in theirs.always.items()}
    unsaid: list[tuple[str, Value, Note]] = []
    for name, value in everything.items():
        spelt = theirs.spelt(name)
        result = _result(theirs, name, value, everything)
        if not isinstance(result, Note):
            place = f"{title}'s {spelt}"
            for field, each in result.items():
                # Trackers and arguments of servers add up.
                before = settings.get(field)
                if before and field == "engine_args":
                    each = f"{before.value} {each}"
                elif before and field == "tracker":
                    each = [*dict.fromkeys([*before.value, *each])]
                settings[field] = Setting(each, place)
        elif name in given:
            unsaid.append((spelt, value, result))
        elif not result.is_same:
            unsaid.append((f"{spelt} (its default)", value, result))
    if "context_length" not in settings:  # prompt and response
        lengths = [settings[name].value for name in ("max_prompt_tokens", "max_new_tokens") if name in settings]
        known = [int(length) for length in lengths if _COUNT.fullmatch(str(length))]
        # Never below our default: a short prompt limit says nothing of the context.
        longest = max(sum(known), RunConfig().model.context_length)
        settings["context_length"] = Setting(str(longest), "--context-length")
    config = validate(RunConfig, {_PATHS[name]: setting for name, setting in settings.items()})
    return Translation(title, config, tuple(unsaid))


def _recognized(given: Given) -> str:
    """Return the trainer that knows most of the settings."""
    known = {title: given.keys() & other_trainers()[title].settings.keys() for title in TRAINERS.values()}
    # Trainers share names such as --lr, so the most known ones decide.
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
        return Note(f"could not be converted ({first_line(error)})")
    if isinstance(result, Note) and result.is_same:
        return result
    if _UNRESOLVED.search(str(value if isinstance(result, Note) else result)):
        return Note("only the running script knows the value")
    if isinstance(result, Note):
        return result
    return _fitting(result)


def _fitting(found: Mapping[str, Value]) -> Result:
    """Return the values as our settings take them, or why they cannot: a part of a thing, or several things for one."""
    fitting: dict[str, Value] = {}
    for name, value in found.items():
        field = _FIELDS[name]
        items = value if isinstance(value, list) else [value]
        if is_tuple(field):
            fitting[name] = items
            continue
        if len(items) != 1:
            return Note("several are one file, folder or column here")
        if field.annotation in (int, int | None) and re.fullmatch(r"\d*\.\d*", items[0]):
            return Note(f"{items[0]} is no whole number of at least 1")
        fitting[name] = items[0]
    return fitting


def _shown(name: str, value: Value) -> str:
    """Return a setting as a line shows it: short, and without secrets."""
    if _SECRET.search(name):
        text = "..."
    elif isinstance(value, list):
        text = " ".join(value)
    else:
        text = value
    return escape_controls(shortened(f"{name} {text}", _SHOWN))  # on one line it cannot leave a comment of the shell
