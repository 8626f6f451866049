"""The agent loop: one environment, one engine session, one append-only token stream.

In: a sample, its environment, limits. Out: a `Trajectory`, whatever happened. The loop alone knows limits; the
environment alone knows when its task ended; a fault of the environment is an end reason and never an exception.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agents.engine import Engine, Session
from agents.invariants import broken_invariant
from agents.renderer import Rendered, Renderer
from agents.types import Completion, EndReason, GenerateRequest, ProcessedImage, SamplingParams, Timing, Trajectory, Turn
from envs.runner import EnvFault, EnvLimits, EnvRunner, EpisodeEnv, StepResult
from envs.types import Message, Sample, content_parts


#: `task.cancel(ABORT)` ends an episode as `aborted`, with all that it has so far; any other cancellation is passed on.
ABORT = "abort"


@dataclass(frozen=True)
class Limits:
    """The loop's limits on one episode.

    `max_new_tokens` is the budget over everything after the prompt, environment tokens included; `env` bounds the calls
    into the environment.
    """

    max_turns: int = 3
    max_new_tokens: int = 256
    env: EnvLimits = field(default_factory=EnvLimits)


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
        """Play one episode to its end, or until its task is cancelled with `ABORT`.

        Raises only what the engine or our own code raises.
        """
        started = time.perf_counter()
        stream, turns, messages = _Stream(), [], list(sample.prompt)
        reward, error = 0.0, None
        env = EnvRunner(make_env, self.limits.env)
        try:
            # Opened before the environment, so that which episodes share a batch does not depend on how fast those are.
            async with self.engine.session() as session:
                messages.extend(await env.open())
                self._open(stream, messages, env)
                end_reason = await self._turns(session, env, stream, turns, messages, seed)
            reward = await env.reward(turns[-1].text if turns else "")
        except EnvFault as fault:
            end_reason, error = EndReason.ENV_TIMEOUT if fault.timed_out else EndReason.ENV_ERROR, str(fault)
        except asyncio.CancelledError as cancelled:
            if cancelled.args != (ABORT,):
                raise
            end_reason = EndReason.ABORTED
        finally:
            close_error = await env.close()
            error = error or close_error
        timing = Timing(
            total_s=time.perf_counter() - started,
            engine_s=sum(turn.engine_s for turn in turns),
            env_s=sum(turn.env_s for turn in turns),
        )
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
            timing=timing,
        )
        return self._verified(trajectory)

    def _open(self, stream: _Stream, messages: Sequence[Message], env: EnvRunner) -> None:
        try:
            stream.read(self.renderer.prompt(messages, env.tools if self.use_tools else ()))
        except Exception as error:  # the first observation may hold anything
            raise _render_fault("prompt", error) from error
        stream.prompt_length = len(stream.ids)

    async def _turns(
        self,
        session: Session,
        env: EnvRunner,
        stream: _Stream,
        turns: list[Turn],
        messages: list[Message],
        seed: int,
    ) -> EndReason:
        """Alternate model and environment until one of them, or a limit, ends the episode."""
        for number in range(self.limits.max_turns):
            budget, room = self._left(stream)
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
            result, fault = StepResult((), False, {}), None
            if completion.finish == "stop":
                try:
                    result = await env.step(text)
                except EnvFault as caught:  # the turn is recorded before the episode ends
                    fault = caught
            turns.append(
                Turn(
                    start=start,
                    end=end,
                    text=text,
                    finish=completion.finish,
                    versions=completion.versions,
                    num_cached=completion.num_cached,
                    observations=result.messages,
                    info=result.info,
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
            if result.done:
                return EndReason.COMPLETED
            if number + 1 < self.limits.max_turns:
                budget, room = self._left(stream)
                if not self._observe(stream, messages, result.messages, min(budget, room)):
                    return EndReason.TOKEN_BUDGET if budget <= room else EndReason.CONTEXT_FULL
        return EndReason.MAX_TURNS

    def _left(self, stream: _Stream) -> tuple[int, int]:
        """Return how many tokens the budget and the context have left."""
        budget = self.limits.max_new_tokens - (len(stream.ids) - stream.prompt_length)
        return budget, self.engine.context_length - len(stream.ids)

    def _observe(self, stream: _Stream, messages: list[Message], observed: Sequence[Message], room: int) -> bool:
        """Append what the environment said, as the template writes it after a model turn; False where it does not fit.

        A text that cannot fit is not even tokenised, which would hold up all other episodes.
        """
        observed = observed or ({"role": "user", "content": ""},)
        texts = [part.get("text", "") for message in observed for part in content_parts(message)]
        if sum(map(len, texts)) > max(0, room) * self.renderer.max_token_chars:
            return False
        try:
            suffix = self.renderer.suffix(observed, last_id=stream.ids[-1])
        except Exception as error:  # an environment's message may hold anything
            raise _render_fault("observation", error) from error
        if len(suffix.ids) >= room:
            return False
        stream.read(suffix)
        messages.extend(observed)
        return True

    def _verified(self, trajectory: Trajectory) -> Trajectory:
        images = self.renderer.images
        rule = broken_invariant(
            trajectory, self.renderer.image_token_id, images.merge_size, self.renderer.suppressed_ids
        )
        if rule is None:
            return trajectory
        return replace(trajectory, end_reason=EndReason.INVALID_STREAM, error=rule)


def _render_fault(what: str, error: Exception) -> EnvFault:
    return EnvFault(f"the {what} cannot be rendered: {''.join(traceback.format_exception(error)).strip()}")
