"""Plays an episode again with the whole agent loop: a record and a renderer in, its token stream of today out.

The engine answers with the recorded ids, so whatever stands between them is today's: template, tokenizer, pictures and
the environment's words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agents.engines.recorded import RecordedEngine, recorded_completions
from agents.episode import Episode, Limits
from agents.recording.recorder import tools_digest
from agents.recording.schema import EpisodeRecord
from agents.renderer import Renderer
from agents.replaying.played import (
    GOES_ON,
    Played,
    PlayedTurn,
    as_recorded,
    first_observation,
    is_broken_answer,
    plain_info,
)
from agents.replaying.player import Stage
from agents.types import EndReason, SamplingParams, Trajectory, Turn


@dataclass(frozen=True)
class StreamPlayed(Played):
    """What an episode gave, its token stream included.

    `spans` are the turns' (start, end), `images` (digest, grid, tokens) of every picture of the stream.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    prompt_length: int
    images: tuple[tuple[str, tuple[int, int, int], int], ...]


class StreamPlayer:
    """Plays records with the agent loop.

    Example::

        played = await StreamPlayer(stage, Renderer.from_checkpoint("path/to/model")).play(episode)
        played.ids == episode.ids      # True
    """

    def __init__(self, stage: Stage, renderer: Renderer) -> None:
        self.stage, self.renderer = stage, renderer
        self._sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)

    async def play(self, episode: EpisodeRecord, num_turns: int | None = None) -> Played:
        """Return what the episode gives today. Raises `UserError` where a picture of the problem is damaged."""
        way, sample = self.stage.way(episode), self.stage.source.sample(episode)
        answers = recorded_completions(episode)[:num_turns]
        if is_broken_answer(episode) and len(answers) == len(episode.turns):
            answers = answers[:-1]
        # Streams are compared with recorded ones; with the template only where that is what had ended them.
        every = 1 if episode.end_reason is EndReason.INVALID_STREAM else 0
        loop = Episode(
            RecordedEngine([answers], way.context_length),
            self.renderer,
            Limits(way.max_turns, way.max_new_tokens, self.stage.limits, every),
            self._sampling,
            way.use_tools,
        )
        played = await loop.run(sample, lambda: self.stage.make_env(sample, way), episode.seed)
        return stream_played(played, len(answers))


def stream_played(t: Trajectory, num_answers: int) -> StreamPlayed:
    """Return a trajectory as it is compared; a turn after `num_answers` was asked for and is not recorded."""
    turns, goes_on = t.turns[:num_answers], len(t.turns) > num_answers
    is_open = bool(len(t.ids_T) or t.turns)
    is_faulty = t.end_reason in (EndReason.ENV_ERROR, EndReason.ENV_TIMEOUT)
    return StreamPlayed(
        first=as_recorded([dict(m) for m in first_observation(t, len(t.ids_T))]) if is_open else None,
        turns=tuple(_turn(turn, is_faulty and turn is turns[-1]) for turn in turns),
        tools=tools_digest(t.tools) if is_open else None,
        reward=None if goes_on or is_faulty else t.reward,
        end=GOES_ON if goes_on else t.end_reason.value,
        error=t.error,
        ids=tuple(t.ids_T.tolist()),
        mask=tuple(t.mask_T.astype(int).tolist()),
        spans=tuple((turn.start, turn.end) for turn in turns),
        prompt_length=t.prompt_length,
        images=tuple((image.digest, image.grid_thw, image.num_tokens) for image in t.images),
    )


def _turn(turn: Turn, may_be_unanswered: bool) -> PlayedTurn | None:
    is_answered = turn.observations or turn.info or turn.done
    if turn.finish != "stop" or (may_be_unanswered and not is_answered):
        return None
    return PlayedTurn(turn.text, as_recorded([dict(m) for m in turn.observations]), plain_info(turn.info), turn.done)


def spelled(renderer: Renderer, ids: Sequence[int]) -> list[Any]:
    """Return ids with their texts, for a report: `[[151644, "<|im_start|>"], [198, "\\n"]]`."""
    return [[each, renderer.encoder.spell(each).decode("utf-8", errors="replace")] for each in ids]
