"""Groups of episodes, all concurrent on one event loop: problems in, the groups of a training step out, in order.

Problems are numbered without end, and a group's episodes depend on its problem's number alone: never on when it is
played, or on what else is. Those of lower numbers begin first.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from agents.engines.metered import MeteredEngine
from agents.episode import ABORT, Episode
from agents.types import EndReason, Timing, Trajectory, TrajectoryGroup
from envs.runner import EpisodeEnv
from envs.types import Sample, private


def derive_seed(*parts: int | str) -> int:
    """Return a 48-bit seed that depends on every part and on their order.

    >>> derive_seed(0, "train", 1) == derive_seed(0, "train", 1) != derive_seed(0, "train", 2)
    True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True, eq=False)
class Problem:
    """A sample, and what the seeds of its episodes come from: copy c has `derive_seed(seed, index, c)`."""

    sample: Sample
    seed: int
    index: int


@dataclass(frozen=True)
class RolloutOptions:
    """How a step's groups are collected.

    A broken episode is in its group with its end reason; a group that they leave fewer than two valid episodes is
    played again with other seeds, up to `resample` times.

    `filter_equal` passes over groups whose valid rewards are all equal, which teach nothing (dynamic sampling, DAPO,
    arXiv 2503.14476, section 3.2): further groups are played in their place, `max_oversample` times the step's number
    at most. `oversample` plays more groups than asked from the start.

    Which groups a step takes is decided by their number: all that were begun are played to the end, and the first ones
    that count are taken. So the embedded engine repeats a run exactly, and no group is preferred for being quick.
    `stop_early` gives that up: the step ends with the first `num_groups` groups that are complete, so it prefers
    problems whose episodes are short, and which those are depends on the clock. What is unfinished then is aborted or,
    with `partial`, paused over the change of weights, to finish in a later step, each token with the version of the
    weights that wrote it; a group begun more than `max_staleness` versions ago is aborted.

    `max_rollout_s` and `max_rollout_tokens` (model tokens) end a step in the same way; 0 is no limit.
    """

    group_size: int
    resample: int = 0
    max_concurrent: int = 1024
    filter_equal: bool = False
    oversample: float = 1.0
    max_oversample: float = 3.0
    stop_early: bool = False
    partial: bool = False
    max_staleness: int = 1
    max_rollout_s: float = 0.0
    max_rollout_tokens: int = 0

    def counts(self, group: TrajectoryGroup) -> bool:
        """Return whether a complete group is one of those that a step asks for."""
        return not self.filter_equal or len({t.reward for t in group.valid}) > 1


@dataclass(frozen=True, eq=False)
class StepRollout:
    """What became of every group that a step has ended, each in order of number.

    `groups` are those to train on. `filtered` have equal rewards; `surplus` were complete and not needed; `aborted`
    were cut off and hold what was played of them. `shortfall` says why there are fewer groups than asked, or is empty.
    """

    groups: tuple[TrajectoryGroup, ...]
    filtered: tuple[TrajectoryGroup, ...] = ()
    surplus: tuple[TrajectoryGroup, ...] = ()
    aborted: tuple[TrajectoryGroup, ...] = ()
    shortfall: str = ""

    @property
    def unused(self) -> dict[str, tuple[TrajectoryGroup, ...]]:
        """The groups that are not trained on, by their fate."""
        return {"filtered": self.filtered, "surplus": self.surplus, "aborted": self.aborted}

    @cached_property
    def played(self) -> tuple[Trajectory, ...]:
        """Every episode of every group, discarded ones included."""
        every = (*self.groups, *self.filtered, *self.surplus, *self.aborted)
        return tuple(t for group in every for t in (*group.discarded, *group.trajectories))


@dataclass(eq=False)
class _Group:
    """A group that was begun and not handed out yet."""

    problem: Problem
    begun_version: int
    attempt: int = 0
    played: dict[int, Trajectory] = field(default_factory=dict)
    discarded: tuple[Trajectory, ...] = ()
    is_cut: bool = False
    result: TrajectoryGroup | None = None

    def seed(self, copy: int) -> int:
        """Return the seed of a copy in the attempt at hand."""
        attempt = (self.attempt,) if self.attempt else ()
        return derive_seed(self.problem.seed, self.problem.index, copy, *attempt)

    def so_far(self) -> TrajectoryGroup:
        """Return what was played, in order of copy."""
        played = tuple(self.played[copy] for copy in sorted(self.played))
        return TrajectoryGroup(self.problem.sample.id, played, self.discarded)


@dataclass(frozen=True, eq=False)
class GroupInFlight:
    """A group that was begun and not handed out: what of it is worth keeping when the process ends.

    `played` holds the copies that have ended, by number; `result` is the group where all have. An episode in the middle
    of being played is in neither: its environment cannot be saved, so it begins again.
    """

    number: int
    begun_version: int
    attempt: int
    played: Mapping[int, Trajectory]
    discarded: tuple[Trajectory, ...]
    result: TrajectoryGroup | None


@dataclass(frozen=True, eq=False)
class ManagerState:
    """Where a `RolloutManager` stands between two steps: the number of its next problem, and its groups in flight."""

    num_begun: int = 0
    in_flight: tuple[GroupInFlight, ...] = ()


class RolloutManager:
    """Keeps episodes running and hands out groups, step by step.

    `problem_at` gives the problem of each number from 0; `on_episode` is called as each episode ends. `state` is that
    of an earlier manager of the same problems, which this one goes on from.

    Example::

        manager = RolloutManager(episode, build_env, args, problem_at, RolloutOptions(group_size=8))
        try:
            rollout = await manager.collect(num_groups=16)      # 128 episodes; rollout.groups has 16 groups
        finally:
            unfinished = await manager.close()
    """

    def __init__(
        self,
        episode: Episode,
        build_env: Callable[..., EpisodeEnv],
        args: Any,
        problem_at: Callable[[int], Problem],
        options: RolloutOptions,
        on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
        state: ManagerState = ManagerState(),
    ) -> None:
        self.engine, self.episode, self.options = episode.engine, episode, options
        if options.max_rollout_tokens:
            self.episode = shallow_copy(episode)
            self.episode.engine = MeteredEngine(episode.engine, self._spend_tokens)
        self._build_env, self._args = build_env, args
        self._problem_at, self._on_episode = problem_at, on_episode
        self.num_begun = state.num_begun  # groups so far, and the number of the next problem
        self._groups: dict[int, _Group] = {}  # by number, in order
        self._jobs: list[tuple[int, int, int]] = []  # number, attempt, copy: a heap of episodes to begin
        for group in state.in_flight:
            self._take_up(group)
        self._running: dict[asyncio.Task[Trajectory], tuple[int, int]] = {}  # number and copy
        self._num_complete = self._num_counting = self._num_to_begin = self._num_tokens = 0
        self._is_collecting = self._is_paused = False
        self._changed = asyncio.Event()
        self._spent = ""
        self._failure: Exception | None = None

    async def collect(self, num_groups: int) -> StepRollout:
        """Play until a step's groups are complete, or its limits are reached.

        With `partial`, the engine is paused on return while episodes are left over; the next call resumes it.

        Raises what an episode raised, which is the engine's fault or our own. After that, or a cancellation, `close`
        ends the other episodes and returns what was played.
        """
        version, options = self.engine.weight_version, self.options
        stale = await self._cut(g for g in self._groups.values() if version - g.begun_version > options.max_staleness)
        await self._resume()
        try:
            await self._play(num_groups)
        finally:
            self._is_collecting, self._num_to_begin = False, 0
        cut: dict[int, TrajectoryGroup] = {}
        if not options.partial:
            cut = await self._cut(group for group in self._groups.values() if group.result is None)
        elif self._running:
            self._is_paused = True
            await self.engine.pause()
        return self._hand_out(num_groups, tuple((stale | cut).values()))

    def state(self) -> ManagerState:
        """Return where this stands, between two calls of `collect`."""
        return ManagerState(
            self.num_begun,
            tuple(
                GroupInFlight(number, g.begun_version, g.attempt, dict(g.played), g.discarded, g.result)
                for number, g in self._groups.items()
            ),
        )

    def _take_up(self, saved: GroupInFlight) -> None:
        """Go on with a group of an earlier manager: its missing copies are played, with the seeds that they had."""
        self._groups[saved.number] = _Group(
            self._problem_at(saved.number),
            saved.begun_version,
            saved.attempt,
            dict(saved.played),
            saved.discarded,
            result=saved.result,
        )
        if saved.result is None:
            missing = [copy for copy in range(self.options.group_size) if copy not in saved.played]
            for copy in missing:
                heapq.heappush(self._jobs, (saved.number, saved.attempt, copy))

    async def close(self) -> tuple[TrajectoryGroup, ...]:
        """Abort what is still running; return all groups that were begun and never handed out, as they are."""
        left = await self._cut(self._groups.values())
        await self._resume()
        return tuple(left.values())

    async def _play(self, num_groups: int) -> None:
        """Return when enough groups are complete, nothing is left to play, or a limit is reached."""
        options = self.options
        self._num_tokens, self._spent, self._is_collecting = 0, "", True
        self._num_complete = sum(group.result is not None for group in self._groups.values())
        self._num_counting = sum(self._counts(group) for group in self._groups.values())
        most = _times(options.max_oversample, num_groups)
        wanted = _times(options.oversample, num_groups) - self._num_unfinished - self._num_counting
        timer = None
        if options.max_rollout_s:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(options.max_rollout_s, self._spend, f"{options.max_rollout_s:g} s")
        try:
            while True:
                self._num_to_begin += max(0, min(wanted, most - len(self._groups) - self._num_to_begin))
                self._begin()
                enough = self._num_counting >= num_groups
                if self._failure or self._spent or (enough and options.stop_early) or not self._num_unfinished:
                    break
                self._changed.clear()
                await self._changed.wait()
                wanted = self._num_missing(num_groups)
        finally:
            if timer:
                timer.cancel()
        if self._failure:
            raise self._failure

    def _num_missing(self, num_groups: int) -> int:
        """Return how many more groups to begin.

        Those that were passed over are made good at once where the clock decides anyway; otherwise only when all others
        have ended, so that what is played does not depend on which of them were first.
        """
        if self.options.stop_early:
            return _times(self.options.oversample, num_groups) - self._num_unfinished - self._num_counting
        return 0 if self._num_unfinished else _times(self.options.oversample, num_groups - self._num_counting)

    @property
    def _num_unfinished(self) -> int:
        return self._num_to_begin + len(self._groups) - self._num_complete

    def _counts(self, group: _Group) -> bool:
        return group.result is not None and self.options.counts(group.result)

    def _begin(self) -> None:
        """Begin episodes in order of number while there are places."""
        may_begin = self._is_collecting and not self._failure
        while may_begin and len(self._running) < self.options.max_concurrent:
            if not self._jobs:
                if not self._num_to_begin:
                    return
                number, self.num_begun = self.num_begun, self.num_begun + 1
                self._num_to_begin -= 1
                self._groups[number] = _Group(self._problem_at(number), self.engine.weight_version)
                self._jobs = [(number, 0, copy) for copy in range(self.options.group_size)]
            number, _, copy = heapq.heappop(self._jobs)
            task = asyncio.get_running_loop().create_task(self._one(number, copy))
            self._running[task] = number, copy
            task.add_done_callback(self._ended)

    async def _one(self, number: int, copy: int) -> Trajectory:
        group = self._groups[number]
        sample = group.problem.sample
        return await self.episode.run(
            sample,
            lambda: self._build_env(private(sample), deepcopy(self._args)),
            seed=group.seed(copy),
            sample_index=copy,
            group=number,
            attempt=group.attempt,
        )

    def _ended(self, task: asyncio.Task[Trajectory]) -> None:
        """Put an episode into its group; whatever goes wrong here or went wrong there ends `collect`."""
        number, copy = self._running.pop(task)
        group = self._groups[number]
        error = None if task.cancelled() else task.exception()
        group.played[copy] = _unplayed(group, number, copy, error) if task.cancelled() or error else task.result()
        try:
            self._on_episode(group.played[copy])
            if error:
                raise error
            if not group.is_cut and len(group.played) == self.options.group_size:
                self._completed(number, group)
            self._begin()
        except Exception as fault:
            self._failure = self._failure or fault
        self._changed.set()

    def _completed(self, number: int, group: _Group) -> None:
        """Take a group whose copies have all ended, or play it again."""
        result = group.so_far()
        if result.is_dropped and group.attempt < self.options.resample:
            group.discarded += result.trajectories
            group.attempt, group.played = group.attempt + 1, {}
            for copy in range(self.options.group_size):
                heapq.heappush(self._jobs, (number, group.attempt, copy))
            return
        group.result = result
        self._num_complete += 1
        self._num_counting += self._counts(group)

    def _spend(self, what: str) -> None:
        self._spent = self._spent or what
        self._changed.set()

    def _spend_tokens(self, count: int) -> None:
        self._num_tokens += count
        if self._num_tokens >= self.options.max_rollout_tokens:
            self._spend(f"{self.options.max_rollout_tokens} tokens")

    async def _cut(self, groups: Iterable[_Group]) -> dict[int, TrajectoryGroup]:
        """Take out groups, whose episodes are aborted first; return by number what was played of each."""
        for group in groups:
            group.is_cut = True
        self._jobs = [job for job in self._jobs if not self._groups[job[0]].is_cut]
        heapq.heapify(self._jobs)
        tasks = [task for task, (number, _) in self._running.items() if self._groups[number].is_cut]
        for task in tasks:
            task.cancel(ABORT)
        if tasks:
            await asyncio.wait(tasks)
        return self._take(number for number, group in self._groups.items() if group.is_cut)

    def _take(self, numbers: Iterable[int]) -> dict[int, TrajectoryGroup]:
        groups = {number: self._groups.pop(number) for number in tuple(numbers)}
        return {number: group.result or group.so_far() for number, group in groups.items()}

    async def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await self.engine.resume()

    def _hand_out(self, num_groups: int, aborted: tuple[TrajectoryGroup, ...]) -> StepRollout:
        """Take out all groups that this step has ended."""
        complete = [number for number, group in self._groups.items() if group.result]
        counting = [number for number in complete if self._counts(self._groups[number])]
        chosen = self._take(counting[:num_groups])
        filtered = self._take(sorted(set(complete) - set(counting)))
        surplus = {} if self.options.partial else self._take(counting[num_groups:])
        shortfall = ""
        if len(chosen) < num_groups:
            unfinished = f", {len(aborted) + len(self._groups)} unfinished when {self._spent} were spent"
            shortfall = f"{len(chosen)} of {num_groups} groups count: {len(filtered)} with equal rewards"
            shortfall += unfinished if self._spent else ""
        return StepRollout(
            groups=tuple(chosen.values()),
            filtered=tuple(filtered.values()),
            surplus=tuple(surplus.values()),
            aborted=aborted,
            shortfall=shortfall,
        )


def _times(factor: float, count: int) -> int:
    """Return the product rounded up, and 11 for 1.1 times 10."""
    return math.ceil(factor * count - 1e-9)


def _unplayed(group: _Group, number: int, copy: int, error: BaseException | None) -> Trajectory:
    """Return the record of an episode that has left none: the engine failed it, or it was aborted as it closed."""
    sample = group.problem.sample
    return Trajectory(
        sample_id=sample.id,
        sample_index=copy,
        seed=group.seed(copy),
        ids_T=np.zeros(0, dtype=np.int64),
        mask_T=np.zeros(0, dtype=np.bool_),
        logprobs_T=np.zeros(0, dtype=np.float32),
        images=(),
        turns=(),
        reward=0.0,
        end_reason=EndReason.ABORTED,
        prompt_length=0,
        messages=sample.prompt,
        error="".join(traceback.format_exception(error)).strip() if error else None,
        metadata=sample.metadata,
        timing=Timing(began=time.time()),
        label=sample.label,
        num_prompt_messages=len(sample.prompt),
        group=number,
        attempt=group.attempt,
    )


async def rollout_groups(
    episode: Episode,
    samples: Sequence[Sample],
    build_env: Callable[..., EpisodeEnv],
    args: Any,
    group_size: int,
    seed: int,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    resample: int = 0,
    max_concurrent: int = 1024,
) -> list[TrajectoryGroup]:
    """Play `group_size` episodes of every sample; return a group for each, in order.

    The same seed gives the same groups with the embedded engine.
    """
    options = RolloutOptions(group_size, resample, max_concurrent)
    problems = [Problem(sample, seed, index) for index, sample in enumerate(samples)]
    manager = RolloutManager(episode, build_env, args, problems.__getitem__, options, on_episode)
    try:
        return list((await manager.collect(len(problems))).groups)
    finally:
        await manager.close()
