"""Play recorded episodes through their environment again: `python -m agents.replay runs/x`.

No model is needed: the recorded turns are given to the environment, offline, and what it answers today is compared with
what was recorded. Exit code 0: nothing differs, 1: something does, 2: it could not be run.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from agents.recording import EPISODES, Recording
from agents.recording.members import is_damaged
from agents.recording.selection import SelectionConfig, selected
from agents.renderer import Renderer
from agents.rendering.checkpoint import model_folder
from agents.replaying.continuation import play_on, the_one
from agents.replaying.fork import ForkConfig
from agents.replaying.notes import env_notes, find_spec, model_notes
from agents.replaying.player import EnvPlayer, Player, Source, Stage
from agents.replaying.report import (
    Setting,
    as_json,
    print_report,
    print_rescoring,
    rescoring_as_json,
    write_report,
)
from agents.replaying.rescore import rescore
from agents.replaying.rounds import Outcome, replay
from agents.replaying.slime import DumpConfig, OutcomePlayer, open_dumps
from agents.replaying.slime_dump import dump_files
from agents.replaying.stream import StreamPlayer, spelled
from envs.cli import exit_code, parse
from envs.errors import UserError
from envs.grading import GraderName
from envs.registry import get_spec
from envs.spec import EnvSpec

#: In place of a model folder: the one that the recording names.
RECORDED = "recorded"


class ReplayConfig(BaseModel):
    """What `python -m agents.replay` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(description="run folder, folder of a recording, or slime's dumps: a .pt file or a folder of them")
    env: str = Field(default="", description="environment to replay through; empty: the recorded one")
    registry: tuple[Path, ...] = Field(
        default=(), description="more registry files; empty: the one that the recording names, where it is still there"
    )
    model: str = Field(
        default="",
        description=f"model folder for its tokenizer and template, to compare the token streams too; 'starter': the "
        f"one in the package, '{RECORDED}': the one that the recording names; empty: streams are not compared",
    )
    turn: int | None = Field(default=None, ge=1, description="replay up to this turn; empty: whole episodes")
    rescore: GraderName | None = Field(
        default=None, description="give the rewards again with this grader and compare only those; empty: no"
    )
    max_concurrent: int = Field(default=64, ge=1, description="episodes at once")
    show: int = Field(default=10, ge=0, description="how many of the episodes that differ to list")
    report: str = Field(default="", description="JSON file to write all that is found to; empty: none")
    selection: SelectionConfig = SelectionConfig()
    fork: ForkConfig = ForkConfig()
    dumps: DumpConfig = DumpConfig()


def open_source(config: ReplayConfig) -> tuple[Recording, EnvSpec, list[str]]:
    """Return the recorded episodes, their environment, and what is not as it was or not known.

    Raises:
        UserError: there are none, there is no such environment, or a dump cannot be read.
    """
    if files := dump_files(Path(config.run)):
        if not config.env:
            raise UserError("--env", "must name the environment that a dump is of", "none", "give its id")
        spec = get_spec(config.env, *config.registry)
        source, notes = open_dumps(files, spec, config.model, config.dumps, config.fork.max_turns)
    else:
        if config.dumps.convert:
            raise UserError(
                "--convert", "must stand with dumps of slime", config.run, "give a .pt file, or leave it out"
            )
        source = Recording.open(config.run)
        spec, notes = find_spec(source.manifest, config.env, config.registry)
        notes += env_notes(source.manifest, spec)
        if not config.selection.limit and is_damaged(source.folder / EPISODES):
            notes.append(f"{source.folder / EPISODES} is damaged: only the episodes before that are there")
    if framework := source.manifest.converted_from:
        notes.insert(0, f"from {framework}: what the environment said, and its infos, are not known and not compared")
    return source, spec, notes


def open_renderer(config: ReplayConfig, source: Source) -> Renderer | None:
    """Return what writes token streams; None where they are not compared.

    Raises:
        UserError: there is no such model.
    """
    if not config.model:
        return None
    named = source.manifest.model if config.model == RECORDED else config.model
    if not named:
        raise UserError("--model", "must name a model, for the recording names none", RECORDED, "give its folder")
    return Renderer.from_checkpoint(model_folder(named), source.manifest.template_options)


@dataclass(frozen=True, eq=False)
class Opened:
    """What a command line names: the recorded episodes, what they are played with, and what is not as it was."""

    source: Source
    stage: Stage
    renderer: Renderer | None
    notes: tuple[str, ...]

    @property
    def player(self) -> Player:
        """What plays a record again."""
        player = StreamPlayer(self.stage, self.renderer) if self.renderer else EnvPlayer(self.stage)
        return OutcomePlayer(player) if self.source.manifest.converted_from else player

    def setting(self, config: ReplayConfig, began: float) -> Setting:
        """Return what a report says of a replay that began then."""
        seconds, model = round(time.perf_counter() - began, 3), config.model if self.renderer else ""
        return Setting(config.run, self.stage.spec.id, model, self.notes, config.turn, seconds)


def open_all(config: ReplayConfig) -> Opened:
    """Open recording, environment and model. Raises `UserError` for what cannot be opened."""
    source, spec, notes = open_source(config)
    manifest = source.manifest
    if config.rescore is not None:
        spec = spec.model_copy(update={"grader": config.rescore})
    # The model of a dump is there to read it.
    renderer = None if dump_files(Path(config.run)) else open_renderer(config, source)
    if renderer:
        notes += model_notes(manifest, renderer)
    return Opened(source, Stage(source, spec), renderer, tuple(notes))


def replay_all(config: ReplayConfig, opened: Opened, on_episode: Callable[[], None] = lambda: None) -> Outcome:
    """Replay all that is meant, and return what differs.

    Example::

        config = ReplayConfig(run="runs/x", model="recorded")
        assert replay_all(config, open_all(config)).differing == []
    """
    renderer = opened.renderer
    return asyncio.run(
        replay(
            opened.player,
            selected(opened.source.episodes(), config.selection),
            config.turn,
            config.max_concurrent,
            (lambda ids: spelled(renderer, ids)) if renderer else list,
            on_episode,
        )
    )


def compare(config: ReplayConfig, opened: Opened, console: Console) -> int:
    """Replay, print what differs; return the exit code."""
    began = time.perf_counter()
    with counting(console, opened.stage.spec.id) as count:
        outcome = replay_all(config, opened, count)
    setting = opened.setting(config, began)
    print_report(setting, outcome, config.show, console)
    if config.report:
        write_report(Path(config.report), as_json(setting, outcome))
    check_any(outcome, config)
    return 1 if outcome.differing else 0


def regrade(config: ReplayConfig, opened: Opened, grader: GraderName, console: Console) -> int:
    """Replay with another grader, print both rewards; return the exit code, which is 0: nothing was expected."""
    began = time.perf_counter()
    with counting(console, opened.stage.spec.id) as count:
        episodes = selected(opened.source.episodes(), config.selection)
        rescoring = asyncio.run(rescore(EnvPlayer(opened.stage), episodes, config.max_concurrent, count))
    setting = opened.setting(config, began)
    print_rescoring(setting, rescoring, grader, config.show, console)
    if config.report:
        write_report(Path(config.report), rescoring_as_json(setting, rescoring, grader))
    check_any(rescoring.outcome, config)
    return 0


def fork(config: ReplayConfig) -> int:
    """Play one episode on from a turn; return the exit code."""
    if config.rescore is not None or config.turn:
        flag = "--turn" if config.turn else "--rescore"
        raise UserError("--fork", f"must stand without {flag}", config.fork.fork, f"leave {flag} out")
    source, spec, notes = open_source(config)
    model = source.manifest.model if config.model == RECORDED else config.model
    return play_on(source, the_one(source, config.selection), spec, model, config.fork, notes)


@contextmanager
def counting(console: Console, name: str) -> Iterator[Callable[[], None]]:
    """Show on a terminal how many episodes have been played; gives what counts one."""
    played = 0
    with console.status("") as status:

        def count() -> None:
            nonlocal played
            played += 1
            if played % 64 == 0:
                status.update(f"{name}: {played} episodes", spinner_style="")

        yield count


def check_any(outcome: Outcome, config: ReplayConfig) -> None:
    """Raise `UserError` where nothing was replayed, which must not look like success."""
    if not outcome.num_episodes:
        raise UserError(config.run, "must hold an episode that is meant", "none", "give other filters")
    if not outcome.num_replayed:
        rule = "must hold an episode that can be replayed"
        raise UserError(config.run, rule, f"{outcome.num_episodes} that cannot", "see above why")


def run(argv: Sequence[str] | None) -> int:
    """Parse, replay, report."""
    config = parse(ReplayConfig, argv, "python -m agents.replay", "Play recorded episodes through an environment.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    has_stream = config.model and not dump_files(Path(config.run))
    if config.rescore is not None and (has_stream or config.turn):
        flag = "--model" if has_stream else "--turn"
        raise UserError("--rescore", f"must stand without {flag}", config.rescore, f"leave {flag} out")
    if config.fork.fork is not None:
        return fork(config)
    console, opened = Console(highlight=False), open_all(config)
    if config.rescore is not None:
        return regrade(config, opened, config.rescore, console)
    return compare(config, opened, console)


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(None))


if __name__ == "__main__":
    sys.exit(main())
