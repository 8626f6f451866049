"""The agent loop: one environment, one engine session, one append-only token stream.

In: a sample, its environment, limits. Out: a `Trajectory`, whatever happened. The loop alone knows limits; the
environment alone knows when its task ended; a fault of the environment is an end reason and never an exception.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from agents.engine import Engine, Session
from agents.invariants import broken_invariant
from agents.renderer import Rendered, Renderer
from agents.types import Completion, EndReason, GenerateRequest, ProcessedImage, SamplingParams, Trajectory, Turn
from envs.types import Message, Sample

R = TypeVar("R")


@runtime_checkable
class EpisodeEnv(Protocol):
    """The part of the environment contract that the loop uses."""

    tools: Any

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]: ...
    def format_observation(self, observation: dict[str, Any]) -> Message: ...
    def reward(self, final_text: str) -> float: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Limits:
    """The loop's limits on one episode.

    `max_new_tokens` is the budget over everything after the prompt, environment tokens included. `env_timeout_s` bounds
    each call into the environment, which then runs on a thread of its own; 0 calls it in place, without a bound.
    """

    max_turns: int = 3
    max_new_tokens: int = 256
    env_timeout_s: float = 30.0


class EnvFault(Exception):
    """The environment raised, hung or returned something that the contract does not know."""

    def __init__(self, reason: EndReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(eq=False)
class _Stream:
    """The growing stream of one episode."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    images: list[ProcessedImage] = field(default_factory=list)
    prompt_length: int = 0

    def read(self, rendered: Rendered) -> None:
        """Append tokens that the model did not write."""
        self.ids.extend(rendered.ids)
        self.mask.extend([False] * len(rendered.ids))
        self.logprobs.extend([0.0] * len(rendered.ids))
        self.images.extend(rendered.images)

    def write(self, completion: Completion) -> tuple[int, int]:
        """Append a model turn; return its span."""
        start = len(self.ids)
        self.ids.extend(completion.ids)
        self.mask.extend([True] * len(completion.ids))
        self.logprobs.extend(completion.logprobs)
        return start, len(self.ids)


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

    async def run(
        self, sample: Sample, make_env: Callable[[], EpisodeEnv], seed: int, sample_index: int = 0
    ) -> Trajectory:
        """Play one episode to its end. Raises only what the engine or our own code raises."""
        stream, turns, messages = _Stream(), [], []
        reward, error = 0.0, None
        env: EpisodeEnv | None = None
        async with self.engine.session() as session:
            try:
                env = await self._call(_build_env, make_env)
                observation, _ = _checked_reset(await self._call(env.reset))
                messages.extend(sample.prompt)
                if observation:
                    messages.append(_checked_message(await self._call(env.format_observation, observation)))
                self._open(stream, messages, env)
                end_reason = await self._turns(session, env, stream, turns, messages, seed)
                reward = await self._reward(env, turns)
            except EnvFault as fault:
                end_reason, error = fault.reason, str(fault)
            finally:
                if env is not None:
                    close_error = await self._close(env)
                    error = error or close_error
        trajectory = Trajectory(
            sample_id=sample.id,
            sample_index=sample_index,
            seed=seed,
            ids_T=np.asarray(stream.ids, dtype=np.int64),
            mask_T=np.asarray(stream.mask, dtype=np.bool_),
            logprobs_T=np.asarray(stream.logprobs, dtype=np.float32),
            images=tuple(stream.images),
            turns=tuple(turns),
            reward=reward,
            end_reason=end_reason,
            prompt_length=stream.prompt_length,
            messages=tuple(messages),
            error=error,
            metadata=sample.metadata,
        )
        return self._verified(trajectory)

    def _open(self, stream: _Stream, messages: list[Message], env: EpisodeEnv) -> None:
        try:
            stream.read(self.renderer.prompt(messages, env.tools if self.use_tools else ()))
        except Exception as error:  # the first observation may hold anything
            raise EnvFault(EndReason.ENV_ERROR, _trace("the prompt cannot be rendered", error)) from error
        stream.prompt_length = len(stream.ids)

    async def _turns(
        self,
        session: Session,
        env: EpisodeEnv,
        stream: _Stream,
        turns: list[Turn],
        messages: list[Message],
        seed: int,
    ) -> EndReason:
        """Alternate model and environment until one of them, or a limit, ends the episode."""
        for number in range(self.limits.max_turns):
            budget = self.limits.max_new_tokens - (len(stream.ids) - stream.prompt_length)
            room = self.engine.context_length - len(stream.ids)
            if min(budget, room) <= 0:
                return EndReason.TOKEN_BUDGET if budget <= room else EndReason.CONTEXT_FULL
            started = time.perf_counter()
            completion = await session.generate(
                GenerateRequest(
                    tuple(stream.ids), tuple(stream.images), min(budget, room), self.sampling, seed * 1000 + number
                )
            )
            assert completion.prompt_length == len(stream.ids), (
                f"turn {number + 1}: the engine read {completion.prompt_length} tokens, the stream has "
                f"{len(stream.ids)}"
            )
            engine_s = time.perf_counter() - started
            start, end = stream.write(completion)
            text = self.renderer.decode(completion.ids)
            messages.append({"role": "assistant", "content": text})
            step_started = time.perf_counter()
            message, done, info, fault = None, False, {}, None
            if completion.finish == "stop":
                try:
                    observation, done, info = _checked_step(await self._call(env.step, text))
                    if observation:
                        message = _checked_message(await self._call(env.format_observation, observation))
                except EnvFault as caught:  # the turn is recorded before the episode ends
                    fault = caught
            turns.append(
                Turn(
                    start=start,
                    end=end,
                    text=text,
                    finish=completion.finish,
                    weight_version=completion.weight_version,
                    observation=message,
                    info=info,
                    engine_s=engine_s,
                    env_s=time.perf_counter() - step_started,
                )
            )
            if fault:
                raise fault
            if completion.finish == "abort":
                return EndReason.ABORTED
            if completion.finish != "stop":
                return EndReason.TOKEN_BUDGET if budget <= room else EndReason.CONTEXT_FULL
            if done:
                return EndReason.COMPLETED
            if number + 1 < self.limits.max_turns:
                self._observe(stream, messages, message)
        return EndReason.MAX_TURNS

    def _observe(self, stream: _Stream, messages: list[Message], message: Message | None) -> None:
        """Append what the environment said, as the template writes it after a model turn."""
        message = message or {"role": "user", "content": ""}
        try:
            stream.read(self.renderer.suffix(message, last_id=stream.ids[-1]))
        except Exception as error:  # an environment's message may hold anything
            raise EnvFault(EndReason.ENV_ERROR, _trace("the observation cannot be rendered", error)) from error
        messages.append(message)

    async def _reward(self, env: EpisodeEnv, turns: list[Turn]) -> float:
        value = await self._call(env.reward, turns[-1].text if turns else "")
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not math.isfinite(value):
            raise EnvFault(EndReason.ENV_ERROR, f"reward must be a finite number, got {value!r}")
        return float(value)

    async def _close(self, env: EpisodeEnv) -> str | None:
        try:
            await self._call(env.close)
        except EnvFault as fault:
            return str(fault)
        return None

    async def _call(self, function: Callable[..., R], *args: object) -> R:
        """Call into the environment within its time limit; everything it raises becomes an `EnvFault`."""
        limit = self.limits.env_timeout_s
        clock = asyncio.timeout(limit)
        try:
            if limit == 0:
                return function(*args)
            async with clock:
                return await _on_thread(function, *args)
        except Exception as error:  # whatever an environment raises is data
            if clock.expired():  # and not a TimeoutError of the environment's own
                name = getattr(function, "__qualname__", repr(function))
                raise EnvFault(EndReason.ENV_TIMEOUT, f"{name} took longer than {limit} s") from error
            raise EnvFault(EndReason.ENV_ERROR, _trace("the environment raised", error)) from error

    def _verified(self, trajectory: Trajectory) -> Trajectory:
        images = self.renderer.images
        rule = broken_invariant(
            trajectory, self.renderer.image_token_id, images.merge_size, self.renderer.suppressed_ids
        )
        if rule is None:
            return trajectory
        return replace(trajectory, end_reason=EndReason.INVALID_STREAM, error=rule)


async def _on_thread(function: Callable[..., R], *args: object) -> R:
    """Run on a daemon thread: one that hangs is left behind and does not keep the program from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def finish(setter: Callable[[Any], None], value: object) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            result = function(*args)
        except BaseException as error:  # handed to the waiting episode
            # A future cannot carry StopIteration, nor should SystemExit reach the event loop.
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            caught = error if plain else RuntimeError(f"{type(error).__name__}: {error}")
            outcome = (future.set_exception, caught)
        else:
            outcome = (future.set_result, result)
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return await future


def _build_env(make_env: Callable[[], EpisodeEnv]) -> EpisodeEnv:
    env = make_env()
    if not isinstance(env, EpisodeEnv):
        raise TypeError(f"building must return an environment with the methods of envs.env.Env, got {env!r:.200}")
    return env


def _checked_reset(value: object) -> tuple[dict[str, Any], Mapping[str, Any]]:
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, dict) for part in value):
        return value
    raise EnvFault(EndReason.ENV_ERROR, f"reset must return (dict, dict), got {value!r:.200}")


def _checked_step(value: object) -> tuple[dict[str, Any], bool, Mapping[str, Any]]:
    if isinstance(value, tuple) and len(value) == 3:
        observation, done, info = value
        if isinstance(observation, dict) and isinstance(done, bool | np.bool_) and isinstance(info, dict):
            return observation, bool(done), info
    raise EnvFault(EndReason.ENV_ERROR, f"step must return (dict, bool, dict), got {value!r:.200}")


def _checked_message(value: object) -> Message:
    if isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str | list):
        return value
    rule = 'format_observation must return {"role": str, "content": str or list}'
    raise EnvFault(EndReason.ENV_ERROR, f"{rule}, got {value!r:.200}")


def _trace(what: str, error: Exception) -> str:
    return f"{what}: {''.join(traceback.format_exception(error)).strip()}"
