"""Runs interaction environments written for slime, unmodified: `adapt` wraps their `build_env`.

Such an environment has no reward and no tools: slime grades the final text by rule and takes the tools from
``sample.metadata["tools"]``. Here the grader of the registry entry grades, and the tools come from the same place.
Modules for slime import from slime; if it is not installed, stand-ins replace what they use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from envs import types
from envs.datasets.rows import read_tools
from envs.env import EnvArgs, observation_message
from envs.grading import extract_boxed, score_text
from envs.types import Message
from envs.wrapper import Wrapper


@dataclass
class SlimeSample:
    """The fields of slime's sample that an environment reads. It is mutable and lives for one episode."""

    prompt: str | list[dict[str, Any]] = ""
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    index: int | None = None
    response: str = ""


class BaseInteractionEnv:
    """Stand-in for the base class of slime's interaction environments."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode."""
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Take a turn."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is held."""

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the message of an observation."""
        return show(observation)


def show(observation: dict[str, Any]) -> Message:
    """Return the message that slime makes of an observation: always a user's, whatever role the observation names."""
    return {**observation_message(observation, "user"), "role": "user"}


class SlimeEnv(Wrapper):
    """Adapts an environment of slime to the contract of `Env`."""

    def __init__(
        self, inner: Any, sample: types.Sample, args: EnvArgs, show_observation: Callable[..., Message]
    ) -> None:
        super().__init__(inner)
        self.sample = sample
        self.args = args
        self._show = getattr(inner, "format_observation", show_observation)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        """The tools in the metadata of the sample, as in slime, else those of the environment."""
        of_row = read_tools(self.sample.metadata.get("tools"), f"sample {self.sample.id} metadata.tools")
        return of_row or getattr(self.env, "tools", ())

    def format_observation(self, observation: dict[str, Any]) -> Message:
        """Return the message as the module itself makes it."""
        return self._show(observation)

    def reward(self, final_text: str) -> float | None:
        """Return the environment's own reward if it has one, else the grade of the text."""
        if hasattr(self.env, "reward"):
            return self.env.reward(final_text)
        return self.args.reward(score_text(final_text, str(self.sample.label), self.args.grader))

    def close(self) -> None:
        """Close the environment if it has a `close`."""
        getattr(self.env, "close", lambda: None)()


def adapt(build: Callable[..., Any]) -> Callable[..., SlimeEnv]:
    """Wrap a slime module's `build_env`; its `args` get `max_turns` and the entry's options as attributes."""

    def build_env(sample: types.Sample, args: EnvArgs) -> SlimeEnv:
        # Their environments write into the sample, which is ours and frozen.
        theirs = SlimeSample([*sample.prompt], sample.label, dict(sample.metadata))
        # slime reads its arguments with getattr, as those of argparse.
        names = SimpleNamespace(**{"max_turns": args.max_turns, **args.options})
        module = sys.modules[build.__module__]
        return SlimeEnv(build(sample=theirs, args=names), sample, args, getattr(module, "format_observation", show))

    return build_env


# Stand-ins ------------------------------------------------------------------------------------------------------------


def _grade(solution: str, ground_truth: str) -> bool:
    boxed = extract_boxed(solution)
    return boxed is not None and score_text(f"\\boxed{{{boxed}}}", extract_boxed(ground_truth) or ground_truth) == 1.0


_STAND_INS: dict[str, dict[str, Any]] = {
    "slime.utils.types": {"Sample": SlimeSample},
    "slime.rollout.rm_hub": {"grade_answer_verl": _grade},
    "slime.rollout.rm_hub.math_utils": {"extract_answer": extract_boxed, "grade_answer_verl": _grade},
    "examples.geo3k_vlm_multi_turn.base_env": {"BaseInteractionEnv": BaseInteractionEnv},
}


def install_stand_ins() -> None:
    """Install stand-ins for those modules of slime that cannot be imported."""
    for name, attributes in _STAND_INS.items():
        try:
            importlib.import_module(name)
        except ImportError:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                _ensure_module(".".join(parts[:length]))
            vars(sys.modules[name]).update(attributes)


def _ensure_module(name: str) -> None:
    if name in sys.modules:
        return
    try:
        importlib.import_module(name)
    except ImportError:
        module = ModuleType(name, "A stand-in of TrueTurn.")
        module.__path__ = []  # a package, so that modules below it can be imported
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
