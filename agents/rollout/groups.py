"""The types of group collection: problems, options, the groups of one step, and the state kept between steps."""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from agents.rollout.stream import Stream
from agents.types import EndReason, Timing, Trajectory, TrajectoryGroup
from envs.contract import plain_dict
from envs.types import Sample


def derive_seed(*parts: int | str) -> int:
    """Return a 48-bit seed that depends on every part and on their order.

    >>> derive_seed(0, "train", 1) == derive_seed(0, "train", 1) != derive_seed(0, "train", 2)
    True
    """
    # A hash and not a sum: neighbouring seeds must not share episodes.
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True, eq=False)
class GroupProblem:
    """A sample and the origin of its episodes' seeds: copy c has `derive_seed(seed, index, c)`."""

    sample: Sample
    seed: int
    index: int


@dataclass(frozen=True)
class RolloutOptions:
    """How the groups of a step are collected.

    A broken episode stays in its group with its end reason. A group with fewer than two valid episodes is played again
    with other seeds, up to `resample` times.

    `filter_equal` leaves out groups whose valid rewards are all equal, which teach nothing (dynamic sampling, DAPO,
    arXiv 2503.14476, section 3.2). Further groups are played in their place, up to `max_oversample` times the groups of
    the step. `oversample` plays more groups than needed from the start.

    A step takes the first groups, by number, that count; every group that was begun is played to its end. So the
    embedded engine repeats a run exactly, and no group is preferred because it is quick. `stop_early` gives that up:
    the step ends with the first `num_groups` complete groups, so it prefers problems with short episodes, and the clock
    decides which those are. Unfinished groups are then aborted.

    With `max_staleness` s above 0, episodes never stop: up to s steps' groups are played ahead while the learner
    learns, and turns in flight go on under new weights, each token with its version. A group that has a token more than
    s versions older than the weights that a step starts from is aborted.

    `group_filter` says of each group whether it counts; the others are replaced in the same way.

    `max_rollout_s` ends a step in the same way; 0 is no limit.
    """

    group_size: int
    resample: int = 0
    max_concurrent: int = 1024
    filter_equal: bool = False
    oversample: float = 1.0
    max_oversample: float = 3.0
    stop_early: bool = False
    max_staleness: int = 0
    max_rollout_s: float = 0.0
    group_filter: Callable[[TrajectoryGroup], bool] | None = None

    def counts(self, group: TrajectoryGroup) -> bool:
        """Return whether a step may train on a complete group."""
        if self.filter_equal and len({t.reward for t in group.valid}) <= 1:
            return False
        return self.group_filter is None or self.group_filter(group)


@dataclass(frozen=True, eq=False)
class StepRollout:
    """Every group that a step has ended, each tuple in order of number.

    `groups` are those to train on. `filtered` have equal rewards; `surplus` were complete and not needed; `aborted`
    were cut off and hold what was played of them. `shortfall` says why there are fewer groups than requested, or is
    empty. `weight_version` is that of the weights that the step starts from.
    `pools` counts the problems of a curriculum's pools after the step.
    """

    groups: tuple[TrajectoryGroup, ...]
    filtered: tuple[TrajectoryGroup, ...] = ()
    surplus: tuple[TrajectoryGroup, ...] = ()
    aborted: tuple[TrajectoryGroup, ...] = ()
    shortfall: str = ""
    weight_version: int = 0
    pools: Mapping[str, int] = field(default_factory=dict)

    @property
    def unused(self) -> dict[str, tuple[TrajectoryGroup, ...]]:
        """The groups that are not trained on, by outcome."""
        return {"filtered": self.filtered, "surplus": self.surplus, "aborted": self.aborted}

    def of_environment(self, env_id: str) -> StepRollout:
        """Return the groups of one environment of a mixture."""

        def own(groups: tuple[TrajectoryGroup, ...]) -> tuple[TrajectoryGroup, ...]:
            return tuple(group for group in groups if group.environment == env_id)

        parts = {name: own(groups) for name, groups in self.unused.items()}
        return replace(self, groups=own(self.groups), **parts)

    @cached_property
    def played(self) -> tuple[Trajectory, ...]:
        """Every episode of every group, discarded ones included."""
        every = (*self.groups, *self.filtered, *self.surplus, *self.aborted)
        return tuple(t for group in every for t in (*group.discarded, *group.trajectories))


@dataclass(frozen=True, eq=False)
class GroupInFlight:
    """What a checkpoint keeps of a group that was begun and not handed out.

    `played` holds the copies that have ended, by number, without the metadata of their problem: it can be any object,
    and comes again with the problem. An episode that is running is not in it: its environment cannot be saved, so it
    begins again.
    """

    number: int
    attempt: int
    played: Mapping[int, Trajectory]
    discarded: tuple[Trajectory, ...]
    is_complete: bool


@dataclass(frozen=True, eq=False)
class ManagerState:
    """The state of a `RolloutManager` between two steps: the number of its next problem, and its groups in flight.

    `problems` is the state of what chooses the problems, as JSON; empty where their number alone decides.
    """

    num_begun: int = 0
    in_flight: tuple[GroupInFlight, ...] = ()
    problems: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class RunningGroup:
    """A group while its episodes run; `is_aborted` says that no more of them may begin.

    `counts` says whether a step may train on it, once that has been asked: a user's filter is called once for a group.
    """

    number: int
    problem: GroupProblem
    attempt: int = 0
    played: dict[int, Trajectory] = field(default_factory=dict)
    discarded: tuple[Trajectory, ...] = ()
    result: TrajectoryGroup | None = None
    is_aborted: bool = False
    counts: bool | None = None

    @classmethod
    def restore(cls, saved: GroupInFlight, problem: GroupProblem) -> RunningGroup:
        """Return the group that `save` was called on."""
        metadata = plain_dict(problem.sample.metadata, lambda value: value)
        played, discarded = _with_metadata(saved.played, saved.discarded, metadata)
        group = cls(saved.number, problem, saved.attempt, played, discarded)
        if saved.is_complete:
            group.result = group.so_far()
        return group

    def save(self) -> GroupInFlight:
        """Return what a checkpoint keeps of the group."""
        played, discarded = _with_metadata(self.played, self.discarded, {})
        return GroupInFlight(self.number, self.attempt, played, discarded, self.result is not None)

    @property
    def oldest_version(self) -> float:
        """The version of the oldest token of the episodes that have ended and may be trained on; inf without any."""
        turns = (turn for t in self.played.values() if t.end_reason.is_valid for turn in t.turns)
        return min((version for turn in turns for version, _ in turn.versions), default=math.inf)

    def seed(self, copy: int) -> int:
        """Return the seed of a copy in the current attempt."""
        # The first attempt has the seed of runs that never play again.
        attempt = (self.attempt,) if self.attempt else ()
        return derive_seed(self.problem.seed, self.problem.index, copy, *attempt)

    def so_far(self) -> TrajectoryGroup:
        """Return what was played, in order of copy."""
        # In order of copy, not of their end: a repeated run must train alike.
        played = tuple(self.played[copy] for copy in sorted(self.played))
        return TrajectoryGroup(self.problem.sample.id, played, self.discarded)

    def empty_trajectory(self, copy: int, error: BaseException | None) -> Trajectory:
        """Return the record of an episode that left none: its engine failed, or it was aborted while it closed."""
        sample = self.problem.sample
        return Trajectory.of_streams(
            [Stream([*sample.prompt]).frozen(())],
            sample_id=sample.id,
            sample_index=copy,
            seed=self.seed(copy),
            turns=(),
            reward=0.0,
            end_reason=EndReason.ABORTED,
            error="".join(traceback.format_exception(error)).strip() if error else None,
            timing=Timing(began=time.time()),
            label=sample.label,
            num_prompt_messages=len(sample.prompt),
            group=self.number,
            attempt=self.attempt,
        )


def _with_metadata(
    played: Mapping[int, Trajectory], discarded: Sequence[Trajectory], metadata: Mapping[str, Any]
) -> tuple[dict[int, Trajectory], tuple[Trajectory, ...]]:
    """Return the episodes of a group with the metadata of its problem."""
    # Metadata may be any object of an author; the problem brings it again.
    kept = {copy: replace(trajectory, metadata=metadata) for copy, trajectory in played.items()}
    return kept, tuple(replace(trajectory, metadata=metadata) for trajectory in discarded)
