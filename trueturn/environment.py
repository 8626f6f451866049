"""An environment with its problems, to play by hand, to check, and to hand to training and evaluation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from envs.config.plugins import give
from envs.datasets.samples import Subset
from envs.env import Env
from envs.errors import UserError
from envs.execution.load import load_env
from envs.registry import register
from envs.spec import EnvSpec
from envs.types import Message, Sample, SampleSource
from trainer.config.inputs import EnvConfig
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES
from trainer.setup.problems import load_problems
from trueturn.settings import config_of

#: Turns of an episode of a class that does not say how many.
MAX_TURNS = 3


def env(source: str | Callable[..., Any], **settings: Any) -> Environment:
    """Return an environment: one of the registry, or one of your own.

    Args:
        source: an id of the registry ("geo3k"), a class derived from `Env` or `ToolEnv`, or a function
            `build_env(sample, args)`.
        settings: the settings of environment and data under the names of their flags, such as `max_turns`, `data` and
            `eval_data`, which may be lists of rows, `answer_key`, `registry`. For a class or function also those of a
            registry entry, such as `dataset`, a function `(split, size, seed) -> samples`, and `isolation`.

    Raises:
        UserError: there is no such environment or setting.

    Example::

        env = tt.env("geo3k", max_turns=3)
        observation, info = env.reset(0)
        observation, done, info = env.step(r"\\boxed{68}")
        env.reward()                                          # 1.0 if that was right

        shop = tt.env(ShopEnv, data=[{"problem": "What does a pear cost?", "answer": "4"}])
    """
    if not isinstance(source, str):
        settings = {**settings, **_registered(source, settings)}
        source = settings.pop("env")
    return Environment({"env": source, **settings})


class Environment:
    """An environment with its settings, as `tt.env` returns it.

    One episode at a time can be played by hand: `reset`, `step`, `reward`. Errors of the environment are raised as they
    are, without the limits of a run, so that a debugger stops where they happen.

    Example: `tt.env("geo3k").problems[0].label` is "2".
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self._config = config_of(RunConfig, SOURCES, self.settings)
        self.spec = self._config.env.resolve()
        self._episode: Env | None = None
        self._final_text = ""
        #: The conversation of the current episode.
        self.messages: list[Message] = []

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r:.60}" for name, value in self.settings.items() if name != "env")
        return f"tt.env({self.settings['env']!r}{given})"

    @functools.cached_property
    def problems(self) -> SampleSource:
        """The training problems."""
        return self._problems[0]

    @functools.cached_property
    def held_out_problems(self) -> SampleSource:
        """The problems of evaluations; empty if there are none."""
        return self._problems[1] or Subset(self.problems, ())

    @functools.cached_property
    def _problems(self) -> tuple[SampleSource, SampleSource | None]:
        return load_problems(self.spec, self._config.data, self._config.seed)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The JSON schemas of the current episode's tools."""
        return self._current.tools

    def reset(self, problem: int | Sample = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode of a training problem; return its first observation, which may be empty, and its info."""
        self.close()
        sample = self.problems[problem] if isinstance(problem, int) else problem
        self._episode, self._final_text = load_env(self.spec)(sample, self.spec.args()), ""
        observation, info = self._episode.reset()
        self.messages = [*sample.prompt, *self._shown(observation)]
        return observation, info

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Give the environment a turn of the model; return its observation, whether the task ended, and its info."""
        observation, done, info = self._current.step(response_text)
        self._final_text = response_text
        self.messages += [{"role": "assistant", "content": response_text}, *self._shown(observation)]
        return observation, done, info

    def reward(self) -> float:
        """Return the reward of the episode, which the last text decides."""
        return self._current.reward(self._final_text)

    def close(self) -> None:
        """End the current episode, if there is one."""
        if self._episode is not None:
            self._episode.close()
        self._episode = None

    def _shown(self, observation: dict[str, Any]) -> list[Message]:
        if not observation:
            return []
        shown = self._current.format_observation(observation)
        return [shown] if isinstance(shown, dict) else list(shown)

    @property
    def _current(self) -> Env:
        if self._episode is None:
            raise UserError("environment", "must be reset before it is played", "no episode", "call reset()")
        return self._episode


def _registered(source: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Register an environment of Python code; return its id, and take the settings of its entry out of `settings`."""
    own = EnvSpec.model_fields.keys() - EnvConfig.model_fields.keys()
    entry = {name: settings.pop(name) for name in own & settings.keys()}
    for name in ("dataset", "system_prompt"):
        if name in entry and not (isinstance(entry[name], str) and ":" in entry[name]):
            entry[name] = give(entry[name])
    name = getattr(source, "__name__", type(source).__name__)
    about = (inspect.getdoc(source) or name).strip().partition("\n")[0]
    reference = give(source)
    entry = {"id": reference.rpartition(":")[2], "description": about, "max_turns": MAX_TURNS, **entry}
    try:
        register(EnvSpec.model_validate({**entry, "entry_point": reference, "origin": "Python code"}))
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        field = ".".join(map(str, first["loc"])) or "environment"
        raise UserError(f"{field}=", rule, first["input"], "see tt.env") from error
    return {"env": entry["id"]}
