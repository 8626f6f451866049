"""What the checks of an environment read (`Evidence`), and helpers that word what they find."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from envs.checking.chat_template import ChatTemplate
from envs.checking.episodes import Fault, Kind, PlayedEpisode, checked_prompt
from envs.checking.leftovers import ProcessState
from envs.checks import Broken
from envs.env import EnvArgs
from envs.errors import shortened
from envs.execution.runner import StepResult
from envs.images import image_digest
from envs.spec import EnvSpec
from envs.types import Message, Sample, content_parts

MAX_SHOWN = 3
#: How far episodes came: built, reset with the solution read, or as far as the answer of a turn.
NOTHING, BUILT, OPENED, STEPPED = range(4)
#: The reason when the episodes ended before the part that a check judges.
NOT_REACHED = "no episode got as far as this"


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that the checks read.

    `samples_again` are the same indices of a data set that was created again, `samples_changed` those that episodes
    have changed; `repeats` are pairs of episodes that must be equal. `states` are those of the program at the start,
    before the repeats and after them. `stopped_after_s` is the time after which no more episodes began; None if all
    were played.
    """

    spec: EnvSpec
    args: EnvArgs
    template: ChatTemplate
    samples: tuple[Sample, ...]
    samples_again: tuple[Sample, ...]
    samples_changed: tuple[Sample, ...]
    episodes: tuple[PlayedEpisode, ...]
    repeats: tuple[tuple[PlayedEpisode, PlayedEpisode], ...]
    states: tuple[ProcessState, ProcessState, ProcessState]
    stopped_after_s: float | None = None

    def of(self, *kinds: Kind) -> list[PlayedEpisode]:
        """Return the episodes of these kinds."""
        return [episode for episode in self.episodes if episode.script.kind in kinds]

    def is_success(self, episode: PlayedEpisode) -> bool:
        """Return whether an episode is a success, as the entry says."""
        return episode.is_success(self.spec.success_rule)

    @property
    def reach(self) -> int:
        """How far the episode came that came farthest: `NOTHING`, `BUILT`, `OPENED` or `STEPPED`."""
        if any(episode.steps for episode in self.episodes):
            return STEPPED
        if any(episode.is_opened for episode in self.episodes):
            return OPENED
        if all(episode.fault and episode.fault.call == "building" for episode in self.episodes):
            return NOTHING
        return BUILT

    @property
    def ordinary_faults(self) -> list[tuple[PlayedEpisode, Fault]]:
        """Faults in episodes whose model texts are ordinary."""
        return [(episode, episode.fault) for episode in self.of("survey", "gold", "wrong", "plain") if episode.fault]


def where(episode: PlayedEpisode) -> str:
    """Name an episode: its sample and its script."""
    return f"sample {episode.sample.id}, {episode.script.name}"


def grouped(faults: Iterable[tuple[PlayedEpisode, str, str]]) -> list[str]:
    """Describe faults (episode, call, text) with equal ones merged: "8 samples, reset: KeyError: 2"."""
    groups: dict[tuple[str, str], list[PlayedEpisode]] = defaultdict(list)
    for episode, call, what in faults:
        groups[call, what].append(episode)
    described = []
    for (call, what), episodes in groups.items():
        first = episodes[0]
        num_samples = len({episode.sample.id for episode in episodes})
        num_others = len({episode.script.name for episode in episodes}) - 1
        place = f"{num_samples} samples"
        if num_samples == 1:
            place = f"sample {first.sample.id}"
        if call not in ("building", "reset", "solution"):  # calls before the model's first text
            place += f", {first.script.name}"
            if num_others:
                place += f" and {num_others} more"
        if call and not what.startswith(f"{call} "):  # "reset must return ..." says it already
            place += f", {call}"
        described.append(f"{place}: {what}")
    return described


def listed(items: Iterable[str]) -> str:
    """List the first three distinct items and count the rest."""
    distinct = list(dict.fromkeys(items))
    shown = distinct[:MAX_SHOWN]
    if len(distinct) > MAX_SHOWN:
        shown.append(f"and {len(distinct) - MAX_SHOWN} more")
    return "; ".join(shown)


def refuse(problems: Iterable[str]) -> None:
    """End the check with a fault if there are problems."""
    if found := listed(problems):
        raise Broken(found)


def quoted(text: str) -> str:
    """Write the beginning of a text in quotes."""
    return repr(shortened(text, 40))


def texts(messages: Iterable[Message]) -> list[str]:
    """Return all text of some messages, part by part."""
    return [part["text"] for message in messages for part in content_parts(message) if part.get("type") == "text"]


def has_text(messages: Iterable[Message]) -> bool:
    """Return whether any text of some messages holds more than blanks."""
    return any(map(str.strip, texts(messages)))


def call_records(step: StepResult) -> list[dict[str, Any]]:
    """Return the records of the calls that a step made, from its info; empty if the info has none."""
    records = step.info.get("tool_calls")
    if isinstance(records, list | tuple) and all(isinstance(record, dict) for record in records):
        return [*records]
    return []


def unlike(one: Sequence[Message], other: Sequence[Message]) -> str:
    """Describe how two conversations differ: "'3' and '4'", "the images differ"."""
    first = "".join(texts(one))
    second = "".join(texts(other))
    if first != second:
        start = max(0, len(os.path.commonprefix([first, second])) - 10)  # noqa: RUF071 - characters are meant
        return f"{quoted(first[start:])} and {quoted(second[start:])}"
    return "the texts are the same, the images differ"


def names_label(text: str, label: str | None) -> bool:
    """Return whether a text shows the label as a word of its own."""
    return label is not None and re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text) is not None


def fingerprint(sample: Sample) -> tuple[object, ...]:
    """Return what makes a sample: its id, its label, and its prompt with images decoded."""
    return sample.id, sample.label, digest(checked_prompt(sample))


def digest(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    """Return roles, texts and image digests; equal conversations have equal digests."""
    found: list[tuple[Any, ...]] = []
    for message in messages:
        for part in content_parts(message):
            image = part.get("image")
            if isinstance(image, Image.Image):
                image = image_digest(image)
            found.append((message.get("role"), part.get("text"), repr(image)))
    return found
