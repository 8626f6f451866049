"""Rollouts and evaluations from Python: `tt.evaluate` is `python -m trainer.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from agents.types import Trajectory
from envs.console import Console
from trainer.config.evaluation import SOURCES, EvaluateConfig
from trueturn.background import run_beside, run_blocking
from trueturn.environment import Environment
from trueturn.environment import env as as_environment
from trueturn.runs import Run
from trueturn.settings import config_of

if TYPE_CHECKING:
    from trainer.evaluation.evaluator import Evaluator, Report

#: Settings of a training environment that an evaluation has under another name, or not at all.
_RENAMED = {"eval_data": "data", "eval_size": "size"}


@dataclass(frozen=True, eq=False)
class Rollout(Sequence[Trajectory]):
    """The episodes of `tt.rollout`, in order of problem and sample, and the folder with their recording.

    Example: `rollout[0].reward` is 1.0; `tt.view(rollout)` shows all episodes.
    """

    folder: Path
    episodes: tuple[Trajectory, ...]

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | Sequence[Trajectory]:
        return self.episodes[index]

    def __len__(self) -> int:
        return len(self.episodes)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.episodes)

    def __repr__(self) -> str:
        valid = [t.reward for t in self.episodes if t.end_reason.is_valid]
        mean = f"mean reward {sum(valid) / len(valid):.3f}" if valid else "none valid"
        return f"Rollout({len(self)} episodes, {mean}, {self.folder})"


def rollout(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: str | Path | Run = "starter",
    num_problems: int = 32,
    samples: int = 1,
    temperature: float = 1.0,
    **settings: Any,
) -> Rollout:
    """Play held-out problems with a model, and return the episodes.

    Args:
        env: what `tt.env` returns or takes.
        model: a model folder, a hub id, or a run.
        num_problems: how many problems to play, the first ones.
        samples: episodes for each problem.
        temperature: of sampling; 0 takes the most likely token.
        settings: other settings of `python -m trainer.evaluate` under the names of its flags.

    Returns:
        The trajectories: token ids, mask and log-probs [T], turns with texts and infos, pictures, reward, end reason.

    Raises:
        UserError: a setting is wrong.
        EngineDown: the servers failed.

    Example::

        rollout = tt.rollout("geo3k", num_problems=2)
        rollout[0].ids_T[rollout[0].mask_T]                    # the tokens that the model wrote
    """
    return run_blocking(lambda: _rollout(env, model, num_problems, samples, temperature, settings))


async def rollout_async(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: str | Path | Run = "starter",
    num_problems: int = 32,
    samples: int = 1,
    temperature: float = 1.0,
    **settings: Any,
) -> Rollout:
    """Do what `rollout` does while the event loop goes on.

    Example::

        rollout = await tt.rollout_async("geo3k", num_problems=2)
    """
    return await run_beside(lambda: _rollout(env, model, num_problems, samples, temperature, settings))


def evaluate(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: str | Path | Run = "starter",
    tools: bool | Literal["both", "on", "off"] = "both",
    **settings: Any,
) -> Report:
    """Measure how good a model is on held-out problems; print the table, and return the report.

    Args:
        env: what `tt.env` returns or takes. With `data` and no `eval_data`, the problems of `data` are played.
        model: a model folder, a hub id, or a run.
        tools: True: all turns, with tools. False: one turn without. "both": one after the other, and their difference.
        settings: other settings of `python -m trainer.evaluate` under the names of its flags: `size`, `samples`, `ks`.

    Raises:
        UserError: a setting is wrong.
        EngineDown: the servers failed.

    Example::

        report = tt.evaluate("geo3k", size=8, tools=False)
        report.ways["without_tool"].accuracy                   # Estimate(value=0.125, low=0.022, high=0.471, ...)
    """
    return run_blocking(lambda: _evaluate(env, model, tools, settings))


async def evaluate_async(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: str | Path | Run = "starter",
    tools: bool | Literal["both", "on", "off"] = "both",
    **settings: Any,
) -> Report:
    """Do what `evaluate` does while the event loop goes on.

    Example::

        report = await tt.evaluate_async("geo3k", size=8)
    """
    return await run_beside(lambda: _evaluate(env, model, tools, settings))


def _rollout(env: Any, model: Any, num_problems: int, samples: int, temperature: float, settings: Any) -> Rollout:
    played: list[Trajectory] = []
    own = {"size": num_problems, "samples": samples, "eval_temperature": temperature, "tools": "on", **settings}
    from trainer.metrics.console import open_console  # imported late: it loads transformers

    open_console()  # libraries print neither progress nor warnings
    evaluator = _play(env, model, own, Console(quiet=True), played.append)
    ordered = sorted(played, key=lambda t: (t.group, t.sample_index))
    return Rollout(evaluator.context.folder, tuple(ordered))


def _evaluate(env: Any, model: Any, tools: Any, settings: Any) -> Report:
    word = {True: "on", False: "off"}.get(tools, tools)
    from trainer.metrics.console import open_console

    return _play(env, model, {"tools": word, **settings}, open_console()).report


def _play(
    env: Any,
    model: Any,
    settings: dict[str, Any],
    console: Console,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Evaluator:
    from trainer.evaluate import evaluate  # imported late: it loads torch

    environment = env if isinstance(env, Environment) else as_environment(env)
    config = config_of(EvaluateConfig, SOURCES, {**_held_out(environment), "model": model, **settings})
    return evaluate(config, console, on_episode)


def _held_out(environment: Environment) -> dict[str, Any]:
    """Return the settings of an environment for an evaluation: its held-out problems, if it has a file of them."""
    settings = {_RENAMED.get(name, name): value for name, value in environment.settings.items() if name != "train_size"}
    return settings | {"data": environment.settings["eval_data"]} if "eval_data" in environment.settings else settings
