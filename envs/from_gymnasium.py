"""Makes Gymnasium environments available as environments of the registry.

One line in a registry file is enough if the actions are `Discrete` or `Text`::

    frozen_lake: {gymnasium: FrozenLake-v1, description: Cross the ice., max_turns: 20}

`GymnasiumOptions` lists the keys of `options`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
from PIL import Image
from pydantic import Field

from envs.bridges import ActionEnv, BridgeOptions, SeededSamples, check_split, user_observation
from envs.env import EnvArgs
from envs.errors import UserError
from envs.tools import ToolError, to_content
from envs.types import Sample

MAX_SHOWN_CHARS = 100

_COLOUR_CODE = re.compile(r"\x1b\[([\d;]*)m")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")


class GymnasiumOptions(BridgeOptions):
    """A registry entry's settings for Gymnasium: `gymnasium` gives the id, `options` the rest.

    Example::

        GymnasiumOptions(id="FrozenLake-v1", kwargs={"is_slippery": False}, actions=["left", "down", "right", "up"])
    """

    framework = "gymnasium"

    id: str = Field(min_length=1, description="id for gymnasium.make; module:id imports the module first")
    kwargs: Mapping[str, Any] = Field(default={}, description="keywords for gymnasium.make")
    actions: Sequence[str] = Field(default=(), description="names of Discrete actions, in order; none: their numbers")
    description: str = Field(default="", description="what the model reads about the task; empty: that of the entry")
    prompt: str = Field(
        default="", description="instructions for the model; empty: derived from description and action space"
    )

    def make(self) -> gymnasium.Env[Any, Any]:
        """Create the environment; it renders as text if its observations are not text and it supports that.

        Raises:
            UserError: the environment cannot be created, or its actions are of another kind.
        """
        try:
            env = gymnasium.make(self.id, disable_env_checker=True, **self.kwargs)
            # Without a rendering the model would read Discrete states as bare numbers.
            is_text = isinstance(env.observation_space, gymnasium.spaces.Text)
            if not is_text and "render_mode" not in self.kwargs and "ansi" in env.metadata.get("render_modes", ()):
                env.close()
                env = gymnasium.make(self.id, disable_env_checker=True, render_mode="ansi", **self.kwargs)
        except Exception as error:  # third-party code may raise anything
            fix = "check id and kwargs, and install what it needs"
            if ":" not in self.id:
                fix += f"; MODULE:{self.id} imports the module that registers it"
            got = f"{type(error).__name__}: {error}"
            raise UserError("gymnasium", f"'{self.id}' must be created", got, fix) from error
        try:
            self._check_actions(env.action_space)
        except UserError:
            env.close()
            raise
        return env

    def _check_actions(self, space: Any) -> None:
        if not isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.Text):
            rule = f"'{self.id}' must have Discrete or Text actions"
            raise UserError("gymnasium", rule, str(space), "wrap it in an environment that has, and register that one")
        num_actions = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 0
        if self.actions and (len(self.actions) != num_actions or len(set(self.actions)) < num_actions):
            rule = f"must name each of the {num_actions} actions of '{self.id}' once"
            raise UserError("gymnasium options actions", rule, list(self.actions), "fix the list, or omit it")

    def instructions(self, env: gymnasium.Env[Any, Any]) -> str:
        """Return the prompt: the given one, or how to read the state and act."""
        if self.prompt:
            return self.prompt
        name = self.id.rpartition(":")[2]  # without the module that registers it
        about = f"You are playing {name}. {self.description}".strip()
        start = f"{about} Every message shows you its state."
        if env.render_mode == "ansi":
            start += " What is coloured stands in brackets, as in [red:S]."
        space: Any = env.action_space
        if isinstance(space, gymnasium.spaces.Text):
            return f"{start} Answer with your next action and nothing else."
        actions = ", ".join(self.actions) or f"the numbers from {space.start} to {space.start + space.n - 1}"
        return f"{start} Act with calls of the tool act. The actions are {actions}."


class GymnasiumSamples(SeededSamples):
    """Episodes of a Gymnasium environment: the instructions as prompt, and the environment's seed.

    Seeds of different splits are never the same. Sample i depends on seed, split and i alone.

    Example::

        samples = GymnasiumSamples("train", size=64, seed=0, id="FrozenLake-v1")
        samples[0].prompt[0]["content"]      # "You are playing FrozenLake-v1. ... The actions are the numbers from ..."
        samples[0].metadata["seed"]          # 894710965
    """

    def __init__(self, split: str, size: int, seed: int = 0, **options: Any) -> None:
        """Create the environment once, to test that it works and to read its actions.

        Raises:
            UserError: the split is unknown, the size is negative, or an option is wrong; see `GymnasiumOptions.make`.
        """
        check_split(split)
        checked = GymnasiumOptions.read(options)
        env = checked.make()
        super().__init__(split, size, seed, checked.id, checked.instructions(env))
        env.close()


class FromGymnasium(ActionEnv):
    """One episode of a Gymnasium environment, whose rewards are those of the turns, on the entry's scale.

    Discrete actions are calls of the tool `act`; a turn without a call is asked for one. With Text actions, the model's
    text without surrounding space is the action. An illegal action gets an error text and costs only the turn.

    Example::

        options = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
        env = FromGymnasium(Sample(id="0", prompt=(), metadata={"seed": 7}), EnvArgs(max_turns=20, options=options))
        env.reset()[0]["obs_str"]        # "[red:S]FFF\\nFHFH\\nFFFH\\nHFFG", brackets mark coloured text
        env.step('<tool_call>{"name": "act", "arguments": {"action": "down"}}</tool_call>')[0]["obs_str"]
        #                                  "  (Down)\\nSFFF\\n[red:F]HFH\\nFFFH\\nHFFG"

    The model sees the rendering with `kwargs: {render_mode: rgb_array}` or if there is an `ansi` one, else the
    observation: text unchanged, uint8 arrays of shape (height, width, 3) as images, everything else as JSON. A
    rendering does not show the texts of an observation, such as the mission of MiniGrid: they come before it.

    A step's info holds `tool_calls`, "reward" (of this turn), "terminated" and "truncated" (by the environment's own
    time limit); the last two end the episode. If the entry names a key of Gymnasium's own info as its `success`, it
    holds that too.
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        super().__init__(sample, args)
        self.options = GymnasiumOptions.read(args.options)
        self.inner = self.options.make()
        self.takes_text = isinstance(self.inner.action_space, gymnasium.spaces.Text)
        if not self.takes_text:
            self._offer_actions(self.inner.action_space)

    def _offer_actions(self, space: Any) -> None:
        first = int(space.start)
        names = tuple(self.options.actions)

        def act(action: Any) -> Any:
            """Take an action."""
            return self.take(first + names.index(action) if names else action)

        numbers = Annotated[int, Field(ge=first, le=first + int(space.n) - 1)]
        act.__annotations__["action"] = Literal[names] if names else numbers
        self.add_tool(act)

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the environment with the sample's seed; the observation shows its first state."""
        super().reset()
        seed = self.episode_seed
        observation, _ = self.inner.reset(seed=seed)
        return user_observation(to_content(self._show(observation))), {"seed": seed}

    def close(self) -> None:
        """Close the Gymnasium environment."""
        super().close()
        self.inner.close()

    def take(self, action: int | str) -> Any:
        """Take one action; return what the model sees of the next state."""
        if self.done:
            raise ToolError("The episode has ended.", "ended")
        space = self.inner.action_space
        if not space.contains(action):
            raise ToolError(_not_in(space, str(action)), "illegal_action")
        try:
            observation, reward, terminated, truncated, inner_info = self.inner.step(action)
        except gymnasium.error.InvalidAction as error:
            raise ToolError(f"No action was taken: {error}", "illegal_action") from error
        self.done = bool(terminated or truncated)
        self.earn(float(reward))
        self.info |= {"terminated": bool(terminated), "truncated": bool(truncated)}
        if (key := self.args.success_key) in inner_info:
            value = inner_info[key]
            self.info[key] = value.item() if isinstance(value, np.generic) else value
        return self._show(observation)

    def _show(self, observation: Any) -> Any:
        """Return the visible state: text, an image, both, or a value for JSON."""
        if self.inner.render_mode not in ("ansi", "rgb_array"):
            return _visible(observation)
        rendering = _visible(self.inner.render())
        texts = _texts(observation)
        if isinstance(rendering, str):
            return texts + rendering
        return [texts, rendering] if texts else rendering


def _visible(state: Any) -> Any:
    """Return a state as the model sees it: text without terminal codes, an image, or a value for JSON."""
    if isinstance(state, str):
        return name_colours(state).strip("\n")
    if _is_image(state):
        return Image.fromarray(state)
    return state


def _texts(observation: Any) -> str:
    """Return the texts of an observation, each on its line under the name that it has in a dict."""
    if isinstance(observation, str):
        return f"{observation.strip()}\n"
    if not isinstance(observation, Mapping):
        return ""
    return "".join(f"{name}: {text}\n" for name, text in observation.items() if isinstance(text, str))


def name_colours(text: str) -> str:
    r"""Return terminal text with colours written as words; in some environments only colours show the state.

    >>> name_colours("\x1b[41mS\x1b[0mFF | \x1b[34;1mB\x1b[0m")
    '[red:S]FF | [blue:B]'
    """
    num_open = 0

    def write_out(code: re.Match[str]) -> str:
        nonlocal num_open
        numbers = [int(number) for number in code.group(1).split(";") if number]
        for number in numbers:
            # Foreground and background colours of terminals; 1 is bold and 0 ends them all.
            if 30 <= number <= 38 or 40 <= number <= 48:
                num_open += 1
                return f"[{_COLOURS[number % 10]}:"
        if num_open and not any(numbers):
            num_open -= 1
            return "]"
        return ""

    return _COLOUR_CODE.sub(write_out, text)


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def _not_in(space: Any, action: str) -> str:
    """Return the error text for an action that the space does not contain."""
    length = f"{space.min_length} to {space.max_length}"
    allowed = f" of {space.characters!r}" if len(space.characters) <= MAX_SHOWN_CHARS else ""
    return f"No action was taken: write {length} characters{allowed} and nothing else, not {action!r:.60}."
