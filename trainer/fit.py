"""Whether a model can read a recording: its ids, chat template and pictures are looked at before anything is loaded.

In: a recording, a renderer and what is known of the network. Out: nothing, or an error that says what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.recording import EpisodeRecord, Recording
from agents.recording.manifest import template_digest
from agents.renderer import Renderer
from envs.errors import UserError
from trainer.trainer import ModelFacts

_FIX = "give the model that the recording was made with"


@dataclass(frozen=True, eq=False)
class Fit:
    """A model against the recording of another run.

    Example::

        fit = Fit(recording, renderer, facts, vocabulary_size=151_936)
        fit.check_model()               # chat template, tokens
        fit.check(episode)              # ids, pictures; each picture is decoded once
    """

    recording: Recording
    renderer: Renderer
    facts: ModelFacts
    vocabulary_size: int
    _grids: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def check_model(self) -> None:
        """Raise `UserError` where the model has another chat template, or its ids stand for something else."""
        own, recorded = template_digest(self.renderer), self.recording.manifest.template
        if own != recorded:
            raise UserError("--model", f"must have the recorded chat template ({recorded})", own, _FIX)
        for token_id, text in self.recording.tokens().items():
            found = self.renderer.encoder.spell(token_id) if token_id < self.vocabulary_size else None
            if found != text:
                rule = f"must read id {token_id} as {_shown(text)}, as recorded"
                got = "no such id" if found is None else _shown(found)
                raise UserError("--model", rule, got, _FIX)

    def check(self, episode: EpisodeRecord) -> None:
        """Raise `UserError` where an episode has ids that the model has not, or pictures that are not whole."""
        place = f"episode {episode.id} of {self.recording.folder}"
        largest = max(episode.ids, default=0)
        if largest >= self.vocabulary_size:
            raise UserError(place, f"must have ids below the model's {self.vocabulary_size}", largest, _FIX)
        shown, wanted = episode.ids.count(self.facts.image_token_id), sum(image.num_tokens for image in episode.images)
        if shown != wanted:
            rule = f"must have {wanted} image tokens, of id {self.facts.image_token_id}, for its pictures"
            raise UserError(place, rule, shown, _FIX)
        names = list(picture_names(episode))
        for name in dict.fromkeys(names):
            self._check_picture(name)
        # Where the stream has fewer pictures than the messages, the last were too many to be read.
        for name, image in zip(names, episode.images, strict=False):
            if self._grids[name] != image.grid:
                rule = f"must cut {name} as recorded, into {'x'.join(map(str, image.grid))} patches"
                got = "x".join(map(str, self._grids[name]))
                raise UserError("--model", rule, got, f"{_FIX}, and its preprocessor_config.json")

    def _check_picture(self, name: str) -> None:
        if name in self._grids:
            return
        picture, store = self.recording.picture(name), self.renderer.images
        self._grids[name] = store.grid(picture) if store else (0, 0, 0)


def picture_names(episode: EpisodeRecord) -> Iterator[str]:
    """Yield the pictures of an episode's messages by name, in order; then those of what the environment answered."""
    yield from _pictures(episode.messages)
    for turn in episode.turns:
        yield from _pictures(turn.observations)


def _pictures(messages: tuple[Mapping[str, Any], ...]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part["image"] for part in content if part.get("type") == "image")


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="backslashreplace"))
