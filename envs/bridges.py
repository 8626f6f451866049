"""What environments of other frameworks share: checked options, samples that are seeds, and an episode of actions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from random import Random
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envs.errors import UserError, did_you_mean
from envs.tool_calls import ToolCallError
from envs.tool_env import ToolEnv
from envs.tools import ToolError, to_content
from envs.types import Content, MadeSamples, Sample, plain_text

SPLITS = ("demonstrations", "train", "heldout")


class BridgeOptions(BaseModel):
    """A registry entry's settings for an environment of another framework; a subclass names it and adds its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    framework: ClassVar[str]

    id: str = Field(min_length=1)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """Return the validated options.

        Raises:
            UserError: a key is unknown, a value is wrong, or there is no id.
        """
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                fix = did_you_mean(key, cls.model_fields)
                raise UserError(f"{cls.framework} options", "must have known keys only", key, fix) from error
            got = "nothing" if first["type"] == "missing" else first["input"]
            raise UserError(f"{cls.framework} options {key}", first["msg"].lower(), got, "fix the value") from error


def check_split(split: str) -> None:
    """Raise `UserError` if there is no such split."""
    if split not in SPLITS:
        raise UserError("split", "must be a known split", split, did_you_mean(split, SPLITS))


class SeededSamples(MadeSamples):
    """Episodes that differ in the environment's seed alone: the instructions are the prompt of all.

    Seeds of different splits are never the same. Sample i depends on seed, split and i alone.
    """

    def __init__(self, split: str, size: int, seed: int, name: str, instructions: str) -> None:
        super().__init__(size)
        self.split = split
        self.seed = seed
        self.name = name
        self.instructions = instructions

    def make(self, place: int) -> Sample:
        """Return the episode at a place."""
        return Sample(
            id=f"{self.name}-{self.split}-{self.seed}-{place}",
            prompt=({"role": "user", "content": self.instructions},),
            metadata={"seed": episode_seed(f"{self.seed}/{self.split}/{place}", self.split)},
        )


class ActionEnv(ToolEnv):
    """An episode whose turns are actions, each with a reward on the entry's scale.

    An action is the model's whole text if `takes_text`, else a call of a tool that `take`s it.
    """

    takes_text = False

    @abstractmethod
    def take(self, action: Any) -> Any:
        """Take one action, note in `self.done` and `self.info` what came of it, and return what the model sees."""

    @property
    def episode_seed(self) -> int:
        """The sample's seed; for a sample of another data set one from its id, so that it always starts alike."""
        return self.sample.metadata.get("seed", episode_seed(self.sample.id, SPLITS[0]))

    def earn(self, reward: float) -> None:
        """Add a reward to those of this turn, in which several calls may stand."""
        # A score of 0 must add nothing, whatever the entry's scale.
        earned = self.args.reward(reward) - self.args.reward(0.0)
        self.info["reward"] = self.info.get("reward", 0.0) + earned

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Take the action, or make the calls, that the model wrote."""
        if not self.takes_text:
            return super().step(response_text)
        self.turn += 1
        self.info = {}
        action = response_text.strip()
        try:
            content = to_content(self.take(action))
        except ToolError as error:
            content = str(error)
        return user_observation(content), self.done, {"tool_calls": [], **self.info}

    def no_call(self, response_text: str) -> str:
        """Ask for the missing call."""
        return self.explain(ToolCallError("there is no call"), "No action was taken.")

    def reward(self, final_text: str) -> float:
        """Return the reward where all turns have 0: what a score of 0 is on the entry's scale."""
        return self.args.reward(0.0)


def user_observation(content: Content) -> dict[str, Any]:
    """Return an observation that a user's message shows."""
    message = {"role": "user", "content": content}
    return {"obs_str": plain_text(message), "messages": [message]}


def episode_seed(key: str, split: str) -> int:
    """Return a seed below 2**31 that no other split can have."""
    # Seeds of splits differ modulo 3.
    return Random(key).randrange(2**29) * len(SPLITS) + SPLITS.index(split)
