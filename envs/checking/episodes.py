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
from envs.execution.watchdog import WATCHDOG, Watcher
from envs.spec import EnvLimits
from envs.success import Success
from envs.types import Message, Sample
from envs.wrapper import Wrapper, can_be_wrapped

Kind = Literal["survey", "gold", "wrong", "revealed", "plain", "hostile", "closing"]

#: The traceback line of an isolated process that builds the environment, which happens in the first call.
_BUILDING = re.compile(r'[/\\]process_env\.py", line \d+, in _build\n')
_TOO_LARGE = re.compile(r"observation image: must have at most \d+ pixels, got (\d+x\d+)")


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
    timed_out: bool = False
    process_ended: bool = False

    @property
    def summary(self) -> str:
        """The last line, with the line of the environment's code that raised it: "KeyError: 2 (shop.py:12)"."""
        return located_line(self.text)

    @property
    def too_large(self) -> str | None:
        """The size of an image that was refused because it has too many pixels: "5000x4000"."""
        found = _TOO_LARGE.search(self.text)
        if found:
            return found[1]
        return None


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """The record of one episode; `steps` and `steps_s` have one item per turn, times are in seconds.

    `prompt` is the sample's prompt with its images decoded; it is empty if they cannot be decoded. `has_hung` tells
    that a call, perhaps `close`, ran into its time limit, `runs_tools` that the steps are made of tool calls.
    `generators` are hashes of the program's random number generators after the episode, by name.
    """

    sample: Sample
    prompt: tuple[Message, ...]
    script: Script
    tools: Sequence[dict[str, Any]] = ()
    solution: tuple[str, ...] = ()
    opening: tuple[Message, ...] = ()
    steps: tuple[StepResult, ...] = ()
    reward: float | None = None
    fault: Fault | None = None
    close_error: str | None = None
    reset_s: float | None = None
    steps_s: tuple[float, ...] = ()
    has_hung: bool = False
    runs_tools: bool = False
    generators: Mapping[str, int] = field(default_factory=dict)

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


@dataclass(frozen=True)
class PlayOptions:
    """What an episode does besides stepping: read the solution, make a call fail, close the environment twice."""

    read_solution: bool = False
    fail_in: Literal["", "reset", "step"] = ""
    close_twice: bool = False


class _OptionsWrapper(Wrapper):
    """Applies the options inside the environment's own calls: on their thread and within their limits."""

    def __init__(self, env: EpisodeEnv, options: PlayOptions) -> None:
        super().__init__(env)
        self.options = options
        self.solution_read: tuple[str, ...] = ()
        self.is_in_solution = False

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.options.fail_in == "reset":
            raise EnvFault("made by the check")
        result = super().reset()
        if self.options.read_solution:
            self.is_in_solution = True
            texts = self.solution()
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise EnvFault(f"solution must return a list of texts, got {texts!r:.200}")
            self.solution_read = plain((*texts,))
            self.is_in_solution = False
        return result

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        result = super().step(response_text)
        if self.options.fail_in == "step":
            raise EnvFault("made by the check")
        return result

    def close(self) -> None:
        super().close()
        if self.options.close_twice:
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
    prompt: tuple[Message, ...],
    script: Script,
    limits: EnvLimits,
    max_turns: int,
    options: PlayOptions | None = None,
    watcher: Watcher = WATCHDOG,
) -> PlayedEpisode:
    """Play an episode in which the script's texts stand for the model, until the texts, the turns or the task end.

    A fault of the environment is recorded, never raised. With `limits.inline` nothing bounds the environment's calls;
    `watcher` is told of each.
    """
    wrappers: list[_OptionsWrapper] = []

    def make() -> EpisodeEnv:
        env = make_env()
        if not can_be_wrapped(env):
            return env
        wrappers.append(_OptionsWrapper(env, options or PlayOptions()))
        return wrappers[-1]

    runner = EnvRunner(make, limits, sample.id, watcher=watcher)
    opening: tuple[Message, ...] = ()
    steps: list[StepResult] = []
    steps_s: list[float] = []
    reset_s: float | None = None
    reward: float | None = None
    fault: Fault | None = None
    runs_tools = False
    call = "reset"
    text = ""
    try:
        started = time.perf_counter()
        opening = await runner.open()
        reset_s = time.perf_counter() - started
        runs_tools = runner.runs_tools
        for number, text in enumerate(script.texts[:max_turns], start=1):
            call = f"step {number}"
            started = time.perf_counter()
            try:
                steps.append(await runner.step(text))
            finally:
                steps_s.append(time.perf_counter() - started)
            if steps[-1].done:
                break
        call = "reward"
        reward = await runner.reward(text)
    except EnvFault as caught:
        if call == "reset" and (not wrappers or _BUILDING.search(str(caught))):
            call = "building"
        elif call == "reset" and wrappers[-1].is_in_solution:
            call = "solution"
        fault = Fault(call, str(caught), caught.timed_out, caught.process_ended)
    finally:
        started = time.perf_counter()
        close_error = await runner.close()
        close_s = time.perf_counter() - started
    return PlayedEpisode(
        sample=sample,
        prompt=prompt,
        script=script,
        tools=runner.tools,
        solution=wrappers[-1].solution_read if wrappers else (),
        opening=opening,
        steps=tuple(steps),
        reward=reward,
        fault=fault,
        close_error=close_error,
        reset_s=reset_s,
        steps_s=tuple(steps_s),
        has_hung=(fault is not None and fault.timed_out) or close_s >= limits.step_timeout_s,
        runs_tools=runs_tools,
    )
