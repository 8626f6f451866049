"""Several environments in one run: a mixture is an entry whose samples name the environment that each belongs to.

Every part keeps its own entry: code, data set, system prompt, limits, tools, grader, rewards and success. A mixture
only decides which share of the problems each part has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from envs.errors import UserError
from envs.spec import EnvSpec
from envs.success import ENVIRONMENT, NONE
from envs.types import Sample, SampleSource

#: What all parts must agree on, because one model writes and one reader reads all of them.
SHARED = ("thinking", "tool_format")


def read_shares(given: Sequence[str]) -> dict[str, float]:
    """Return the share of each environment; without one, all have the same.

    >>> read_shares(["geo3k:0.7", "calculator:0.3"])
    {'geo3k': 0.7, 'calculator': 0.3}
    >>> read_shares(["geo3k"])
    {'geo3k': 1.0}

    Raises:
        UserError: a share is no number above 0, or an environment is named twice.
    """
    shares: dict[str, float] = {}
    for text in given:
        env_id, has_share, number = text.partition(":")
        try:
            share = float(number) if has_share else 1.0
        except ValueError:
            share = 0.0
        if not (isfinite(share) and share > 0):
            raise UserError("--env", "must have a share above 0 after the colon", text, f"write {env_id}:0.5")
        if env_id in shares:
            raise UserError("--env", "must name each environment once", env_id, "add its shares up")
        shares[env_id] = share
    return shares


def mix(shares: Mapping[str, float], parts: Sequence[EnvSpec], env_id: str = "", description: str = "") -> EnvSpec:
    """Return the mixture of some entries, whose ids `shares` has.

    Raises:
        UserError: a part is a mixture itself, or the parts read the model's text in different ways.
    """
    ids = [part.id for part in parts]
    name = env_id or "+".join(ids)
    if nested := [part.id for part in parts if part.parts]:
        raise UserError(f"environment '{name}'", "must mix environments", f"the mixture {nested[0]}", "name its parts")
    for key in SHARED:
        values = list(dict.fromkeys(str(getattr(part, key)) for part in parts))
        if len(values) > 1:
            rule = f"must mix environments with the same {key}"
            raise UserError(f"environment '{name}'", rule, " and ".join(values), f"give {key} to all of them")
    needs_tools = any(part.tools == "required" for part in parts)
    return EnvSpec(
        id=name,
        entry_point="envs.mixture",  # never called: `envs.execution.load` builds the parts
        description=description or f"A mixture of {', '.join(ids)}.",
        max_turns=max(part.max_turns for part in parts),
        tools="required" if needs_tools else "optional",
        success=NONE if all(part.success_rule is None for part in parts) else None,
        thinking=parts[0].thinking,
        tool_format=parts[0].tool_format,
        mixture=dict(shares),
        parts={part.id: part for part in parts},
    )


def places(shares: Mapping[str, float], size: int) -> list[tuple[str, int]]:
    """Return the environment of each of `size` samples, and its place among that environment's own.

    Environments are spread evenly: of every stretch from the beginning each has its share, to within one.

    >>> places({"geo3k": 0.5, "guess": 0.5}, 3)
    [('geo3k', 0), ('guess', 0), ('geo3k', 1)]
    """
    counts = dict.fromkeys(shares, 0)
    total = sum(shares.values())
    found = []
    for number in range(1, size + 1):
        # The part that lags furthest behind its share comes next.
        env_id = max(shares, key=lambda name: shares[name] / total * number - counts[name])
        found.append((env_id, counts[env_id]))
        counts[env_id] += 1
    return found


@dataclass(frozen=True, eq=False)
class MixedSamples:
    """Samples of several environments at the places that `places` gives; each names its environment.

    An environment with fewer samples than it has places shows them again.
    """

    sources: Mapping[str, SampleSource]
    places: Sequence[tuple[str, int]]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        env_id, place = self.places[index]
        source = self.sources[env_id]
        sample = source[place % len(source)]
        return replace(sample, metadata={**sample.metadata, ENVIRONMENT: env_id})


_SHARES = TypeAdapter(dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]])


@dataclass(frozen=True)
class MixtureEntry:
    """An entry `mixture: {geo3k: 0.7, calculator: 0.3}` of a registry file, before its environments are looked up."""

    env_id: str
    shares: Mapping[str, float]
    description: str

    @classmethod
    def read(cls, where: str, env_id: str, entry: Mapping[str, object]) -> MixtureEntry:
        """Return the checked entry. Raises `UserError` if it has other keys, or shares that are no numbers above 0."""
        if others := sorted(entry.keys() - {"mixture", "description"}):
            fix = "write it in the entries of the environments that are mixed"
            raise UserError(f"{where} {others[0]}", "cannot stand beside mixture", entry[others[0]], fix)
        try:
            shares = _SHARES.validate_python(entry["mixture"])
        except ValidationError as error:
            fix = "write mixture: {geo3k: 0.7, calculator: 0.3}"
            rule = "must give each environment a share above 0"
            raise UserError(f"{where} mixture", rule, entry["mixture"], fix) from error
        return cls(env_id, shares, str(entry.get("description", "")))
