"""Plays one scripted episode without a model and records everything that the environment did."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from envs.checking.error_location import located_line
from envs.contract import EnvFault, EpisodeEnv, checked_messages, plain
from envs.errors import UserError
from envs.execution.runner import EnvRunner, StepResult
from envs.spec import EnvLimits
from envs.success import Success
from envs.types import Message, Sample
from envs.wrapper import Wrapper, can_be_wrapped

Kind = Literal["survey", "gold", "wrong", "revealed", "plain", "hostile", "closing"]

#: The traceback line of an isolated process that builds the environment, which happens in the first call.
_BUILDING = re.compile(r'[/\\]process_env\.py", line \d+, in _build\n')


@dataclass(frozen=True)
class Script:
    """The model texts of one episode, one per turn.

    `needs_answer`: the last text tries a call that cannot be made, so the environment must answer it.

    Example::

        Script("gold", "Answer: label", ("Answer: 68",))
    """

    kind: Kind
    name: str
    texts: tuple[str, ...] = ()
    needs_answer: bool = False


@dataclass(frozen=True)
class Fault:
    """A fault in an episode: the call that failed ("building", "reset", "step 1") and the text of the `EnvFault`."""

    call: str
    text: str
    process_ended: bool = False

    @property
    def summary(self) -> str:
        """The last line, with the line of the environment's code that raised it: "KeyError: 2 (shop.py:12)"."""
        return located_line(self.text)


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """The record of one episode; `slowest_s` is the duration of its slowest step in seconds.

    `prompt` is the sample's prompt with its images decoded; it is empty if they cannot be decoded. `is_opened` tells
    that the environment was reset and its solution read, `has_hung` that a call, perhaps `close`, ran into its time
    limit, `runs_tools` that the steps are made of tool calls. `generators` are hashes of the program's random number
    generators after the episode, by name. `place` is the place of the sample among those that are played.
    """

    sample: Sample
    script: Script
    prompt: tuple[Message, ...] = ()
    tools: Sequence[dict[str, Any]] = ()
    solution: tuple[str, ...] = ()
    opening: tuple[Message, ...] = ()
    steps: tuple[StepResult, ...] = ()
    reward: float | None = None
    fault: Fault | None = None
    close_error: str | None = None
    is_opened: bool = False
    slowest_s: float = 0.0
    has_hung: bool = False
    runs_tools: bool = False
    generators: Mapping[str, int] = field(default_factory=dict)
    place: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether a call hung or ended the process."""
        return self.has_hung or (self.fault is not None and self.fault.process_ended)

    def is_success(self, rule: Success | None) -> bool:
        """Return whether it is a success by the rule of its environment; without one, none is."""
        if rule is None or self.reward is None:
            return False
        return rule.holds(self.reward, [step.info for step in self.steps])

    @property
    def observations(self) -> list[Message]:
        """All messages of the environment, in order."""
        return [*self.opening, *(message for step in self.steps for message in step.messages)]


class _ScriptedWrapper(Wrapper):
    """Does what a script asks for besides steps, inside the environment's own calls: on their thread and in their time.

    A survey reads the solution. The closing scripts make a call fail, and close the environment twice.
    """

    def __init__(self, env: EpisodeEnv, script: Script) -> None:
        super().__init__(env)
        self.script = script
        self.solution_read: tuple[str, ...] = ()
        self.is_in_solution = False

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self._fail("reset")
        result = super().reset()
        if self.script.kind == "survey":
            self.is_in_solution = True
            texts = self.solution()
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise EnvFault(f"solution must return a list of texts, got {texts!r:.200}")
            self.solution_read = plain((*texts,))
            self.is_in_solution = False
        return result

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        result = super().step(response_text)
        self._fail("step")
        return result

    def _fail(self, call: str) -> None:
        if self.script.kind == "closing" and self.script.name.endswith(call):
            raise EnvFault("made by the check")

    def close(self) -> None:
        super().close()
        # The agent loop closes an episode that was cancelled during its close once more.
        if self.script.kind == "closing":
            super().close()


def checked_prompt(sample: Sample) -> tuple[Message, ...]:
    """Return a sample's prompt with its images decoded; empty if the prompt is not valid."""
    try:
        return checked_messages(list(sample.prompt))
    except (EnvFault, UserError, TypeError):
        return ()  # `check_prompts` reports why


async def play_episode(
    make_env: Callable[[], EpisodeEnv],
    sample: Sample,
    script: Script,
    limits: EnvLimits,
    max_turns: int,
) -> PlayedEpisode:
    """Play an episode in which the script's texts stand for the model, until the texts, the turns or the task end.

    A fault of the environment is recorded, never raised. With `limits.inline` nothing bounds the environment's calls.
    """
    wrappers: list[_ScriptedWrapper] = []

    def make() -> EpisodeEnv:
        env = make_env()
        if not can_be_wrapped(env):
            return env  # the runner says what it lacks
        wrappers.append(_ScriptedWrapper(env, script))
        return wrappers[-1]

    runner = EnvRunner(make, limits, sample.id)
    opening: tuple[Message, ...] = ()
    steps: list[StepResult] = []
    slowest_s = 0.0
    is_opened = False
    reward: float | None = None
    fault: Fault | None = None
    runs_tools = False
    has_hung = False
    call = "reset"
    text = ""
    try:
        opening = await runner.open()
        is_opened = True
        runs_tools = runner.runs_tools
        for number, text in enumerate(script.texts[:max_turns], start=1):
            call = f"step {number}"
            started = time.perf_counter()
            try:
                steps.append(await runner.step(text))
            finally:
                slowest_s = max(slowest_s, time.perf_counter() - started)
            if steps[-1].done:
                break  # the texts that are left would be of a finished task
        call = "reward"
        reward = await runner.reward(text)
    except EnvFault as caught:
        if call == "reset" and (not wrappers or _BUILDING.search(str(caught))):
            call = "building"
        elif call == "reset" and wrappers[-1].is_in_solution:
            call = "solution"
        fault = Fault(call, str(caught), caught.process_ended)
        has_hung = caught.timed_out
    finally:
        started = time.perf_counter()
        close_error = await runner.close()
        close_s = time.perf_counter() - started
    return PlayedEpisode(
        sample=sample,
        script=script,
        tools=runner.tools,
        solution=wrappers[-1].solution_read if wrappers else (),
        opening=opening,
        steps=tuple(steps),
        reward=reward,
        fault=fault,
        close_error=close_error,
        is_opened=is_opened,
        slowest_s=slowest_s,
        has_hung=has_hung or close_s >= limits.step_timeout_s,
        runs_tools=runs_tools,
    )
