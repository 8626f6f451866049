"""What translates one trainer's settings: the type, and the conversions that several trainers share.

A value is a text, or a list of texts, as it stands in a command or file. A conversion gets it with all settings of the
same trainer, its defaults included, because units depend on each other: a batch in episodes is one in problems times
the group's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

Value = str | list[str]
#: A trainer's settings by their names, spelt with underscores.
Given = Mapping[str, Value]
#: Values of ours by field; none if other settings of theirs already say it.
Fields = Mapping[str, Value]


@dataclass(frozen=True)
class NoCounterpart:
    """Nothing here does what the setting says; the reason, and what to do instead if there is something."""

    reason: str


@dataclass(frozen=True)
class SameHere:
    """The setting asks for what happens here anyway."""

    reason: str


Result = Fields | Value | NoCounterpart | SameHere
Conversion = Callable[[Value, Given], Result]


@dataclass(frozen=True)
class Dialect:
    """How a trainer's settings become ours.

    Args:
        trainer: its name in `OTHER_TRAINERS`, which says what its settings are called here.
        defaults: its own defaults where ours are not the same, and those that conversions need.
        always: what every run of it does, by our field.
        conversions: by its name for a setting, or a pattern of names. A setting without a conversion of its own keeps
            its value if it has a name here; else the first pattern that fits counts. The rest has no counterpart.
        is_flags: whether it spells its settings `--some-flag`.

    Example::

        Dialect("TRL", {"epsilon": "0.2"}, {"dtype": "bfloat16"}, {"bf16": flag({"dtype": "bfloat16"}, {})})
    """

    trainer: str
    defaults: Given = field(default_factory=dict)
    always: Fields = field(default_factory=dict)
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    is_flags: bool = False

    def spelt(self, name: str) -> str:
        """Return a setting's name as its users write it."""
        return f"--{name.replace('_', '-')}" if self.is_flags else name

    def convert(self, name: str, own: str | None, value: Value, given: Given) -> Result:
        """Return what a setting becomes, whose name here is `own`.

        Raises:
            ValueError, KeyError, ZeroDivisionError: the value, or one that it depends on, is no number or not there.
        """
        if name in self.conversions:
            return self.conversions[name](value, given)
        if own:
            return value
        fitting = (found for pattern, found in self.conversions.items() if fnmatchcase(name, pattern))
        return next(fitting, lost("no setting here does this"))(value, given)


# Conversions ----------------------------------------------------------------------------------------------------------


def lost(reason: str) -> Conversion:
    """Every value lacks a counterpart."""
    return lambda value, given: NoCounterpart(reason)


def same(reason: str) -> Conversion:
    """Every value asks for what happens here anyway."""
    return lambda value, given: SameHere(reason)


def used(value: Value, given: Given) -> Result:
    """Other conversions read the value."""
    return {}


def neutral(values: str, reason: str, otherwise: str) -> Conversion:
    """These values, in one text, change nothing here; others lack a counterpart."""
    return lambda value, given: SameHere(reason) if is_in(value, values) else NoCounterpart(otherwise)


def words(table: Mapping[str, Result]) -> Conversion:
    """Each word has its result; others lack a counterpart."""

    def convert(value: Value, given: Given) -> Result:
        return table.get(str(value).lower(), NoCounterpart(f"known here: {', '.join(table)}"))

    return convert


def flag(on: Result, off: Result) -> Conversion:
    """A switch."""
    return lambda value, given: on if is_true(value) else off


def is_true(value: Value | None) -> bool:
    """Return whether a switch is on."""
    return str(value).lower() in ("true", "1", "yes", "on")


def is_in(value: Value, values: str) -> bool:
    """Return whether a value is one of those in a text, numbers compared as numbers.

    >>> is_in("0.00", "0 none"), is_in("1e-3", "0 none")
    (True, False)
    """

    def plain(text: str) -> str:
        try:
            return f"{float(text):g}"
        except ValueError:
            return text.lower()

    return plain(str(value)) in map(plain, values.split())


def whole(value: float) -> Result:
    """Return a number of things as text; there is none if it is not whole."""
    return f"{value:.0f}" if value == int(value) >= 1 else NoCounterpart(f"{value:g} is no whole number of at least 1")


def number(given: Given, name: str) -> float:
    """Return a setting as a number. Raises ValueError if it is none, KeyError if it is missing."""
    return float(str(given[name]))


def group(value: Value, given: Given) -> Result:
    """Return the episodes of a problem, at least two: advantages compare them."""
    return value if float(str(value)) >= 2 else NoCounterpart("advantages compare at least 2 episodes: --group-size")


def one(value: Value, given: Given) -> Result:
    """Return the only item of a list; several have no counterpart."""
    items = value if isinstance(value, list) else [value]
    return items[0] if len(items) == 1 else NoCounterpart("several are one file, folder or column here")


def server_argument(name: str) -> Conversion:
    """An argument of SGLang's server."""
    return lambda value, given: {"engine_args": f"--{name} {value}"}


TRACKERS = ("tensorboard", "wandb", "trackio")


def trackers(value: Value, given: Given) -> Result:
    """Return the trackers that are here too; the console always shows the run."""
    names = [name for name in (value if isinstance(value, list) else [value]) if name not in ("console", "none", "all")]
    if others := [name for name in names if name not in TRACKERS]:
        return NoCounterpart(f"known here: {', '.join(TRACKERS)} (not {', '.join(others)})")
    return {"tracker": names}


SECRET = lost("a secret: log in with `wandb login`")
RESUME = lost("its checkpoints are not read; a run of ours resumes with --resume RUN")
EVALUATION = lost("accuracy is measured with --eval-data, before, after and with --eval-every while it trains")
OWN_REWARD = lost("a function of a finished episode is --reward my.py:NAME@WEIGHT; its parameters are others there")


def eval_every(value: Value, given: Given) -> Result:
    """Return the steps between evaluations; below 1 there are none while it trains."""
    return whole(float(str(value))) if float(str(value)) >= 1 else SameHere("no evaluation while it trains")


#: Of servers that share the learners' GPUs, in their trainers.
SHARED_MEMORY = NoCounterpart("its servers give their memory back while it trains, ours keep it: --mem-fraction 0.4")


def same_memory(value: Value, given: Given) -> Result:
    """Return why the memory of servers on the learners' GPUs is not the same here."""
    return SHARED_MEMORY


#: Names of the backends that other trainers have.
BACKENDS = words(
    {"megatron": {"backend": "megatron"}, **dict.fromkeys(("fsdp", "fsdp2"), SameHere("FSDP2 trains by default"))}
)
#: Megatron's names of what its ranks share -> the field of ours.
_SHARED = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "context_parallel_size": "cp",
}


def megatron(section: str, backend: str) -> dict[str, Conversion]:
    """Megatron's settings in a section. They count unless the setting `backend` names another one."""

    def is_read(given: Given) -> bool:
        return str(given.get(backend, "megatron")).lower() == "megatron"

    def ranks(field: str) -> Conversion:
        def convert(value: Value, given: Given) -> Result:
            if not is_read(given) or is_in(value, "1 none null"):
                return SameHere("not shared there and here")
            return {"backend": "megatron", field: value}

        return convert

    def tokens(value: Value, given: Given) -> Result:
        shares = is_read(given) and is_true(value) and not is_in(given.get(f"{section}{tensor}", "1"), "1 none null")
        return {"backend": "megatron", "sp": "true"} if shares else SameHere("not shared there and here")

    def lengths(value: Value, given: Given) -> Result:
        if is_true(value) or not is_read(given):
            return SameHere("micro-batches have their own lengths")
        return {"backend": "megatron", "pad_microbatches": "true"}

    tensor = "tensor_model_parallel_size"
    found = {name: ranks(field) for name, field in _SHARED.items()}
    found |= {"sequence_parallel": tokens, "variable_seq_lengths": lengths}
    return {section + name: convert for name, convert in found.items()}


EPOCHS = lost("give --steps: epochs x rows / problems per step")
MICRO_BATCH = lost("counts samples: memory is bounded by tokens here, --max-tokens-per-microbatch")
