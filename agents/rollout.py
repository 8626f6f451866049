"""Groups of episodes, all concurrent on one event loop: samples in, one `TrajectoryGroup` per sample out, in order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from agents.episode import Episode
from agents.types import Trajectory, TrajectoryGroup
from envs.runner import EpisodeEnv
from envs.types import Sample, private


def derive_seed(*parts: int | str) -> int:
    """Return a 48-bit seed that depends on every part and on their order.

    >>> derive_seed(0, "train", 1) == derive_seed(0, "train", 1) != derive_seed(0, "train", 2)
    True
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


async def rollout_groups(
    episode: Episode,
    samples: Sequence[Sample],
    build_env: Callable[..., EpisodeEnv],
    args: Any,
    group_size: int,
    seed: int,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    resample: int = 0,
) -> list[TrajectoryGroup]:
    """Play `group_size` episodes of every sample; `on_episode` is called as each one ends.

    The same seed gives the same groups with the embedded engine. A broken episode is in its group with its end reason;
    a group that they leave fewer than two valid episodes is played again with other seeds, up to `resample` times.
    """

    async def one(index: int, sample: Sample, copy: int, attempt: int) -> Trajectory:
        parts = (seed, index, copy, attempt) if attempt else (seed, index, copy)
        trajectory = await episode.run(
            sample, lambda: build_env(private(sample), deepcopy(args)), seed=derive_seed(*parts), sample_index=copy
        )
        on_episode(trajectory)
        return trajectory

    async def group(index: int, sample: Sample) -> TrajectoryGroup:
        discarded: tuple[Trajectory, ...] = ()
        for attempt in range(resample + 1):
            played = await asyncio.gather(*(one(index, sample, copy, attempt) for copy in range(group_size)))
            result = TrajectoryGroup(sample.id, tuple(played), discarded)
            if not result.is_dropped or attempt == resample:
                return result
            discarded += result.trajectories
        raise AssertionError(f"the last of {resample + 1} attempts returns")

    return list(await asyncio.gather(*(group(index, sample) for index, sample in enumerate(samples))))
