"""Plays episodes with the model of an endpoint: the agent loop's limits, rewards and end reasons, without tokens.

Its trajectories have no ids. A turn has its text, an empty span, and the server's counts of tokens in `usage`. The
environment is called as by any other episode, so recordings replay.
"""

from __future__ import annotations

import time
from itertools import count

from agents.endpoints.chat import EndpointFault, answer_to_server
from agents.endpoints.client import EndpointClient
from agents.endpoints.judge import load_rewards
from agents.engines.base import Session
from agents.rollout.episode import Episode, Limits, render_fault
from agents.rollout.episode_state import EpisodeState
from agents.rollout.invariants import Vocabulary
from agents.types import EndReason, SamplingParams, Turn
from envs.execution.runner import StepResult
from envs.spec import EnvLimits, EnvSpec
from envs.tool_calls.thinking import TAGS, Thinking
from envs.types import Message, openai_message


def text_thinking(setting: str) -> Thinking | None:
    """Return the tags around thoughts; without a chat template, `auto` is `<think>`, as most servers write them."""
    if setting == "keep":
        return None
    opening, closing = TAGS["think" if setting == "auto" else setting]  # type: ignore[index]
    return Thinking(opening, closing)


class EndpointEpisode(Episode):
    """What all episodes of an endpoint share; `run` plays one.

    `max_new_tokens` bounds what the model writes in an episode; the server counts it. An answer that the server does
    not give ends the episode as `aborted`, which is in no reward and no accuracy of valid episodes.

    Example::

        episode = EndpointEpisode(client, spec, max_turns=3, max_new_tokens=4096)
        trajectory = await episode.run(sample, lambda: build_env(sample, args), seed=7)
        trajectory.turns[0].usage       # {"prompt_tokens": 412, "completion_tokens": 96}
    """

    engine: EndpointClient

    def __init__(
        self,
        client: EndpointClient,
        spec: EnvSpec,
        max_turns: int,
        max_new_tokens: int,
        temperature: float = 0.0,
        use_tools: bool = True,
    ) -> None:
        spec.check_has_no_loop("--endpoint")
        self.engine = client
        self.limits = Limits(max_turns, max_new_tokens, EnvLimits.of(spec), check_template_every=0)
        self.sampling = SamplingParams(temperature)
        self.use_tools = use_tools
        self.thinking = text_thinking(spec.thinking)
        self.rewards = load_rewards(spec.reward)
        self._numbers = count()
        # Streams are empty here, so no rule has anything to find.
        self._vocabulary = Vocabulary(None, 1, frozenset())

    async def _play(self, state: EpisodeState) -> tuple[float, EndReason, str | None]:
        try:
            return await super()._play(state)
        except EndpointFault as fault:
            return 0.0, EndReason.ABORTED, str(fault)

    def _read_prompt(self, state: EpisodeState) -> None:
        if self.use_tools:
            state.tools = state.env.tools

    async def _alternate(self, session: Session, state: EpisodeState) -> EndReason:
        """Alternate model and environment until one of them, or a limit, ends the episode."""
        try:
            # Encoded once: an image would be sent anew in each turn.
            said = [openai_message(message) for message in state.messages]
        except Exception as error:  # an image that is only now decoded
            raise render_fault("prompt", error) from error
        room = self.limits.max_new_tokens
        for number in range(1, self.limits.max_turns + 1):
            if room <= 0:
                return EndReason.TOKEN_BUDGET
            result = await self._ask(state, said, number, room)
            # As the server counts: hidden reasoning is in it.
            room -= state.turns[-1].usage.get("completion_tokens", 0)
            if state.turns[-1].finish != "stop":
                return EndReason.TOKEN_BUDGET
            if result.done:
                return EndReason.COMPLETED
            if number < self.limits.max_turns:
                state.messages.extend(result.messages or ({"role": "user", "content": ""},))
        return EndReason.MAX_TURNS

    async def _ask(self, state: EpisodeState, said: list[Message], number: int, room: int) -> StepResult:
        """Let the model write one turn and the environment answer it; add both to the state and to `said`."""
        asked = time.perf_counter()
        body = {
            "messages": said,
            "tools": [*state.tools] or None,
            "temperature": self.sampling.temperature,
            "max_completion_tokens": room,
        }
        answer = await self.engine.ask(body, state.seed)
        turn = Turn(
            start=0,
            end=0,
            text=answer.text,
            finish=answer.finish,
            versions=(),
            num_cached=0,
            observations=(),
            info={},
            engine_s=time.perf_counter() - asked,
            env_s=0.0,
            usage=answer.usage,
        )
        result = await self._answer(state, turn)
        try:
            said += [answer.message, *answer_to_server(result.messages, answer.call_ids)]
        except Exception as error:
            raise render_fault("observation", error) from error
        return result
