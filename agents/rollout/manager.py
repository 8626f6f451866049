"""Collects the groups of episodes for each training step. All episodes run concurrently on one event loop.

Problems are numbered without end. A group's problem and seeds depend on its number alone, never on when it runs or on
what else runs. Groups with lower numbers begin first. With `max_staleness`, episodes go on between the steps.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agents.rollout.episode import ABORT, Episode
from agents.rollout.groups import GroupProblem, ManagerState, RolloutOptions, RunningGroup, StepRollout
from agents.types import Trajectory, TrajectoryGroup
from envs.contract import EpisodeEnv
from envs.types import Sample, private


@dataclass(frozen=True)
class _Begun:
    """An episode that runs, and the version of the weights when it began."""

    number: int
    copy: int
    version: int


class RolloutManager:
    """Keeps episodes running and hands out groups, step by step.

    `problem_at` gives the problem of each number from 0. Calls `on_episode(trajectory)` when an episode ends. `state`
    is the state of an earlier manager of the same problems; this one resumes from it.

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
        problem_at: Callable[[int], GroupProblem],
        options: RolloutOptions,
        on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
        state: ManagerState = ManagerState(),
    ) -> None:
        self.engine = episode.engine
        self.episode = episode
        self.options = options
        self._build_env = build_env
        self._args = args
        self._problem_at = problem_at
        self._on_episode = on_episode
        self.num_begun = state.num_begun  # groups so far, and the number of the next problem
        self._groups: dict[int, RunningGroup] = {}  # by number, in order
        self._jobs: list[tuple[int, int, int]] = []  # number, attempt, copy: a heap of episodes to begin
        for saved in state.in_flight:
            group = self._groups[saved.number] = RunningGroup.restore(saved, problem_at(saved.number))
            if group.result is None:
                self._queue_missing(group)
        self._running: dict[asyncio.Task[Trajectory], _Begun] = {}
        self._aborted: dict[int, TrajectoryGroup] = {}  # by number; neither `collect` nor `close` has returned them yet
        self._num_complete = self._num_counting = self._num_to_begin = 0
        self._num_groups = self._num_steps = 0  # groups of a step, and the steps that groups are played for
        self._num_ahead = 0  # of these, the steps that come after the one that is collected or learnt from
        self._changed = asyncio.Event()
        self._is_time_up = False
        self._failure: Exception | None = None

    async def collect(self, num_groups: int, steps_to_come: float = math.inf) -> StepRollout:
        """Return the groups of a step, once they are complete or its limits are reached.

        With `max_staleness`, episodes go on after the return, and new ones begin for the steps to come after this one.

        Raises what an episode raised, which is a fault of the engine or our own. After that, or after a cancellation,
        `close` ends the other episodes and returns what was played.
        """
        # First: what is too old for this step can only get older.
        await self._abort(self._too_old())
        self._recount()
        # Steps that never come need no episodes: a run would end with work thrown away.
        self._num_ahead = int(min(self.options.max_staleness, steps_to_come))
        try:
            await self._play(num_groups)
        finally:
            self._num_steps = self._num_to_begin = 0
        if not self.options.max_staleness:
            await self._abort(group for group in self._groups.values() if group.result is None)
        # Before more are begun, since these free their places.
        rollout = self._step_rollout(num_groups)
        self._go_on()
        return rollout

    @property
    def in_flight(self) -> Collection[int]:
        """The numbers of the groups that were begun and not handed out."""
        return self._groups.keys()

    def state(self) -> ManagerState:
        """Return the state between two calls of `collect`, from which another manager can resume."""
        return ManagerState(self.num_begun, tuple(group.save() for group in self._groups.values()))

    async def close(self) -> tuple[TrajectoryGroup, ...]:
        """Abort the running episodes; return all groups that were begun and never handed out, as they are."""
        self._num_steps = self._num_to_begin = 0
        await self._abort(self._groups.values())
        return self._take_aborted()

    async def _play(self, num_groups: int) -> None:
        """Return when enough groups are complete, nothing is left to play, or a limit is reached."""
        options = self.options
        self._num_groups = num_groups
        self._num_steps = self._num_ahead + 1
        self._is_time_up = False
        timer = None
        if options.max_rollout_s:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(options.max_rollout_s, self._end_step)
        try:
            while True:
                self._begin_groups()
                if self._failure or self._is_time_up or self._is_enough or not self._num_unfinished:
                    break
                self._changed.clear()
                await self._changed.wait()
        finally:
            if timer:
                timer.cancel()
        if self._failure:
            raise self._failure

    def _go_on(self) -> None:
        """Let episodes go on between two steps, for as many steps as `max_staleness` allows and as will come."""
        if self.options.max_staleness:
            self._recount()
            self._num_steps = self._num_ahead
            self._begin_groups()

    @property
    def _is_enough(self) -> bool:
        """Whether the step may end although episodes are running."""
        if self.options.stop_early:
            return self._num_counting >= self._num_groups
        if not self.options.max_staleness:
            return False
        # In order: a quick group must not overtake a slow one.
        complete = takewhile(lambda group: group.result is not None, self._groups.values())
        return sum(map(self._counts, complete)) >= self._num_groups

    def _begin_groups(self) -> None:
        """Decide how many more groups to begin, and begin them as `max_concurrent` allows.

        Where the clock decides anyway (`stop_early`, `max_staleness`), a filtered group is replaced at once. Otherwise
        filtered groups are replaced once all others have ended, so that it does not matter which of them ended first.

        Steps take groups in order. So the last of `max_staleness` steps' groups, played beside the step that is
        collected or learnt from, is that many versions old when its turn comes.
        """
        options = self.options
        if options.stop_early or options.max_staleness:
            unfinished = len(self._groups) - self._num_complete
            wanted = (self._num_steps - 1) * self._num_groups + _times(options.oversample, self._num_groups)
            # Those that count or may still count are as many as are wanted.
            room = wanted - unfinished - self._num_counting
        elif not self._num_unfinished:
            room = _times(options.oversample, self._num_groups - self._num_counting)
        else:
            room = self._num_to_begin
        # Rewards may all be equal for ever; a step must end.
        most = _times(options.max_oversample, self._num_steps * self._num_groups)
        self._num_to_begin = max(0, min(room, most - len(self._groups)))
        self._begin_episodes()

    @property
    def _num_unfinished(self) -> int:
        return self._num_to_begin + len(self._groups) - self._num_complete

    def _recount(self) -> None:
        self._num_complete = sum(group.result is not None for group in self._groups.values())
        self._num_counting = sum(self._counts(group) for group in self._groups.values())

    def _too_old(self) -> list[RunningGroup]:
        """Return the groups with a token that is over `max_staleness` versions old.

        An episode that runs counts from its begin, since its turn in flight may have tokens of that age.
        """
        oldest = {number: group.oldest_version for number, group in self._groups.items()}
        for begun in self._running.values():
            oldest[begun.number] = min(oldest[begun.number], begun.version)
        least = self.engine.weight_version - self.options.max_staleness
        return [self._groups[number] for number, version in oldest.items() if version < least]

    def _counts(self, group: RunningGroup) -> bool:
        if group.result is None:
            return False
        if group.counts is None:
            group.counts = self.options.counts(group.result)
        return group.counts

    def _queue_missing(self, group: RunningGroup) -> None:
        """Queue every copy of a group that has not ended."""
        for copy in range(self.options.group_size):
            if copy not in group.played:
                # A heap, so that a group that is played again comes before later ones.
                heapq.heappush(self._jobs, (group.number, group.attempt, copy))

    def _begin_episodes(self) -> None:
        """Begin episodes in order of number, up to `max_concurrent` at once."""
        while not self._failure and len(self._running) < self.options.max_concurrent:
            if not self._jobs:
                if not self._num_to_begin:
                    return
                group = RunningGroup(self.num_begun, self._problem_at(self.num_begun))
                self._groups[group.number] = group
                self.num_begun += 1
                self._num_to_begin -= 1
                self._queue_missing(group)
            number, _, copy = heapq.heappop(self._jobs)
            task = asyncio.get_running_loop().create_task(self._run_episode(self._groups[number], copy))
            self._running[task] = _Begun(number, copy, self.engine.weight_version)
            task.add_done_callback(self._on_end)

    async def _run_episode(self, group: RunningGroup, copy: int) -> Trajectory:
        sample = group.problem.sample
        return await self.episode.run(
            sample,
            lambda: self._build_env(private(sample), deepcopy(self._args)),
            seed=group.seed(copy),
            sample_index=copy,
            group=group.number,
            attempt=group.attempt,
        )

    def _on_end(self, task: asyncio.Task[Trajectory]) -> None:
        """Add an episode to its group. An error of the episode, or in here, ends `collect`."""
        try:
            begun = self._running.pop(task)
            group = self._groups[begun.number]
            copy = begun.copy
            if task.cancelled():
                error = None
            else:
                error = task.exception()
            # Also a failed episode is recorded, so that none vanishes.
            has_failed = task.cancelled() or error
            group.played[copy] = group.empty_trajectory(copy, error) if has_failed else task.result()
            self._on_episode(group.played[copy])
            if error:
                raise error
            # An aborted group is returned as it is, complete or not.
            if not group.is_aborted and len(group.played) == self.options.group_size:
                self._complete(group)
            self._begin_groups()
        except Exception as fault:
            self._failure = self._failure or fault
        self._changed.set()

    def _complete(self, group: RunningGroup) -> None:
        """Accept a group whose copies have all ended, or play it again."""
        result = group.so_far()
        # Fewer than two valid episodes have no advantage.
        if result.is_dropped and group.attempt < self.options.resample:
            group.discarded += result.trajectories
            group.attempt = group.attempt + 1
            group.played = {}
            self._queue_missing(group)
            return
        group.result = result
        self._num_complete += 1
        self._num_counting += self._counts(group)

    def _end_step(self) -> None:
        self._is_time_up = True
        self._changed.set()

    async def _abort(self, groups: Iterable[RunningGroup]) -> None:
        """Abort the episodes of groups, and keep what was played of each until `_take_aborted`."""
        for group in groups:
            group.is_aborted = True
        self._jobs = [job for job in self._jobs if not self._groups[job[0]].is_aborted]
        heapq.heapify(self._jobs)
        tasks = [task for task, begun in self._running.items() if self._groups[begun.number].is_aborted]
        for task in tasks:
            task.cancel(ABORT)
        if tasks:
            # They close their environments first, however long that takes.
            await asyncio.wait(tasks)
        self._aborted |= self._remove(number for number, group in self._groups.items() if group.is_aborted)

    def _take_aborted(self) -> tuple[TrajectoryGroup, ...]:
        """Remove and return the aborted groups, in order of number."""
        aborted = self._aborted
        self._aborted = {}
        return tuple(aborted[number] for number in sorted(aborted))

    def _remove(self, numbers: Iterable[int]) -> dict[int, TrajectoryGroup]:
        groups = {number: self._groups.pop(number) for number in tuple(numbers)}
        return {number: group.result or group.so_far() for number, group in groups.items()}

    def _step_rollout(self, num_groups: int) -> StepRollout:
        """Remove and return all groups that this step has ended."""
        aborted = self._take_aborted()
        complete = [number for number, group in self._groups.items() if group.result]
        counting = [number for number in complete if self._counts(self._groups[number])]
        oldest = min((self._groups[number].oldest_version for number in counting[:num_groups]), default=math.inf)
        least = self.engine.weight_version - self.options.max_staleness
        assert oldest >= least, (
            f"a step of weights {self.engine.weight_version} has a token of {oldest}, before {least}"
        )
        chosen = self._remove(counting[:num_groups])
        filtered = self._remove(sorted(set(complete) - set(counting)))
        if self.options.max_staleness:
            surplus = {}
        else:
            surplus = self._remove(counting[num_groups:])
        shortfall = ""
        if len(chosen) < num_groups:
            shortfall = f"{len(chosen)} of {num_groups} groups count: {len(filtered)} with equal rewards"
            if self._is_time_up:
                num_left = len(aborted) + len(self._groups)
                shortfall += f", {num_left} unfinished when {self.options.max_rollout_s:g} s were spent"
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

    The embedded engine gives the same groups for the same seed.
    """
    options = RolloutOptions(group_size, resample, max_concurrent)
    problems = [GroupProblem(sample, seed, index) for index, sample in enumerate(samples)]
    manager = RolloutManager(episode, build_env, args, problems.__getitem__, options, on_episode)
    try:
        return list((await manager.collect(len(problems))).groups)
    finally:
        await manager.close()
