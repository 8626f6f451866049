"""Claims about rollouts: which groups a step takes and when it ends, that nothing is lost and nothing played twice."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from agents.engines.hf import HFEngine
from agents.engines.scripted import ScriptedEngine
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.groups import (
    GroupProblem,
    ManagerState,
    RolloutOptions,
    RunningGroup,
    StepRollout,
    derive_seed,
)
from agents.rollout.manager import RolloutManager
from agents.rollout.rewards import RewardSum, WeightedReward
from agents.types import Completion, EndReason, GenerateRequest, SamplingParams, Trajectory, TrajectoryGroup, Turn
from envs.env import Env
from envs.spec import EnvLimits
from envs.types import Sample
from tests.budget import examples
from tests.builders import sampling, versions_of
from tests.prompts import sample

SEED, COPIES = 7, 4
WHO = {
    derive_seed(SEED, number, copy, *again): (number, copy)
    for number in range(600)
    for copy in range(COPIES)
    for again in ((), (1,))
}
"""Which problem and copy an episode's seed is of."""

Text = Callable[[int, int], str]
"""What the model writes, given problem and copy: a reward, or "raise" to break the environment."""


def mixed(number: int, copy: int) -> str:
    return str(copy % 2)


def who(request: GenerateRequest) -> tuple[int, int]:
    return WHO[request.seed // 1000]


def problem(number: int) -> GroupProblem:
    return GroupProblem(sample(f"GroupProblem {number}.", id=str(number)), SEED, number)


class Judge(Env):
    """Ends the episode after one turn, whose text is the reward; counts what is open."""

    open_now: ClassVar[Counter[str]] = Counter()
    lock: ClassVar[threading.Lock] = threading.Lock()
    close_s = 0.0

    def __init__(self, asked: Sample, _: object) -> None:
        self.id = asked.id
        self.count(1)

    def count(self, change: int) -> None:
        with self.lock:
            self.open_now[self.id] += change

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        if response_text == "raise":
            raise RuntimeError("broken")
        return {}, True, {}

    def reward(self, final_text: str) -> float:
        return float(final_text)

    def close(self) -> None:
        time.sleep(self.close_s)
        self.count(-1)


@pytest.fixture(autouse=True)
def all_environments_are_closed() -> Iterable[None]:
    Judge.open_now.clear()
    yield
    deadline = time.monotonic() + 20
    while +Judge.open_now and time.monotonic() < deadline:  # one that is aborted as it is built is closed on its thread
        time.sleep(0.01)
    assert not +Judge.open_now, "environments were left open"


class PacedEngine:
    """Writes `text(number, copy)` after `wait(number, copy)`, and notes the order in which episodes came."""

    context_length = 4096

    def __init__(self, renderer: Renderer, text: Text = mixed, wait: Callable[[int, int], Any] | None = None) -> None:
        self.renderer, self.text, self.wait = renderer, text, wait
        self.weight_version = 0
        self.asked: list[tuple[int, int]] = []
        self.most_open = self.num_open = self.most_tasks = self.num_pauses = self.num_resumes = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[PacedEngine]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        try:
            yield self
        finally:
            self.num_open -= 1

    async def generate(self, request: GenerateRequest) -> Completion:
        number, copy = who(request)
        self.asked.append((number, copy))
        await (self.wait(number, copy) if self.wait else asyncio.sleep(0))
        ids = self.renderer.tokenizer(self.text(number, copy), add_special_tokens=False)["input_ids"]
        ids = (*ids, request.sampling.stop_ids[-1])
        versions = ((self.weight_version, len(ids)),)
        return Completion(ids, (-0.1,) * len(ids), "stop", len(request.ids), versions)

    async def pause(self) -> None:
        self.num_pauses += 1

    async def resume(self) -> None:
        self.num_resumes += 1

    async def score(self, *_: object) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        return None


async def forever() -> None:
    await asyncio.Event().wait()


def manager_of(
    renderer: Renderer,
    engine: Any,
    env: Any = Judge,
    max_turns: int = 1,
    state: ManagerState = ManagerState(),
    **options: Any,
) -> RolloutManager:
    episode = Episode(engine, renderer, Limits(max_turns=max_turns, max_new_tokens=400), sampling(renderer))
    settings = RolloutOptions(**{"group_size": COPIES, **options})
    return RolloutManager(episode, env, None, problem, settings, state=state)


def finish(story: Coroutine[Any, Any, Any]) -> Any:
    """Run a story that must not hang."""
    return asyncio.run(asyncio.wait_for(story, 60))


def collect(manager: RolloutManager, *nums: int) -> tuple[list[StepRollout], tuple[TrajectoryGroup, ...]]:
    """Collect steps of so many groups, then close; nothing may be lost or be there twice."""

    async def story() -> tuple[list[StepRollout], tuple[TrajectoryGroup, ...]]:
        rollouts = [await manager.collect(num) for num in nums]
        return rollouts, await manager.close()

    rollouts, left = finish(story())
    assert_each_once(manager, *rollouts, StepRollout((), aborted=left))
    return rollouts, left


def assert_each_once(manager: RolloutManager, *rollouts: StepRollout) -> None:
    """Every group that was begun is in one place, and every seed in it once; none but an aborted one lacks a copy."""
    groups = [g for r in rollouts for g in (*r.groups, *r.filtered, *r.surplus, *r.aborted)]
    assert sorted(int(g.sample_id) for g in groups) == list(range(manager.num_begun))
    seeds = Counter(t.seed for r in rollouts for t in r.played)
    assert set(seeds.values()) <= {1}
    whole = [g for r in rollouts for g in (*r.groups, *r.filtered, *r.surplus)]
    assert all([t.sample_index for t in g.trajectories] == list(range(COPIES)) for g in whole)
    assert all(WHO[t.seed][0] == int(g.sample_id) for g in groups for t in (*g.discarded, *g.trajectories))
    assert all(WHO[t.seed][1] == t.sample_index for r in rollouts for t in r.played)


def numbers(groups: Iterable[TrajectoryGroup]) -> list[int]:
    return [int(group.sample_id) for group in groups]


def test_each_step_takes_the_next_problems_and_every_episode_has_its_own_seed(renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer.tokenizer, lambda _, request: mixed(*who(request)))
    (first, second), left = collect(manager_of(renderer, engine), 3, 2)
    assert (numbers(first.groups), numbers(second.groups), left) == ([0, 1, 2], [3, 4], ())
    assert [t.seed for t in second.groups[1].trajectories] == [derive_seed(SEED, 4, copy) for copy in range(COPIES)]
    assert [t.reward for t in first.groups[0].trajectories] == [0.0, 1.0, 0.0, 1.0]
    assert first.unused == {"filtered": (), "surplus": (), "aborted": ()} and first.shortfall == ""


def test_episodes_begin_in_order_and_no_more_than_allowed_at_once(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=lambda number, copy: asyncio.sleep(0.001 * ((3 * number + copy) % 5)))
    collect(manager_of(renderer, engine, max_concurrent=6), 12)
    assert engine.asked[:6] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    # An environment opens on a thread, so neighbours may swap; nobody is overtaken by more than what runs beside it.
    expected = [(number, copy) for number in range(12) for copy in range(COPIES)]
    assert all(abs(expected.index(one) - place) < 6 for place, one in enumerate(engine.asked))
    assert engine.most_open == 6
    assert engine.most_tasks <= 6 + 4  # no task for an episode that has not begun


def test_two_thousand_episodes_run_at_once_and_each_is_played_once(renderer: Renderer) -> None:
    gate: list[asyncio.Event] = []
    engine = PacedEngine(renderer, wait=lambda *_: gate[0].wait())

    async def story() -> StepRollout:
        gate.append(asyncio.Event())
        manager = manager_of(renderer, engine, max_concurrent=2000)
        collecting = asyncio.create_task(manager.collect(500))
        while len(engine.asked) < 2000:
            await asyncio.sleep(0.01)
        gate[0].set()
        rollout = await collecting
        assert_each_once(manager, rollout)
        return rollout

    started = time.perf_counter()
    rollout = finish(story())
    assert time.perf_counter() - started < 40
    assert engine.most_open == 2000
    assert Counter(t.end_reason for t in rollout.played) == {EndReason.COMPLETED: 2000}


def test_a_group_of_broken_episodes_is_played_again_with_other_seeds(renderer: Renderer) -> None:
    tries: Counter[tuple[int, int]] = Counter()

    def breaks_once(number: int, copy: int) -> str:
        tries[number, copy] += 1
        return "raise" if number == 1 and copy > 0 and tries[number, copy] == 1 else mixed(number, copy)

    (rollout,), _ = collect(manager_of(renderer, PacedEngine(renderer, breaks_once), resample=1), 3)
    assert [len(group.discarded) for group in rollout.groups] == [0, COPIES, 0]
    assert [t.seed for t in rollout.groups[1].trajectories] == [derive_seed(SEED, 1, c, 1) for c in range(COPIES)]
    assert not any(group.is_dropped for group in rollout.groups)


def every_third_equal(number: int, copy: int) -> str:
    return "1" if number % 3 == 0 else mixed(number, copy)


def test_groups_with_equal_rewards_are_passed_over_and_others_played_in_their_place(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, every_third_equal)
    (first, second), _ = collect(manager_of(renderer, engine, filter_equal=True), 4, 2)
    assert (numbers(first.groups), numbers(first.filtered)) == ([1, 2, 4, 5], [0, 3])
    assert (numbers(second.groups), numbers(second.filtered)) == ([7, 8], [6])
    assert first.shortfall == ""


def test_without_the_filter_equal_groups_count(renderer: Renderer) -> None:
    (rollout,), _ = collect(manager_of(renderer, PacedEngine(renderer, every_third_equal)), 4)
    assert (numbers(rollout.groups), rollout.filtered) == ([0, 1, 2, 3], ())


def test_a_group_that_broken_episodes_left_nothing_to_compare_is_passed_over_too(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, lambda number, copy: "raise" if number == 0 else mixed(number, copy))
    (rollout,), _ = collect(manager_of(renderer, engine, filter_equal=True), 1)
    assert (numbers(rollout.groups), numbers(rollout.filtered)) == ([1], [0])


def test_the_search_for_unequal_rewards_ends_and_says_so(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, lambda number, copy: mixed(number, copy) if number == 4 else "0")
    (rollout,), _ = collect(manager_of(renderer, engine, filter_equal=True, max_oversample=2.0), 3)
    assert (numbers(rollout.groups), numbers(rollout.filtered)) == ([4], [0, 1, 2, 3, 5])
    assert rollout.shortfall == "1 of 3 groups count: 5 with equal rewards"


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    num_groups=st.integers(1, 4),
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
    equal=st.sets(st.integers(0, 11)),
    max_concurrent=st.sampled_from([1, 5, 100]),
)
def test_which_groups_a_step_takes_does_not_depend_on_the_clock(
    renderer: Renderer, seed: int, num_groups: int, oversample: float, equal: set[int], max_concurrent: int
) -> None:
    """Whatever order episodes end in, the groups are the first that count, and what was played is the same."""
    options = {"filter_equal": True, "oversample": oversample, "max_concurrent": max_concurrent}

    def text(number: int, copy: int) -> str:
        return "1" if number in equal else mixed(number, copy)

    async def shuffled(number: int, copy: int) -> None:
        for _ in range(derive_seed(seed, number, copy) % 7):
            await asyncio.sleep(0)

    def play(wait: Any) -> tuple[list[int], ...]:
        (rollout,), _ = collect(manager_of(renderer, PacedEngine(renderer, text, wait), **options), num_groups)
        return numbers(rollout.groups), numbers(rollout.filtered), numbers(rollout.surplus)

    groups, filtered, surplus = play(shuffled)
    assert (groups, filtered, surplus) == play(None)
    begun = sorted([*groups, *filtered, *surplus])
    assert groups == [number for number in begun if number not in equal][:num_groups]
    assert len(groups) == num_groups or len(begun) == 3 * num_groups
    assert set(filtered) == set(begun) & equal


def test_oversampling_takes_the_first_groups_and_keeps_the_others_apart(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=lambda number, copy: asyncio.sleep(0.05 if number < 2 else 0))
    (first, second), _ = collect(manager_of(renderer, engine, oversample=1.5), 4, 2)
    assert (numbers(first.groups), numbers(first.surplus)) == ([0, 1, 2, 3], [4, 5])
    assert (numbers(second.groups), numbers(second.surplus)) == ([6, 7], [8])


def test_a_tenth_more_of_ten_groups_is_one_group_more(renderer: Renderer) -> None:
    (rollout,), _ = collect(manager_of(renderer, PacedEngine(renderer), oversample=1.1), 10)
    assert numbers(rollout.surplus) == [10]


def hang(*hanging: int) -> Callable[[int, int], Coroutine[Any, Any, None]]:
    """Return a wait that ends at once, but for the last copy of some problems, never."""
    return lambda number, copy: forever() if number in hanging and copy == COPIES - 1 else asyncio.sleep(0)


def test_an_early_stop_takes_what_is_complete_and_records_the_rest_as_aborted(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=hang(0, 2))
    (rollout,), _ = collect(manager_of(renderer, engine, oversample=2.0, stop_early=True), 2)
    assert len(rollout.groups) == 2 and set(numbers(rollout.groups)) <= {1, 3}
    assert {0, 2} <= set(numbers(rollout.aborted))
    ends = [t.end_reason for group in rollout.aborted if group.sample_id == "0" for t in group.trajectories]
    assert ends[-1] is EndReason.ABORTED and EndReason.COMPLETED in ends
    assert rollout.shortfall == ""


def test_with_an_early_stop_a_group_that_is_passed_over_is_made_good_at_once(renderer: Renderer) -> None:
    """Of problems 0 to 4, two have equal rewards and one hangs, so that only 5 and 6 can make up three groups."""
    engine = PacedEngine(renderer, lambda n, c: "1" if n in (0, 1) else mixed(n, c), wait=hang(2))
    options = {"filter_equal": True, "stop_early": True, "oversample": 1.5}
    (rollout,), _ = collect(manager_of(renderer, engine, **options), 3)
    assert len(rollout.groups) == 3 and set(numbers(rollout.groups)) <= {3, 4, 5, 6}
    assert set(numbers(rollout.filtered)) == {0, 1} and 2 in numbers(rollout.aborted)


def test_spent_seconds_end_a_step_with_what_is_complete(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=hang(1))
    (first, second), _ = collect(manager_of(renderer, engine, max_rollout_s=0.3), 3, 1)
    assert (numbers(first.groups), numbers(first.aborted)) == ([0, 2], [1])
    assert first.shortfall == "2 of 3 groups count: 0 with equal rewards, 1 unfinished when 0.3 s were spent"
    assert (numbers(second.groups), second.shortfall) == ([3], "")


def test_a_group_that_was_cut_off_is_not_played_again(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=lambda number, _: forever() if number == 1 else asyncio.sleep(0))
    (first, second), _ = collect(manager_of(renderer, engine, max_rollout_s=0.3, resample=1), 2, 2)
    assert (numbers(first.groups), numbers(first.aborted), numbers(second.groups)) == ([0], [1], [2, 3])


def test_copies_of_a_group_that_was_cut_off_are_not_begun_later(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=lambda number, _: forever() if number == 0 else asyncio.sleep(0))
    (first, second), _ = collect(manager_of(renderer, engine, max_rollout_s=0.3, max_concurrent=2), 1, 1)
    assert (first.groups, [len(group.trajectories) for group in first.aborted]) == ((), [2])
    assert numbers(second.groups) == [1]


def test_a_synchronous_manager_plays_nothing_between_two_steps(renderer: Renderer) -> None:
    engine = PacedEngine(renderer)
    manager = manager_of(renderer, engine)

    async def story() -> None:
        await manager.collect(2)
        await asyncio.sleep(0.05)
        assert (len(engine.asked), manager.num_begun, manager._running) == (2 * COPIES, 2, {})
        await manager.close()

    finish(story())


def ahead(
    manager: RolloutManager,
    engine: PacedEngine,
    *nums: int,
    learn_s: float = 0.05,
    until_idle: bool = False,
    goes_on: bool = True,
) -> list[StepRollout]:
    """Collect steps of so many groups; between two steps the learner takes `learn_s`, and the weights change.

    With `until_idle` it takes as long as episodes run. Unless it `goes_on`, these are the last steps of the run.
    """

    async def story() -> list[StepRollout]:
        rollouts = []
        for place, num in enumerate(nums, 1):
            to_come = math.inf if goes_on else len(nums) - place
            rollouts.append(replace(await manager.collect(num, to_come), weight_version=engine.weight_version))
            await asyncio.sleep(learn_s)
            while until_idle and manager._running:
                await asyncio.sleep(0.005)
            engine.weight_version += 1
        return [*rollouts, StepRollout((), aborted=await manager.close())]

    rollouts = finish(story())
    assert_each_once(manager, *rollouts)
    return rollouts


def ages(rollout: StepRollout) -> set[int]:
    """How many versions old the tokens of a step are."""
    turns = (turn for g in rollout.groups for t in g.trajectories for turn in t.turns)
    return {rollout.weight_version - version for turn in turns for version, _ in turn.versions}


def test_episodes_of_the_next_steps_are_played_while_the_learner_learns(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=lambda *_: asyncio.sleep(0.01))
    *steps, _ = ahead(manager_of(renderer, engine, max_staleness=2), engine, 2, 2, 2, 2, 2, until_idle=True)
    assert [numbers(r.groups) for r in steps] == [[2 * i, 2 * i + 1] for i in range(5)]
    assert [ages(r) for r in steps] == [{0}, {1}, {2}, {2}, {2}]
    assert not any(r.aborted or r.surplus or r.filtered or r.shortfall for r in steps)


def test_the_last_steps_begin_no_group_that_no_step_would_take(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=lambda *_: asyncio.sleep(0.01))
    manager = manager_of(renderer, engine, max_staleness=2)
    *steps, left = ahead(manager, engine, 2, 2, 2, 2, until_idle=True, goes_on=False)
    assert [numbers(r.groups) for r in steps] == [[2 * i, 2 * i + 1] for i in range(4)]
    assert (manager.num_begun, left.aborted) == (8, ())


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(1, 3),
    equal=st.sets(st.integers(0, 20)),
    broken=st.sets(st.integers(0, 20)),
    max_concurrent=st.sampled_from([1, 5, 100]),
    stop_early=st.booleans(),
    oversample=st.sampled_from([1.0, 1.5]),
)
def test_no_token_of_a_step_is_too_old_and_no_group_is_lost_or_there_twice(
    renderer: Renderer,
    seed: int,
    staleness: int,
    equal: set[int],
    broken: set[int],
    max_concurrent: int,
    stop_early: bool,
    oversample: float,
) -> None:
    options: dict[str, Any] = {"filter_equal": True, "max_concurrent": max_concurrent, "resample": 1}
    options |= {"stop_early": stop_early, "oversample": oversample}

    def text(number: int, copy: int) -> str:
        return "raise" if number in broken else "1" if number in equal else mixed(number, copy)

    async def shuffled(number: int, copy: int) -> None:
        for _ in range(derive_seed(seed, number, copy) % 9):
            await asyncio.sleep(0.0005)

    engine = PacedEngine(renderer, text, shuffled)
    manager = manager_of(renderer, engine, max_staleness=staleness, **options)
    *steps, _ = ahead(manager, engine, 2, 2, 2, 2, learn_s=0.002)
    assert all(max(ages(r), default=0) <= staleness for r in steps)
    if not stop_early:  # the first by number that count, whoever ended first
        taken = [number for r in steps for number in numbers(r.groups)]
        skipped = {number for r in steps for number in numbers(r.aborted)}
        counting = [n for n in range(manager.num_begun) if n not in equal | broken | skipped]
        assert taken == counting[: len(taken)]


def test_a_group_whose_episode_is_too_slow_is_aborted_before_its_tokens_are_too_old(renderer: Renderer) -> None:
    """GroupProblem 1 never ends: steps take what is behind it as long as they may, then it is given up and counted."""
    engine = PacedEngine(renderer, wait=hang(1))
    manager = manager_of(renderer, engine, max_staleness=1, stop_early=True)
    *steps, left = ahead(manager, engine, 2, 2, 2, 2)
    assert [numbers(r.aborted) for r in steps] == [[], [], [1], []] and 1 not in numbers(left.aborted)
    assert steps[2].aborted[0].trajectories[-1].end_reason is EndReason.ABORTED
    assert all(len(r.groups) == 2 and max(ages(r)) <= 1 for r in steps)


def test_a_step_waits_for_its_first_groups_until_its_time_is_up(renderer: Renderer) -> None:
    """Without `stop_early` no group is preferred because it is quick: problem 0 holds up the step, up to its limit."""
    engine = PacedEngine(renderer, wait=hang(0))
    manager = manager_of(renderer, engine, max_staleness=1, max_rollout_s=0.5)
    first, second, third, _ = ahead(manager, engine, 1, 1, 1)
    assert (numbers(first.groups), numbers(second.groups)) == ([1], [2])
    assert (numbers(third.aborted), numbers(third.groups)) == ([0], [3])


def test_groups_ahead_are_no_more_than_steps_may_still_take(renderer: Renderer) -> None:
    engine = PacedEngine(renderer)
    manager = manager_of(renderer, engine, max_staleness=2)

    async def story() -> list[int]:
        begun = []
        for _ in range(3):
            await manager.collect(2)
            await asyncio.sleep(0.1)
            begun.append(manager.num_begun)
            engine.weight_version += 1
        await manager.close()
        return begun

    assert finish(story()) == [6, 8, 10]  # those handed out, and two steps ahead


def test_a_group_of_equal_rewards_is_replaced_while_the_learner_learns(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, every_third_equal)
    manager = manager_of(renderer, engine, max_staleness=1, filter_equal=True)
    first, second, third, _ = ahead(manager, engine, 2, 2, 2, until_idle=True)
    assert [numbers(r.groups) for r in (first, second, third)] == [[1, 2], [4, 5], [7, 8]]


def test_a_search_without_end_stops_in_every_asynchronous_step_too(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, lambda *_: "1")
    manager = manager_of(renderer, engine, max_staleness=1, filter_equal=True, max_oversample=2.0)
    first, second, _ = ahead(manager, engine, 2, 2)
    assert (first.groups, second.groups) == ((), ())
    assert first.shortfall == "0 of 2 groups count: 8 with equal rewards"


def test_a_failure_between_two_steps_ends_the_next_one(renderer: Renderer) -> None:
    async def fails(number: int, copy: int) -> None:
        if number == 3:
            await asyncio.sleep(0.3)
            raise ConnectionError("no server answers")

    manager = manager_of(renderer, PacedEngine(renderer, wait=fails), max_staleness=1)

    async def story() -> tuple[TrajectoryGroup, ...]:
        first = await manager.collect(2)
        await asyncio.sleep(0.4)
        with pytest.raises(ConnectionError, match="no server"):
            await manager.collect(2)
        return (*first.groups, *await manager.close())

    played = finish(story())
    assert sorted(numbers(played)) == list(range(manager.num_begun))


def test_another_manager_goes_on_from_the_state_of_one_that_ended(renderer: Renderer) -> None:
    """The state is taken while episodes run: complete groups, ended copies, and those that must begin again."""

    async def story(state: ManagerState, engine: PacedEngine, num_steps: int) -> tuple[list[StepRollout], ManagerState]:
        manager = manager_of(renderer, engine, state=state, max_staleness=1)
        rollouts = [await manager.collect(2) for _ in range(num_steps)]
        while len(manager._running) > 1:
            await asyncio.sleep(0.01)
        left = pickle.loads(pickle.dumps(manager.state()))
        await manager.close()
        return rollouts, left

    first, state = finish(story(ManagerState(), PacedEngine(renderer, wait=hang(3)), 1))
    assert numbers(first[0].groups) == [0, 1] and state.num_begun == 4
    assert [(g.number, sorted(g.played), g.is_complete) for g in state.in_flight] == [
        (2, [0, 1, 2, 3], True),
        (3, [0, 1, 2], False),
    ]
    engine = PacedEngine(renderer)
    second, _ = finish(story(state, engine, 1))
    assert engine.asked[0] == (3, 3)  # what was begun comes first, and of it only what was missing is played
    assert {(n, c) for n, c in engine.asked if n in (2, 3)} == {(3, 3)}
    assert numbers(second[0].groups) == [2, 3]
    for group in second[0].groups:
        assert [WHO[t.seed] for t in group.trajectories] == [(int(group.sample_id), copy) for copy in range(COPIES)]


def test_tokens_that_a_resumed_run_kept_may_be_too_old_and_are_aborted(renderer: Renderer) -> None:
    async def story(state: ManagerState, version: int) -> tuple[StepRollout, ManagerState]:
        engine = PacedEngine(renderer)
        engine.weight_version = version
        manager = manager_of(renderer, engine, state=state, max_staleness=1)
        rollout = await manager.collect(2)
        while manager._running:
            await asyncio.sleep(0.01)
        left = manager.state()
        await manager.close()
        return rollout, left

    _, state = finish(story(ManagerState(), 0))
    rollout, _ = finish(story(state, 2))
    assert (numbers(rollout.aborted), numbers(rollout.groups)) == ([2, 3], [4, 5])


def test_a_failing_engine_ends_the_step_and_every_other_episode_is_kept(renderer: Renderer) -> None:
    async def fails(number: int, copy: int) -> None:
        if (number, copy) == (2, 1):
            raise ConnectionError("no server answers")
        if number:
            await forever()

    manager = manager_of(renderer, PacedEngine(renderer, wait=fails))

    async def story() -> tuple[TrajectoryGroup, ...]:
        with pytest.raises(ConnectionError, match="no server"):
            await manager.collect(4)
        return await manager.close()

    left = finish(story())
    assert_each_once(manager, StepRollout((), aborted=left))
    assert [len(group.trajectories) for group in left] == [COPIES] * 4
    ends = Counter(t.end_reason for group in left for t in group.trajectories)
    assert ends[EndReason.ABORTED] >= 3 * COPIES and sum(ends.values()) == 4 * COPIES
    (failed,) = (t for group in left for t in group.trajectories if t.error)
    assert "ConnectionError: no server answers" in str(failed.error) and failed.sample_index == 1


def test_an_error_in_the_record_of_a_failed_episode_ends_the_step(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(number: int, copy: int) -> None:
        raise ConnectionError("no server answers")

    def broken(*_: object) -> None:
        raise RecursionError("a record that cannot be made")

    monkeypatch.setattr(RunningGroup, "empty_trajectory", broken)
    manager = manager_of(renderer, PacedEngine(renderer, wait=fails))
    with pytest.raises(RecursionError, match="cannot be made"):
        finish(manager.collect(1))


def test_metadata_of_an_author_is_made_plain_on_a_thread_of_the_episode(renderer: Renderer) -> None:
    class Level:
        threads: ClassVar[set[str]] = set()

        def __repr__(self) -> str:
            self.threads.add(threading.current_thread().name)
            return "hard"

    seen = []

    def asks(trajectory: Trajectory) -> float:
        seen.append(type(trajectory.metadata["level"]))
        return 0.0

    rewards = RewardSum((WeightedReward("asks", 1.0, asks),))
    engine: Any = PacedEngine(renderer)
    episode = Episode(engine, renderer, Limits(max_turns=1, max_new_tokens=400), sampling(renderer), rewards=rewards)
    hard = GroupProblem(replace(problem(0).sample, metadata={"level": Level(), "tags": ("a",)}), SEED, 0)
    manager = RolloutManager(episode, Judge, None, lambda number: hard, RolloutOptions(COPIES))
    (group,) = finish(manager.collect(1)).groups
    assert {str(t.metadata) for t in group.trajectories} == {"{'level': 'hard', 'tags': ('a',)}"}
    assert not any(t.is_exact for t in group.trajectories)  # replay has a text in the place of the object
    assert Level.threads == {"environment"} and set(seen) == {Level}


def test_a_problem_that_cannot_be_read_ends_the_step(renderer: Renderer) -> None:
    def broken(number: int) -> GroupProblem:
        if number == 3:
            raise OSError("no such row")
        return problem(number)

    manager = manager_of(renderer, PacedEngine(renderer), max_concurrent=COPIES)
    manager._problem_at = broken

    async def story() -> tuple[TrajectoryGroup, ...]:
        with pytest.raises(OSError, match="no such row"):
            await manager.collect(5)
        return await manager.close()

    left = finish(story())
    assert numbers(left) == [0, 1, 2]


def test_a_cancelled_step_leaves_its_episodes_to_be_closed_and_kept(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=lambda number, _: forever() if number else asyncio.sleep(0))
    manager = manager_of(renderer, engine)

    async def story() -> tuple[TrajectoryGroup, ...]:
        collecting = asyncio.create_task(manager.collect(3))
        while len(engine.asked) < 3 * COPIES:
            await asyncio.sleep(0.001)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        return await manager.close()

    left = finish(story())
    assert_each_once(manager, StepRollout((), aborted=left))
    assert [{t.end_reason for t in group.trajectories} for group in left[1:]] == [{EndReason.ABORTED}] * 2


def test_a_group_that_was_too_old_for_a_step_is_kept_when_the_step_is_cancelled(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=hang(1))
    manager = manager_of(renderer, engine, max_staleness=1, stop_early=True)

    async def story() -> list[StepRollout]:
        rollouts = []
        for _ in range(2):
            rollouts.append(await manager.collect(2))
            engine.weight_version += 1
        engine.wait = lambda *_: forever()
        collecting = asyncio.create_task(manager.collect(9))
        while 1 in manager._groups:
            await asyncio.sleep(0.01)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        return [*rollouts, StepRollout((), aborted=await manager.close())]

    rollouts = finish(story())
    assert_each_once(manager, *rollouts)
    assert 1 in numbers(rollouts[-1].aborted)


def test_an_abort_that_comes_as_an_episode_closes_comes_too_late(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Judge, "close_s", 0.5)
    (rollout,), _ = collect(manager_of(renderer, PacedEngine(renderer), max_rollout_s=0.25), 2)
    ends = [t.end_reason for group in rollout.aborted for t in group.trajectories]
    assert ends == [EndReason.COMPLETED] * 2 * COPIES


def test_an_episode_that_is_aborted_in_its_environment_keeps_the_turn_that_it_has_written(renderer: Renderer) -> None:
    freed = threading.Event()

    class Slow(Judge):
        def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
            freed.wait(20)
            return {}, True, {}

    manager = manager_of(renderer, PacedEngine(renderer), env=Slow, max_rollout_s=0.5)
    (rollout,), _ = collect(manager, 1)
    freed.set()
    (group,) = rollout.aborted
    assert [(t.end_reason, len(t.turns), t.error) for t in group.trajectories] == [
        (EndReason.ABORTED, 1, None)
    ] * COPIES
    assert all(t.num_model_tokens == 2 for t in group.trajectories)


def test_an_episode_that_is_aborted_in_a_reward_function_keeps_the_turn_that_it_has_written(renderer: Renderer) -> None:
    freed = threading.Event()
    slow = WeightedReward("slow", 1.0, lambda trajectory: float(freed.wait(20)))
    limits = Limits(max_turns=1, max_new_tokens=400)
    engine: Any = PacedEngine(renderer)
    episode = Episode(engine, renderer, limits, sampling(renderer), rewards=RewardSum((slow,)))
    manager = RolloutManager(episode, Judge, None, problem, RolloutOptions(COPIES, max_rollout_s=0.5))
    (rollout,), _ = collect(manager, 1)
    freed.set()
    (group,) = rollout.aborted
    ends = [(t.end_reason, len(t.turns), t.reward) for t in group.trajectories]
    assert ends == [(EndReason.ABORTED, 1, 0.0)] * COPIES


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ((3e38, 3e38), "the weighted sum 1 first + 1 second must be a finite number within 3.4e+38, got 6e+38"),
        ((1.0, -1e39), "the reward function second must return a finite number within 3.4e+38, got -1e+39"),
        ((3e38, -3e38), None),
    ],
)
def test_no_reward_that_float32_cannot_hold_is_trained_on(values: tuple[float, float], error: str | None) -> None:
    terms = [WeightedReward(name, 1.0, lambda _, v=v: v) for name, v in zip(("first", "second"), values, strict=True)]
    scored = asyncio.run(RewardSum(tuple(terms)).score(ended(0), EnvLimits(inline=True)))
    assert (scored.end_reason is EndReason.REWARD_ERROR) == (error is not None) and scored.reward == 0.0
    assert error is None or error in (scored.error or "")


class Retry(Judge):
    """Gives problems from 2 on a second turn; all answers are worth their length's parity."""

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return ({"obs_str": "again"}, False, {}) if int(self.id) >= 2 else ({}, True, {})

    def reward(self, final_text: str) -> float:
        return float(len(final_text) % 2)


def network_manager(
    checkpoint: Any, renderer: Renderer, **options: Any
) -> tuple[RolloutManager, HFEngine, PolicyModel]:
    model = PolicyModel.load(checkpoint)
    engine = HFEngine(model)
    any_word = tuple(range(30, renderer.tokenizer.vocab_size, 20))  # so that the random model ends its turns
    params = SamplingParams(1.0, any_word, renderer.suppressed_ids)
    episode = Episode(engine, renderer, Limits(max_turns=2, max_new_tokens=600), params)
    options = {"group_size": COPIES, **options}
    return RolloutManager(episode, Retry, None, problem, RolloutOptions(**options)), engine, model


def test_turns_in_flight_go_on_under_new_weights_and_each_token_names_its_version(
    checkpoint: Any, renderer: Renderer
) -> None:
    manager, engine, model = network_manager(checkpoint, renderer, max_staleness=1)
    torch.manual_seed(0)
    new = {name: p.detach() * (1 + 0.1 * torch.randn_like(p)) for name, p in model.named_parameters()}

    async def story() -> list[StepRollout]:
        first = await manager.collect(2)
        await engine.pause()
        engine.load_weights(new, version=1)
        await engine.resume()
        second = await manager.collect(2)
        return [first, second, StepRollout((), aborted=await manager.close())]

    rollouts = finish(story())
    assert_each_once(manager, *rollouts)
    assert [numbers(r.groups) for r in rollouts[:2]] == [[0, 1], [2, 3]]
    assert {int(v) for t in rollouts[0].played for v in versions_of(t)} == {-1, 0}
    carried = [versions_of(t)[t.mask_T].tolist() for t in rollouts[1].played]
    assert all(versions == sorted(versions) for versions in carried)
    assert [0, 1] in [sorted(set(versions)) for versions in carried]
    assert all(t.end_reason.is_valid for r in rollouts[:2] for t in r.played)


def test_weights_that_arrive_while_every_episode_is_in_a_tool_call_write_the_next_turn(
    checkpoint: Any, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_tool, may_end = threading.Semaphore(0), threading.Event()

    def step(self: Retry, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        in_tool.release()
        assert int(self.id) < 2 or may_end.wait(30)
        return {"obs_str": "again"}, False, {}

    monkeypatch.setattr(Retry, "step", step)
    manager, engine, model = network_manager(checkpoint, renderer, max_staleness=1)

    async def story() -> StepRollout:
        await manager.collect(2)
        for _ in range(6 * COPIES):  # two turns of each episode of the step, one of the next
            assert await asyncio.to_thread(in_tool.acquire, True, 30)
        await engine.pause()
        engine.load_weights({name: p.detach() * 1.1 for name, p in model.named_parameters()}, version=1)
        await engine.resume()
        may_end.set()
        second = await manager.collect(2)
        await manager.close()
        return second

    rollout = finish(story())
    versions = [[[v for v, _ in turn.versions] for turn in t.turns] for g in rollout.groups for t in g.trajectories]
    assert versions == [[[0], [1]]] * 2 * COPIES


def test_a_seed_repeats_steps_to_the_last_digit_with_the_embedded_engine(checkpoint: Any, renderer: Renderer) -> None:
    def steps() -> list[Any]:
        manager, _, _ = network_manager(checkpoint, renderer, filter_equal=True, oversample=1.5)
        rollouts, left = collect(manager, 2, 2)
        assert left == ()
        return [
            [(t.seed, t.ids_T.tolist(), t.logprobs_T.tolist(), t.reward) for t in part]
            for r in rollouts
            for part in ([t for g in r.groups for t in g.trajectories], r.played)
        ]

    assert steps() == steps()


def test_two_seeds_differ() -> None:
    assert derive_seed(1, 2) != derive_seed(12) and derive_seed(0, 1, 2) != derive_seed(0, 2, 1)


def test_episodes_of_many_threads_do_not_wait_for_one_another(renderer: Renderer) -> None:
    """An environment that blocks holds up its own group alone: the step stops without it."""
    blocked = threading.Event()

    class Blocking(Judge):
        def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
            if self.id == "1":
                blocked.wait(20)
            return {}, {}

    manager = manager_of(renderer, PacedEngine(renderer), env=Blocking, oversample=2.0, stop_early=True)

    async def story() -> StepRollout:
        try:
            return await manager.collect(3)
        finally:
            blocked.set()

    rollout = finish(story())
    assert len(rollout.groups) == 3 and 1 not in numbers(rollout.groups)


def ended(copy: int, *versions: tuple[int, int]) -> Trajectory:
    """Return an episode whose turns have tokens of these (oldest, newest) versions."""
    turn = Turn(0, 2, "1", "stop", (), 0, (), {}, 0.0, 0.0, True)
    turns = tuple(replace(turn, versions=((old, 1), (new, 1))) for old, new in versions)
    empty = RunningGroup(0, problem(0)).empty_trajectory(copy, None)
    return replace(empty, turns=turns, end_reason=EndReason.COMPLETED)


def test_the_oldest_token_of_a_group_may_be_in_any_turn_and_episode() -> None:
    for versions in (((3, 5), (6, 7)), ((6, 7), (3, 5)), ((5, 3), (6, 7))):
        group = RunningGroup(0, problem(0), played={0: ended(0, (6, 7)), 1: ended(1, *versions)})
        assert group.oldest_version == 3
    broken = replace(ended(1, (1, 1)), end_reason=EndReason.ENV_ERROR)
    assert RunningGroup(0, problem(0), played={0: ended(0, (6, 7)), 1: broken}).oldest_version == 6


def test_an_episode_that_runs_is_as_old_as_its_begin_and_is_aborted_with_its_group(renderer: Renderer) -> None:
    engine = PacedEngine(renderer, wait=hang(2))

    async def story() -> tuple[StepRollout, list[int]]:
        manager = manager_of(renderer, engine, max_staleness=1)
        await manager.collect(2)
        while len(manager._running) > 1:  # of group 2 the last copy alone, the other groups are complete
            await asyncio.sleep(0.01)
        manager._groups[2].played.clear()  # so that only the running episode tells how old the group is
        engine.weight_version = 2
        old = [group.number for group in manager._too_old()]
        return StepRollout((), aborted=await manager.close()), old

    _, old = finish(story())
    assert 2 in old


def test_a_group_comes_back_from_a_checkpoint_with_what_was_discarded() -> None:
    played, discarded = {1: ended(1, (6, 7))}, (ended(0, (1, 1)), ended(1, (1, 1)))
    group = RunningGroup(4, problem(4), 1, played, discarded)
    again = RunningGroup.restore(pickle.loads(pickle.dumps(group.save())), problem(4))
    assert (again.number, again.attempt, again.result) == (4, 1, None)
    assert [t.sample_index for t in again.discarded] == [0, 1] and [*again.played] == [1]
    assert len(again.so_far().discarded) == 2
