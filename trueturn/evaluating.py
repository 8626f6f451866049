"""Rollouts and evaluations from Python: `tt.evaluate` is `python -m trainer.evaluate`."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from agents.types import Trajectory
from envs.console import Console
from trainer.config.evaluation import SOURCES, EvaluateConfig
from trueturn.arguments import public
from trueturn.background import as_coroutine, run_blocking
from trueturn.environment import Environment, as_environment
from trueturn.keywords import EvaluateKeywords, RolloutKeywords
from trueturn.settings import HasFolder, config_of

if TYPE_CHECKING:
    from trainer.evaluation.evaluator import Evaluator, Report

R = TypeVar("R", bound="Rollout | Report")


class Rollout(list[Trajectory]):
    """The episodes of `tt.rollout`, in order of problem and sample, and the folder with their recording.

    The folder goes when the rollout does, unless `out` or `name` was given.

    Example: `rollout[0].reward` is 1.0; `tt.view(rollout)` shows all episodes.
    """

    def __init__(self, folder: Path, episodes: Iterable[Trajectory]) -> None:
        super().__init__(episodes)
        self.folder = folder

    def __repr__(self) -> str:
        valid = [t.reward for t in self if t.end_reason.is_valid]
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
    own = {"size": num_problems, "samples": samples, "eval_temperature": temperature, "tools": "on", **settings}
    played: list[Trajectory] = []

    def ordered(evaluator: Evaluator) -> Rollout:
        return Rollout(evaluator.context.folder, sorted(played, key=lambda t: (t.group, t.sample_index)))

    return run_blocking(lambda: _play(env, model, own, ordered, is_quiet=True, on_episode=played.append))


rollout_async = as_coroutine(rollout, '"geo3k", num_problems=2')


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
    words = {True: "on", False: "off"}
    own = {"tools": tools if isinstance(tools, str) else words[tools], **settings}
    return run_blocking(lambda: _play(env, model, own, lambda evaluator: evaluator.report))


evaluate_async = as_coroutine(evaluate, '"geo3k", size=8')


def _play(
    env: Environment | str | Callable[..., Any],
    model: HasFolder | str | Path,
    settings: Mapping[str, Any],
    result_of: Callable[[Evaluator], R],
    is_quiet: bool = False,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
) -> R:
    """Return `result_of` an evaluation; a folder that nobody named goes when that does."""
    from trainer.evaluate import evaluate  # imported late: it loads torch
    from trainer.metrics.console import open_console

    console = open_console()  # libraries print neither progress nor warnings
    if is_quiet:
        console = Console(quiet=True)
    given = {**_held_out(as_environment(env).settings), "model": model, **settings}

    def played(settings: Mapping[str, Any]) -> R:
        config = config_of(EvaluateConfig, SOURCES, settings)
        if config.endpoints.endpoint:
            config.endpoints.only(config.model.model)
        return result_of(evaluate(config, console, on_episode)[0])

    if given.keys() & {"out", "name"}:
        return played(given)
    folder = tempfile.mkdtemp(prefix="trueturn-")
    try:
        result = played(given | {"out": folder})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(result, shutil.rmtree, folder, ignore_errors=True)
    return result


def _held_out(of_training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an environment for an evaluation: its held-out problems, if it has a file of them."""
    settings = {name: value for name, value in of_training.items() if name != "train_size"}
    for name, ours in (("eval_data", "data"), ("eval_size", "size")):
        if name in settings:
            settings[ours] = settings.pop(name)
    return settings
