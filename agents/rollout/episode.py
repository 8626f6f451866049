"""The agent loop: plays one episode with one environment, one engine session and one append-only token stream.

`Episode.run` always returns a `Trajectory`. Only the loop knows limits; only the environment knows when its task has
ended. A fault of the environment, or a completion that does not belong to its request, becomes an end reason and is
never raised.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from agents.engines.base import Engine, Session
from agents.rendering.renderer import Renderer
from agents.rollout.episode_state import EpisodeState
from agents.rollout.invariants import (
    Vocabulary,
    broken_invariant,
    broken_routes,
    broken_turn,
    check_types,
    in_stream,
)
from agents.rollout.rewards import RewardSum
from agents.rollout.stream import Stream, first_turn, is_same
from agents.rollout.template_check import template_mismatch
from agents.types import (
    EndReason,
    GenerateRequest,
    RouteShape,
    SamplingParams,
    Timing,
    Trajectory,
    Turn,
)
from envs.contract import EnvFault, EpisodeEnv, ToolFault, is_json, plain_dict
from envs.execution.runner import EnvRunner, StepResult
from envs.history import History
from envs.spec import EnvLimits
from envs.tool_calls.thinking import Thinking
from envs.types import Message, Sample, content_parts, message_images

#: `task.cancel(ABORT)` ends an episode as `aborted` and keeps what it has so far. Any other cancellation is raised.
ABORT = "abort"


@dataclass(frozen=True)
class Limits:
    """The loop's limits on one episode.

    `max_new_tokens` is the budget for everything after the prompt, environment tokens included; `env` limits the calls
    into the environment. The first episode, and every `check_template_every`-th after it, is compared with the model's
    chat template as a whole (`agents.rollout.template_check`, about a millisecond; 1 compares all, 0 none). Every
    episode is checked against the other rules of a stream (`agents.rollout.invariants`).
    """

    max_turns: int = 3
    max_new_tokens: int = 256
    env: EnvLimits = field(default_factory=EnvLimits)
    check_template_every: int = 128


#: The result of a turn that the environment did not see.
_NO_STEP = StepResult((), False, {})


class _BrokenStream(Exception):
    """The completion breaks a rule of the stream; the message says which."""


class Episode:
    """What all episodes of a run share; `run` plays one.

    The environment gets only what the model says outside of `thinking` (None: each turn as it is); the stream and the
    turns of the trajectory hold all of it. `rewards` are the reward functions of the run, if it has any. With `routes`
    the engine is asked which experts each token takes, as the shape says; it must be one that `gives_routes`. `history`
    says what of the conversation the model goes on seeing; where it cuts, a new stream begins.

    Example::

        episode = Episode(engine, renderer, Limits(max_turns=3), SamplingParams(stop_ids=renderer.stop_ids))
        trajectory = await episode.run(sample, lambda: build_env(sample, args), seed=7)
        trajectory.end_reason, trajectory.reward      # (EndReason.COMPLETED, 1.0)
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        limits: Limits,
        sampling: SamplingParams,
        use_tools: bool = True,
        thinking: Thinking | None = None,
        rewards: RewardSum = RewardSum(),
        routes: RouteShape | None = None,
        history: History | None = None,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.limits = limits
        self.sampling = sampling
        self.use_tools = use_tools
        self.thinking = thinking
        self.rewards = rewards
        self.routes = routes
        self.history = history
        self._numbers = count()
        self._vocabulary = Vocabulary.of(renderer)

    def part(self, sample: Sample) -> Episode:
        """Return the agent loop that plays a sample: this one, except in a mixture."""
        return self

    async def run(
        self,
        sample: Sample,
        make_env: Callable[[], EpisodeEnv],
        seed: int,
        sample_index: int = 0,
        group: int = 0,
        attempt: int = 0,
    ) -> Trajectory:
        """Play one episode to its end, or until its task is cancelled with `ABORT`.

        `sample_index`, `group` and `attempt` are stored in the trajectory.

        Raises only what the engine or our own code raises. An episode whose stream breaks a rule, in a turn or at its
        end, ends as `invalid_stream`; its `error` says which rule and where.
        """
        started = time.perf_counter()
        every = self.limits.check_template_every
        # Not each one: the template writes the whole conversation again for each turn.
        checks_template = every > 0 and next(self._numbers) % every == 0

        def build() -> EpisodeEnv:
            state.is_exact = is_json(sample.metadata)  # here, because it may be objects of an author
            state.metadata = plain_dict(sample.metadata, copy_known=lambda value: value)  # the environment has its own
            return make_env()

        env = EnvRunner(build, self.limits.env, sample.id, self.thinking)
        state = EpisodeState(env, seed, list(sample.prompt), checks_template)
        reward, end_reason, error = await self._play(state)
        state.drop_unwritten()
        trajectory = Trajectory.of_streams(
            state.frozen_streams(),
            sample_id=sample.id,
            sample_index=sample_index,
            seed=seed,
            turns=tuple(state.turns),
            reward=reward,
            end_reason=end_reason,
            error=error,
            metadata=sample.metadata,
            label=sample.label,
            num_prompt_messages=state.num_prompt,
            tools=tuple(state.tools),
            group=group,
            attempt=attempt,
        )
        return self._checked(await self._scored(trajectory), state, started)

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with the rewards of the run's functions; it is aborted if its task is meanwhile."""
        with _until_aborted():
            return await self.rewards.score(trajectory, self.limits.env)
        return replace(trajectory, reward=0.0, end_reason=EndReason.ABORTED)

    async def _play(self, state: EpisodeState) -> tuple[float, EndReason, str | None]:
        """Play the turns, grade them and close the environment; return reward, end reason and error."""
        env = state.env
        reward = 0.0
        error = None
        try:
            # Opened before the environment: which episodes share a batch must not depend on how fast environments are.
            async with self.engine.session() as session:
                state.say(await env.open())
                self._read_prompt(state)
                end_reason = await self._alternate(session, state)
            reward = await env.reward(self._final_text(state))
        except ToolFault as fault:  # whatever the environment's own `reward` would say
            reward = self.limits.env.reward_min_val
            end_reason = EndReason.TOOL_FAULT
            error = str(fault)
        except EnvFault as fault:
            if fault.timed_out:
                end_reason = EndReason.ENV_TIMEOUT
            else:
                end_reason = EndReason.ENV_ERROR
            error = str(fault)
        except _BrokenStream as broken:
            end_reason = EndReason.INVALID_STREAM
            error = str(broken)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (ABORT,):
                raise
            end_reason = EndReason.ABORTED
        finally:
            close_error = await _close(env)
            error = error or close_error
        return reward, end_reason, error

    def _checked(self, trajectory: Trajectory, state: EpisodeState, started: float) -> Trajectory:
        """Return the trajectory, plain and with its timing; an `invalid_stream` where its stream breaks a rule."""
        check_started = time.perf_counter()
        end_reason = trajectory.end_reason
        error = trajectory.error
        rule = None
        if end_reason is not EndReason.INVALID_STREAM:
            rule = self._broken_rule(trajectory, state)
        # The environment's own error stays: it may be the cause.
        if rule is not None:
            end_reason = EndReason.INVALID_STREAM
            error = f"{error}\n\n{rule}" if error else rule
        now = time.perf_counter()
        total_s = now - started
        check_s = state.check_s + now - check_started
        engine_s = sum([turn.engine_s for turn in trajectory.turns])
        timing = Timing(time.time() - total_s, total_s, engine_s, state.env.seconds, check_s)
        facts = {"metadata": state.metadata, "is_exact": state.is_exact}
        return replace(trajectory, end_reason=end_reason, error=error, timing=timing, **facts)

    def _broken_rule(self, trajectory: Trajectory, state: EpisodeState) -> str | None:
        """Return the first rule that one of the streams breaks."""
        for number, (stream, grown) in enumerate(zip(trajectory.streams, state.streams, strict=True), 1):
            rule = broken_invariant(stream, self._vocabulary, grown.pieces)
            if rule is None and state.checks_template:
                rule = template_mismatch(stream, self.renderer)
            if rule is not None:
                return in_stream(number, rule)
        return None

    def _read_prompt(self, state: EpisodeState) -> None:
        stream = state.stream
        if self.use_tools:
            state.tools = state.env.tools
        stream.tools = state.tools
        stream.num_opening = stream.num_given = len(state.messages)
        try:
            stream.read(self.renderer.prompt(state.messages, state.tools))
        except Exception as error:  # the first observation may hold anything
            raise render_fault("prompt", error) from error

    async def _alternate(self, session: Session, state: EpisodeState) -> EndReason:
        """Alternate model and environment until one of them, or a limit, ends the episode."""
        for number in range(1, self.limits.max_turns + 1):
            room, limit = self._room(state)
            # Asked before the turn: an engine that gets no room would answer with nothing.
            if room <= 0:
                return limit
            result = await self._turn(session, state, number, room)
            finish = state.turns[-1].finish
            if finish == "abort":
                return EndReason.ABORTED
            if finish != "stop":
                return limit
            if result.done:
                return EndReason.COMPLETED
            if number < self.limits.max_turns:
                limit = await self._observe(state, result.messages)
                if limit is not None:
                    return limit
        return EndReason.MAX_TURNS

    async def _turn(self, session: Session, state: EpisodeState, number: int, room: int) -> StepResult:
        """Let the model write at most `room` tokens, and the environment answer."""
        stream = state.stream
        seed = state.seed * 1000 + number - 1
        num_routed = stream.num_routed if self.routes else None
        request = GenerateRequest(stream.ids, stream.images, room, self.sampling, seed, num_routed, state.place)
        asked = time.perf_counter()
        completion = await session.generate(request)
        answered = time.perf_counter()
        check_types(completion)
        rule = broken_turn(number, request, completion)
        rule = rule or broken_routes(number, request, completion, self.routes, stream.last_turn)
        if rule:  # so that nothing that follows joins arrays of different widths
            completion = replace(completion, kept_NK=None, routes_RLK=None)
        state.check_s += time.perf_counter() - answered
        start, end = stream.write(completion)
        turn = Turn(
            start=start,
            end=end,
            text=self._text(completion.ids),
            finish=completion.finish,
            versions=completion.versions if rule is None else ((-1, end - start),),
            num_cached=completion.num_cached,
            observations=(),
            info={},
            engine_s=answered - asked,
            env_s=0.0,
            stream=state.place,
        )
        return await self._answer(state, turn, rule)

    async def _answer(self, state: EpisodeState, turn: Turn, rule: str | None = None) -> StepResult:
        """Let the environment answer a turn where the model stopped by itself and broke no `rule` of the stream.

        Adds the turn to the state in any case, then raises the fault of engine or environment, if there is one.
        """
        state.say([{"role": "assistant", "content": turn.text}])
        env_s = state.env.seconds
        result = _NO_STEP
        if rule is None:
            fault = None
        else:
            fault = _BrokenStream(rule)
        if fault is None and turn.finish == "stop":
            try:
                result = await self._step(state, turn.text)
            except (EnvFault, asyncio.CancelledError) as caught:
                fault = caught
                if isinstance(caught, ToolFault):
                    result = StepResult((), False, caught.info)
        state.turns.append(
            replace(
                turn,
                observations=result.messages,
                info=result.info,
                env_s=state.env.seconds - env_s,
                done=result.done,
                reward=result.reward,
            )
        )
        if fault:
            raise fault
        return result

    async def _step(self, state: EpisodeState, text: str) -> StepResult:
        return await state.env.step(text)

    def _final_text(self, state: EpisodeState) -> str:
        """Return the text that the environment's reward is of."""
        if state.turns:
            return state.turns[-1].text
        return ""

    def _text(self, ids: Sequence[int]) -> str:
        try:
            return self.renderer.decode(ids)
        except (OverflowError, TypeError):  # ids that are no tokens: `broken_turn` reports them
            return ""

    def _room(self, state: EpisodeState) -> tuple[int, EndReason]:
        """Return how many more tokens fit, and the end reason once none do."""
        budget = self.limits.max_new_tokens - state.num_appended
        room = self.engine.context_length - len(state.stream.ids)
        if budget <= room:
            return (budget, EndReason.TOKEN_BUDGET)
        return (room, EndReason.CONTEXT_FULL)

    async def _observe(self, state: EpisodeState, observed: Sequence[Message]) -> EndReason | None:
        """Append the observation as the template writes it after a model turn, or begin a stream where the history is
        cut; return the end reason where it does not fit.
        """
        # Some templates cannot write two turns of the assistant in a row.
        observed = observed or ({"role": "user", "content": ""},)
        cut = await self._cut_history(state, observed)
        try:
            if cut is None:
                return self._append(state, observed)
            own = set(map(id, state.stream.messages[state.stream.num_given :]))
            return self._begin_stream(state, cut, state.tools, first_turn(cut, own))
        except Exception as error:  # an environment's message may hold anything
            raise render_fault("observation", error) from error

    async def _cut_history(self, state: EpisodeState, observed: Sequence[Message]) -> list[Message] | None:
        """Return what the model goes on seeing of its stream's messages and the observation; None if that is all."""
        if not self.history and not state.env.edits_history:
            return None
        messages = [*state.stream.messages, *observed]
        shown = messages
        if self.history:
            problem_images = message_images(state.streams[0].messages[: state.num_prompt])
            shown = self.history.shown(shown, state.stream.num_given, problem_images)
        if state.env.edits_history:
            shown = list(await state.env.edit_history(shown))
        is_whole = len(shown) == len(messages) and all(map(is_same, shown, messages))
        return None if is_whole else shown

    def _append(self, state: EpisodeState, messages: Sequence[Message]) -> EndReason | None:
        """Append messages to the stream as the template writes them after a model turn.

        Return the end reason where they do not fit. Raises whatever the template raises.
        """
        room, limit = self._room(state)
        if room <= 0 or not self._may_fit(messages, room):
            return limit
        stream = state.stream
        suffix = self.renderer.suffix(messages, last_id=stream.ids[-1], has_tools=bool(stream.tools))
        # One token at least must be left to write, or the turn would be empty.
        if len(suffix.ids) >= room:
            return limit
        stream.read(suffix)
        state.say(messages)
        return None

    def _begin_stream(
        self, state: EpisodeState, messages: list[Message], tools: Sequence[Mapping[str, Any]], num_given: int
    ) -> EndReason | None:
        """Begin a stream whose prompt is a conversation; return the end reason where it is too long.

        What the assistant says from message `num_given` on are turns of the model. Raises whatever the template raises.
        """
        room = self.engine.context_length
        if not self._may_fit(messages, room):
            return EndReason.CONTEXT_FULL
        stream = Stream(messages, tools)
        stream.num_opening = len(messages)
        stream.num_given = num_given
        rendered = self.renderer.prompt(messages, tools, num_given)
        if len(rendered.ids) >= room:
            return EndReason.CONTEXT_FULL
        stream.read(rendered)
        state.begin_stream(stream)
        return None

    def _may_fit(self, messages: Sequence[Message], room: int) -> bool:
        """Return False for a text that is too long to fit: tokenising it would block all other episodes."""
        texts = [part.get("text", "") for message in messages for part in content_parts(message)]
        return sum(map(len, texts)) <= max(0, room) * self.renderer.max_token_chars


async def _close(env: EnvRunner) -> str | None:
    """Close the environment. An abort during this is too late to count; the environment goes on closing by itself."""
    with _until_aborted():
        return await env.close()
    return None


@contextmanager
def _until_aborted() -> Iterator[None]:
    """Leave the block where the task is cancelled with `ABORT`."""
    try:
        yield
    except asyncio.CancelledError as cancelled:
        if cancelled.args != (ABORT,):
            raise


def render_fault(what: str, error: Exception) -> EnvFault:
    return EnvFault(f"the {what} cannot be rendered: {''.join(traceback.format_exception(error)).strip()}")
