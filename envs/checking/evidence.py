"""What checks judge and what they say: plays without a model, one `Finding` per claim, and how both are shown."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from envs.checking.chat_template import ChatTemplate
from envs.checking.playing import Fault, Kind, Play
from envs.env import EnvArgs
from envs.images import image_digest
from envs.runner import StepResult
from envs.spec import EnvSpec
from envs.types import Message, Sample, content_parts

MAX_SHOWN = 3
#: Why a check does not apply where the plays ended before what it judges.
NOT_REACHED = "no play got as far as this"


@dataclass(frozen=True)
class Finding:
    """What a check found: whether it passed (None: it does not apply here), and why or with which figures.

    Example::

        Finding("gold answer", False, "sample 3 (label '68'): Answer: label 0.0")
    """

    check: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that the checks judge.

    `samples_again` are the same indices of a data set made anew; `repeats` are pairs of plays that must be the same.
    """

    spec: EnvSpec
    args: EnvArgs
    template: ChatTemplate
    samples: tuple[Sample, ...]
    samples_again: tuple[Sample, ...]
    plays: tuple[Play, ...]
    repeats: tuple[tuple[Play, Play], ...]

    def of(self, *kinds: Kind) -> list[Play]:
        """Return the plays of some kinds."""
        return [play for play in self.plays if play.script.kind in kinds]

    @property
    def is_opened(self) -> bool:
        """Whether any environment was built and reset, and said what solves it."""
        return any(play.reset_s is not None for play in self.of("survey"))

    @property
    def is_stepped(self) -> bool:
        """Whether any environment took a turn."""
        return any(play.steps for play in self.plays)

    @property
    def ordinary_faults(self) -> list[tuple[Play, Fault]]:
        """Faults in plays that write nothing odd."""
        return [(play, play.fault) for play in self.of("survey", "gold", "wrong", "plain") if play.fault]


def where(play: Play) -> str:
    """Name a play: its sample, and what was written."""
    return f"sample {play.sample.id}, {play.script.name}"


def grouped(faults: Iterable[tuple[Play, str, str]]) -> list[str]:
    """Say what went wrong in some plays and in which call, equal ones once: "8 samples, reset: KeyError: 2"."""
    groups: dict[tuple[str, str], list[Play]] = defaultdict(list)
    for play, call, what in faults:
        groups[call, what].append(play)
    return [_grouped(plays, call, what) for (call, what), plays in groups.items()]


def _grouped(plays: Sequence[Play], call: str, what: str) -> str:
    samples = list(dict.fromkeys(play.sample.id for play in plays))
    scripts = list(dict.fromkeys(play.script.name for play in plays))
    parts = [f"sample {samples[0]}" if len(samples) == 1 else f"{len(samples)} samples"]
    if call not in ("building", "reset", "solution"):  # where no text was written yet
        parts.append(scripts[0] if len(scripts) == 1 else f"{scripts[0]} and {len(scripts) - 1} more")
    if call and not what.startswith(f"{call} "):  # "reset must return ..." says it already
        parts.append(call)
    return f"{', '.join(parts)}: {what}"


def listed(items: Iterable[str]) -> str:
    """Name the first few, and say how many more there are."""
    distinct = list(dict.fromkeys(items))
    more = f"; and {len(distinct) - MAX_SHOWN} more" if len(distinct) > MAX_SHOWN else ""
    return "; ".join(distinct[:MAX_SHOWN]) + more


def span(counts: Sequence[int]) -> str:
    """Write "3", or "1 to 3"."""
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def quoted(text: str) -> str:
    """Write the beginning of a text in quotes."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def duration(seconds: float) -> str:
    """Write "35 µs", "1.2 ms" or "3.4 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def texts(messages: Iterable[Message]) -> list[str]:
    """Return all text of some messages, part by part."""
    return [part["text"] for message in messages for part in content_parts(message) if part.get("type") == "text"]


def said(step: StepResult) -> list[str]:
    """Return the texts with which a step was answered."""
    return texts(step.messages)


def call_records(step: StepResult) -> list[dict[str, Any]]:
    """Return what a step's info says of the calls that were made, nothing where it does not."""
    records = step.info.get("tool_calls")
    if isinstance(records, list | tuple) and all(isinstance(record, dict) for record in records):
        return [*records]
    return []


def unlike(one: Sequence[Message], other: Sequence[Message]) -> str:
    """Say how two different conversations differ: "'3' and '4'", "the pictures differ"."""
    first, second = "".join(texts(one)), "".join(texts(other))
    if first != second:
        same = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))
        start = same - 10 if same > 20 else 0
        return f"{quoted(first[start:])} and {quoted(second[start:])}"
    if [message.get("role") for message in one] != [message.get("role") for message in other]:
        return "the roles differ"
    return "the texts are the same, the pictures differ"


def names_label(text: str, label: str | None) -> bool:
    """Return whether a text shows the label as a word of its own."""
    return label is not None and re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text) is not None


def digest(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    """Return what two equal conversations have in common: roles, texts, and the pixels of pictures."""
    found: list[tuple[Any, ...]] = []
    for message in messages:
        for part in content_parts(message):
            image = part.get("image")
            shown = image_digest(image) if isinstance(image, Image.Image) else repr(image)
            found.append((message.get("role"), part.get("text"), shown))
    return found
