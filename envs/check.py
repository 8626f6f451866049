"""Check an environment without a model: `python -m envs.check geo3k`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envs.checking.answers import answer_scripts, check_gold, check_reward_source, check_wrong
from envs.checking.behaviour import check_calls, check_closing, check_contract, check_deterministic, check_timing
from envs.checking.chat_template import ChatTemplate
from envs.checking.evidence import Evidence, Finding
from envs.checking.hostile import hostile_scripts
from envs.checking.messages import (
    check_control_tokens,
    check_images,
    check_prompts,
    check_rendering,
    check_tools,
    schema_problem,
)
from envs.checking.playing import Meddling, Play, Script, checked_prompt, play
from envs.cli import exit_code, parse
from envs.problems import ProblemsConfig, open_problems, read_sample
from envs.registry import get_spec
from envs.runner import EnvLimits
from envs.spec import BuildEnv, EnvSpec
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
)


class CheckConfig(BaseModel):
    """What `python -m envs.check` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(description="environment id in the registry")
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    samples: int = Field(default=8, ge=1, description="how many problems to try")
    chat_template: str = Field(default="", description="Jinja file to render with; empty: a general ChatML template")
    model: str = Field(default="", description="checkpoint folder whose chat template to render with")
    problems: ProblemsConfig = ProblemsConfig()


def check_env(
    spec: EnvSpec,
    problems: ProblemsConfig | None = None,
    num_samples: int = 8,
    template: ChatTemplate | None = None,
    on_play: Callable[[Script], None] = lambda script: None,
) -> list[Finding]:
    """Play an environment without a model and return what every check found, in the order of `CHECKS`.

    Example, as a test::

        findings = check_env(get_spec("my_env", Path("registry.yaml")))
        assert [finding for finding in findings if finding.passed is False] == []

    Raises:
        UserError: the entry point or the data set cannot be used.
    """
    template = template or ChatTemplate.open()
    problems = problems or ProblemsConfig()
    build_env = spec.load()
    source = open_problems(spec, problems, num_samples)
    samples = [read_sample(spec, source, index) for index in range(max(1, min(num_samples, len(source))))]
    again = source if problems.data else open_problems(spec, problems, num_samples)
    stage = _Stage(spec, build_env, template, on_play)
    evidence = asyncio.run(stage.rehearse(samples))
    evidence = replace(evidence, samples_again=tuple(read_sample(spec, again, k) for k in range(len(samples))))
    return [check(evidence) for check in CHECKS]


class _Stage:
    """Where one environment is played; after a call that ran into its time limit, the plays that are left are not."""

    def __init__(
        self, spec: EnvSpec, build_env: BuildEnv, template: ChatTemplate, on_play: Callable[[Script], None]
    ) -> None:
        self.spec, self.build_env, self.template, self.on_play = spec, build_env, template, on_play
        self.args = spec.args(tool_format=detect_format(template.source))
        self.limits = EnvLimits.of(spec)
        self.has_hung = False
        self._prompts: dict[int, tuple[Message, ...]] = {}

    async def rehearse(self, samples: Sequence[Sample]) -> Evidence:
        """Play every script, some of them twice."""
        survey = Script("survey", "no turn at all")
        surveys = await self._all(((sample, survey) for sample in samples), Meddling(read_solution=True))
        opened = [found for found in surveys if found.reset_s is not None]
        plays = [*surveys]
        for found in opened:
            others = [sample.label for sample in samples if sample.label is not None]
            scripts = answer_scripts(found, others, self.args)
            plays += await self._all((found.sample, script) for script in scripts)
        hostile = [hostile_scripts(_usable(found.tools), self.args.tool_format) for found in opened]
        for number in range(max(map(len, hostile), default=0)):  # each text once, the samples taking turns
            turn = number % len(opened)
            plays += await self._all((opened[turn].sample, script) for script in hostile[turn][number : number + 1])
        repeated = [first for first in plays if first.script.kind in ("gold", "plain", "hostile")]
        repeats = await self._all((first.sample, first.script) for first in repeated)
        closing = Script("closing", "closed after a fault", ("Let me see.",))
        for fails_in in ("reset", "step"):
            meddling = Meddling(fail_in=fails_in, close_twice=True)
            plays += await self._all(((found.sample, closing) for found in surveys[:1]), meddling)
        return Evidence(
            spec=self.spec,
            args=self.args,
            template=self.template,
            samples=tuple(samples),
            samples_again=(),
            plays=tuple(plays),
            repeats=tuple(zip(repeated, repeats, strict=False)),
        )

    async def _all(self, parts: Iterable[tuple[Sample, Script]], meddling: Meddling | None = None) -> list[Play]:
        """Play one after the other, so that times are those of one episode alone."""
        plays: list[Play] = []
        limits = replace(self.limits, retries=0) if meddling and meddling.fail_in else self.limits
        for sample, script in parts:
            if self.has_hung:
                break
            self.on_play(script)
            if id(sample) not in self._prompts:  # decoded once, not for every play
                self._prompts[id(sample)] = checked_prompt(sample)
            prompt = self._prompts[id(sample)]

            def make(sample: Sample = sample):
                return self.build_env(sample, self.args)

            plays.append(await play(make, sample, prompt, script, limits, self.args.max_turns, meddling))
            self.has_hung = plays[-1].fault is not None and plays[-1].fault.timed_out
        return plays


def _usable(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [tool for tool in tools if schema_problem(tool) is None]


def report(spec: EnvSpec, findings: Sequence[Finding], console: Console) -> int:
    """Print the findings as a table; return the exit code."""
    table = Table(title=f"{spec.id}: {spec.description}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("detail", overflow="fold")
    words = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("n/a", "dim")}
    for finding in findings:
        word, style = words[finding.passed]
        shown = finding.detail.encode("utf-8", "backslashreplace").decode()
        table.add_row(finding.check, Text(word, style), Text(shown, "dim" if finding.passed is None else ""))
    console.print(table)
    count = {result: sum(finding.passed is result for finding in findings) for result in words}
    console.print(f"{spec.id}: {count[True]} passed, {count[False]} failed, {count[None]} not applicable", markup=False)
    return 1 if count[False] else 0


def run(argv: Sequence[str] | None) -> int:
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
            on_play=lambda script: status.update(f"{spec.id}: playing {script.kind}, {script.name}"),
        )
    return report(spec, findings, console)


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(None))


if __name__ == "__main__":
    sys.exit(main())
