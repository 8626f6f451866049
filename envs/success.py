"""What makes an episode a success, as the entry of its environment says: a reward, or a true value in its info."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator

NONE = "none"
#: The key in a sample's metadata, and the column of rows, that names its environment in a mixture.
ENVIRONMENT = "env"
#: How far below the threshold a reward may end that is a sum of floats.
SLACK = 1e-6


@dataclass(frozen=True)
class Success:
    """The rule of one environment: a reward of at least `reward` or, with a `key`, a true value of it in the info.

    Example::

        Success(0.9).holds(0.955, [])                                       # True
        Success(key="is_success").holds(-3.0, [{}, {"is_success": True}])   # True
    """

    reward: float = 1.0
    key: str = ""

    def __str__(self) -> str:
        if self.key:
            return f"a true '{self.key}' in the episode's info"
        return f"a reward of at least {self.reward:g}"

    def of(self, metadata: Mapping[str, Any]) -> Success | None:
        """Return the rule for an episode of a sample with this metadata: here the same for all."""
        return self

    def holds(self, reward: float, infos: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether an episode with this reward and these infos, one a turn, is a success.

        The last turn whose info has the key decides.
        """
        if not self.key:
            return reward >= self.reward - SLACK
        values = [info[self.key] for info in infos if self.key in info]
        return bool(values) and _is_true(values[-1])


@dataclass(frozen=True)
class MixedSuccess(Success):
    """The rules of the environments of a mixture; None for one that knows no success."""

    rules: Mapping[str, Success | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"{env_id}: {rule or NONE}" for env_id, rule in self.rules.items())

    def of(self, metadata: Mapping[str, Any]) -> Success | None:
        """Return the rule of the environment that the metadata names."""
        return self.rules.get(metadata.get(ENVIRONMENT, ""))


def _is_true(value: Any) -> bool:
    """Return whether a value is true. A text never is: "False" is one, and recordings write foreign objects as text."""
    try:
        return not isinstance(value, str) and bool(value)
    except Exception:  # such as an array of several values
        return False


def read_success(value: Any) -> Any:
    """Return a setting as the threshold or the key that it means: "0.9" from a command line is 0.9."""
    if value is None or value == "":
        return None
    try:
        # float(True) would be a threshold of 1.
        if isinstance(value, bool):
            number = math.nan
        else:
            number = float(value)
    except (TypeError, ValueError, OverflowError):
        if isinstance(value, str):
            if value.lower() == NONE:
                return NONE
            return value
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("must be a reward such as 0.9, a key of the episode's info, or none")
    return number


#: The setting: a threshold, a key, "none", or None for the best reward that the entry declares.
SuccessSetting = Annotated[float | str | None, BeforeValidator(read_success)]
SUCCESS_DESCRIPTION = (
    "what an episode needs to be a success: a reward of at least this, or the key of a true value in its info; none: "
    "there is no success, and evaluations go by the mean reward; empty: a reward of reward_max_val (of a Gymnasium "
    "environment without one: none)"
)
