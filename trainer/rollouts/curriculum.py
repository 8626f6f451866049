"""Chooses problems by how often they were solved: most of a step comes from those that can teach something.

A problem belongs to a pool by the share of right episodes in the last group that played it. A group whose episodes are
all right, or all wrong, teaches nothing (DAPO, arXiv 2503.14476, section 3.2); prime-rl keeps such problems in pools of
their own. Here a small share of a step still comes from them, so that a problem which has become hard, or possible, is
noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agents.rollout.groups import StepRollout
from agents.types import TrajectoryGroup, is_success
from envs.success import Success
from trainer.config.rollout import RolloutConfig

SOLVED = "solved"
LEARNABLE = "learnable"
UNSOLVED = "unsolved"
#: Problems that no group has played yet; they count as learnable, and come before those.
UNSEEN = "unseen"
POOLS = (SOLVED, LEARNABLE, UNSOLVED, UNSEEN)


class Curriculum:
    """Pools of the training problems' indices, for each environment of a mixture its own.

    Which problem a number gets depends on the seed and on what earlier steps have found, so a run that resumes from
    `state` draws the same ones. In every pool the problem that was drawn longest ago comes first.

    Example::

        curriculum = Curriculum(config, seed=0, size=1024, environment=lambda index: "", state={})
        index = curriculum.draw(number=0, planned=17)
        curriculum.update(rollout, Success(1.0), in_flight=())
        curriculum.sizes()                              # {"solved": 3, "learnable": 5, "unsolved": 0, "unseen": 1016}
    """

    def __init__(
        self,
        config: RolloutConfig,
        seed: int,
        size: int,
        environment: Callable[[int], str],
        state: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._seed = seed
        self._environment = environment
        #: By number of a group in flight: the index that it plays, and the pool that the index was taken from.
        self._drawn: dict[int, tuple[int, str]] = {}
        #: A dict keeps the order of its keys: the next index to draw is the first.
        self._pools: dict[str, dict[str, dict[int, None]]] = {}
        if state:
            self._drawn = {number: (index, pool) for number, index, pool in state["drawn"]}
            for env_id, pools in state["pools"].items():
                self._pools[env_id] = {name: dict.fromkeys(indices) for name, indices in pools.items()}
            return
        for index in range(size):
            self._of(index)[UNSEEN][index] = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        pools = {env_id: {name: list(found) for name, found in pools.items()} for env_id, pools in self._pools.items()}
        return {"drawn": [(number, *drawn) for number, drawn in self._drawn.items()], "pools": pools}

    def sizes(self) -> dict[str, int]:
        """Return the number of problems in each pool, those in flight included."""
        taken = [pool for _, pool in self._drawn.values()]
        return {name: taken.count(name) + sum(len(pools[name]) for pools in self._pools.values()) for name in POOLS}

    def draw(self, number: int, planned: int) -> int:
        """Return the index of the problem that a group plays, of the same environment as the planned one.

        The planned one, which comes next in the epoch, is taken where it has not been played yet, and where all
        problems are in flight.
        """
        if number in self._drawn:
            return self._drawn[number][0]
        pools = self._of(planned)
        shares = dict(zip((SOLVED, LEARNABLE, UNSOLVED), self._config.curriculum_shares, strict=True))
        shares = {name: share for name, share in shares.items() if share and self._next_pool(pools, name)}
        if not shares:
            self._drawn[number] = (planned, "")
            return planned
        rng = random.Random(f"{self._seed}/curriculum/{number}")
        (name,) = rng.choices(list(shares), list(shares.values()))
        pool = self._next_pool(pools, name)
        index = planned if planned in pools[UNSEEN] and pool == UNSEEN else next(iter(pools[pool]))
        del pools[pool][index]
        self._drawn[number] = (index, pool)
        return index

    def update(self, rollout: StepRollout, success: Success, in_flight: Collection[int]) -> None:
        """Sort the problems of a step's groups into their pools.

        Those of groups that were aborted, and are no longer in flight, go back where they came from.
        """
        for group in (*rollout.groups, *rollout.filtered, *rollout.surplus):
            self._put_back(group.trajectories[0].group, self._pool_of(group, success))
        for number in self._drawn.keys() - set(in_flight):
            self._put_back(number, "")

    def _put_back(self, number: int, pool: str) -> None:
        index, old = self._drawn.pop(number)
        pools = self._of(index)
        for others in pools.values():  # a problem that two groups play at once is in one already
            others.pop(index, None)
        pools[pool or old or UNSEEN][index] = None

    def _pool_of(self, group: TrajectoryGroup, success: Success) -> str:
        """Return the pool by the share of right episodes; none where no episode was valid."""
        if not group.valid:
            return ""
        share = sum(bool(is_success(t, success)) for t in group.valid) / len(group.valid)
        least, most = self._config.curriculum_bounds
        if share <= least:
            return UNSOLVED
        if share >= most:
            return SOLVED
        return LEARNABLE

    def _next_pool(self, pools: Mapping[str, Mapping[int, None]], name: str) -> str:
        """Return the pool to draw from for a share: unseen problems before learnable ones; empty if there is none."""
        if name == LEARNABLE and pools[UNSEEN]:
            return UNSEEN
        return name if pools[name] else ""

    def _of(self, index: int) -> dict[str, dict[int, None]]:
        return self._pools.setdefault(self._environment(index), {name: {} for name in POOLS})
