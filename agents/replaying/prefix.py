"""Checks, before a fork, that the turns up to it are those of the recorded episode."""

from __future__ import annotations

from collections.abc import Sequence

from agents.recording import EpisodeRecord, Recording
from agents.rendering.renderer import Renderer
from agents.rollout.stream import first_difference
from agents.types import GenerateRequest

_SHOWN_BEFORE = 40
_SHOWN = 160


class PrefixCheck:
    """Compares the tokens and images that the model reads before each turn with the recorded ones.

    Example::

        prefix = PrefixCheck(recording, episode, renderer)
        prefix.see(0, first_request)        # the prompt
        prefix.see(1, second_request)       # the environment's answer to turn 1
        prefix.differences                  # ["the environment answers turn 1 differently\\n  ..."]
    """

    def __init__(self, recording: Recording, episode: EpisodeRecord, renderer: Renderer) -> None:
        self._recording = recording
        self._episode = episode
        self._renderer = renderer
        self.differences: list[str] = []
        self._num_read = self._num_images = 0

    def see(self, turn: int, request: GenerateRequest) -> None:
        """Check the request for the turn after `turn` recorded ones."""
        if found := self._difference(turn, request):
            self.differences.append(found)
        self._num_images = len(request.images)
        if turn < len(self._episode.turns):
            span = self._episode.turns[turn]
            self._num_read = len(request.ids) + span.end - span.start

    def _difference(self, turn: int, request: GenerateRequest) -> str | None:
        turns = self._episode.turns
        if turn and turns[turn - 1].done:
            return f"turn {turn} ended the episode in the recording, and does not now"
        now = request.ids[self._num_read :]
        recorded, digests = self._recorded(turn)
        if turn:
            what = f"the environment answers turn {turn} differently"
        else:
            what = "the prompt differs"
        if now != recorded:
            texts = [self._renderer.shown(ids) for ids in (recorded, now)]
            if texts[0] == texts[1]:
                return f"{what}: {len(recorded)} and {len(now)} tokens of the same text"
            shown = _around_difference(*texts)
            return f"{what}\n  recorded: {shown[0]}\n  now:      {shown[1]}"
        # Equal tokens mean equally many new images. One side may have had more images before.
        new = [image.digest for image in request.images[self._num_images :]]
        # `digests` are all images so far, of which the last ones are new.
        before = digests[-len(new) :]
        place = first_difference(new, before)
        if place == min(len(new), len(before)):
            return None
        return f"{what}: image {self._num_images + place + 1} of the stream has other pixels"

    def _recorded(self, turn: int) -> tuple[tuple[int, ...], list[str]]:
        """Return the recorded tokens between the previous turn and this one, and the hashes of all images so far."""
        episode = self._episode
        turns = self._episode.turns
        start = turns[turn - 1].end if turn else 0
        if turn < len(turns) or not turns:
            ids = episode.ids[start : turns[turn].start if turns else len(episode.ids)]
            return ids, self._digests(episode.ids[: start + len(ids)])
        # The model never read the answer to the last turn, so it is rendered now.
        observed = self._recording.messages(turns[-1].observations) or ({"role": "user", "content": ""},)
        try:
            rendered = self._renderer.suffix(observed, last_id=episode.ids[start - 1], has_tools=bool(episode.tools))
        except Exception:  # perhaps the reason why the episode ended
            return (), []
        return rendered.ids, [*self._digests(episode.ids[:start]), *(image.digest for image in rendered.images)]

    def _digests(self, ids: Sequence[int]) -> list[str]:
        """Return the hashes of the recorded images in the first part of the stream."""
        num_placeholders = ids.count(self._renderer.image_token_id)
        digests = []
        for image in self._episode.images:
            if num_placeholders <= 0:
                break
            num_placeholders -= image.num_tokens
            digests.append(image.digest)
        return digests


def _around_difference(recorded: str, now: str) -> tuple[str, str]:
    """Return both texts around their first difference.

    >>> _around_difference("Score 0.0", "Score 1.0")
    ("'Score 0.0'", "'Score 1.0'")
    """
    place = first_difference(recorded, now)
    start = max(0, place - _SHOWN_BEFORE)
    texts = [repr(text[start : place + _SHOWN]) for text in (recorded, now)]
    return ("..." * bool(start) + texts[0], "..." * bool(start) + texts[1])
