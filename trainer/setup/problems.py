"""Loads the problems of a run, and tries its environment on the first of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agents.rendering.renderer import Renderer
from envs.checking.error_location import located_line
from envs.config.commands import command_line, flag_words
from envs.contract import EnvFault
from envs.errors import UserError
from envs.execution.runner import EnvRunner
from envs.problems import RowsConfig, checked_problems, checked_rows
from envs.spec import BuildEnv, EnvLimits, EnvSpec
from envs.tool_calls import ToolFormat
from envs.types import Sample, SampleSource
from trainer.config.inputs import NUM_HELD_OUT, NUM_TRAIN, DataConfig, EnvConfig, PromptsConfig
from trainer.config.rollout import RolloutConfig
from trainer.config.run import EvaluationConfig

#: An environment counts as broken if it fails on this many samples.
NUM_PROBED = 4


def load_problems(
    spec: EnvSpec, data: DataConfig, seed: int, with_held_out: bool = True
) -> tuple[SampleSource, SampleSource | None]:
    """Return the training problems, and the held-out problems if they are wanted and there are any."""
    if data.data:
        train = load_rows(spec, data, data.data, limit=data.train_size)
    else:
        train = own_problems(spec, data, "train", data.train_size or NUM_TRAIN, seed)
    if not with_held_out or data.eval_size == 0:
        return train, None
    if data.eval_data:
        return train, load_rows(spec, data, data.eval_data, limit=data.eval_size)
    if not data.data:
        # Seed 0 for every run, so that runs can be compared.
        return train, own_problems(spec, data, "heldout", data.eval_size or NUM_HELD_OUT, 0)
    # Asked for, but there are none: silence would look like an accuracy of nothing.
    check_eval_size(data.eval_size)
    return train, None


def check_evaluations(config: EvaluationConfig, held_out: SampleSource | None, spec: EnvSpec) -> None:
    """Raise `UserError` if there is nothing to evaluate on, or the run goes by a success that nobody defines."""
    if config.eval_every and not held_out:
        rule = "needs held-out problems, and a run that plays and trains"
        fix = "give --eval-data, and no --eval-size 0, --rollout-only or --replay-rollouts"
        raise UserError("--eval-every", rule, config.eval_every, fix)
    if spec.success_rule or (config.stop_at_accuracy is None and config.best_by != "success"):
        return
    if config.stop_at_accuracy is not None:
        asked = "--stop-at-accuracy"
    else:
        asked = "best_by"
    rule = f"needs an environment that says what a success is, and '{spec.id}' has success: none"
    fix = (
        "write success: 0.9 (a reward) or success: KEY (of the episode's info) in the entry, or give it as "
        "--success; --patience and best_by reward go by the mean reward"
    )
    raise UserError(asked, rule, config.stop_at_accuracy or config.best_by, fix)


def check_curriculum(config: RolloutConfig, spec: EnvSpec) -> None:
    """Raise `UserError` if problems should be chosen by a success that an environment does not know."""
    if not config.curriculum:
        return
    for entry in spec.entries:
        if entry.success_rule is None:
            rule = f"needs environments that say what a success is, and '{entry.id}' has success: none"
            fix = "write success: 0.9 (a reward) or success: KEY (of the episode's info) in its entry"
            raise UserError("--curriculum", rule, entry.id, fix)


def check_eval_size(eval_size: int | None) -> None:
    """Raise `UserError` for a number of held-out problems where --data comes without any."""
    if eval_size:
        fix = "name them with --eval-data, or leave --eval-size out"
        raise UserError("--eval-size", "needs held-out problems, which --data does not have", eval_size, fix)


def load_rows(
    spec: EnvSpec, data: PromptsConfig, source: str, split: str = "train", limit: int | None = None
) -> SampleSource:
    """Return the problems of a data set, with the configured system prompt or, without one, the environment's."""
    return checked_rows(spec, data, source, split, limit, data.system_prompt)


def own_problems(spec: EnvSpec, data: PromptsConfig, split: str, size: int, seed: int) -> SampleSource:
    """Return the environment's own problems, with the same system prompt as in `load_rows`."""
    return checked_problems(spec, split, size, seed, data.system_prompt)


def check_command(env: EnvConfig, data: RowsConfig) -> str:
    """Return the command that checks this environment without a model."""
    fields = RowsConfig.model_fields
    if env.registry:
        given = {"registry": env.registry}
    else:
        given = {}
    # Only what differs, so that the command stays short enough to read.
    given |= {name: getattr(data, name) for name in fields if getattr(data, name) != fields[name].default}
    words = [word for name, value in given.items() for word in flag_words(name, value)]
    return command_line("envs.check", [*env.env, *words])


def first_samples(spec: EnvSpec, samples: SampleSource) -> dict[str, list[Sample]]:
    """Return the first few samples of each environment that is played, by its id.

    Raises:
        UserError: an environment of a mixture has none.
    """
    first: dict[str, list[Sample]] = {entry.id: [] for entry in spec.entries}
    for index in range(len(samples)):
        sample = samples[index]
        found = first[spec.part(sample.metadata).id]
        if len(found) < NUM_PROBED:
            found.append(sample)
        if all(len(found) == NUM_PROBED for found in first.values()):
            break
    if spec.parts and (empty := [env_id for env_id, found in first.items() if not found]):
        fix = "give it a larger share, more problems, or leave it out"
        raise UserError(f"environment '{empty[0]}'", "must have a problem in the mixture", "none", fix)
    return first


def probe_tools(
    spec: EnvSpec, build_env: BuildEnv, tool_format: ToolFormat, samples: SampleSource, check: str
) -> Mapping[str, Sequence[dict[str, Any]]]:
    """Return the tools of each environment that is played, by its id.

    They are those of the first of a few samples on which it plays an empty turn and a reward. `check` is the command
    that shows more; an error names it.

    Raises:
        UserError: the environment fails on all of these samples (says why), or cannot do what `on_tool_fault` asks.
    """

    async def probe(entry: EnvSpec, sample: Sample) -> Sequence[dict[str, Any]]:
        args = spec.args(tool_format=tool_format)
        runner = EnvRunner(lambda: build_env(sample, args), EnvLimits.of(entry), sample.id)
        try:
            await runner.open()
            entry.check_tool_faults(runner.runs_tools)
            # An empty turn is what a model may write too: it must not break an environment.
            await runner.step("")
            await runner.reward("")
            return runner.tools
        finally:
            await runner.close()

    def tools_of(entry: EnvSpec, first: Sequence[Sample]) -> Sequence[dict[str, Any]]:
        fault = None
        for sample in first:
            try:
                return asyncio.run(probe(entry, sample))
            except EnvFault as error:
                # The first one is shown; the others are tried, since one sample may be broken alone.
                fault = fault or error
        if fault is None:
            return ()
        rule = "must play a turn and give a reward"
        reason = located_line(str(fault))
        raise UserError(f"environment '{entry.id}'", rule, reason, f"see {check}") from fault

    first = first_samples(spec, samples)
    return {entry.id: tools_of(entry, first[entry.id]) for entry in spec.entries}


def prompt_length(
    spec: EnvSpec, renderer: Renderer, tools: Mapping[str, Sequence[dict[str, Any]]]
) -> Callable[[Sample], int]:
    """Return a function that counts the tokens of a sample's prompt, with the tools of its environment."""
    return lambda sample: renderer.prompt_length(sample.prompt, tools[spec.part(sample.metadata).id])
