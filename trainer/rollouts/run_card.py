"""What the model card of a reinforcement run says: its environment and the held-out accuracy."""

from __future__ import annotations

from envs.spec import EnvSpec
from trainer.checkpoint.model_card import ModelCard
from trainer.config.run import RunConfig
from trainer.evaluation.curve import Curve, Ways, title
from trainer.evaluation.results import Figure


def run_card(
    name: str,
    config: RunConfig,
    spec: EnvSpec,
    curve: Curve,
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
    table = figure_table(curve, step, figure)
    figures = (f"Held-out {title(figure)} [95 % interval]", table)
    return ModelCard(
        name=name,
        task=f"reinforcement learning in the environment `{spec.id}` (up to {spec.max_turns} turns)",
        tags=("reinforcement-learning",),
        base_model=config.model.model,
        data=tuple(filter(None, (config.data.data, config.data.eval_data))),
        step=step,
        ending=ending,
        tables=(figures,) if len(table) > 1 else (),
        sees_images=sees_images,
    )


def figure_table(curve: Curve, step: int, figure: Figure = "accuracy") -> list[list[str]]:
    """Return the figure at the start and after a step, way by way; only headings where it is not known."""
    table = [["", "before", f"after step {step}", "problems"]]
    for way, found in curve.get(step, {}).items():
        first = _cell(curve.get(0, {}), way, figure)
        table.append([title(way), first, _cell(curve[step], way, figure), str(found.num_problems)])
    return table


def _cell(ways: Ways, way: str, figure: Figure) -> str:
    if way in ways:
        estimate = ways[way].estimate(figure)
    else:
        estimate = None
    return str(estimate or "")
