"""What the model card of a reinforcement run says: environment, held-out accuracy, and the curves as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.spec import EnvSpec
from trainer.checkpoint.model_card import ModelCard
from trainer.config.run import RunConfig
from trainer.evaluation.curve import Curve, Ways

#: The most rows of the table of curves.
MAX_ROWS = 12
#: Rewards are means over this many steps.
WINDOW = 10


def run_card(
    name: str,
    config: RunConfig,
    spec: EnvSpec,
    curve: Curve,
    rows: Sequence[Mapping[str, float]],
    step: int,
    ending: str,
    sees_images: bool,
) -> ModelCard:
    """Return the card of the weights after a step of a run that has ended."""
    accuracies = ("Held-out accuracy [95 % interval]", accuracy_table(curve, step))
    curves = ("Over the steps", curve_table(curve, rows))
    return ModelCard(
        name=name,
        task=f"reinforcement learning in the environment `{spec.id}` (up to {spec.max_turns} turns)",
        tags=("reinforcement-learning",),
        base_model=config.model.model,
        data=tuple(filter(None, (config.data.data, config.data.eval_data))),
        config=config,
        step=step,
        ending=ending,
        tables=tuple(table for table in (accuracies, curves) if len(table[1]) > 1),
        results={
            f"held-out accuracy, {_title(way)}": found.accuracy.value for way, found in curve.get(step, {}).items()
        },
        measured_on=config.data.eval_data or spec.id,
        sees_images=sees_images,
    )


def accuracy_table(curve: Curve, step: int) -> list[list[str]]:
    """Return the accuracies at the start and after a step, way by way; only headings where they are not known."""
    table = [["", "before", f"after step {step}", "problems"]]
    for way, found in curve.get(step, {}).items():
        first = str(curve[0][way].accuracy) if 0 in curve else ""
        table.append([_title(way), first, str(found.accuracy), str(found.num_problems)])
    return table


def curve_table(curve: Curve, rows: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Return reward and held-out accuracy at some steps, evenly spread."""
    rewards = {round(row["step"]): row["reward"] for row in rows}
    names: Ways = next(iter(curve.values()), {})
    table = [["step", f"reward, mean of {WINDOW} steps", *(f"accuracy {_title(way)}" for way in names)]]
    for step in sorted({*_spread(list(rewards)), *_spread(sorted(curve))}):
        window = [rewards[each] for each in range(step - WINDOW + 1, step + 1) if each in rewards]
        reward = f"{sum(window) / len(window):.3f}" if window else ""
        ways = curve.get(step, {})
        table.append([str(step), reward, *(str(ways[way].accuracy) if way in ways else "" for way in names)])
    return table


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `MAX_ROWS` of the steps, the first and the last among them."""
    if len(steps) <= MAX_ROWS:
        return list(steps)
    return [steps[round(number * (len(steps) - 1) / (MAX_ROWS - 1))] for number in range(MAX_ROWS)]


def _title(way: str) -> str:
    return way.replace("_", " ")
