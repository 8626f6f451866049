"""Calls one episode's environment within its limits and checks the results; the event loop never waits.

Every fault of an environment (it raises, hangs, returns a wrong value or ends its process) becomes an `EnvFault`; one
that the model's action caused becomes a `ToolFault`, as the entry's `on_tool_fault` says.
`close` always runs: after a fault, after a call that never returned, and for an environment that was built too late.

No object of the environment reaches the event loop, where its methods, or its end, would hold up all episodes: what a
call returns or raises is made plain within the call, and the environment itself stays in a `_Slot`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from envs.contract import (
    TOOL_FAULT,
    EnvFault,
    EpisodeEnv,
    HostLost,
    ToolFault,
    checked_answer,
    checked_opening,
    checked_tools,
    plain,
    plain_dict,
    plain_fault,
)
from envs.env import Env
from envs.errors import shortened
from envs.execution import watchdog
from envs.execution.threads import CallTimeout, call_on_thread
from envs.history import checked_history, with_numbers
from envs.spec import EnvLimits
from envs.tool_calls.thinking import Thinking
from envs.turn_rewards import EpisodeReward, reward_of_text
from envs.types import Message
from envs.wrapper import unwrapped

R = TypeVar("R")
#: The most characters of an error of several lines.
MAX_ERROR_CHARS = 500


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a turn: messages for the model (may be empty), whether the task ended, its info and its reward."""

    messages: tuple[Message, ...]
    done: bool
    info: Mapping[str, Any]
    reward: float = 0.0


class EnvRunner:
    """Runs the environment of one episode.

    Example::

        runner = EnvRunner(lambda: build_env(sample, args), EnvLimits(step_timeout_s=10))
        try:
            messages = await runner.open()                 # built and reset; runner.tools is known
            result = await runner.step("\\\\boxed{68}")      # StepResult(messages=(), done=True, info={...})
            reward = await runner.reward("\\\\boxed{68}")    # 1.0
        finally:
            close_error = await runner.close()             # None, or what went wrong
    """

    def __init__(
        self,
        make_env: Callable[[], EpisodeEnv],
        limits: EnvLimits,
        sample_id: str = "",
        thinking: Thinking | None = None,
    ) -> None:
        """`sample_id` is for messages. The environment gets only what a turn says outside of `thinking`."""
        self._make_env = make_env
        self.limits = limits
        self._sample_id = sample_id
        self._thinking = thinking
        self.tools: Sequence[dict[str, Any]] = ()
        #: Whether the environment's steps are made of tool calls, as those of a `ToolEnv`; known once it is open.
        self.runs_tools = False
        #: Whether the environment has an `edit_history`; known once it is open.
        self.edits_history = False
        #: Duration of all calls so far, with the time spent waiting for a thread.
        self.seconds = 0.0
        self._slot = _Slot()
        self._earned = EpisodeReward()

    async def open(self) -> tuple[Message, ...]:
        """Build and reset; return the first observation's messages."""
        for attempt in range(self.limits.retries + 1):
            try:
                opened = await self._call(self.limits.reset_timeout_s, self._open, self._slot)
                self.tools, self.runs_tools, self.edits_history, messages = opened
                return messages
            except EnvFault:
                if attempt == self.limits.retries:
                    raise
                await self.close()  # what was built before the fault
                await asyncio.sleep(self.limits.retry_backoff_s * 2**attempt)
                self._slot = _Slot()
        raise AssertionError("the last attempt returns or raises")

    async def step(self, response_text: str) -> StepResult:
        """Give the environment what the model says in one turn.

        Raises:
            ToolFault: the text made the step fail, and the entry says that the episode counts.
            EnvFault: any other fault.
        """
        said = self._said(response_text)
        try:
            messages, done, info = await self._call(self.limits.step_timeout_s, self._step, self._slot, said)
            return StepResult(messages, done, info, self._earned.add(info))
        except ToolFault:
            raise
        except EnvFault as fault:
            if not (self._slot.is_stepping and self._is_of_action(fault)):
                raise
            info = {"tool_calls": [await self._lost_call(said, fault)]}
            raise ToolFault(str(fault), info, fault.timed_out) from fault

    def _is_of_action(self, fault: EnvFault) -> bool:
        """Return whether a fault in `step` counts against the model.

        With "observe", a `ToolEnv` shows what its tools raise. A tool that hangs or ends the process leaves no
        environment that could go on. The episode counts all the same, because dropping it would favour breaking things.
        """
        if isinstance(fault, HostLost):  # no text of a model takes a host away
            return False
        if self.limits.on_tool_fault == "observe":
            return self.runs_tools and (fault.timed_out or fault.process_ended)
        return self.limits.on_tool_fault == "reward_min"

    async def _lost_call(self, response_text: str, fault: EnvFault) -> dict[str, Any]:
        """Return the record of a call that never returned; which one is known if all calls are of one tool."""
        try:
            names = await self._call(self.limits.step_timeout_s, _called_tools, self._slot, response_text)
        except EnvFault:
            names = None
        name = names[0] if names and len(set(names)) == 1 else None
        return {"name": name, "arguments": None, "outcome": TOOL_FAULT, "reason": last_line(str(fault))}

    async def reward(self, final_text: str) -> float:
        """Return the episode's reward: the sum of its turns' rewards and of that of the last text."""
        of_text = await self._call(self.limits.step_timeout_s, self._reward, self._slot, self._said(final_text))
        return self._earned.total(of_text)

    async def edit_history(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return what the environment lets the model go on seeing of a conversation; images are the same objects."""
        return await self._call(self.limits.step_timeout_s, self._edit_history, self._slot, messages)

    def _said(self, text: str) -> str:
        if self._thinking:
            return self._thinking.said(text)
        return text

    async def close(self) -> str | None:
        """Close the environment, now or as soon as it is built; return the fault of closing, if any."""
        if not self._slot.abandon():
            return None
        try:
            await self._call(self.limits.step_timeout_s, _close, self._slot)
        except EnvFault as fault:
            return str(fault)
        return None

    def _open(self, slot: _Slot) -> tuple[Sequence[dict[str, Any]], bool, bool, tuple[Message, ...]]:
        env = self._make_env()
        if not slot.fill(env):  # the caller gave up while this thread was building
            _close(slot)
            return (), False, False, ()
        _check_methods(env)
        observation = _checked_reset(env.reset())
        messages = checked_opening(env.format_observation(observation)) if observation else ()
        edits_history = callable(getattr(env, "edit_history", None))
        return checked_tools(env.tools), _called_tools(slot, "") is not None, edits_history, messages

    @staticmethod
    def _step(slot: _Slot, response_text: str) -> tuple[tuple[Message, ...], bool, dict[str, Any]]:
        env = slot.env
        slot.is_stepping = True
        result = env.step(response_text)
        slot.is_stepping = False
        observation, done, info = _checked_step(result)
        messages = checked_answer(env.format_observation(observation)) if observation else ()
        return messages, done, plain_dict(info)

    @staticmethod
    def _edit_history(slot: _Slot, messages: Sequence[Message]) -> tuple[Message, ...]:
        env: Any = slot.env
        numbered, _ = with_numbers(messages)
        return checked_history(env.edit_history(numbered), messages)

    @staticmethod
    def _reward(slot: _Slot, final_text: str) -> float | None:
        return reward_of_text(slot.env, final_text)

    async def _call(self, limit_s: float, function: Callable[..., R], slot: _Slot, *args: object) -> R:
        """Call within the time limit; every exception becomes an `EnvFault`."""
        started = time.perf_counter()
        name = function.__name__.strip("_")
        label = f"{name} of {slot.kind}, sample {self._sample_id or 'unknown'}"
        names = CallNames(label, "the environment", name)
        try:
            return await call_within(limit_s, self.limits.inline, names, function, slot, *args)
        finally:
            self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class CallNames:
    """What the watchdog calls a call of a user's code, and who has raised or taken too long in messages of faults."""

    label: str
    raised: str
    too_long: str


async def call_within(
    limit_s: float,
    inline: bool,
    names: CallNames,
    function: Callable[..., R],
    *args: object,
) -> R:
    """Call code of a user within a time limit, on a thread or `inline`; every exception becomes an `EnvFault`."""
    if not inline:
        return await _on_thread(limit_s, names, function, *args)
    with watchdog.WATCHDOG.watch(names.label, limit_s, inline):
        return _called(names.raised, function, *args)


class _Slot:
    """Holds the environment, which a thread may still build after the caller has given up.

    `kind` is the name of the environment's class, for messages; before it is built there is none. `is_stepping` tells
    that the environment's own `step` runs or has raised; its thread may still run after the time limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False
        self._env: EpisodeEnv | None = None
        self.kind = "an environment"
        self.is_stepping = False

    @property
    def env(self) -> EpisodeEnv:
        assert self._env is not None, "the runner is not open"
        return self._env

    def fill(self, env: EpisodeEnv) -> bool:
        """Store the environment; return False if the slot was abandoned, so that the builder must close it."""
        self.kind = type(unwrapped(env)).__qualname__
        with self._lock:
            self._env = env
            return not self._abandoned

    def abandon(self) -> bool:
        """Return whether there is an environment, which the caller must close; one that comes later its builder."""
        with self._lock:
            is_first = not self._abandoned
            self._abandoned = True
            return is_first and self._env is not None

    def take(self) -> EpisodeEnv:
        """Remove and return the environment."""
        env = self.env
        self._env = None
        return env


async def _on_thread(limit_s: float, names: CallNames, function: Callable[..., R], *args: object) -> R:
    """Run on a thread; raise `EnvFault` after the time limit, even if the thread still runs."""

    threads: list[int] = []

    def watched() -> R:
        threads.append(threading.get_ident())
        with watchdog.WATCHDOG.watch(names.label, limit_s):
            return _called(names.raised, function, *args)

    try:
        return await call_on_thread(watched, limit_s=limit_s)
    except CallTimeout as error:
        raise EnvFault(f"{_stack(threads)}{names.too_long} took longer than {limit_s:g} s", timed_out=True) from error


def _stack(threads: Sequence[int]) -> str:
    """Return where the environment's code stands on a thread, outermost call first; empty if it never ran."""
    frame = sys._current_frames().get(threads[0]) if threads else None
    stack = traceback.extract_stack(frame) if frame else []
    ours = max((place for place, frame in enumerate(stack) if frame.filename == __file__), default=len(stack))
    return "".join(traceback.format_list(stack[ours + 1 :]))


def _called(who: str, function: Callable[..., R], *args: object) -> R:
    """Call; every exception becomes an `EnvFault`, which is made here: a foreign `__str__` may never return."""
    process = os.getpid()
    try:
        return function(*args)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            if threading.current_thread() is threading.main_thread():
                raise
            exec("")  # an author's `exec` that raised it lets Python end with the status of Ctrl-C; this takes it back
        if isinstance(error, EnvFault):
            fault = plain_fault(error)
        else:
            fault = EnvFault(f"{who} raised: {trace_of(error)}")
        traceback.clear_frames(error.__traceback__)  # they may hold the error, and end with it on any thread
    finally:
        if os.getpid() != process:  # the call forked, and this is the copy: the program must not go on in both
            os._exit(1)
    raise fault  # here, where it has no link to the author's exception


def trace_of(error: BaseException) -> str:
    """Return the traceback without the frames of this file."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        each.stack = traceback.StackSummary.from_list([f for f in each.stack if f.filename != __file__])
        each = each.__cause__ or each.__context__
    return "".join(shown.format()).strip()


# Checks of what an environment returns --------------------------------------------------------------------------------

_METHODS = ("tools", "reset", "step", "format_observation", "close")


def _check_methods(env: object) -> None:
    for name in _METHODS:
        try:
            getattr(env, name)
        except AttributeError as error:  # a property may name the attribute that it needs
            is_of_slime = name == "tools" and hasattr(env, "step") and not hasattr(env, "reward")
            fix = " (an environment written for slime: add `compat: slime` to its entry)" if is_of_slime else ""
            rule = f"building must return an environment with {', '.join(_METHODS)}"
            raise EnvFault(f"{rule}, got {type(env).__name__}: {error}{fix}") from error


def _called_tools(slot: _Slot, response_text: str) -> list[str] | None:
    env = slot.env
    names = env.called_tools(response_text) if isinstance(env, Env) else None
    return None if names is None else plain([*names])


def _close(slot: _Slot) -> None:
    env = slot.take()
    if hasattr(env, "close"):
        env.close()


def last_line(text: str | None) -> str:
    """Return the last line of a fault's text, which names the error; of a traceback the whole error, in one line.

    What follows a blank line says more than the traceback before it.

    >>> last_line('Traceback:\\n  File "shop.py", line 3\\n    check(x)\\nValidationError: 1 error\\n  For help ...')
    'ValidationError: 1 error For help ...'
    """
    lines = (text or "").strip().rpartition("\n\n")[2].splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    for number in range(frames[-1] + 1 if frames else len(lines), len(lines)):
        if not lines[number].startswith(" "):  # below the last frame's source code
            return shortened(" ".join(" ".join(lines[number:]).split()), MAX_ERROR_CHARS)
    if lines:
        return lines[-1]
    return "it does not say why"


def _checked_reset(value: object) -> dict[str, Any]:
    match value:
        case tuple((dict() as observation, dict())):
            return observation
    raise EnvFault(f"reset must return (dict, dict), got {_quoted(value)}")


def _checked_step(value: object) -> tuple[dict[str, Any], bool, Mapping[str, Any]]:
    match value:
        # numpy's flag too, without importing it
        case tuple((dict() as observation, done, dict() as info)) if type(done).__name__ in ("bool", "bool_"):
            return observation, bool(done), info
    raise EnvFault(f"step must return (dict, bool, dict), got {_quoted(value)}")


def _quoted(value: object) -> str:
    return "None; does it return?" if value is None else f"{value!r:.200}"
