"""Checks that a model can read a recording, before anything is loaded: its chat template, token ids and images."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from agents.model.architectures import ModelFacts
from agents.recording import EpisodeRecord, Recording
from agents.recording.manifest import template_digest
from agents.recording.schema import image_names
from agents.recording.stream_check import broken_record
from agents.rendering.renderer import Renderer
from agents.rollout.invariants import Vocabulary, wrong_experts
from envs.contract import MAX_REWARD
from envs.errors import UserError

_FIX = "give the model that the recording was made with"


@dataclass(frozen=True, eq=False)
class RecordingCheck:
    """Compares a model with the recording of another run.

    Example::

        check = RecordingCheck(recording, renderer, facts, vocabulary_size=151_936)
        check.model()                   # chat template, tokens
        check.episode(episode)          # ids, images; each image is decoded once
    """

    recording: Recording
    renderer: Renderer
    facts: ModelFacts
    vocabulary_size: int
    top_k: int = 0
    _grids: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.renderer)

    def model(self) -> None:
        """Raise `UserError` where the model has another chat template, or its ids stand for something else."""
        own = template_digest(self.renderer)
        recorded = self.recording.manifest.template
        if own != recorded:
            raise UserError("--model", f"must have the recorded chat template ({recorded})", own, _FIX)
        # The same template with another vocabulary would train on other texts, in silence.
        for token_id, text in self.recording.tokens().items():
            if token_id < self.vocabulary_size:
                found = self.renderer.encoder.spell(token_id)
            else:
                found = None
            if found != text:
                rule = f"must read id {token_id} as {_shown(text)}, as recorded"
                if found is None:
                    got = "no such id"
                else:
                    got = _shown(found)
                raise UserError("--model", rule, got, _FIX)

    def episode(self, episode: EpisodeRecord) -> None:
        """Raise `UserError` where the model cannot have written the episode, or an image is damaged."""
        place = f"episode {episode.id} of {self.recording.folder}"
        kept_NK = episode.kept_NK
        if episode.end_reason.is_valid and episode.num_model_tokens:
            found = 0 if kept_NK is None else kept_NK.shape[1]
            if found != self.top_k:
                rule = f"must have {self.top_k} ids that each token was drawn from, as --top-k of its run says"
                raise UserError(place, rule, found, "take the recording as it was written")
        most_kept = 0 if kept_NK is None else int(kept_NK.max(initial=0))
        for each in (max(episode.ids, default=0), min(episode.ids, default=0), most_kept):
            if not 0 <= each < self.vocabulary_size:
                raise UserError(place, f"must have ids below the model's {self.vocabulary_size}", each, _FIX)
        self._check_routes(episode, place)
        # A stranger's number may be anything, and one is enough to ruin a step.
        if abs(episode.reward) > MAX_REWARD:
            raise UserError(place, f"must have a reward within {MAX_REWARD:g}", episode.reward, "leave the episode out")
        if len(episode.ids) > self.facts.max_positions:
            raise UserError(place, f"must have at most {self.facts.max_positions} tokens", len(episode.ids), _FIX)
        # Each placeholder takes a row of pixels: one too many would shift all that follow.
        shown = episode.ids.count(self.facts.image_token_id)
        wanted = sum(image.num_tokens for image in episode.images)
        if shown != wanted:
            rule = f"must have {wanted} image tokens, of id {self.facts.image_token_id}, for its images"
            raise UserError(place, rule, shown, _FIX)
        # The rules of every stream: packing indexes by what the record says.
        if rule := broken_record(episode, self._vocabulary):
            raise UserError(place, "must keep the rules of a token stream", rule, _FIX)
        answers = (message for turn in episode.turns for message in turn.observations)
        names = [*image_names(episode.messages), *image_names(answers)]
        for name in dict.fromkeys(names):
            self._check_image(name)
        # A stream has fewer images than its messages where the context was full.
        for name, image in zip(names, episode.images, strict=False):
            if self._grids[name] != image.grid:
                rule = f"must cut {name} as recorded, into {'x'.join(map(str, image.grid))} patches"
                got = "x".join(map(str, self._grids[name]))
                raise UserError("--model", rule, got, f"{_FIX}, and its preprocessor_config.json")

    def _check_routes(self, episode: EpisodeRecord, place: str) -> None:
        """Raise `UserError` where the model's tokens cannot have taken the recorded experts."""
        routes_RLK = episode.routes_RLK
        if routes_RLK is None:
            return
        if self.facts.routes is None:
            raise UserError(place, "must have no experts, as the model has none", routes_RLK.shape, _FIX)
        if rule := wrong_experts(routes_RLK, len(routes_RLK), self.facts.routes):
            raise UserError(place, "must have experts of the model", rule, _FIX)

    def _check_image(self, name: str) -> None:
        if name in self._grids:
            return
        # Decoded once, however many episodes show it.
        image = self.recording.image(name)
        store = self.renderer.images
        self._grids[name] = store.grid(image) if store else (0, 0, 0)


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="backslashreplace"))
