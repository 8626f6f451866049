"""Makes the environments of the registry available as Gymnasium environments.

Importing this module registers them, which is Gymnasium's convention::

    import gymnasium
    import envs.as_gymnasium

    env = gymnasium.make("trueturn/geo3k-v0")
    observation, info = env.reset(seed=7)           # {"text": "[system]\\nSolve ...", "images": (uint8 (128, 160, 3),)}
    observation, reward, terminated, truncated, info = env.step("\\\\boxed{68}")

``gymnasium.make("envs.as_gymnasium:trueturn/geo3k-v0")`` does both. Gymnasium has no entry points that would register
an installed package without an import (https://gymnasium.farama.org/gymnasium_release_notes/, v1.0.0).

`AsyncVectorEnv` needs ``shared_memory=False``, because shared memory holds arrays of fixed size only.
"""

from __future__ import annotations

import re
import string
from collections import UserDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import InvalidAction, ResetNeeded

from envs.contract import checked_messages, plain, plain_dict, shown
from envs.datasets.prompts import add_system_prompt
from envs.env import Env
from envs.errors import UserError
from envs.execution.load import load_env
from envs.registry import get_spec, load_registry
from envs.turn_rewards import EpisodeReward, reward_of_text
from envs.types import Message, SampleSource, message_images, plain_text

NAMESPACE = "trueturn"
MAX_CHARS = 1_000_000
MAX_SAMPLED_CHARS = 64


class AnyText(spaces.Text):
    """Texts of any characters up to a length; `sample` draws short printable texts.

    Example::

        AnyText().contains("∠x = 68°")        # True
    """

    def __init__(self, max_length: int = MAX_CHARS, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable, seed=seed)

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draw a text of at most 64 printable characters; masks are ignored."""
        longest = min(MAX_SAMPLED_CHARS, self.max_length)
        return super().sample((int(self.np_random.integers(longest + 1)), None))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"


class RGBImage(spaces.Space[np.ndarray]):
    """Images of any size: uint8 arrays of shape (height, width, 3); `spaces.Box` has a fixed size.

    Example::

        RGBImage().contains(np.zeros((128, 160, 3), np.uint8))        # True
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, np.uint8, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False, because the size is not fixed."""
        return False

    def contains(self, x: Any) -> bool:
        """Return whether `x` is such an array."""
        return isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.ndim == 3 and x.shape[2] == 3

    def sample(self, mask: Any = None, probability: Any = None) -> np.ndarray:
        """Draw a random image of 1 to 16 pixels per side; masks are ignored."""
        height, width = self.np_random.integers(1, 17, size=2)
        return self.np_random.integers(0, 256, size=(height, width, 3), dtype=np.uint8)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RGBImage)

    def __repr__(self) -> str:
        return "RGBImage()"


class TrueTurnEnv(gymnasium.Env[dict[str, Any], str]):
    r"""One environment of the registry with its data set; each reset draws a sample.

    An action is the model's text of one turn. An observation holds "text", with a heading per message and ``<image>``
    for each image, and "images", the images in that order. The first observation shows the whole prompt, a later
    one the environment's answer (empty text if there is none).

    Example::

        env = TrueTurnEnv("geo3k")
        observation, info = env.reset(seed=7)
        info["sample_id"]                          # "geo3k-procedural-train-0-944"
        env.step('<tool_call>{"name": "calc_score", "arguments": {"answer": "9"}}</tool_call>')
        # ({"text": "[tool]\nScore 0.0: 9 is wrong. ...", "images": ()}, 0.0, False, False, {"step_info": ..., ...})
        env.step("\\boxed{9}")[1:4]                # (0.0, True, False): a wrong answer ends the episode

    An action's reward is that of its turn; the last action gets that of the final text too. The episode terminates when
    the environment ends the task, and is truncated after `max_turns`; with ``max_turns=1`` it always terminates. To
    play longer than the registry entry says, raise the limit of `gymnasium.make` too:
    ``make("trueturn/geo3k-v0", max_turns=5, max_episode_steps=5)``.

    The info of `reset` holds "sample_id", "tools" (the JSON schemas of the tools) and "reset_info", that of `step`
    "sample_id", "step_info" and, after the last step, "end": "completed" or "max_turns". "reset_info" and "step_info"
    are mappings but not dicts, because a vector environment would merge dicts key by key.

    An exception of the environment passes through and ends the episode.
    """

    def __init__(
        self,
        env_id: str,
        *,
        registry: str | Path | Sequence[str | Path] = (),
        split: str = "train",
        size: int = 1000,
        data_seed: int = 0,
        samples: SampleSource | None = None,
        max_turns: int | None = None,
    ) -> None:
        """Find the entry `env_id` (also in the overlay files `registry`) and load its code and data set.

        The data set is `samples`, or else `size` samples of `split`, created with `data_seed`.

        Raises:
            UserError: there is no such entry, its code cannot be imported, it has no data set, or an option is wrong.
        """
        if max_turns is not None and max_turns < 1:
            raise UserError("max_turns", "must be at least 1", max_turns, "leave it out for the registry's limit")
        overlays = [registry] if isinstance(registry, str | Path) else registry
        spec = get_spec(env_id, *map(Path, overlays))
        spec.check_has_no_loop("environment")
        self._build = load_env(spec)
        self._args = spec.args(max_turns)
        self._samples = spec.load_dataset(split, size, data_seed) if samples is None else samples
        if not len(self._samples):
            raise UserError(f"environment '{env_id}' samples", "must not be empty", 0, "give at least one")
        self._system_prompt = spec.load_system_prompt()
        self.observation_space = spaces.Dict({"text": AnyText(), "images": spaces.Sequence(RGBImage())})
        self.action_space = AnyText()
        self._inner: Env | None = None
        self._playing = False
        self._turn = 0
        self._earned = EpisodeReward()
        self._sample_id = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode with a random sample, or with that of ``options={"index": 3}``.

        Raises:
            ValueError: there is no such sample, or `options` has another key.
        """
        super().reset(seed=seed)
        self.close()
        sample = self._samples[self._index(options or {})]
        self._sample_id = sample.id
        self._turn = 0
        self._earned = EpisodeReward()
        inner = self._inner = self._build(sample, self._args)
        observation, reset_info = inner.reset()
        prompt = add_system_prompt(sample.prompt, self._system_prompt) if self._system_prompt else [*sample.prompt]
        observed = self._show([*checked_messages(prompt), *_messages(inner, observation)])
        self._playing = True
        info = {"sample_id": sample.id, "tools": plain(inner.tools), "reset_info": _plain_info(reset_info)}
        return observed, info

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Take one turn; the action is the model's text.

        Raises:
            ResetNeeded: there is no episode, or it has ended.
            InvalidAction: the action is not text.
        """
        if not self._playing or self._inner is None:
            raise ResetNeeded("no episode is running: call reset() before the first step and after the end")
        if not isinstance(action, str):
            raise InvalidAction(f"an action is the model's text, got {type(action).__name__}")
        self._playing = False  # a fault ends the episode
        # A text drawn from a space is a numpy text.
        observation, done, step_info = self._inner.step(str(action))
        observed = self._show(_messages(self._inner, observation))
        self._turn += 1
        at_limit = self._turn >= self._args.max_turns
        reward = self._earned.add(step_info)
        if done or at_limit:
            of_text = reward_of_text(self._inner, str(action))
            self._earned.total(of_text)  # raises where there is no reward at all
            reward += of_text or 0.0
        # One turn is the whole task then, and no limit cut it short.
        terminated = bool(done) or self._args.max_turns == 1
        self._playing = not (done or at_limit)
        info: dict[str, Any] = {"sample_id": self._sample_id, "step_info": _plain_info(step_info)}
        if not self._playing:
            info["end"] = "completed" if done else "max_turns"
        return observed, reward, terminated, at_limit and not terminated, info

    def close(self) -> None:
        """Close the episode's environment; may be called twice."""
        inner = self._inner
        self._inner = None
        self._playing = False
        if inner is not None:
            inner.close()

    def _index(self, options: Mapping[str, Any]) -> int:
        """Return the index of the sample. Raises ValueError, which `AsyncVectorEnv` can send from another process."""
        size = len(self._samples)
        index = self.np_random.integers(size) if not options else options.get("index")
        if len(options) > 1 or not isinstance(index, int | np.integer) or not 0 <= index < size:
            raise ValueError(f"reset options: must be {{'index': a number from 0 to {size - 1}}}, got {options!r:.200}")
        return int(index)

    def _show(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return the observation of messages, with copies of the images."""
        text = "\n\n".join(f"[{message['role']}]\n{plain_text(message)}" for message in messages)
        return {"text": text, "images": tuple(np.array(image.convert("RGB")) for image in message_images(messages))}


def register_all(*overlays: Path) -> list[str]:
    """Register every environment of the registry that has a built-in data set; return the Gymnasium ids.

    ``geo3k`` becomes ``trueturn/geo3k-v0``. Characters that Gymnasium forbids (all but letters, digits, "_", "." and
    "-") become "_". A repeated call, also with other overlays, replaces earlier entries of the same id.

    Raises:
        UserError: a registry file is wrong (see `load_registry`).
    """
    files = [str(Path(overlay).resolve()) for overlay in overlays]
    registered: list[str] = []
    for env_id, spec in load_registry(*map(Path, files)).items():
        if spec.dataset is None:
            continue
        name = f"{NAMESPACE}/{re.sub(r'[^A-Za-z0-9_.-]', '_', env_id)}-v0"
        gymnasium.registry.pop(name, None)  # avoids Gymnasium's warning about a replaced id
        gymnasium.register(
            id=name,
            entry_point=f"{__name__}:{TrueTurnEnv.__name__}",
            max_episode_steps=spec.max_turns,
            kwargs={"env_id": env_id, "registry": files},
        )
        registered.append(name)
    return registered


def _messages(env: Env, observation: dict[str, Any]) -> tuple[Message, ...]:
    if observation:
        return checked_messages(env.format_observation(observation))
    return ()


def _plain_info(info: Mapping[str, Any]) -> UserDict[str, Any]:
    """Return a copy whose values can be compared, which Gymnasium's checker does and arrays refuse."""
    return UserDict(plain_dict(info, lambda known: known.tolist() if hasattr(known, "tolist") else shown(known)))


register_all()
