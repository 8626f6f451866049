"""An environment with its problems, to play by hand, to check, and to hand to training and evaluation."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from envs.config.plugins import give
from envs.datasets.samples import Subset
from envs.env import Env
from envs.errors import UserError
from envs.execution.load import load_env
from envs.registry import parse_entry, register
from envs.spec import EnvSpec
from envs.turn_rewards import EpisodeReward, reward_of_text
from envs.types import Message, Sample, SampleSource
from trainer.config.inputs import EnvConfig
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES
from trainer.setup.problems import load_problems
from trueturn.arguments import public
from trueturn.keywords import EnvKeywords
from trueturn.settings import config_of

#: Turns of an episode of a class that does not say how many.
MAX_TURNS = 3
#: What an entry has beside the settings of a run, and Python code does not give.
_NOT_GIVEN = {"entry_point", "origin", "system_prompt", "mixture", "parts"}
#: Keys of a registry entry that no setting of a run replaces.
ENTRY_KEYS = EnvSpec.model_fields.keys() - EnvConfig.model_fields.keys() - _NOT_GIVEN


@public()
def env(source: str | Sequence[str] | Callable[..., Any], **settings: Unpack[EnvKeywords]) -> Environment:
    """Return an environment: one of the registry, or one of your own.

    Args:
        source: an id of the registry ("geo3k"), a list of several with their shares (["geo3k:0.7", "guess:0.3"]), a
            class derived from `Env` or `ToolEnv`, or a function `build_env(sample, args)`.
        settings: the settings of environment and data under the names of their flags, such as `max_turns`, `data` and
            `eval_data`, which may be lists of rows, `answer_key`, `registry`. For a class or function also those of a
            registry entry: `dataset`, a function `(split, size, seed) -> samples`, `options`, `description`, `version`,
            `tool_calls`, `on_tool_fault`, `retries`, and so on, and `id`, by default its name.

    Raises:
        UserError: there is no such environment or setting.

    Example::

        env = tt.env("geo3k", max_turns=3)
        observation, info = env.reset(0)
        observation, done, info = env.step(r"\\boxed{68}")
        env.reward()                                          # 1.0 if that was right

        shop = tt.env(ShopEnv, data=[{"problem": "What does a pear cost?", "answer": "4"}])
    """
    if not callable(source):
        return Environment({"env": source, **settings})
    own = ENTRY_KEYS & settings.keys()
    entry = _entry_of(source, {name: value for name, value in settings.items() if name in own | {"isolation"}})
    given = {name: value for name, value in settings.items() if name not in own}
    return Environment({"env": entry.id, **given}, entry)


def as_environment(given: Environment | str | Callable[..., Any]) -> Environment:
    """Return the environment that a call is given: what `tt.env` returns or takes. Its id stands for it from now on."""
    if isinstance(given, Environment):
        environment = given
    else:
        environment = env(given)
    environment.take_its_name()
    return environment


class Environment:
    """An environment with its settings, as `tt.env` returns it.

    One episode at a time can be played by hand: `reset`, `step`, `reward`. Errors of the environment are raised as they
    are, without the limits of a run, so that a debugger stops where they happen.

    Example: `tt.env("geo3k").problems[0].label` is "2".
    """

    def __init__(self, settings: Mapping[str, Any], entry: EnvSpec | None = None) -> None:
        self.settings = dict(settings)
        self._entry = entry
        self.take_its_name()
        self._config = config_of(RunConfig, SOURCES, self.settings)
        self.spec = self._config.env.resolve()
        self._episode: Env | None = None
        self._final_text = ""
        self._earned = EpisodeReward()
        #: The conversation of the current episode.
        self.messages: list[Message] = []

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r:.60}" for name, value in self.settings.items() if name != "env")
        return f"tt.env({self.settings['env']!r}{given})"

    def take_its_name(self) -> None:
        """Register an environment of Python code again: meanwhile another one of its name may have been made."""
        if self._entry is not None:
            register(self._entry)

    @functools.cached_property
    def problems(self) -> SampleSource:
        """The training problems."""
        return self._problems[0]

    @functools.cached_property
    def held_out_problems(self) -> SampleSource:
        """The problems of evaluations; empty if there are none."""
        return self._problems[1] or Subset(self.problems, ())

    @functools.cached_property
    @public()
    def _problems(self) -> tuple[SampleSource, SampleSource | None]:
        return load_problems(self.spec, self._config.data, self._config.seed)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The JSON schemas of the tools: of the current episode, or else of one of the first problem."""
        if self._episode is not None:
            return self._episode.tools
        with contextlib.closing(self._build(self._problem(0))) as episode:
            episode.reset()
            return episode.tools

    @public()
    def reset(self, problem: int | Sample = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode of a training problem; return its first observation, which may be empty, and its info.

        Args:
            problem: the number of a training problem, from 0, or a sample
        """
        if isinstance(problem, Sample):
            sample = problem
        else:
            sample = self._problem(problem)
        self.close()
        self._episode = self._build(sample)
        self._final_text = ""
        self._earned = EpisodeReward()
        observation, info = self._episode.reset()
        self.messages = [*sample.prompt, *self._shown(observation)]
        return observation, info

    def _problem(self, number: int) -> Sample:
        size = len(self.problems)
        if not -size <= number < size:
            raise UserError("problem=", f"must be from 0 to {size - 1}", number, "see env.problems")
        return self.problems[number]

    def _build(self, sample: Sample) -> Env:
        return load_env(self.spec)(sample, self.spec.args())

    @public()
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Give the environment a turn of the model; return its observation, whether the task ended, and its info."""
        observation, done, info = self._current.step(response_text)
        self._final_text = response_text
        self._earned.add(info)
        self.messages += [{"role": "assistant", "content": response_text}, *self._shown(observation)]
        return observation, done, info

    def reward(self) -> float:
        """Return the reward of the episode: the sum of its turns' rewards and of that of the last text."""
        return self._earned.total(reward_of_text(self._current, self._final_text))

    def close(self) -> None:
        """End the current episode, if there is one."""
        if self._episode is not None:
            self._episode.close()
        self._episode = None

    def _shown(self, observation: dict[str, Any]) -> list[Message]:
        if not observation:
            return []
        shown = self._current.format_observation(observation)
        if isinstance(shown, dict):
            return [shown]
        return list(shown)

    @property
    def _current(self) -> Env:
        if self._episode is None:
            raise UserError("environment", "must be reset before it is played", "no episode", "call reset()")
        return self._episode


def _entry_of(source: Callable[..., Any], settings: Mapping[str, Any]) -> EnvSpec:
    """Return the registry entry of an environment of Python code. Raises `UserError` if one of its keys is wrong."""
    name = getattr(source, "__name__", type(source).__name__)
    about = (inspect.getdoc(source) or name).strip().partition("\n")[0]
    reference = give(source)
    entry = {"description": about, "max_turns": MAX_TURNS, **settings, "entry_point": reference}
    if not isinstance(dataset := entry.get("dataset"), str | None):
        entry["dataset"] = give(dataset)
    spec = parse_entry("Python code", entry.pop("id", reference.rpartition(":")[2]), entry)
    spec.load_here()
    return spec
