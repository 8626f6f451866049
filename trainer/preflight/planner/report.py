"""What the planner prints: memory, flags, speed, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping

from envs.config.commands import command_line, flag_words
from trainer.preflight.planner.hardware import Hardware
from trainer.preflight.planner.layout import Layout
from trainer.preflight.planner.search import Planned
from trainer.preflight.planner.simulation import Forecast

NOT_MEASURED = "not measured: all times of --backend megatron; it is taken to compute as fast as FSDP2 does"


def command(layout: Layout, settings: Mapping[str, object]) -> str:
    """Return the command of `trainer.run` for a layout, with further settings by field name."""
    given = {name: value for name, value in {**settings, **layout.flags()}.items() if value is not False}
    words = [word for name, value in given.items() for word in flag_words(name, value)]
    shared = f" {layout.learner.layout.flags()}" if layout.learner.layout else ""
    return command_line("trainer.run", words) + shared


def speed(forecast: Forecast) -> list[str]:
    """Return the lines on speed."""
    idle = {name: 1 - forecast.busy[name] for name in ("learner", "servers")}
    waited, train, sync = (forecast.mean(name) for name in ("waited_s", "train_s", "sync_s"))
    return [
        f"{forecast.samples_per_s:.2f} samples/s, {forecast.tokens_per_s:,.0f} model tokens/s",
        f"step {forecast.step_s:.1f} s: waits {waited:.1f} s for rollouts, trains {train:.1f} s, pushes {sync:.2f} s",
        f"idle: learner {idle['learner']:.0%}, servers {idle['servers']:.0%}; limit: {forecast.limit}",
    ]


def memory(layout: Layout, hardware: Hardware) -> str:
    """Return the line on memory."""
    return (
        f"memory: a learner {layout.learner_gib:.0f} GiB, a server {layout.server_gib:.0f} GiB with "
        f"{layout.cache_tokens:,.0f} tokens in its cache, of {hardware.memory_gib:g} GiB"
    )


def plan_text(planned: Planned, hardware: Hardware, settings: Mapping[str, object], num_gpus: int) -> str:
    """Return what the command prints."""
    layout = planned.layout
    idle = num_gpus - layout.num_gpus
    unused = f"; {idle} of {num_gpus} GPUs would add nothing" if idle else ""
    return "\n".join(
        [
            f"{layout.describe()}{unused}",
            memory(layout, hardware),
            *speed(planned.forecast),
            command(layout, settings),
            *hardware.notes(),
            *([NOT_MEASURED] if layout.learner.layout else []),
        ]
    )
