"""Replays an episode with the whole agent loop, to compare its token streams too.

The engine answers with the recorded ids. Everything between them comes from today's chat template, tokenizer, image
processor and environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agents.gateway.entries import episode_of
from agents.recording.recorder import tools_digest
from agents.recording.schema import EpisodeRecord
from agents.rendering.renderer import Renderer
from agents.replaying.episode_result import (
    CONTINUES,
    EpisodeResult,
    TurnResult,
    as_recorded,
    is_broken_answer,
    plain_info,
)
from agents.replaying.recorded_engine import RecordedEngine, recorded_completions
from agents.replaying.replayer import ReplayContext
from agents.rollout.episode import Limits
from agents.types import EndReason, SamplingParams, TokenStream, Trajectory, Turn


@dataclass(frozen=True)
class StreamResult(EpisodeResult):
    """The result of an episode with its token streams; `spans` are the turns' (stream, start, end)."""

    streams: tuple[TokenStream, ...]
    spans: tuple[tuple[int, int, int], ...]


class StreamReplayer:
    """Replays episodes with the agent loop.

    Example::

        result = await StreamReplayer(context, Renderer.from_checkpoint("path/to/model")).play(episode)
        result.streams[0].ids_T.tolist() == list(episode.ids)      # True
    """

    def __init__(self, context: ReplayContext, renderer: Renderer) -> None:
        self.context = context
        self.renderer = renderer
        self._sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)

    async def play(self, episode: EpisodeRecord, num_turns: int | None = None) -> EpisodeResult:
        """Return today's result of the episode, or of its first `num_turns` turns.

        Raises:
            UserError: an image of the problem is damaged.
        """
        way = self.context.way(episode)
        sample = self.context.source.sample(episode)
        answers = recorded_completions(episode)[:num_turns]
        # The engine's broken answer is left out; the loop then ends where the recording did.
        if is_broken_answer(episode) and len(answers) == len(episode.turns):
            answers = answers[:-1]
        # The recorded stream is the reference. Only an episode that the template check ended is checked again.
        if episode.end_reason is EndReason.INVALID_STREAM:
            every = 1
        else:
            every = 0
        entry = self.context.spec.part(sample.metadata)
        loop = episode_of(entry)(
            RecordedEngine([answers], way.context_length),
            self.renderer,
            Limits(way.max_turns, way.max_new_tokens, self.context.limits(sample), every),
            self._sampling,
            way.use_tools,
            way.thinking,
            history=entry.history,
        )
        trajectory = await loop.run(sample, lambda: self.context.make_env(sample, way), episode.seed)
        return stream_result(trajectory, len(answers))


def stream_result(t: Trajectory, num_answers: int) -> StreamResult:
    """Return the result of a trajectory; a turn after `num_answers` was requested but is not in the recording."""
    turns, continues = t.turns[:num_answers], len(t.turns) > num_answers
    # Without a prompt, the environment was not read from, and nothing is compared.
    is_open = bool(len(t.ids_T) or t.turns)
    is_faulty = t.end_reason in (EndReason.ENV_ERROR, EndReason.ENV_TIMEOUT)
    return StreamResult(
        first=as_recorded([dict(m) for m in t.opening[t.num_prompt_messages :]]) if is_open else None,
        turns=tuple(_turn(turn, is_faulty and turn is turns[-1]) for turn in turns),
        tools=tools_digest(t.tools) if is_open else None,
        reward=None if continues or is_faulty else t.reward,
        end=CONTINUES if continues else t.end_reason.value,
        error=t.error,
        streams=t.streams,
        spans=tuple((turn.stream, turn.start, turn.end) for turn in turns),
    )


def _turn(turn: Turn, may_be_unanswered: bool) -> TurnResult | None:
    is_answered = turn.observations or turn.info or turn.done
    # The environment sees no turn that was cut, and a fault leaves none of its answers.
    if turn.finish != "stop" or (may_be_unanswered and not is_answered):
        return None
    return TurnResult(turn.text, as_recorded([dict(m) for m in turn.observations]), plain_info(turn.info), turn.done)


def token_texts(renderer: Renderer, ids: Sequence[int]) -> list[Any]:
    """Return ids with their texts for a report: `[[151644, "<|im_start|>"], [198, "\\n"]]`."""
    return [[each, renderer.encoder.spell(each).decode("utf-8", errors="replace")] for each in ids]
