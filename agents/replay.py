"""Replays recorded episodes through their environment: `python -m agents.replay runs/x`.

It needs no model: it gives the recorded turns to the environment and compares today's answers with the recorded ones.
Exit code 0: all was replayed and nothing differs, 1: something differs, 2: the replay could not run, 3: nothing is
known to differ, but some episodes could not be read or compared.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rich.text import Text

from agents.recording import EPISODES, Recording
from agents.recording.gzip_lines import num_skipped
from agents.recording.selection import SelectionConfig, select_episodes
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.replaying.compatibility import env_notes, find_spec, model_notes
from agents.replaying.continuation import only_episode, run_fork
from agents.replaying.fork import ForkConfig
from agents.replaying.replayer import EnvReplayer, ReplayContext, Replayer
from agents.replaying.report import ReportHeader, as_json, print_report, write_report
from agents.replaying.runner import ReplaySummary, replay
from agents.replaying.stream_replayer import StreamReplayer
from envs.config.cli import exit_code, parse
from envs.config.settings import Section, with_absolute_paths
from envs.console import Console
from envs.errors import UserError
from envs.spec import EnvSpec

#: The exit code if nothing is known to differ, but some episodes could not be read or compared.
NOT_ALL = 3
#: Value of --model that means the model named in the recording.
RECORDED = "recorded"


class ReplayConfig(Section):
    """The settings of `python -m agents.replay`."""

    run: str = Field(description="run folder or recording folder")
    env: str = Field(default="", description="environment to replay through; empty: the recorded one")
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    model: str = Field(
        default="",
        description=f"model folder whose tokenizer and template are used to compare the token streams too; 'starter': "
        f"the bundled model, '{RECORDED}': the recording's model; empty: token streams are not compared",
    )
    max_concurrent: int = Field(default=64, ge=1, description="episodes to replay at the same time")
    show: int = Field(default=10, ge=0, description="how many differing episodes to list")
    report: Path | None = Field(default=None, description="JSON file for the full report; empty: none")
    selection: SelectionConfig = SelectionConfig()
    fork: ForkConfig = ForkConfig()


def open_source(config: ReplayConfig, spec: EnvSpec | None = None) -> tuple[Recording, EnvSpec, list[str]]:
    """Return the recording, its environment (`spec`, or the one of its id), and notes on what has changed since.

    Raises:
        UserError: there is no recording or no such environment.
    """
    # The spec is given from Python, where an environment need not be in a registry.
    source = Recording.open(config.run)
    spec = spec or find_spec(source.manifest, config.env, config.registry)
    return source, spec, [*env_notes(source.manifest, spec), *source.damage()]


def open_renderer(config: ReplayConfig, source: Recording) -> Renderer | None:
    """Return the renderer of token streams; None if they are not compared.

    Raises:
        UserError: there is no such model.
    """
    if not config.model:
        return None
    # The options of the recorded run, such as `enable_thinking`, change every prompt.
    return Renderer.from_checkpoint(model_folder(named_model(config, source)), source.manifest.template_options)


def named_model(config: ReplayConfig, source: Recording) -> str:
    """Return the model that the flags name; a path in the recording is taken only where they say so.

    Raises:
        UserError: no model is named.
    """
    recorded = source.manifest.model
    if not source.manifest.has_ids:
        fix = "replay it without --model, which needs no model"
        raise UserError(config.run, "must have token ids for --model and --fork", f"those of {recorded}", fix)
    # A path in a stranger's recording could name any file of this machine, so the user says it.
    if not config.model and recorded != "starter":
        fix = f"give its folder, or '--model {RECORDED}' for that of the recording ({recorded or 'which names none'})"
        raise UserError("--model", "must be given: no path is taken from a recording", "nothing", fix)
    if config.model == RECORDED and not recorded:
        raise UserError("--model", "must name a model, because the recording names none", RECORDED, "give its folder")
    if config.model not in ("", RECORDED):
        return config.model
    return recorded


@dataclass(frozen=True, eq=False)
class ReplayInputs:
    """The recording that a command line names, what it is replayed with, and notes on what has changed since."""

    source: Recording
    context: ReplayContext
    renderer: Renderer | None
    notes: tuple[str, ...]
    num_damaged: int = 0

    @property
    def replayer(self) -> Replayer:
        """What replays an episode."""
        if self.renderer:
            return StreamReplayer(self.context, self.renderer)
        for entry in self.context.spec.entries:
            if entry.agent:
                rule = f"must be given to replay '{entry.id}', an agent: its requests are written by a model's template"
                raise UserError("--model", rule, "none", f"give its folder, or '--model {RECORDED}'")
        return EnvReplayer(self.context)

    def header(self, config: ReplayConfig, began: float) -> ReportHeader:
        """Return the header of the report on a replay that began at a time of `perf_counter`."""
        seconds = round(time.perf_counter() - began, 3)
        model = config.model if self.renderer else ""
        return ReportHeader(config.run, self.context.spec.id, model, self.notes, seconds)


def open_all(config: ReplayConfig, spec: EnvSpec | None = None) -> ReplayInputs:
    """Open recording, environment (if `spec` is not it) and model. Raises `UserError` if one cannot be opened."""
    source, spec, notes = open_source(config, spec)
    manifest = source.manifest
    renderer = open_renderer(config, source)
    if renderer:
        notes += model_notes(manifest, renderer)
    # Counted before the replay: the report says it even where every episode that was read is equal.
    damaged = num_skipped(source.folder / EPISODES)
    return ReplayInputs(source, ReplayContext(source, spec), renderer, tuple(notes), damaged)


def replay_all(
    config: ReplayConfig, inputs: ReplayInputs, on_episode: Callable[[], None] = lambda: None
) -> ReplaySummary:
    """Replay the selected episodes, and return what differs.

    Example::

        config = ReplayConfig(run="runs/x", model="recorded")
        assert replay_all(config, open_all(config)).differing == []
    """
    summary = asyncio.run(
        replay(
            inputs.replayer,
            select_episodes(inputs.source.episodes(), config.selection),
            config.max_concurrent,
            on_episode,
        )
    )
    # A damaged place may have held an episode that differs, so the result is not complete.
    summary.num_damaged = inputs.num_damaged
    return summary


def compare(config: ReplayConfig, inputs: ReplayInputs, console: Console) -> int:
    """Replay, print what differs, and return the exit code."""
    began = time.perf_counter()
    with counting(console, inputs.context.spec.id) as count:
        summary = replay_all(config, inputs, count)
    header = inputs.header(config, began)
    print_report(header, summary, config.show, console)
    if config.report:
        write_report(config.report, as_json(header, summary))
    # After the report, whose lines say why each episode was left out.
    check_any(summary, config)
    if summary.differing:
        return 1
    if summary.is_complete:
        return 0
    return NOT_ALL


def fork(config: ReplayConfig) -> int:
    """Continue one episode from a turn; return the exit code."""
    source, spec, notes = open_source(config)
    if config.fork.by == "model" and not config.model:
        raise UserError("--model", "must name the model for --by model", "none", "give a model or run folder")
    model = named_model(config, source)
    return run_fork(source, only_episode(source, config.selection), spec, model, config.fork, notes)


@contextmanager
def counting(console: Console, name: str) -> Iterator[Callable[[], None]]:
    """Show the number of replayed episodes on a terminal; yields the function that counts one."""
    played = 0
    with console.status("") as status:

        def count() -> None:
            nonlocal played
            played += 1
            # Not at each: to draw the line can take longer than to replay an episode.
            if played % 64 == 0:
                status.update(Text(f"{name}: {played} episodes"), spinner_style="")

        yield count


def check_any(summary: ReplaySummary, config: ReplayConfig) -> None:
    """Raise `UserError` if nothing was replayed, because that must not look like success."""
    if not summary.num_episodes:
        raise UserError(config.run, "must hold an episode that the flags select", "none", "give other filters")
    if not summary.num_replayed:
        rule = "must hold an episode that can be replayed"
        raise UserError(config.run, rule, f"{summary.num_episodes} that cannot", "see the reasons above")


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, replay, report."""
    description = "Replay recorded episodes through an environment."
    config = parse(ReplayConfig, argv, "python -m agents.replay", description)
    if config.fork.fork is not None:
        return fork(config)
    console = Console()
    inputs = open_all(config)
    # Code of the environment may change the working directory before the report is written.
    config = with_absolute_paths(config)
    return compare(config, inputs, console)


if __name__ == "__main__":
    sys.exit(exit_code(run))
