"""Check an environment without a model: `python -m envs.check geo3k`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field
from rich.console import Console

from envs.checking.answers import answer_scripts, check_gold, check_reward_source, check_wrong
from envs.checking.behaviour import (
    check_calls,
    check_closing,
    check_contract,
    check_deterministic,
    check_leftovers,
    check_timing,
)
from envs.checking.chat_template import ChatTemplate
from envs.checking.episodes import PlayedEpisode, PlayOptions, Script, checked_prompt, play_episode
from envs.checking.findings import Evidence, Finding, print_findings
from envs.checking.hostile import hostile_scripts
from envs.checking.leftovers import ProcessState
from envs.checking.messages import (
    check_control_tokens,
    check_images,
    check_prompts,
    check_rendering,
    check_tools,
    schema_problem,
)
from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.execution.load import load_env
from envs.problems import ProblemsConfig, open_problems, read_sample
from envs.registry import get_spec
from envs.spec import BuildEnv, EnvLimits, EnvSpec
from envs.tool_calls import detect_format
from envs.types import Message, Sample

CHECKS: tuple[Callable[[Evidence], Finding], ...] = (
    check_contract,
    check_prompts,
    check_tools,
    check_deterministic,
    check_gold,
    check_wrong,
    check_reward_source,
    check_calls,
    check_timing,
    check_rendering,
    check_control_tokens,
    check_images,
    check_closing,
    check_leftovers,
)


class CheckConfig(Section):
    """The options of `python -m envs.check`."""

    id: str = Field(description="environment id in the registry")
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    samples: int = Field(default=8, ge=1, description="how many problems to try")
    chat_template: str = Field(default="", description="Jinja file to render with; empty: a general ChatML template")
    model: str = Field(default="", description="checkpoint folder whose chat template to render with")
    max_seconds: float = Field(
        default=120, gt=0, description="no episode begins later; the check takes at most the limits of one more"
    )
    problems: ProblemsConfig = ProblemsConfig()


def check_env(
    spec: EnvSpec,
    problems: ProblemsConfig | None = None,
    num_samples: int = 8,
    template: ChatTemplate | None = None,
    on_script: Callable[[Script], None] = lambda script: None,
    max_seconds: float = 120,
) -> list[Finding]:
    """Play scripted episodes in an environment and return what each check found, in the order of `CHECKS`.

    No episode begins after `max_seconds`, or after a call that ran into its time limit.

    Example, as a test::

        findings = check_env(get_spec("my_env", Path("registry.yaml")))
        assert [finding for finding in findings if finding.passed is False] == []

    Raises:
        UserError: the entry point or the data set cannot be used.
    """
    template = template or ChatTemplate.open()
    problems = problems or ProblemsConfig()
    build_env = load_env(spec)
    source = open_problems(spec, problems, num_samples)
    samples = [read_sample(spec, source, index) for index in range(max(1, min(num_samples, len(source))))]
    again = source if problems.data else open_problems(spec, problems, num_samples)
    check_run = _CheckRun(spec, build_env, template, on_script, max_seconds)
    evidence = asyncio.run(check_run.play_all(samples))
    evidence = replace(evidence, samples_again=tuple(read_sample(spec, again, k) for k in range(len(samples))))
    return [check(evidence) for check in CHECKS]


class _CheckRun:
    """Plays the scripted episodes of one environment, until a call runs into its time limit or the time is up."""

    def __init__(
        self,
        spec: EnvSpec,
        build_env: BuildEnv,
        template: ChatTemplate,
        on_script: Callable[[Script], None],
        max_seconds: float,
    ) -> None:
        self.spec, self.build_env, self.template, self.on_script = spec, build_env, template, on_script
        # With "drop" a fault of a tool is reported with its line, whatever it is worth in training.
        self.args = replace(spec.args(tool_format=detect_format(template.source)), on_tool_fault="drop")
        self.limits = replace(EnvLimits.of(spec), on_tool_fault="drop")
        self.max_seconds, self.end = max_seconds, time.monotonic() + max_seconds
        self.has_hung = self.is_late = False
        self._prompts: dict[int, tuple[Message, ...]] = {}

    async def play_all(self, samples: Sequence[Sample]) -> Evidence:
        """Play every script, some of them twice."""
        states = [ProcessState.now()]
        survey = Script("survey", "no turn at all")
        surveys = await self._play(((sample, survey) for sample in samples), PlayOptions(read_solution=True))
        opened = [found for found in surveys if found.reset_s is not None]
        episodes = [*surveys]
        for found in opened:
            others = [sample.label for sample in samples if sample.label is not None]
            scripts = answer_scripts(found, others, self.args)
            episodes += await self._play((found.sample, script) for script in scripts)
        usable = [[tool for tool in found.tools if schema_problem(tool) is None] for found in opened]
        hostile = [hostile_scripts(tools, self.args.tool_format) for tools in usable]
        for number in range(max(map(len, hostile), default=0)):  # each text once; the samples take turns
            turn = number % len(opened)
            episodes += await self._play((opened[turn].sample, script) for script in hostile[turn][number : number + 1])
        repeated = [first for first in episodes if first.script.kind in ("gold", "plain", "hostile")]
        states.append(ProcessState.now())
        repeats = await self._play((first.sample, first.script) for first in repeated)
        states.append(ProcessState.now())
        closing = Script("closing", "closed after a fault", ("Let me see.",))
        for fails_in in ("reset", "step"):
            options = PlayOptions(fail_in=fails_in, close_twice=True)
            episodes += await self._play(((found.sample, closing) for found in surveys[:1]), options)
        os.chdir(states[0].directory)
        return Evidence(
            spec=self.spec,
            args=self.args,
            template=self.template,
            samples=tuple(samples),
            samples_again=(),
            episodes=tuple(episodes),
            repeats=tuple(zip(repeated, repeats, strict=False)),
            states=tuple(states),
            stopped_after_s=self.max_seconds if self.is_late else None,
        )

    async def _play(
        self, scripts: Iterable[tuple[Sample, Script]], options: PlayOptions | None = None
    ) -> list[PlayedEpisode]:
        """Play the scripts one after the other, so that a measured time is that of one episode alone."""
        episodes: list[PlayedEpisode] = []
        limits = replace(self.limits, retries=0) if options and options.fail_in else self.limits
        for sample, script in scripts:
            self.is_late = self.is_late or time.monotonic() > self.end
            if self.has_hung or self.is_late:
                break
            self.on_script(script)
            if id(sample) not in self._prompts:  # decode once, not for every episode
                self._prompts[id(sample)] = checked_prompt(sample)
            prompt = self._prompts[id(sample)]

            def make(sample: Sample = sample):
                return self.build_env(sample, self.args)

            episodes.append(await play_episode(make, sample, prompt, script, limits, self.args.max_turns, options))
            self.has_hung = episodes[-1].has_hung
        return episodes


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, check, report."""
    config = parse(CheckConfig, argv, "python -m envs.check", "Check an environment without a model.")
    spec = get_spec(config.id, *config.registry)
    template = ChatTemplate.open(config.chat_template, config.model)
    console = Console(highlight=False)
    with console.status("") as status:
        findings = check_env(
            spec,
            config.problems,
            config.samples,
            template,
            on_script=lambda script: status.update(f"{spec.id}: playing {script.kind}, {script.name}"),
            max_seconds=config.max_seconds,
        )
    return print_findings(spec.id, spec.description, findings, console)


if __name__ == "__main__":
    sys.exit(exit_code(run))
