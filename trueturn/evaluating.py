"""Rollouts and evaluations from Python: `tt.evaluate` is `python -m trainer.evaluate`."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from agents.types import Trajectory
from envs.console import Console
from trainer.config.evaluation import SOURCES, EvaluateConfig
from trueturn.arguments import public
from trueturn.background import run_beside, run_blocking
from trueturn.environment import Environment, as_environment
from trueturn.keywords import EvaluateKeywords, RolloutKeywords
from trueturn.settings import HasFolder, config_of

if TYPE_CHECKING:
    from trainer.evaluation.evaluator import Evaluator, Report

#: Settings of a training environment that an evaluation has under another name, or not at all.
_RENAMED = {"eval_data": "data", "eval_size": "size"}


@dataclass(frozen=True, eq=False)
class Rollout(Sequence[Trajectory]):
    """The episodes of `tt.rollout`, in order of problem and sample, and the folder with their recording.

    The folder goes when the rollout does, unless `out` or `name` was given.

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
        if valid:
            mean = f"mean reward {sum(valid) / len(valid):.3f}"
        else:
            mean = "none valid"
        return f"Rollout({len(self)} episodes, {mean}, {self.folder})"


@public(size="num_problems", eval_temperature="temperature")
def rollout(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: HasFolder | str | Path = "starter",
    num_problems: int = 32,
    samples: int = 1,
    temperature: float = 1.0,
    **settings: Unpack[RolloutKeywords],
) -> Rollout:
    """Play held-out problems with a model, and return the episodes.

    Args:
        env: what `tt.env` returns or takes.
        model: a model folder, a hub id, or a run.
        num_problems: how many problems to play, the first ones.
        samples: episodes for each problem.
        temperature: temperature of sampling; 0 takes the most likely token.
        settings: other settings of `python -m trainer.evaluate` under the names of its flags; `out` or `name` keeps the
            folder with the recording.

    Returns:
        The trajectories: token ids, mask and log-probs [T], turns with texts and infos, images, reward, end reason.

    Raises:
        UserError: a setting is wrong.
        EngineDown: the servers failed.

    Example::

        rollout = tt.rollout("geo3k", num_problems=2)
        rollout[0].ids_T[rollout[0].mask_T]                    # the tokens that the model wrote
    """
    return run_blocking(lambda: _rollout(env, model, num_problems, samples, temperature, settings))


@public(size="num_problems", eval_temperature="temperature")
async def rollout_async(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: HasFolder | str | Path = "starter",
    num_problems: int = 32,
    samples: int = 1,
    temperature: float = 1.0,
    **settings: Unpack[RolloutKeywords],
) -> Rollout:
    """Do what `rollout` does while the event loop goes on.

    Example::

        rollout = await tt.rollout_async("geo3k", num_problems=2)
    """
    return await run_beside(lambda: _rollout(env, model, num_problems, samples, temperature, settings))


@public()
def evaluate(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: HasFolder | str | Path = "starter",
    tools: bool | Literal["both", "on", "off"] = "both",
    **settings: Unpack[EvaluateKeywords],
) -> Report:
    """Measure how good a model is on held-out problems; print the table, and return the report.

    Args:
        env: what `tt.env` returns or takes. With `data` and no `eval_data`, the problems of `data` are played.
        model: a model folder, a hub id, or a run.
        tools: True: all turns, with tools. False: one turn without. "both": one after the other, and their difference.
        settings: other settings of `python -m trainer.evaluate` under the names of its flags: `size`, `samples`, `ks`;
            `out` or `name` keeps the folder with the results, which goes when the report does.

    Raises:
        UserError: a setting is wrong.
        EngineDown: the servers failed.

    Example::

        report = tt.evaluate("geo3k", size=8, tools=False)
        report.ways["without_tool"].accuracy                   # Estimate(value=0.125, low=0.022, high=0.471, ...)
    """
    return run_blocking(lambda: _evaluate(env, model, tools, settings))


@public()
async def evaluate_async(
    env: Environment | str | Callable[..., Any] = "geo3k",
    model: HasFolder | str | Path = "starter",
    tools: bool | Literal["both", "on", "off"] = "both",
    **settings: Unpack[EvaluateKeywords],
) -> Report:
    """Do what `evaluate` does while the event loop goes on.

    Example::

        report = await tt.evaluate_async("geo3k", size=8)
    """
    return await run_beside(lambda: _evaluate(env, model, tools, settings))


def _rollout(
    env: Environment | str | Callable[..., Any],
    model: HasFolder | str | Path,
    num_problems: int,
    samples: int,
    temperature: float,
    settings: Mapping[str, Any],
) -> Rollout:
    played: list[Trajectory] = []
    own = {"size": num_problems, "samples": samples, "eval_temperature": temperature, "tools": "on"}
    from trainer.metrics.console import open_console  # imported late: it loads transformers

    open_console()  # libraries print neither progress nor warnings

    def play(out: Mapping[str, Any]) -> Rollout:
        evaluator = _play(env, model, {**own, **settings, **out}, Console(quiet=True), played.append)
        ordered = sorted(played, key=lambda t: (t.group, t.sample_index))
        return Rollout(evaluator.context.folder, tuple(ordered))

    return _in_folder(play, settings)


def _evaluate(
    env: Environment | str | Callable[..., Any],
    model: HasFolder | str | Path,
    tools: bool | Literal["both", "on", "off"],
    settings: Mapping[str, Any],
) -> Report:
    word = tools
    if not isinstance(tools, str):
        word = "on" if tools else "off"
    from trainer.metrics.console import open_console

    def play(out: Mapping[str, Any]) -> Report:
        return _play(env, model, {"tools": word, **settings, **out}, open_console()).report

    return _in_folder(play, settings)


R = TypeVar("R", bound="Rollout | Report")


def _in_folder(play: Callable[[Mapping[str, Any]], R], settings: Mapping[str, Any]) -> R:
    """Return what `play(settings of the folder)` returns; a folder that nobody named goes when that does."""
    if settings.keys() & {"out", "name"}:
        return play({})
    folder = tempfile.mkdtemp(prefix="trueturn-")
    try:
        result = play({"out": folder})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


def _play(
    env: Environment | str | Callable[..., Any],
    model: HasFolder | str | Path,
    settings: Mapping[str, Any],
    console: Console,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Evaluator:
    from trainer.evaluate import evaluate  # imported late: it loads torch

    config = config_of(EvaluateConfig, SOURCES, {**_held_out(as_environment(env).settings), "model": model, **settings})
    if config.endpoints.endpoint:
        config.endpoints.only(config.model.model)
    return evaluate(config, console, on_episode)[0]


def _held_out(of_training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an environment for an evaluation: its held-out problems, if it has a file of them."""
    settings = {_RENAMED.get(name, name): value for name, value in of_training.items() if name != "train_size"}
    if "eval_data" in of_training:
        return settings | {"data": of_training["eval_data"]}
    return settings
