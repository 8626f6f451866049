"""Drives the recorded turns of an episode through its environment again: a record in, what it gives today out.

The calls are those of the agent loop, behind the same time limits; there is no model, no tokenizer and no stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Protocol

from agents.recording.recorder import tools_digest
from agents.recording.schema import EpisodeRecord, Manifest, WayRecord
from agents.replaying.played import GOES_ON, Played, PlayedTurn, as_recorded, asks_reward, is_faulty, plain_info
from agents.types import EndReason
from envs.env import Env
from envs.errors import UserError
from envs.runner import EnvFault, EnvLimits, EnvRunner, StepResult
from envs.spec import BuildEnv, EnvSpec
from envs.tool_calls import ToolFormat
from envs.types import Message, Sample, private


class Source(Protocol):
    """Where recorded episodes come from: `agents.recording.Recording`, or the dumps of another framework."""

    @property
    def manifest(self) -> Manifest:
        """What all episodes have in common."""
        ...

    def episodes(self) -> Iterator[EpisodeRecord]:
        """Yield the episodes."""
        ...

    def sample(self, episode: EpisodeRecord) -> Sample:
        """Return the problem of an episode. Raises `UserError` where a picture is missing or damaged."""
        ...


class Player(Protocol):
    """Plays a record again, up to a turn where one is given."""

    async def play(self, episode: EpisodeRecord, num_turns: int | None = None) -> Played:
        """Return what the episode gives today. Raises `UserError` where it cannot be played again."""
        ...


class Stage:
    """What every episode is played with: the environment and its limits, and the problems of the recording.

    Example::

        stage = Stage(Recording.open("runs/x"), get_spec("geo3k"))
        env = stage.make_env(stage.source.sample(episode), stage.way(episode))
    """

    def __init__(self, source: Source, spec: EnvSpec) -> None:
        """Import the environment's code. Raises `UserError` where that fails."""
        self.source, self.spec, self.limits = source, spec, EnvLimits.of(spec)
        self._build_env: BuildEnv = spec.load()

    def way(self, episode: EpisodeRecord) -> WayRecord:
        """Return the way in which an episode was played."""
        ways = self.source.manifest.ways
        if episode.way not in ways:
            raise UserError(episode.id, "must be played in a way of the manifest", episode.way, "take the whole folder")
        return ways[episode.way]

    def make_env(self, sample: Sample, way: WayRecord) -> Env:
        """Return an environment as the agent loop would have it built."""
        tool_format: ToolFormat = "qwen_xml" if self.source.manifest.tool_format == "qwen_xml" else "hermes"
        return self._build_env(private(sample), deepcopy(self.spec.args(way.max_turns, tool_format)))


class EnvPlayer:
    """Plays records with the environment alone.

    A limit of the agent loop that counts tokens is taken as recorded, all others hold as they did.

    Example::

        played = await EnvPlayer(stage).play(episode)
        played.reward, played.end      # (1.0, "completed")
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def play(self, episode: EpisodeRecord, num_turns: int | None = None) -> Played:
        """Return what the environment says today. Raises `UserError` where a picture of the problem is damaged."""
        way, sample = self.stage.way(episode), self.stage.source.sample(episode)
        env = EnvRunner(lambda: self.stage.make_env(sample, way), self.stage.limits)
        first: tuple[Message, ...] | None = None
        results: list[StepResult | None] = []
        reward, end, error = None, None, None
        try:
            first = await env.open()
            end = await self._step_all(env, episode, way, num_turns, results)
            if end is not None and asks_reward(episode) and (end != GOES_ON or is_faulty(episode)):
                reward = await env.reward(episode.turns[len(results) - 1].text if results else "")
        except EnvFault as fault:
            end, error = _fault_end(fault), str(fault)
        finally:
            close_error = await env.close()
        texts = [turn.text for turn in episode.turns]
        return Played(
            first=None if first is None else as_recorded(first),
            turns=tuple(_turn(text, result) for text, result in zip(texts, results, strict=False)),
            tools=None if first is None else tools_digest(env.tools if way.use_tools else ()),
            reward=reward if end != GOES_ON else None,
            end=end,
            error=error or close_error,
        )

    async def _step_all(
        self,
        env: EnvRunner,
        episode: EpisodeRecord,
        way: WayRecord,
        num_turns: int | None,
        results: list[StepResult | None],
    ) -> str | None:
        """Let the environment answer turn after turn; return how the episode ends, None where that is not asked."""
        for number, turn in enumerate(episode.turns[:num_turns], 1):
            if turn.finish != "stop":
                results.append(None)
                is_cut = is_faulty(episode) or episode.end_reason is EndReason.INVALID_STREAM
                return (EndReason.TOKEN_BUDGET if is_cut else episode.end_reason).value
            result = await env.step(turn.text)
            results.append(result)
            if result.done:
                return EndReason.COMPLETED.value
            if number == way.max_turns:
                return EndReason.MAX_TURNS.value
        if num_turns is not None and num_turns < len(episode.turns):
            return None
        # What was said did not fit any more, or nothing did: tokens that are not counted here.
        is_full = episode.end_reason in (EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL)
        last = episode.turns[-1] if episode.turns else None
        return episode.end_reason.value if is_full and not (last and last.done) else GOES_ON


def _fault_end(fault: EnvFault) -> str:
    return (EndReason.ENV_TIMEOUT if fault.timed_out else EndReason.ENV_ERROR).value


def _turn(text: str, result: StepResult | None) -> PlayedTurn | None:
    if result is None:
        return None
    return PlayedTurn(text, as_recorded(result.messages), plain_info(result.info), result.done)
