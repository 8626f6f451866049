"""Replays an episode with the whole agent loop, to compare its token streams too.

The engine answers with the recorded ids. Everything between them comes from today's chat template, tokenizer, image
processor and environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agents.engines.base import Engine
from agents.gateway.entries import episode_of
from agents.recording.recorder import tools_digest
from agents.recording.schema import EpisodeRecord, WayRecord
from agents.rendering.renderer import Renderer
from agents.replaying.episode_result import (
    CONTINUES,
    EpisodeResult,
    answered_turn,
    as_recorded,
    drop_unanswered,
    is_broken_answer,
)
from agents.replaying.recorded_engine import RecordedEngine, recorded_completions
from agents.replaying.replayer import ReplayContext
from agents.rollout.episode import Episode, Limits
from agents.types import EndReason, SamplingParams, TokenStream, Trajectory
from envs.spec import EnvLimits
from envs.types import Sample

#: Returns ids with their texts.
TokenTexts = Callable[[Sequence[int]], list[Any]]


@dataclass(frozen=True)
class StreamResult(EpisodeResult):
    """The result of an episode with its token streams; `spans` are the turns' (stream, start, end).

    `token_texts` adds their texts to token ids.
    """

    streams: tuple[TokenStream, ...]
    spans: tuple[tuple[int, int, int], ...]
    token_texts: TokenTexts


@dataclass(frozen=True)
class StreamReplayer:
    """Replays episodes with the agent loop.

    Example::

        result = await StreamReplayer(context, Renderer.from_checkpoint("path/to/model")).play(episode)
        result.streams[0].ids_T.tolist() == list(episode.ids)      # True
    """

    context: ReplayContext
    renderer: Renderer

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
        every = int(episode.end_reason is EndReason.INVALID_STREAM)
        engine = RecordedEngine([answers], way.context_length)
        loop = recorded_loop(engine, self.context, self.renderer, sample, way, every)
        trajectory = await loop.run(sample, lambda: self.context.make_env(sample, way), episode.seed)
        return stream_result(trajectory, len(answers), self.token_texts)

    def token_texts(self, ids: Sequence[int]) -> list[Any]:
        """Return ids with their texts for a report: `[[151644, "<|im_start|>"], [198, "\\n"]]`."""
        spell = self.renderer.encoder.spell
        return [[each, spell(each).decode("utf-8", errors="replace")] for each in ids]


def recorded_loop(
    engine: Engine,
    context: ReplayContext,
    renderer: Renderer,
    sample: Sample,
    way: WayRecord,
    check_every: int = Limits.check_template_every,
) -> Episode:
    """Return the agent loop for a sample, with the limits and the sampling of a way."""
    part = context.spec.part(sample.metadata)
    return episode_of(part)(
        engine,
        renderer,
        Limits(way.max_turns, way.max_new_tokens, EnvLimits.of(part), check_every),
        SamplingParams(way.temperature, renderer.stop_ids, renderer.suppressed_ids),
        way.use_tools,
        way.thinking,
        history=part.history,
    )


def stream_result(t: Trajectory, num_answers: int, token_texts: TokenTexts) -> StreamResult:
    """Return the result of a trajectory; a turn after `num_answers` was requested but is not in the recording."""
    recorded = t.turns[:num_answers]
    continues = len(t.turns) > num_answers
    # Without a prompt, the environment was not read from, and nothing is compared.
    is_open = bool(len(t.ids_T) or t.turns)
    is_faulty = t.end_reason in (EndReason.ENV_ERROR, EndReason.ENV_TIMEOUT)
    # The environment sees no turn that was cut, and a fault leaves none of its answers.
    turns = [
        answered_turn(turn.text, turn.observations, turn.info, turn.done) if turn.finish == "stop" else None
        for turn in recorded
    ]
    if is_faulty:
        drop_unanswered(turns)
    return StreamResult(
        first=as_recorded(t.opening[t.num_prompt_messages :]) if is_open else None,
        turns=tuple(turns),
        tools=tools_digest(t.tools) if is_open else None,
        reward=None if continues or is_faulty else t.reward,
        end=CONTINUES if continues else t.end_reason.value,
        error=t.error,
        streams=t.streams,
        spans=tuple((turn.stream, turn.start, turn.end) for turn in recorded),
        token_texts=token_texts,
    )
