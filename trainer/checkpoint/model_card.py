"""The README.md of a model folder, in the form of the Hugging Face hub: where the weights come from.

A model folder is shared, so the card has no path, address or host name: a folder or file goes by its own name, and of
the settings only numbers, switches and words of a fixed choice are shown.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from agents.recording.manifest import software_versions
from envs.config.files import text_of
from envs.config.plugins import plugin_name
from envs.config.settings import FieldPath, changed, flag_of, leaves, takes_references, words_of
from envs.safe_text import write_text
from trainer.checkpoint.settings_parts import settings_changes

CARD = "README.md"
#: Settings that the card names elsewhere, and those that say where a run was, not what it was.
_NOT_LISTED = {"env", "registry", "data", "eval_data", "model", "rollout_only", "replay_rollouts", "resume"}
_NOT_LISTED_SECTION = "log"


@dataclass(frozen=True)
class ModelCard:
    """What a card says. `step` is the step of the weights, `ending` how the run ended, `tables` are titles and rows.

    `parts` are the settings until then, each with the first step that had them. The first row of a table holds its
    headings. `results` are figures of the weights by name, for the hub, of the kind `metric`, `measured_on` a data set
    or environment.

    Example: `ModelCard(name="first", task="reinforcement learning in `geo3k`", base_model="starter", ...)`.
    """

    name: str
    task: str
    tags: tuple[str, ...]
    base_model: str
    data: tuple[str, ...]
    parts: Sequence[tuple[int, BaseModel]]
    step: int
    ending: str
    tables: tuple[tuple[str, Sequence[Sequence[str]]], ...]
    results: Mapping[str, float]
    measured_on: str
    sees_images: bool
    metric: str = "accuracy"

    def text(self, image: str = "") -> str:
        """Return the card; `image` is a file beside it."""
        return "\n".join(self._lines(image)) + "\n"

    def _lines(self, image: str) -> Iterator[str]:
        yield f"---\n{yaml.safe_dump(self._front_matter(), sort_keys=False)}---\n"
        yield f"# {self.name}\n"
        yield f"{shared_name(self.base_model)} after {self.step} steps of {self.task}, with TrueTurn.\n"
        if self.data:
            yield f"Data: {', '.join(map(shared_name, self.data))}.\n"
        yield f"{self.ending}\n"
        for title, rows in self.tables:
            yield f"## {title}\n"
            yield from markdown_table(rows)
        if image:
            yield f"![the curves of the run]({image})\n"
        yield "## Settings\n"
        yield from self._settings()
        yield from self._changes()
        yield "## Software\n"
        yield ", ".join(f"{name} {version}" for name, version in software_versions().items()) + "\n"

    def _front_matter(self) -> dict[str, Any]:
        if self.sees_images:
            task = "image-text-to-text"
        else:
            task = "text-generation"
        if is_hub_id(self.base_model):
            public = {"base_model": self.base_model}
        else:
            public = {}
        datasets = [name for name in dict.fromkeys(self.data) if is_hub_id(name)]
        metrics = [{"type": self.metric, "name": name, "value": value} for name, value in self.results.items()]
        result = {
            "task": {"type": task},
            "dataset": {"name": shared_name(self.measured_on), "type": shared_name(self.measured_on)},
            "metrics": metrics,
        }
        return {
            **public,
            "library_name": "transformers",
            "pipeline_tag": task,
            "tags": ["trueturn", *self.tags],
            **({"datasets": datasets} if datasets else {}),
            **({"model-index": [{"name": self.name, "results": [result]}]} if metrics else {}),
        }

    def _settings(self) -> Iterator[str]:
        """Yield the settings of the last step that differ from their defaults; of free text only the flag."""
        _, config = self.parts[-1]
        fields = dict(leaves(type(config)))
        rows = []
        unnamed = []
        for path, (default, value) in _listed(changed(config, type(config)())):
            flag = flag_of(path[-1], fields[path])
            annotation = fields[path].annotation
            if shown := _shown(value, annotation):
                rows.append((f"`{flag}`", shown, _shown(default, annotation) or "empty"))
            else:
                unnamed.append(f"`{flag}`")
        yield from markdown_table([("setting", "value", "default"), *rows]) if rows else ["All have their defaults.\n"]
        if unnamed:
            yield f"Also set: {', '.join(unnamed)}.\n"

    def _changes(self) -> Iterator[str]:
        """Yield the settings that the run changed on its way, where it was resumed."""
        rows = []
        for (_, before), (step, after) in pairwise(self.parts):
            fields = dict(leaves(type(after)))
            for path, (old, new) in _listed(settings_changes(before, after)):
                shown = [_shown(value, fields[path].annotation) or "empty or free text" for value in (old, new)]
                rows.append((f"`{flag_of(path[-1], fields[path])}`", *shown, str(step)))
        if rows:
            yield from markdown_table([("changed when resumed", "before", "after", "from step"), *rows])


def _listed(found: Mapping[FieldPath, tuple[Any, Any]]) -> list[tuple[FieldPath, tuple[Any, Any]]]:
    """Return the settings that a card shows."""
    return [
        (path, pair) for path, pair in found.items() if path[-1] not in _NOT_LISTED and path[0] != _NOT_LISTED_SECTION
    ]


def write_card(card: ModelCard, folder: Path, image: Path) -> None:
    """Write the card into a model folder, with a copy of the image if there is one."""
    has_image = image.is_file()
    if has_image:
        shutil.copyfile(image, folder / image.name)
    write_text(folder / CARD, card.text(image.name if has_image else ""))


def ending_of(num_steps: int, planned: int, stopped_by: str, is_interrupted: bool) -> str:
    """Return how a run ended, in a sentence.

    >>> ending_of(30, 50, "--patience 3 evaluations without a better one", False)
    'The run stopped after step 30 of 50: --patience 3 evaluations without a better one.'
    """
    done = f"after step {num_steps} of {planned}"
    if stopped_by:
        return f"The run stopped {done}: {stopped_by}."
    if is_interrupted:
        return f"The run was interrupted {done}."
    if num_steps == planned:
        return f"The run took all {planned} steps."
    return f"An error ended the run {done}."


def is_hub_id(name: str) -> bool:
    """Return whether a model or data set is on the hub, not here."""
    return "/" in name and not Path(name).is_absolute() and not Path(name).exists()


def shared_name(name: str) -> str:
    """Return a name without its place: a hub id whole, the last part of a path.

    >>> shared_name("Qwen/Qwen3-VL-2B-Instruct"), shared_name("/home/me/data/test.jsonl")
    ('Qwen/Qwen3-VL-2B-Instruct', 'test.jsonl')
    """
    if is_hub_id(name):
        return name
    return Path(name).name


def markdown_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; the first row holds the headings."""
    head, *others = rows
    for cells in (head, ["---"] * len(head), *others):
        yield f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"
    yield ""


def _shown(value: Any, annotation: Any) -> str:
    """Return a value that says nothing of where the run was; empty for any other."""
    if isinstance(value, tuple):
        return ", ".join(filter(None, (_shown(each, annotation) for each in value)))
    if isinstance(value, bool | int | float):
        return text_of(value)
    if isinstance(value, str) and takes_references(annotation):
        return plugin_name(value)
    if str(value) in words_of(annotation):
        return str(value)
    return ""
