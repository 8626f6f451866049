"""Check an environment without a model: `python -m envs.check geo3k`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import Field
from rich.text import Text

from envs.checking.agent import agent_findings
from envs.checking.answers import answer_scripts, check_gold, check_reward_source, check_wrong
from envs.checking.behaviour import (
    check_calls,
    check_closing,
    check_contract,
    check_deterministic,
    check_leftovers,
)
from envs.checking.chat_template import ChatTemplate
from envs.checking.episodes import PlayedEpisode, Script
from envs.checking.findings import BUILT, NOT_REACHED, NOTHING, OPENED, STEPPED, Evidence
from envs.checking.hostile import hostile_scripts
from envs.checking.leftovers import ProcessState
from envs.checking.messages import (
    check_control_tokens,
    check_images,
    check_prompts,
    check_rendering,
    check_tools,
    usable,
)
from envs.checking.worker_player import WorkerPlayer, longest_episode_s
from envs.checks import CheckRun, Finding, print_findings
from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.console import Console
from envs.env import EnvArgs
from envs.errors import UserError
from envs.execution.load import load_env
from envs.execution.process_env import IMPORT_LIMIT_S
from envs.problems import ProblemsConfig, open_problems, read_sample
from envs.registry import get_mixture
from envs.spec import EnvSpec
from envs.tool_calls import detect_format
from envs.types import Sample

#: By the name of the row: the check, and how far an episode must have come for it to say anything.
CHECKS: Mapping[str, tuple[Callable[[Evidence], str], int]] = {
    "contract": (check_contract, NOTHING),
    "prompts": (check_prompts, NOTHING),
    "tools": (check_tools, OPENED),
    "deterministic": (check_deterministic, STEPPED),
    "gold answer": (check_gold, STEPPED),
    "wrong answers": (check_wrong, STEPPED),
    "reward source": (check_reward_source, STEPPED),
    "malformed calls": (check_calls, STEPPED),
    "rendering": (check_rendering, STEPPED),
    "control tokens": (check_control_tokens, STEPPED),
    "image sizes": (check_images, STEPPED),
    "closing": (check_closing, BUILT),
    "leftovers": (check_leftovers, NOTHING),
}

#: What is played twice, to see whether it is the same and what it leaves.
REPEATED = ("gold", "plain", "hostile")
#: So many episodes of a kind may hang or end their process before the others of it are left out.
MAX_LOST = 3
#: The place of a sample, and what is played on it.
_Planned = tuple[int, Script]


class CheckConfig(Section):
    """The options of `python -m envs.check`."""

    id: tuple[str, ...] = Field(description="environment id in the registry; several are checked one after the other")
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    samples: int = Field(default=8, ge=1, description="how many problems to try")
    chat_template: str = Field(default="", description="Jinja file to render with; empty: a general ChatML template")
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

    No episode begins after `max_seconds`, or after a call with an ordinary text that ran into its time limit. The
    episodes are played in a process of their own.

    Example, as a test::

        findings = check_env(get_spec("my_env", Path("registry.yaml")))
        assert [finding for finding in findings if finding.passed is False] == []

    Raises:
        UserError: the entry point or the data set cannot be used.
    """
    template = template or ChatTemplate.open()
    problems = problems or ProblemsConfig()
    try:
        source = open_problems(spec, problems, num_samples)
    except UserError:
        load_env(spec)  # an entry point that cannot be imported is what to mend first
        raise
    samples = [read_sample(spec, source, index) for index in range(max(1, min(num_samples, len(source))))]
    if spec.agent:
        return agent_findings(spec, samples)
    again = source if problems.data else open_problems(spec, problems, num_samples)
    # With "drop" a fault of a tool is reported with its line, whatever it is worth in training.
    args = replace(spec.args(tool_format=detect_format(template.source)), on_tool_fault="drop")
    player = WorkerPlayer(spec, args, samples)
    try:
        evidence = _CheckRun(player, on_script, max_seconds).play_all(spec, args, samples, template)
    finally:
        player.close()
    evidence = replace(evidence, samples_again=tuple(read_sample(spec, again, k) for k in range(len(samples))))
    checks = CheckRun()
    for name, (check, needed) in CHECKS.items():
        if evidence.reach >= needed:
            checks.run(name, partial(check, evidence))
        else:
            checks.skip([name], NOT_REACHED)
    return checks.findings


def longest_s(spec: EnvSpec, max_seconds: float) -> float:
    """Return the time in which `check_env` has ended, whatever the environment does; reading data is not in it."""
    return max_seconds + IMPORT_LIMIT_S + longest_episode_s(spec)


class _CheckRun:
    """Plays the scripted episodes of one environment, until an ordinary call hangs or the time is up."""

    def __init__(self, player: WorkerPlayer, on_script: Callable[[Script], None], max_seconds: float) -> None:
        self.player = player
        self.on_script = on_script
        self.max_seconds = max_seconds
        self.end = time.monotonic() + max_seconds
        self.has_hung = False
        self.is_late = False

    def play_all(self, spec: EnvSpec, args: EnvArgs, samples: Sequence[Sample], template: ChatTemplate) -> Evidence:
        """Play every script, some of them twice."""
        played = self._play((place, Script("survey", "no turn at all")) for place in range(len(samples)))
        opened = [episode for episode in played if episode.is_opened]
        labels = [sample.label for sample in samples if sample.label is not None]
        hostile: list[_Planned] = []
        for number, found in enumerate(opened):
            scripts = answer_scripts(found, labels, args, spec.thinking == "keep")
            played += self._play((found.place, script) for script in scripts)
            scripts = hostile_scripts(usable(found.tools), args.tool_format)
            # The samples share the texts, so that each is played once.
            hostile += [(found.place, script) for script in scripts[number :: len(opened)]]
        played += self._play(hostile)
        middle = self._state()  # what is made once and kept has been made by now
        again = [episode for episode in played if episode.script.kind in REPEATED and not episode.is_lost]
        repeats = self._play((first.place, first.script) for first in again)
        last = self._state()
        closing = [Script("closing", f"closed after a fault in {call}", ("Let me see.",)) for call in ("reset", "step")]
        played += self._play((0, script) for script in closing)
        return Evidence(
            spec=spec,
            args=args,
            template=template,
            samples=tuple(samples),
            samples_again=(),
            samples_changed=tuple(samples[place] for place in self.player.changed()),
            episodes=tuple(played),
            repeats=tuple(zip(again, repeats, strict=False)),
            states=(self.player.start, middle, last),
            stopped_after_s=self.max_seconds if self.is_late else None,
        )

    def _state(self) -> ProcessState:
        """Return the state of the program that plays; after a hang nobody asks for it."""
        if self.has_hung:
            return self.player.start
        return self.player.state()

    def _play(self, plan: Iterable[_Planned]) -> list[PlayedEpisode]:
        """Play the scripts one after the other, so that a measured time is that of one episode alone.

        A hostile text that hangs is one finding among others; an ordinary one ends the play.
        """
        episodes: list[PlayedEpisode] = []
        for place, script in plan:
            self.is_late = self.is_late or time.monotonic() > self.end
            num_lost = sum(episode.is_lost for episode in episodes)
            if self.has_hung or self.is_late or num_lost >= MAX_LOST:
                break
            self.on_script(script)
            episodes.append(self.player.play(place, script))
            self.has_hung = episodes[-1].has_hung and script.kind != "hostile"
        return episodes


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, check, report."""
    config = parse(CheckConfig, argv, "python -m envs.check", "Check an environment without a model.")
    spec = get_mixture(config.id, *config.registry)
    template = ChatTemplate.open(config.chat_template)
    console = Console()
    return max([_check(entry, config, template, console) for entry in spec.entries])


def _check(spec: EnvSpec, config: CheckConfig, template: ChatTemplate, console: Console) -> int:
    bound = f" (at most {longest_s(spec, config.max_seconds):.0f} s)"
    with console.status("") as status:
        findings = check_env(
            spec,
            config.problems,
            config.samples,
            template,
            on_script=lambda script: status.update(Text(f"{spec.id}{bound}: playing {script.kind}, {script.name}")),
            max_seconds=config.max_seconds,
        )
    return print_findings(spec.id, spec.description, findings, console)


if __name__ == "__main__":
    sys.exit(exit_code(run))
