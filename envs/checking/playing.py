"""One episode without a model: texts written beforehand go in, everything that the environment did comes out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envs.checking.places import author_place, frames_in
from envs.errors import UserError
from envs.runner import EnvFault, EnvLimits, EnvRunner, EpisodeEnv, StepResult, checked_messages
from envs.types import Message, Sample
from envs.wrapper import Wrapper, can_be_wrapped

Kind = Literal["survey", "gold", "wrong", "revealed", "plain", "hostile", "closing"]

#: Where a process of its own builds the environment, within the first call.
_BUILDING = re.compile(r'[/\\]process_env\.py", line \d+, in _build\n')
_TOO_LARGE = re.compile(r"observation image: must have at most \d+ pixels, got (\d+x\d+)")


@dataclass(frozen=True)
class Script:
    """The model texts of one episode, one a turn.

    `needs_answer` says that the last of them tries a call that cannot be made, so that silence would be a fault.

    Example::

        Script("gold", "Answer: label", ("Answer: 68",))
    """

    kind: Kind
    name: str
    texts: tuple[str, ...] = ()
    needs_answer: bool = False


@dataclass(frozen=True)
class Fault:
    """What went wrong in an episode: in which call ("building", "reset", "step 1"), and the text of the `EnvFault`."""

    call: str
    text: str
    timed_out: bool = False

    @property
    def summary(self) -> str:
        """The last line, with the place in the environment's code that raised it: "KeyError: 2 (shop.py:12)"."""
        last_line = self.text.strip().splitlines()[-1]
        place = author_place(frames_in(self.text))
        return f"{last_line} ({place})" if place else last_line

    @property
    def too_large(self) -> str | None:
        """The size of the picture that was refused for its pixels: "5000x4000"."""
        found = _TOO_LARGE.search(self.text)
        return found[1] if found else None


@dataclass(frozen=True, eq=False)
class Play:
    """One episode as it went; `steps` and `steps_s` have one item per turn taken, times are in seconds.

    `prompt` is the sample's with its pictures decoded, and empty where it cannot be shown.
    """

    sample: Sample
    prompt: tuple[Message, ...]
    script: Script
    tools: Sequence[dict[str, Any]]
    solution: tuple[str, ...]
    opening: tuple[Message, ...]
    steps: tuple[StepResult, ...]
    reward: float | None
    fault: Fault | None
    close_error: str | None
    reset_s: float | None
    steps_s: tuple[float, ...]

    @property
    def observations(self) -> list[Message]:
        """Everything that the environment said, in order."""
        return [*self.opening, *(message for step in self.steps for message in step.messages)]


@dataclass(frozen=True)
class Meddling:
    """What a play does to its environment besides stepping: read the solution, fail in a call, close it twice."""

    read_solution: bool = False
    fail_in: Literal["", "reset", "step"] = ""
    close_twice: bool = False


class _Meddler(Wrapper):
    """Does what a `Meddling` says, on the thread and within the limits of the call that it belongs to."""

    def __init__(self, env: EpisodeEnv, meddling: Meddling) -> None:
        super().__init__(env)
        self.meddling = meddling
        self.solution_read: tuple[str, ...] = ()
        self.is_in_solution = False

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.meddling.fail_in == "reset":
            raise EnvFault("made by the check")
        result = super().reset()
        if self.meddling.read_solution:
            self.is_in_solution = True
            texts = self.solution()
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise EnvFault(f"solution must return a list of texts, got {texts!r:.200}")
            self.solution_read = tuple(texts)
            self.is_in_solution = False
        return result

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        result = super().step(response_text)
        if self.meddling.fail_in == "step":
            raise EnvFault("made by the check")
        return result

    def close(self) -> None:
        super().close()
        if self.meddling.close_twice:
            super().close()


def checked_prompt(sample: Sample) -> tuple[Message, ...]:
    """Return a sample's prompt with its pictures decoded, empty where it cannot be shown."""
    try:
        return checked_messages(list(sample.prompt))
    except (EnvFault, UserError, TypeError):
        return ()  # `check_prompts` says why


async def play(
    make_env: Callable[[], EpisodeEnv],
    sample: Sample,
    prompt: tuple[Message, ...],
    script: Script,
    limits: EnvLimits,
    max_turns: int,
    meddling: Meddling | None = None,
) -> Play:
    """Play an episode in which the model writes the script's texts, until they, the turns or the task end.

    Never raises for what the environment does; with `limits.inline`, though, it has the whole program.
    """
    meddlers: list[_Meddler] = []

    def make() -> EpisodeEnv:
        env = make_env()
        if not can_be_wrapped(env):
            return env
        meddlers.append(_Meddler(env, meddling or Meddling()))
        return meddlers[-1]

    runner = EnvRunner(make, limits)
    opening: tuple[Message, ...] = ()
    steps: list[StepResult] = []
    steps_s: list[float] = []
    reset_s: float | None = None
    reward: float | None = None
    fault: Fault | None = None
    call, text = "reset", ""
    try:
        started = time.perf_counter()
        opening = await runner.open()
        reset_s = time.perf_counter() - started
        for number, text in enumerate(script.texts[:max_turns], start=1):
            call, started = f"step {number}", time.perf_counter()
            try:
                steps.append(await runner.step(text))
            finally:
                steps_s.append(time.perf_counter() - started)
            if steps[-1].done:
                break
        call = "reward"
        reward = await runner.reward(text)
    except EnvFault as caught:
        if call == "reset" and (not meddlers or _BUILDING.search(str(caught))):
            call = "building"
        elif call == "reset" and meddlers[-1].is_in_solution:
            call = "solution"
        fault = Fault(call, str(caught), caught.timed_out)
    finally:
        close_error = await runner.close()
    return Play(
        sample=sample,
        prompt=prompt,
        script=script,
        tools=runner.tools,
        solution=meddlers[-1].solution_read if meddlers else (),
        opening=opening,
        steps=tuple(steps),
        reward=reward,
        fault=fault,
        close_error=close_error,
        reset_s=reset_s,
        steps_s=tuple(steps_s),
    )
