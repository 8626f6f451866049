"""The agent loop: one environment, one engine session, one append-only token stream.

In: a sample, its environment, limits. Out: a `Trajectory`, whatever happened. The loop alone knows limits; the
environment alone knows when its task ended; a fault of the environment is an end reason and never an exception, and so
is an engine's answer that does not belong to its request.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from agents.engine import Engine, Session
from agents.invariants import Vocabulary, broken_invariant, broken_turn
from agents.renderer import Renderer
from agents.stream import Stream
from agents.template_check import template_mismatch
from agents.types import EndReason, GenerateRequest, SamplingParams, Timing, Trajectory, Turn
from envs.runner import EnvFault, EnvLimits, EnvRunner, EpisodeEnv, StepResult
from envs.types import Message, Sample, content_parts

#: `task.cancel(ABORT)` ends an episode as `aborted`, with all that it has so far; any other cancellation is passed on.
ABORT = "abort"


@dataclass(frozen=True)
class Limits:
    """The loop's limits on one episode.

    `max_new_tokens` is the budget over everything after the prompt, environment tokens included; `env` bounds the calls
    into the environment. The first episode, and each `check_template_every`-th after it, is compared as a whole with
    the model's chat template (`agents.template_check`: about a millisecond; 1 checks all, 0 none). The other rules of a
    stream (`agents.invariants`) hold in every episode.
    """

    max_turns: int = 3
    max_new_tokens: int = 256
    env: EnvLimits = field(default_factory=EnvLimits)
    check_template_every: int = 128


#: What a turn gave that the environment was not asked about.
_NOT_ASKED = StepResult((), False, {})


class _BrokenStream(Exception):
    """The engine's answer breaks a rule of the stream; the message says which."""


@dataclass(eq=False)
class _Play:
    """One episode while it is played."""

    env: EnvRunner
    seed: int
    messages: list[Message]
    stream: Stream = field(default_factory=Stream)
    turns: list[Turn] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    is_template_checked: bool = False
    check_s: float = 0.0


class Episode:
    """Everything that episodes of a run share; `run` plays one.

    Example::

        episode = Episode(engine, renderer, Limits(max_turns=3), SamplingParams(stop_ids=renderer.stop_ids))
        trajectory = await episode.run(sample, lambda: build_env(sample, args), seed=7)
        trajectory.end_reason, trajectory.reward      # (EndReason.COMPLETED, 1.0)
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, limits: Limits, sampling: SamplingParams, use_tools: bool = True
    ) -> None:
        self.engine, self.renderer, self.limits, self.sampling = engine, renderer, limits, sampling
        self.use_tools = use_tools
        self._numbers = count()
        self._vocabulary = Vocabulary(
            renderer.image_token_id,
            renderer.merge_size,
            frozenset(renderer.suppressed_ids),
            renderer.tokenizer.decode,
        )

    async def run(
        self,
        sample: Sample,
        make_env: Callable[[], EpisodeEnv],
        seed: int,
        sample_index: int = 0,
        group: int = 0,
        attempt: int = 0,
    ) -> Trajectory:
        """Play one episode to its end, or until its task is cancelled with `ABORT`; numbers are `Trajectory`'s.

        Raises only what the engine or our own code raises. A stream that breaks a rule, by the engine's answer or when
        it is finished, ends as `invalid_stream`; `error` says which rule and where.
        """
        started = time.perf_counter()
        play = _Play(EnvRunner(make_env, self.limits.env), seed, list(sample.prompt))
        every = self.limits.check_template_every
        play.is_template_checked = every > 0 and next(self._numbers) % every == 0
        env, turns = play.env, play.turns
        reward, error = 0.0, None
        try:
            # Opened before the environment, so that which episodes share a batch does not depend on how fast those are.
            async with self.engine.session() as session:
                play.messages.extend(await env.open())
                self._open(play)
                end_reason = await self._turns(session, play)
            reward = await env.reward(turns[-1].text if turns else "")
        except EnvFault as fault:
            end_reason, error = EndReason.ENV_TIMEOUT if fault.timed_out else EndReason.ENV_ERROR, str(fault)
        except _BrokenStream as broken:
            end_reason, error = EndReason.INVALID_STREAM, str(broken)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (ABORT,):
                raise
            end_reason = EndReason.ABORTED
        finally:
            close_error = await _close(env)
            error = error or close_error
        return self._trajectory(sample, (group, sample_index, attempt), play, reward, end_reason, error, started)

    def _trajectory(
        self,
        sample: Sample,
        key: tuple[int, int, int],
        play: _Play,
        reward: float,
        end_reason: EndReason,
        error: str | None,
        started: float,
    ) -> Trajectory:
        """Return the finished episode; one whose stream breaks a rule ends as `invalid_stream`."""
        stream, turns, messages = play.stream, tuple(play.turns), tuple(play.messages)
        ids_T, mask_T, logprobs_T = stream.arrays()
        group, sample_index, attempt = key

        def make(end_reason: EndReason, error: str | None, timing: Timing) -> Trajectory:
            return Trajectory(
                sample_id=sample.id,
                sample_index=sample_index,
                seed=play.seed,
                ids_T=ids_T,
                mask_T=mask_T,
                logprobs_T=logprobs_T,
                images=stream.images,
                turns=turns,
                reward=reward,
                end_reason=end_reason,
                prompt_length=stream.prompt_length,
                messages=messages,
                error=error,
                metadata=sample.metadata,
                timing=timing,
                label=sample.label,
                num_prompt_messages=len(sample.prompt),
                tools=tuple(play.tools),
                group=group,
                attempt=attempt,
            )

        checked = time.perf_counter()
        if end_reason is not EndReason.INVALID_STREAM:
            rule = self._broken_rule(make(end_reason, error, Timing()), play)
            if rule is not None:
                end_reason, error = EndReason.INVALID_STREAM, f"{error}\n{rule}" if error else rule
        now = time.perf_counter()
        engine_s = sum([turn.engine_s for turn in turns])
        total_s, check_s = now - started, play.check_s + now - checked
        return make(end_reason, error, Timing(time.time() - total_s, total_s, engine_s, play.env.seconds, check_s))

    def _broken_rule(self, trajectory: Trajectory, play: _Play) -> str | None:
        rule = broken_invariant(trajectory, self._vocabulary, play.stream.pieces)
        if rule is None and play.is_template_checked:
            try:
                rule = template_mismatch(trajectory, self.renderer, play.tools)
            except Exception as error:  # a conversation that the template cannot write as a whole
                return f"the whole conversation cannot be rendered: {type(error).__name__}: {error}"
        return rule

    def _open(self, play: _Play) -> None:
        if self.use_tools:
            play.tools = play.env.tools
        try:
            play.stream.read(self.renderer.prompt(play.messages, play.tools))
        except Exception as error:  # the first observation may hold anything
            raise _render_fault("prompt", error) from error

    async def _turns(self, session: Session, play: _Play) -> EndReason:
        """Alternate model and environment until one of them, or a limit, ends the episode."""
        for number in range(1, self.limits.max_turns + 1):
            room, limit = self._room(play.stream)
            if room <= 0:
                return limit
            result = await self._turn(session, play, number, room)
            finish = play.turns[-1].finish
            if finish == "abort":
                return EndReason.ABORTED
            if finish != "stop":
                return limit
            if result.done:
                return EndReason.COMPLETED
            if number < self.limits.max_turns:
                room, limit = self._room(play.stream)
                if not self._observe(play, result.messages, room):
                    return limit
        return EndReason.MAX_TURNS

    async def _turn(self, session: Session, play: _Play, number: int, room: int) -> StepResult:
        """Let the model write at most `room` tokens, and the environment answer where it stopped by itself.

        The turn is recorded whatever happens; then a fault of either is raised.
        """
        stream, env = play.stream, play.env
        request = GenerateRequest(stream.ids, stream.images, room, self.sampling, play.seed * 1000 + number - 1)
        asked = time.perf_counter()
        completion = await session.generate(request)
        answered = time.perf_counter()
        rule = broken_turn(number, request, completion)
        play.check_s += time.perf_counter() - answered
        start, end = stream.write(completion)
        text = self._text(completion.ids)
        play.messages.append({"role": "assistant", "content": text})
        env_s = env.seconds
        result, fault = _NOT_ASKED, None if rule is None else _BrokenStream(rule)
        if fault is None and completion.finish == "stop":
            try:
                result = await env.step(text)
            except (EnvFault, asyncio.CancelledError) as caught:
                fault = caught
        play.turns.append(
            Turn(
                start=start,
                end=end,
                text=text,
                finish=completion.finish,
                versions=completion.versions if rule is None else ((-1, end - start),),
                num_cached=completion.num_cached,
                observations=result.messages,
                info=result.info,
                engine_s=answered - asked,
                env_s=env.seconds - env_s,
                done=result.done,
            )
        )
        if fault:
            raise fault
        return result

    def _text(self, ids: Sequence[int]) -> str:
        try:
            return self.renderer.decode(ids)
        except (OverflowError, TypeError):  # ids that are no tokens: `broken_turn` has said so
            return ""

    def _room(self, stream: Stream) -> tuple[int, EndReason]:
        """Return how many tokens may still come, and what has ended the episode once there are none left."""
        length = len(stream.ids)
        budget = self.limits.max_new_tokens - (length - stream.prompt_length)
        room = self.engine.context_length - length
        return (budget, EndReason.TOKEN_BUDGET) if budget <= room else (room, EndReason.CONTEXT_FULL)

    def _observe(self, play: _Play, observed: Sequence[Message], room: int) -> bool:
        """Append what the environment said, as the template writes it after a model turn; False where it does not fit.

        A text that cannot fit is not even tokenised, which would hold up all other episodes.
        """
        observed = observed or ({"role": "user", "content": ""},)
        texts = [part.get("text", "") for message in observed for part in content_parts(message)]
        if sum(map(len, texts)) > max(0, room) * self.renderer.max_token_chars:
            return False
        try:
            suffix = self.renderer.suffix(observed, last_id=play.stream.ids[-1])
        except Exception as error:  # an environment's message may hold anything
            raise _render_fault("observation", error) from error
        if len(suffix.ids) >= room:
            return False
        play.stream.read(suffix)
        play.messages.extend(observed)
        return True


async def _close(env: EnvRunner) -> str | None:
    """Close the environment; an abort that comes meanwhile comes too late, and the closing goes on by itself."""
    try:
        return await env.close()
    except asyncio.CancelledError as cancelled:
        if cancelled.args != (ABORT,):
            raise
        return None


def _render_fault(what: str, error: Exception) -> EnvFault:
    return EnvFault(f"the {what} cannot be rendered: {''.join(traceback.format_exception(error)).strip()}")
