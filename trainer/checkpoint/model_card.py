"""The README.md of a model folder, in the form of the Hugging Face hub: where the weights come from.

A model folder is shared, so the card has no path, address or host name: a folder or file goes by its own name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agents.recording.manifest import software_versions
from envs.safe_text import write_text

CARD = "README.md"


@dataclass(frozen=True)
class ModelCard:
    """What a card says. `step` is the step of the weights, `ending` how the run ended, `tables` are titles and rows.

    The first row of a table holds its headings.

    Example: `ModelCard(name="first", task="reinforcement learning in `geo3k`", base_model="starter", ...)`.
    """

    name: str
    task: str
    tags: tuple[str, ...]
    base_model: str
    data: tuple[str, ...]
    step: int
    ending: str
    tables: tuple[tuple[str, Sequence[Sequence[str]]], ...]
    sees_images: bool

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
        yield "## Software\n"
        yield ", ".join(f"{name} {version}" for name, version in software_versions().items()) + "\n"

    def _front_matter(self) -> dict[str, Any]:
        if self.sees_images:
            task = "image-text-to-text"
        else:
            task = "text-generation"
        matter: dict[str, Any] = {
            "library_name": "transformers",
            "pipeline_tag": task,
            "tags": ["trueturn", *self.tags],
        }
        # The hub links what is on it; a name from here would lead nowhere.
        if is_hub_id(self.base_model):
            matter["base_model"] = self.base_model
        if datasets := [name for name in dict.fromkeys(self.data) if is_hub_id(name)]:
            matter["datasets"] = datasets
        return matter


def write_card(card: ModelCard, folder: Path, image: Path | None = None) -> None:
    """Write the card into a model folder, with a copy of the image if there is one."""
    name = ""
    if image and image.is_file():
        # A link out of the folder would be broken on the hub.
        shutil.copyfile(image, folder / image.name)
        name = image.name
    write_text(folder / CARD, card.text(name))


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
    # A path has a slash too: what exists here is not meant for the hub.
    return "/" in name and not Path(name).is_absolute() and not Path(name).exists()


def shared_name(name: str) -> str:
    """Return a name without its place: a hub id whole, the last part of a path.

    >>> shared_name("Qwen/Qwen3-VL-2B-Instruct"), shared_name("/home/me/data/test.jsonl")
    ('Qwen/Qwen3-VL-2B-Instruct', 'test.jsonl')
    """
    if is_hub_id(name):
        return name
    # The folders above tell of a user and a machine.
    return Path(name).name


def markdown_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; the first row holds the headings."""
    head, *others = rows
    for cells in (head, ["---"] * len(head), *others):
        # A bar in a cell would begin a new column.
        yield f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"
    yield ""
