"""Functions of the user that choose what a step trains on: the order of problems, and a filter of groups."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from agents.types import TrajectoryGroup
from envs.datasets.samples import epoch_order
from envs.types import SampleSource
from trainer.config.rollout import GROUP_FILTER, SAMPLER


def problem_order(samples: SampleSource, sampler: str, seed: int, epoch: int) -> list[int]:
    """Return the indices of an epoch's problems in order: by the user's `sampler`, or a seeded shuffle without one.

    A resumed run asks again, so a sampler must depend on its arguments alone.

    Raises:
        UserError: the sampler raises, or does not return as many indices as there are samples.
    """
    if not sampler:
        return epoch_order(len(samples), seed, epoch)
    found = SAMPLER.call("--sampler", sampler, SAMPLER.load("--sampler", sampler), samples, seed, epoch)
    with SAMPLER.result_of("--sampler", sampler, found):
        order = [operator.index(index) for index in found]
        if len(order) != len(samples) or not set(order) <= set(range(len(samples))):
            raise ValueError(f"it must be {len(samples)} indices from 0 to {len(samples) - 1}")
    return order


def own_filter(reference: str) -> Callable[[TrajectoryGroup], bool] | None:
    """Return the user's filter of groups, checked; None where the settings name none.

    Raises:
        UserError: it cannot be imported, or takes other parameters.
    """
    if not reference:
        return None
    function: Callable[[TrajectoryGroup], bool] = GROUP_FILTER.load("--group-filter", reference)

    def keeps(group: TrajectoryGroup) -> bool:
        found = GROUP_FILTER.call("--group-filter", reference, function, group)
        with GROUP_FILTER.result_of("--group-filter", reference, found):
            if not isinstance(found, bool | np.bool_):
                raise TypeError("it must be True or False")
        return bool(found)

    return keeps
