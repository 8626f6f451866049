"""What the model card of a reinforcement run says: environment, held-out accuracy, and the curves as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.spec import EnvSpec
from trainer.checkpoint.model_card import ModelCard
from trainer.config.run import RunConfig
from trainer.evaluation.curve import Curve, Ways, title
from trainer.evaluation.results import Figure

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
    names: Ways = next(iter(curve.values()), {})
    if names:
        figure = next(iter(names.values())).main
    else:
        figure = "accuracy"
    figures = (f"Held-out {title(figure)} [95 % interval]", figure_table(curve, step, figure))
    curves = ("Over the steps", curve_table(curve, rows, figure))
    return ModelCard(
        name=name,
        task=f"reinforcement learning in the environment `{spec.id}` (up to {spec.max_turns} turns)",
        tags=("reinforcement-learning",),
        base_model=config.model.model,
        data=tuple(filter(None, (config.data.data, config.data.eval_data))),
        step=step,
        ending=ending,
        tables=tuple(table for table in (figures, curves) if len(table[1]) > 1),
        sees_images=sees_images,
    )


def figure_table(curve: Curve, step: int, figure: Figure = "accuracy") -> list[list[str]]:
    """Return the figure at the start and after a step, way by way; only headings where it is not known."""
    table = [["", "before", f"after step {step}", "problems"]]
    for way, found in curve.get(step, {}).items():
        first = _cell(curve.get(0, {}), way, figure)
        table.append([title(way), first, _cell(curve[step], way, figure), str(found.num_problems)])
    return table


def curve_table(curve: Curve, rows: Sequence[Mapping[str, float]], figure: Figure = "accuracy") -> list[list[str]]:
    """Return reward and a held-out figure at some steps, evenly spread."""
    rewards = {round(row["step"]): row["reward"] for row in rows}
    names: Ways = next(iter(curve.values()), {})
    table = [["step", f"reward, mean of {WINDOW} steps", *(f"{title(figure)} {title(way)}" for way in names)]]
    for step in sorted({*_spread(list(rewards)), *_spread(sorted(curve))}):
        window = [rewards[each] for each in range(step - WINDOW + 1, step + 1) if each in rewards]
        if window:
            reward = f"{sum(window) / len(window):.3f}"
        else:
            reward = ""
        ways = curve.get(step, {})
        table.append([str(step), reward, *(_cell(ways, way, figure) for way in names)])
    return table


def _cell(ways: Ways, way: str, figure: Figure) -> str:
    if way in ways:
        estimate = ways[way].estimate(figure)
    else:
        estimate = None
    return str(estimate or "")


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `MAX_ROWS` of the steps, the first and the last among them."""
    if len(steps) <= MAX_ROWS:
        return list(steps)
    return [steps[round(number * (len(steps) - 1) / (MAX_ROWS - 1))] for number in range(MAX_ROWS)]
