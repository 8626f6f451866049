"""Code of the user that a run names: imported and tried before the run begins, so that what is wrong is found first.

`problem_order` and `own_filter` choose what a step trains on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch

from agents.types import TrajectoryGroup
from envs.config.plugins import place_of
from envs.datasets.samples import epoch_order
from envs.errors import UserError, first_line
from envs.execution.watchdog import watched
from envs.types import SampleSource
from trainer.algorithms.advantages import is_own
from trainer.algorithms.importance_sampling import CORRECTIONS
from trainer.algorithms.objective import objective
from trainer.algorithms.policy_loss import POLICY_LOSSES
from trainer.config.algorithm import ADVANTAGE, POLICY_LOSS, AlgorithmConfig
from trainer.config.rollout import GROUP_FILTER, SAMPLER
from trainer.types import ModelTokens


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise `UserError` if advantage, policy loss or correction is a user's and cannot be used.

    Loss and correction are called once, on five tokens of two samples.
    """
    if is_own(config.advantage):
        ADVANTAGE.load("--advantage", config.advantage)
    if config.policy_loss in POLICY_LOSSES and config.correction in CORRECTIONS:
        return
    # Two samples, so that a loss that mixes them up has something to mix.
    tokens = _few_tokens()
    # Code of the user may hang; the watch says where.
    with watched(f"--policy-loss '{config.policy_loss}' with --correction '{config.correction}'"):
        loss = objective(tokens, config).loss
        if config.policy_loss in POLICY_LOSSES:
            return
        function = POLICY_LOSS.load("--policy-loss", config.policy_loss)
        try:
            # A loss without a gradient would train nothing, in silence.
            torch.autograd.grad(loss, tokens.logprobs_N)
        except RuntimeError as error:
            rule = f"'{config.policy_loss}' must have a gradient by `logprobs_N`"
            got = f"{first_line(error)} ({place_of(function)})"
            raise UserError("--policy-loss", rule, got, "see docs/plugins.md") from error


def _few_tokens() -> ModelTokens:
    """Return the tokens of two samples, as a loss gets them on the first update of a step."""
    logprobs_N = torch.tensor([-0.7, -2.3, -1.1, -0.2, -4.0], requires_grad=True)
    old_N = logprobs_N.detach()
    return ModelTokens(
        logprobs_N=logprobs_N,
        entropy_N=torch.full_like(old_N, 0.5).requires_grad_(),
        old_logprobs_N=old_N,
        # Not equal: a correction that divides by the gap must have one.
        rollout_logprobs_N=old_N + 0.01,
        ref_logprobs_N=old_N,
        advantages_N=torch.tensor([0.7, 0.7, -0.7, -0.7, -0.7]),
        weights_N=torch.full_like(old_N, 1 / 5),
        sample_N=torch.tensor([0, 0, 1, 1, 1]),
        num_samples=2,
    )


def problem_order(samples: SampleSource, sampler: str, seed: int, epoch: int) -> list[int]:
    """Return the indices of an epoch's problems in order: by the user's `sampler`, or a seeded shuffle without one.

    A resumed run asks again, so a sampler must depend on its arguments alone.

    Raises:
        UserError: the sampler raises, or does not return as many indices as there are samples.
    """
    if not sampler:
        return epoch_order(len(samples), seed, epoch)
    function = SAMPLER.load("--sampler", sampler)
    with watched(f"--sampler '{sampler}'"):
        found = SAMPLER.call("--sampler", sampler, function, samples, seed, epoch)
    with SAMPLER.result_of("--sampler", sampler, found):
        order = [operator.index(index) for index in found]
        # Any order will do, repeats included: a sampler may weigh problems.
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
        with watched(f"--group-filter '{reference}'"):
            found = GROUP_FILTER.call("--group-filter", reference, function, group)
        with GROUP_FILTER.result_of("--group-filter", reference, found):
            # Anything else has a truth value too, such as a group that was returned by mistake.
            if not isinstance(found, bool | np.bool_):
                raise TypeError("it must be True or False")
        return bool(found)

    return keeps
