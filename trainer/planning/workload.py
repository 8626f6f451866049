"""What is planned: the means of a run's episodes, and its schedule. Loads no torch, so that --help answers at once."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from envs.config.settings import Section

#: Model tokens of an episode below which forecasts missed by up to 44 % (docs/scale.md).
LEAST_TOKENS = 300


class Workload(Section):
    """Means of the episodes.

    Lengths are log-normal with `spread`, the standard deviation of their logarithm.

    Example: `Workload(prompt_tokens=400, image_tokens=256, turns=3, turn_tokens=300)` has streams of 1,676 tokens in
    the mean, 900 of them the model's.
    """

    prompt_tokens: int = Field(default=400, ge=1, description="text tokens of a prompt")
    image_tokens: int = Field(default=256, ge=0, description="tokens of the prompt's images")
    turns: float = Field(default=3.0, ge=1, le=1000, description="model turns of an episode")
    turn_tokens: float = Field(default=300, ge=1, description="tokens that the model writes in a turn")
    observation_tokens: float = Field(default=60, ge=0, description="tokens of the environment's answer to a turn")
    tool_s: float = Field(default=0.1, ge=0, description="seconds of the environment in a turn")
    spread: float = Field(
        default=0.6, ge=0, le=2, description="standard deviation of the logarithm of lengths and seconds; 0: all equal"
    )

    @field_validator("turn_tokens")
    @classmethod
    def _is_predicted(cls, value: float, info: ValidationInfo) -> float:
        if value * info.data.get("turns", 1) < LEAST_TOKENS:
            raise ValueError(
                f"must give episodes of {LEAST_TOKENS} model tokens or more: shorter ones were missed by up to 44 %"
            )
        return value

    @property
    def model_tokens(self) -> float:
        """Tokens that the model writes in an episode."""
        return self.turns * self.turn_tokens

    @property
    def prompt(self) -> int:
        """Tokens of a prompt with its images."""
        return self.prompt_tokens + self.image_tokens

    @property
    def stream(self) -> float:
        """Tokens of an episode's stream."""
        return self.prompt + self.model_tokens + (self.turns - 1) * self.observation_tokens

    @property
    def longest(self) -> int:
        """The tokens of a stream that hardly any exceeds: three times the mean."""
        # Images are not stretched: their number of tokens is known.
        return self.image_tokens + round(
            3 * (self.prompt_tokens + self.turns * (self.turn_tokens + self.observation_tokens))
        )

    def longest_of(self, num_episodes: int) -> float:
        """Return how many tokens the model writes in the longest of so many episodes, about."""
        # An episode is a sum of turns, whose lengths average out.
        deviation = self.spread / math.sqrt(self.turns)
        # The largest of n standard normal values is about this.
        normal = math.sqrt(2 * math.log(max(2, num_episodes)))
        return self.model_tokens * math.exp(deviation * normal - deviation**2 / 2)


class Schedule(Section):
    """The run."""

    placement: Literal["auto", "colocate", "split"] = Field(default="auto", description="--placement of trainer.run")
    max_staleness: int = Field(default=0, ge=0, description="--max-staleness of trainer.run")
    keep_kv_cache: bool = Field(default=False, description="--keep-kv-cache of trainer.run; means --placement split")
    problems_per_step: int = Field(default=32, ge=1, description="--problems-per-step of trainer.run")
    group_size: int = Field(default=8, ge=2, description="--group-size of trainer.run")

    @field_validator("keep_kv_cache")
    @classmethod
    def _has_episodes_at_a_push(cls, value: bool, info: ValidationInfo) -> bool:
        # A push without episodes in progress has no cache to keep.
        if value and (info.data.get("placement") == "colocate" or not info.data.get("max_staleness")):
            raise ValueError("is for --max-staleness above 0 and --placement split")
        return value

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.problems_per_step * self.group_size
