"""Training from Python: `tt.train` is `python -m trainer.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agents.types import Trajectory
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES
from trueturn.background import run_beside, run_blocking
from trueturn.environment import Environment
from trueturn.environment import env as as_environment
from trueturn.runs import Run
from trueturn.settings import config_of, weighted_rewards

RewardFunction = Callable[[Trajectory], float]


class TrainConfig(RunConfig):
    """The settings of a training run, under the names of the flags.

    Example::

        config = tt.TrainConfig(steps=1, lr=1e-5, group_size=4, eval_size=0)
        config.optim.lr                                        # 1e-05
        tt.train("geo3k", config=config)
    """

    def __init__(self, **settings: Any) -> None:
        """Check the settings. Raises `UserError` where there is no such setting, or a value breaks a rule."""
        super().__init__(**dict(config_of(RunConfig, SOURCES, settings)))


def train(
    env: Environment | str | Callable[..., Any] | None = None,
    *,
    config: RunConfig | str | None = None,
    reward_funcs: Sequence[RewardFunction | str] = (),
    reward_weights: Sequence[float] | None = None,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> Run:
    """Train a policy by reinforcement; print how it goes, and return the run.

    Args:
        env: what `tt.env` returns or takes; by default `geo3k`.
        config: settings to begin with: `tt.TrainConfig(...)`, a YAML file or the name of a ready configuration.
        reward_funcs: functions of a finished `Trajectory` whose weighted sum is the reward; `tt.rewards.answer` is the
            environment's own reward. Without any, that alone counts.
        reward_weights: the weight of each, by default 1.
        callbacks: objects or classes like `trainer.callbacks.Callback`.
        settings: the settings of `python -m trainer.run` under the names of its flags: `steps`, `lr`, `group_size`,
            `model`, which may be a `Run`, `resume`, and so on. Where a flag takes module:NAME, an object will do.

    Returns:
        The run, in its folder. A run that is interrupted returns too, with everything so far.

    Raises:
        UserError: a setting is wrong, or the doctor found a fault; nothing was trained.
        RunFailed: learner, servers, disk, weights or token streams failed; the message says how to resume.

    Example::

        run = tt.train(tt.env("geo3k", max_turns=3), model="starter", steps=2, eval_size=0)
        len(run.rows)                                          # 2
    """
    return run_blocking(lambda: _train(env, config, reward_funcs, reward_weights, callbacks, settings))


async def train_async(
    env: Environment | str | Callable[..., Any] | None = None,
    *,
    config: RunConfig | str | None = None,
    reward_funcs: Sequence[RewardFunction | str] = (),
    reward_weights: Sequence[float] | None = None,
    callbacks: Sequence[Any] = (),
    **settings: Any,
) -> Run:
    """Do what `train` does while the event loop goes on. Cancelling the call ends the run as Ctrl-C does.

    Example::

        run = await tt.train_async("geo3k", steps=2, eval_size=0)
    """
    return await run_beside(lambda: _train(env, config, reward_funcs, reward_weights, callbacks, settings))


def _train(
    env: Environment | str | Callable[..., Any] | None,
    config: RunConfig | str | None,
    reward_funcs: Sequence[RewardFunction | str],
    reward_weights: Sequence[float] | None,
    callbacks: Sequence[Any],
    settings: dict[str, Any],
) -> Run:
    # Imported late: it loads torch.
    from trainer.metrics.console import open_console
    from trainer.run import check_stages, train

    environment = env if isinstance(env, Environment | None) else as_environment(env)
    given = {**(environment.settings if environment else {}), **settings}
    if reward_funcs:
        given["reward"] = weighted_rewards(reward_funcs, reward_weights)
    if callbacks:
        given["callback"] = list(callbacks)
    checked = config_of(RunConfig, SOURCES, given, config)
    check_stages(checked)
    return Run(Path(train(checked, open_console()).folder))
