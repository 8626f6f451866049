"""Replays the recorded turns of an episode with its environment alone.

The environment gets the same calls as from the agent loop, with the same time limits. There is no model, no tokenizer
and no token stream.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

from agents.recording.recorder import tools_digest
from agents.recording.recording import Recording
from agents.recording.schema import EpisodeRecord, WayRecord
from agents.replaying.episode_result import (
    CONTINUES,
    EpisodeResult,
    TurnResult,
    answered_turn,
    as_recorded,
    asks_reward,
    is_faulty,
)
from agents.types import EndReason
from envs.contract import EnvFault, ToolFault
from envs.env import Env
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner, StepResult
from envs.spec import BuildEnv, EnvLimits, EnvSpec
from envs.success import ENVIRONMENT
from envs.tool_calls import ToolFormat
from envs.types import Message, Sample, private


class Replayer(Protocol):
    """Replays a recorded episode."""

    async def play(self, episode: EpisodeRecord) -> EpisodeResult:
        """Return today's result of the episode. Raises `UserError` if it cannot be replayed."""
        ...


class ReplayContext:
    """What every episode is replayed with: the recording, the environment and its limits.

    Example::

        context = ReplayContext(Recording.open("runs/x"), get_spec("geo3k"))
        env = context.make_env(context.source.sample(episode), context.way(episode))
    """

    def __init__(self, source: Recording, spec: EnvSpec) -> None:
        """Import the environment's code. Raises `UserError` if that fails."""
        self.source, self.spec = source, spec
        self._build_env: BuildEnv = load_env(spec)

    def way(self, episode: EpisodeRecord) -> WayRecord:
        """Return the way (limits and sampling) in which an episode was played, in a mixture by its environment."""
        ways = self.source.manifest.ways
        if episode.way not in ways:
            raise UserError(episode.id, "must be played in a way of the manifest", episode.way, "take the whole folder")
        way = ways[episode.way]
        recorded = self.source.manifest.env
        if not recorded.parts:
            return way
        env_id = str(episode.metadata.get(ENVIRONMENT))
        if env_id not in recorded.parts or (self.spec.parts and env_id not in self.spec.parts):
            known = ", ".join(self.spec.parts or recorded.parts)
            raise UserError(f"{episode.id} {ENVIRONMENT}", f"must be one of {known}", env_id, "give another --env")
        return way.model_copy(update={"max_turns": min(way.max_turns, recorded.parts[env_id].max_turns)})

    def make_env(self, sample: Sample, way: WayRecord) -> Env:
        """Build an environment as the agent loop does."""
        # The recorded one: recorded calls are written in it, whatever the model of today has.
        tool_format: ToolFormat = "qwen_xml" if self.source.manifest.tool_format == "qwen_xml" else "hermes"
        args = self.spec.part(sample.metadata).args(way.max_turns, tool_format)
        return self._build_env(private(sample), deepcopy(args))


@dataclass(frozen=True)
class EnvReplayer:
    """Replays episodes with the environment alone.

    Limits that count tokens are assumed to act as recorded; all other limits are applied again.

    Example::

        result = await EnvReplayer(context).play(episode)
        result.reward, result.end      # (1.0, "completed")
    """

    context: ReplayContext

    async def play(self, episode: EpisodeRecord) -> EpisodeResult:
        """Return the environment's result today. Raises `UserError` if an image of the problem is damaged."""
        way = self.context.way(episode)
        sample = self.context.source.sample(episode)
        limits = EnvLimits.of(self.context.spec.part(sample.metadata))
        env = EnvRunner(lambda: self.context.make_env(sample, way), limits, sample.id, way.thinking)
        first: tuple[Message, ...] | None = None
        results: list[StepResult | None] = []
        reward = None
        end = None
        error = None
        try:
            first = await env.open()
            end = await self._step_all(env, episode, way, results)
            # Where the environment wants another turn, its reward is not final, unless a fault stopped the recording.
            if asks_reward(episode) and (end != CONTINUES or is_faulty(episode)):
                reward = await env.reward(episode.turns[len(results) - 1].text if results else "")
        except ToolFault as fault:
            results.append(StepResult((), False, fault.info))
            # As the agent loop scores a tool that the model broke.
            reward = limits.reward_min_val
            end = EndReason.TOOL_FAULT.value
            error = str(fault)
        except EnvFault as fault:
            end = (EndReason.ENV_TIMEOUT if fault.timed_out else EndReason.ENV_ERROR).value
            error = str(fault)
        finally:
            # Last, after every end: processes and files of the episode are released.
            close_error = await env.close()
        turns: list[TurnResult | None] = []
        for turn, result in zip(episode.turns, results, strict=False):
            turns.append(result and answered_turn(turn.text, result.messages, result.info, result.done))
        return EpisodeResult(
            first=None if first is None else as_recorded(first),
            turns=tuple(turns),
            tools=None if first is None else tools_digest(env.tools if way.use_tools else ()),
            reward=reward if end != CONTINUES else None,
            end=end,
            error=error or close_error,
        )

    async def _step_all(
        self,
        env: EnvRunner,
        episode: EpisodeRecord,
        way: WayRecord,
        results: list[StepResult | None],
    ) -> str:
        """Give the environment turn after turn; return how the episode ends."""
        for number, turn in enumerate(episode.turns, 1):
            if turn.finish != "stop":
                results.append(None)
                # That end came later than this turn, whose tokens had run out.
                is_cut = is_faulty(episode) or episode.end_reason is EndReason.INVALID_STREAM
                return (EndReason.TOKEN_BUDGET if is_cut else episode.end_reason).value
            result = await env.step(turn.text)
            results.append(result)
            if result.done:
                return EndReason.COMPLETED.value
            if number == way.max_turns:
                return EndReason.MAX_TURNS.value
        # The next message did not fit into the token limits, which are not counted here.
        is_full = episode.end_reason in (EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL)
        last = episode.turns[-1] if episode.turns else None
        if is_full and not (last and last.done):
            return episode.end_reason.value
        return CONTINUES
