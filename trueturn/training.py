"""Training from Python: `tt.train` is `python -m trainer.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from agents.types import Trajectory
from envs.errors import UserError
from trainer.callbacks import Callback
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES, with_whole_paths
from trueturn.arguments import NOT_GIVEN, public
from trueturn.background import as_coroutine, run_blocking
from trueturn.environment import Environment, as_environment
from trueturn.keywords import TrainKeywords
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

    @public()
    def __init__(self, **settings: Unpack[TrainKeywords]) -> None:
        """Check the settings. Raises `UserError` where there is no such setting, or a value breaks a rule."""
        super().__init__(**dict(config_of(RunConfig, SOURCES, settings)))


@public()
def train(
    env: Environment | str | Callable[..., Any] = NOT_GIVEN,
    *,
    config: RunConfig | str | Path | None = None,
    reward_funcs: Sequence[RewardFunction | str] | RewardFunction | str = (),
    reward_weights: Sequence[float] | None = None,
    callbacks: list[Any] | tuple[Any, ...] | Callback | type[Callback] = (),
    **settings: Unpack[TrainKeywords],
) -> Run:
    """Train a policy by reinforcement; print how it goes, and return the run.

    Args:
        env: what `tt.env` returns or takes; by default that of `config` or `resume`, else `geo3k`.
        config: settings to begin with: `tt.TrainConfig(...)`, a YAML file or the name of a ready configuration.
        reward_funcs: a function of a finished `Trajectory`, or several, whose weighted sum is the reward;
            `tt.rewards.answer` is the environment's own reward. Without any, that alone counts.
        reward_weights: the weight of each, by default 1.
        callbacks: objects or classes like `tt.Callback`, or a single one.
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

    def work() -> Run:
        # Imported late: it loads torch.
        from trainer.metrics.console import open_console
        from trainer.run import check_settings, train

        own: dict[str, Any] = {}
        if reward_funcs or reward_weights is not None:
            own["reward"] = weighted_rewards(reward_funcs, reward_weights)
        if callbacks:
            own["callback"] = callbacks
        if twice := own.keys() & settings.keys():
            name = min(twice)
            rule = "must not be given beside reward_funcs and callbacks, which stand for reward and callback"
            raise UserError(f"{name}=", rule, settings[name], "leave one out")
        if env is NOT_GIVEN:
            environment = {}
        else:
            environment = as_environment(env).settings
        given = {**environment, **settings, **own}
        run_config = with_whole_paths(config_of(RunConfig, SOURCES, given, config))
        check_settings(run_config)
        return Run(Path(train(run_config, open_console()).folder))

    return run_blocking(work)


train_async = as_coroutine(train, '"geo3k", steps=2, eval_size=0')
