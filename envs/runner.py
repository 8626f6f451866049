"""One environment behind its limits: calls in, checked results or an `EnvFault` out; the event loop never waits.

Whatever an environment does (raise, hang, return the wrong thing, end its process) is an `EnvFault`, and `close` always
runs: after a fault, after a call that never came back, and for an environment that was built too late.
"""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeVar

from envs.images import load_image
from envs.isolation.threads import CallTimeout, call_on_thread
from envs.spec import EnvSpec
from envs.types import Message

R = TypeVar("R")
MAX_IMAGE_PIXELS = 16_000_000


class EpisodeEnv(Protocol):
    """The part of the environment contract that an episode needs."""

    @property
    def tools(self) -> Any: ...
    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]: ...
    def format_observation(self, observation: dict[str, Any]) -> Message | Sequence[Message]: ...
    def reward(self, final_text: str) -> float: ...
    def close(self) -> None: ...


class EnvFault(Exception):
    """The environment raised, hung or returned something that the contract does not know; the message says which."""

    def __init__(self, detail: str, timed_out: bool = False) -> None:
        super().__init__(detail)
        self.timed_out = timed_out


@dataclass(frozen=True)
class EnvLimits:
    """The limits of one environment, in seconds.

    `reset_timeout_s` bounds building and resetting together, `step_timeout_s` a step with the formatting of what it
    observed, and also the reward and closing. Building and resetting are tried `retries` times more, after
    `retry_backoff_s`, then twice that, and so on. `inline` calls in place, on the event loop, without any time limit.
    """

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    retries: int = 0
    retry_backoff_s: float = 1.0
    inline: bool = False

    @classmethod
    def of(cls, spec: EnvSpec) -> EnvLimits:
        """Return what a registry entry declares."""
        return cls(
            reset_timeout_s=spec.reset_timeout_s,
            step_timeout_s=spec.step_timeout_s,
            retries=spec.retries,
            retry_backoff_s=spec.retry_backoff_s,
            inline=spec.isolation == "inline",
        )


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a turn gave: the messages for the model (none: nothing to say), whether the task ended, and facts."""

    messages: tuple[Message, ...]
    done: bool
    info: Mapping[str, Any]


class EnvRunner:
    """One episode's environment.

    Example::

        runner = EnvRunner(lambda: build_env(sample, args), EnvLimits(step_timeout_s=10))
        try:
            messages = await runner.open()                 # built and reset; runner.tools is known
            result = await runner.step("\\\\boxed{68}")      # StepResult(messages=(), done=True, info={...})
            reward = await runner.reward("\\\\boxed{68}")    # 1.0
        finally:
            close_error = await runner.close()             # None, or what went wrong
    """

    def __init__(self, make_env: Callable[[], EpisodeEnv], limits: EnvLimits) -> None:
        self._make_env, self.limits = make_env, limits
        self.tools: Sequence[dict[str, Any]] = ()
        #: How long all calls so far took, waiting for a thread included.
        self.seconds = 0.0
        self._slot = _Slot()

    async def open(self) -> tuple[Message, ...]:
        """Build and reset; return the first observation's messages."""
        for attempt in range(self.limits.retries + 1):
            try:
                self.tools, messages = await self._call(self.limits.reset_timeout_s, self._open, self._slot)
                return messages
            except EnvFault:
                if attempt == self.limits.retries:
                    raise
                await self.close()
                await asyncio.sleep(self.limits.retry_backoff_s * 2**attempt)
                self._slot = _Slot()
        raise AssertionError("the last attempt returns or raises")

    async def step(self, response_text: str) -> StepResult:
        """Let the environment take a turn of the model."""
        return await self._call(self.limits.step_timeout_s, self._step, self._slot.env, response_text)

    async def reward(self, final_text: str) -> float:
        """Return the episode's reward."""
        return await self._call(self.limits.step_timeout_s, self._reward, self._slot.env, final_text)

    async def close(self) -> str | None:
        """Close the environment, or see to it that it is closed once it has been built; return what went wrong."""
        env = self._slot.abandon()
        if env is None:
            return None
        try:
            await self._call(self.limits.step_timeout_s, _close, env)
        except EnvFault as fault:
            return str(fault)
        return None

    def _open(self, slot: _Slot) -> tuple[Sequence[dict[str, Any]], tuple[Message, ...]]:
        env = self._make_env()
        if not slot.fill(env):  # given up meanwhile
            _close(env)
            return (), ()
        if missing := {name: error for name in _METHODS if (error := _missing(env, name))}:
            fix = (
                " (an environment written for slime: add `compat: slime` to its entry)"
                if {"tools", "reward"} <= missing.keys() and "step" not in missing
                else ""
            )
            reasons = "; ".join(dict.fromkeys(map(str, missing.values())))
            rule = f"building must return an environment with {', '.join(_METHODS)}"
            raise EnvFault(f"{rule}, got {env!r:.200}: {reasons}{fix}")
        observation = _checked_reset(env.reset())
        return env.tools, checked_messages(env.format_observation(observation)) if observation else ()

    @staticmethod
    def _step(env: EpisodeEnv, response_text: str) -> StepResult:
        observation, done, info = _checked_step(env.step(response_text))
        messages = checked_messages(env.format_observation(observation)) if observation else ()
        # Copied, for an environment may go on with the list that it has put in.
        return StepResult(messages, done, {key: copy.copy(value) for key, value in info.items()})

    @staticmethod
    def _reward(env: EpisodeEnv, final_text: str) -> float:
        value = env.reward(final_text)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            fix = "; write float(...)" if isinstance(value, bool) else "; does it return?" if value is None else ""
            raise EnvFault(f"reward must be a finite number, got {value!r:.200}{fix}")
        return float(value)

    async def _call(self, limit_s: float, function: Callable[..., R], *args: object) -> R:
        """Call within the time limit; everything that is raised becomes an `EnvFault`."""
        started = time.perf_counter()
        inline = self.limits.inline
        try:
            return function(*args) if inline else await _on_thread(limit_s, function, *args)
        except (EnvFault, KeyboardInterrupt):
            raise
        except BaseException as error:  # whatever an environment raises is data; but a wait may be cancelled
            if not inline and not isinstance(error, Exception):
                raise
            raise EnvFault(f"the environment raised: {_trace(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started


class _Slot:
    """The place of an environment that a thread may still be building when nobody waits for it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False
        self._env: EpisodeEnv | None = None

    @property
    def env(self) -> EpisodeEnv:
        assert self._env is not None, "the runner is not open"
        return self._env

    def fill(self, env: EpisodeEnv) -> bool:
        """Put the environment in; False where it was abandoned, and is the builder's to close."""
        with self._lock:
            if not self._abandoned:
                self._env = env
            return not self._abandoned

    def abandon(self) -> EpisodeEnv | None:
        """Take the environment out, if there is one, to be closed."""
        with self._lock:
            env, self._env, self._abandoned = self._env, None, True
            return env


async def _on_thread(limit_s: float, function: Callable[..., R], *args: object) -> R:
    """Run on a thread; raise `EnvFault` where that takes longer than the limit, whatever the thread then does."""
    try:
        return await call_on_thread(function, *args, limit_s=limit_s)
    except CallTimeout as error:
        name = function.__name__.strip("_")
        raise EnvFault(f"{name} took longer than {limit_s:g} s", timed_out=True) from error


def _trace(error: BaseException) -> str:
    """Return the traceback without the frames of this file, which say nothing about the environment."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        each.stack = traceback.StackSummary.from_list([f for f in each.stack if f.filename != __file__])
        each = each.__cause__ or each.__context__
    return "".join(shown.format()).strip()


# Checks of what an environment returns --------------------------------------------------------------------------------

_METHODS = ["tools", "reset", "step", "format_observation", "reward", "close"]


def _missing(env: object, name: str) -> AttributeError | None:
    """Return why an attribute is not there; a property that needs one that is not set tells of that."""
    try:
        getattr(env, name)
    except AttributeError as error:
        return error
    return None


def _close(env: EpisodeEnv) -> None:
    if hasattr(env, "close"):
        env.close()


def last_line(text: str | None) -> str:
    """Return the last line of a fault's text, which says most."""
    lines = (text or "").strip().splitlines()
    return lines[-1] if lines else "it does not say why"


def _checked_reset(value: object) -> dict[str, Any]:
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, dict) for part in value):
        return value[0]
    fix = "; does it return?" if value is None else ""
    raise EnvFault(f"reset must return (dict, dict), got {value!r:.200}{fix}")


def _checked_step(value: object) -> tuple[dict[str, Any], bool, Mapping[str, Any]]:
    if isinstance(value, tuple) and len(value) == 3:
        observation, done, info = value
        is_flag = isinstance(done, bool) or type(done).__name__ in ("bool_", "bool")  # numpy's, without importing it
        if isinstance(observation, dict) and is_flag and isinstance(info, dict):
            return observation, bool(done), info
    fix = "; does it return?" if value is None else ""
    raise EnvFault(f"step must return (dict, bool, dict), got {value!r:.200}{fix}")


def checked_messages(value: object) -> tuple[Message, ...]:
    """Return what `format_observation` gave as checked messages whose pictures are decoded."""
    return tuple(_message(each) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _message(value: object) -> Message:
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        content = value.get("content")
        if isinstance(content, str):
            return {**value}
        if isinstance(content, list):
            return {**value, "content": [_part(part) for part in content]}
    rule = 'format_observation must return {"role": str, "content": str or list of parts}, or a list of such messages'
    raise EnvFault(f"{rule}, got {value!r:.200}")


def _part(part: object) -> dict[str, Any]:
    if isinstance(part, dict):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return {**part}
        if part.get("type") == "image":
            return {
                **part,
                "image": load_image(part.get("image"), "observation image", None, max_pixels=MAX_IMAGE_PIXELS),
            }
    raise EnvFault(
        f'a part must be {{"type": "text", "text": str}} or {{"type": "image", "image": picture}}, got {part!r:.200}'
    )
