"""TrueTurn from Python: environments, training, rollouts, evaluation, replay and the viewer.

Example::

    import trueturn as tt

    env = tt.env("geo3k", max_turns=3)
    run = tt.train(env, model="starter", steps=10)
    run.metrics, run.accuracy, run.model_path
    episodes = tt.rollout(env, model=run, num_problems=8)

Everything works in scripts and in notebooks. Settings are keywords with the names of the flags: `--group-size 4` is
`group_size=4`. Every wrong setting raises `UserError`, before anything is trained.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from envs.interrupts import end_quietly

end_quietly(__name__)

if TYPE_CHECKING:
    from agents.types import Trajectory as Trajectory
    from agents.types import TrajectoryGroup as TrajectoryGroup
    from envs import Env as Env
    from envs import Sample as Sample
    from envs import ToolEnv as ToolEnv
    from envs import ToolError as ToolError
    from envs import tool as tool
    from envs.errors import UserError as UserError
    from trainer.callbacks import Callback as Callback
    from trainer.callbacks import RunStart as RunStart
    from trainer.callbacks import Stop as Stop
    from trueturn import rewards as rewards
    from trueturn.environment import Environment as Environment
    from trueturn.environment import env as env
    from trueturn.evaluating import Rollout as Rollout
    from trueturn.evaluating import evaluate as evaluate
    from trueturn.evaluating import evaluate_async as evaluate_async
    from trueturn.evaluating import rollout as rollout
    from trueturn.evaluating import rollout_async as rollout_async
    from trueturn.recorded import View as View
    from trueturn.recorded import fork as fork
    from trueturn.recorded import replay as replay
    from trueturn.recorded import view as view
    from trueturn.runs import Run as Run
    from trueturn.training import TrainConfig as TrainConfig
    from trueturn.training import train as train
    from trueturn.training import train_async as train_async

#: The module of everything public.
_PUBLIC = {
    "Callback": "trainer.callbacks",
    "Env": "envs.env",
    "Environment": "trueturn.environment",
    "Rollout": "trueturn.evaluating",
    "Run": "trueturn.runs",
    "RunStart": "trainer.callbacks",
    "Sample": "envs.types",
    "Stop": "trainer.callbacks",
    "ToolEnv": "envs.tool_env",
    "ToolError": "envs.tools",
    "TrainConfig": "trueturn.training",
    "Trajectory": "agents.types",
    "TrajectoryGroup": "agents.types",
    "UserError": "envs.errors",
    "View": "trueturn.recorded",
    "env": "trueturn.environment",
    "evaluate": "trueturn.evaluating",
    "evaluate_async": "trueturn.evaluating",
    "fork": "trueturn.recorded",
    "replay": "trueturn.recorded",
    "rewards": "trueturn",
    "rollout": "trueturn.evaluating",
    "rollout_async": "trueturn.evaluating",
    "tool": "envs.tools",
    "train": "trueturn.training",
    "train_async": "trueturn.training",
    "view": "trueturn.recorded",
}

__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll] - each is imported on first use


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command answers at once."""
    if name == "rewards":
        return importlib.import_module("trueturn.rewards")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trueturn' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
