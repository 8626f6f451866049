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
from agents.types import TokenStream
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
        streams = episode.streams
        for stream in streams:
            self._check_ids(stream, place, episode.end_reason.is_valid)
        # A stranger's number may be anything, and one is enough to ruin a step.
        if abs(episode.reward) > MAX_REWARD:
            raise UserError(place, f"must have a reward within {MAX_REWARD:g}", episode.reward, "leave the episode out")
        for stream in streams:
            self._check_lengths(stream, place)
        # The rules of every stream: packing indexes by what the record says.
        if rule := broken_record(episode, self._vocabulary):
            raise UserError(place, "must keep the rules of a token stream", rule, _FIX)
        answers = [message for turn in episode.turns for message in turn.observations]
        for name in dict.fromkeys(image_names([*episode.said, *answers])):
            self._check_image(name)
        for stream in streams:
            self._check_grids(stream)

    def _check_ids(self, stream: TokenStream, place: str, is_valid: bool) -> None:
        """Raise `UserError` where the model has no such ids or experts."""
        kept_NK = stream.kept_NK
        if is_valid and stream.mask_T.any():
            found = 0 if kept_NK is None else kept_NK.shape[1]
            if found != self.top_k:
                rule = f"must have {self.top_k} ids that each token was drawn from, as --top-k of its run says"
                raise UserError(place, rule, found, "take the recording as it was written")
        most_kept = 0 if kept_NK is None else int(kept_NK.max(initial=0))
        for each in (int(stream.ids_T.max(initial=0)), int(stream.ids_T.min(initial=0)), most_kept):
            if not 0 <= each < self.vocabulary_size:
                raise UserError(place, f"must have ids below the model's {self.vocabulary_size}", each, _FIX)
        routes_RLK = stream.routes_RLK
        if routes_RLK is None:
            return
        if self.facts.routes is None:
            raise UserError(place, "must have no experts, as the model has none", routes_RLK.shape, _FIX)
        if rule := wrong_experts(routes_RLK, len(routes_RLK), self.facts.routes):
            raise UserError(place, "must have experts of the model", rule, _FIX)

    def _check_lengths(self, stream: TokenStream, place: str) -> None:
        """Raise `UserError` where a stream is too long, or has other images than its tokens say."""
        num_tokens = len(stream.ids_T)
        if num_tokens > self.facts.max_positions:
            raise UserError(place, f"must have at most {self.facts.max_positions} tokens", num_tokens, _FIX)
        # Each placeholder takes a row of pixels: one too many would shift all that follow.
        shown = int((stream.ids_T == self.facts.image_token_id).sum())
        wanted = sum(image.num_tokens for image in stream.images)
        if shown != wanted:
            rule = f"must have {wanted} image tokens, of id {self.facts.image_token_id}, for its images"
            raise UserError(place, rule, shown, _FIX)

    def _check_grids(self, stream: TokenStream) -> None:
        """Raise `UserError` where the model's processor would cut an image otherwise."""
        # A stream has fewer images than its messages where the context was full.
        for name, image in zip(image_names(stream.messages), stream.images, strict=False):
            if self._grids[name] != image.grid_thw:
                rule = f"must cut {name} as recorded, into {'x'.join(map(str, image.grid_thw))} patches"
                got = "x".join(map(str, self._grids[name]))
                raise UserError("--model", rule, got, f"{_FIX}, and its preprocessor_config.json")

    def _check_image(self, name: str) -> None:
        if name in self._grids:
            return
        # Decoded once, however many episodes show it.
        image = self.recording.image(name)
        store = self.renderer.images
        self._grids[name] = store.grid(image) if store else (0, 0, 0)


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="backslashreplace"))
