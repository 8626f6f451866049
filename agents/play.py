"""Lets a person be the policy: `python -m agents.play --env geo3k` plays one episode in the terminal.

The agent loop is the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from agents.cli.terminal import (
    HELP,
    Gallery,
    PlayerQuit,
    Terminal,
    TerminalPlayer,
    print_early_end,
    print_summary,
    run_interruptible,
)
from agents.cli.text import counted
from agents.endpoints.play import play_endpoint
from agents.endpoints.settings import EndpointConfig
from agents.engines.scripted import ScriptedEngine
from agents.recording.manifest import build_manifest
from agents.recording.played import check_record_folder, record_played
from agents.recording.schema import PLAY
from agents.rendering.renderer import Renderer
from agents.rendering.thinking import find_thinking
from agents.rendering.tokenizer_files import model_folder
from agents.rollout.episode import Episode, Limits
from agents.types import SamplingParams
from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError
from envs.execution.load import load_env
from envs.problems import ProblemsConfig, open_problems, read_sample
from envs.registry import get_spec
from envs.spec import EnvLimits
from envs.tool_calls import detect_format
from envs.types import message_images


class PlayConfig(Section):
    """The flags of `python -m agents.play`."""

    env: str = Field(default="geo3k", description="environment id in the registry")
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    index: int = Field(default=0, ge=0, le=999_999, description="which of the problems")
    max_turns: int | None = Field(default=None, ge=1, description="turns of the episode; empty: the entry's")
    max_new_tokens: int = Field(
        default=2048, ge=1, description="token budget of an episode after its prompt, tool output included"
    )
    context_length: int = Field(default=8192, ge=2, description="longest stream in tokens, prompt included")
    model: str = Field(
        default="starter", description="model folder, for its tokenizer and template; 'starter': the one in the package"
    )
    images: Path = Field(default=Path("play"), description="folder that images are saved in")
    record: Path | None = Field(default=None, description="folder to record the episode in; empty: none")
    problems: ProblemsConfig = ProblemsConfig()
    endpoints: EndpointConfig = EndpointConfig()


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, play, report."""
    description = "Play an environment in the terminal."
    config = parse(PlayConfig, argv, "python -m agents.play", description)
    spec = get_spec(config.env, *config.registry)
    build_env = load_env(spec)
    # Only as many problems as the index needs: a data set may be drawn or downloaded one by one.
    source = open_problems(spec, config.problems, config.index + 1)
    if 0 < len(source) <= config.index:
        fix = f"the data has {len(source)} problem{'' if len(source) == 1 else 's'}, counted from 0"
        raise UserError("--index", f"must be at most {len(source) - 1}", config.index, fix)
    sample = read_sample(spec, source, config.index)
    if config.endpoints.endpoint:
        return play_endpoint(config, spec, build_env, sample)
    renderer = Renderer.from_checkpoint(model_folder(config.model))
    # A model writes calls in the format of its chat template, and so does the person.
    tool_format = detect_format(renderer.chat_template)
    args = spec.args(config.max_turns, tool_format)
    terminal = Terminal.standard()
    gallery = Gallery.named(config.images, f"{spec.id}-{config.index}")
    thinking = find_thinking(renderer.template, spec.thinking)
    player = TerminalPlayer(terminal, gallery, renderer, args.tool_format, thinking)
    episode = Episode(
        ScriptedEngine(renderer.tokenizer, player.take_turn, config.context_length),
        renderer,
        Limits(args.max_turns, config.max_new_tokens, EnvLimits.of(spec)),
        SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids),
        thinking=thinking,
        history=spec.history,
    )
    # Absolute now: code of the environment may change the working directory while it plays.
    record = config.record and config.record.absolute()
    if record:
        # Before the first turn: nobody plays an episode that cannot be kept.
        check_record_folder(record)
    terminal.say(f"{spec.id}: {spec.description}\nsample {sample.id}, {counted(args.max_turns, 'turn')}\n{HELP}\n---")
    gallery.save(message_images(sample.prompt), "prompt")
    try:
        trajectory = run_interruptible(
            episode.run(
                # The index is the number of the problem, so the recording names it as a run would.
                sample,
                lambda: player.watch(build_env(sample, args)),
                seed=config.problems.seed,
                group=config.index,
            )
        )
    except (PlayerQuit, KeyboardInterrupt) as quit_by:
        return print_early_end(quit_by, terminal, config.record)
    if record:
        manifest = build_manifest(spec, renderer, config.model, {PLAY: episode})
        record_played(record, [trajectory], manifest, renderer.encoder.spell)
        terminal.say(f"recorded in {config.record}")
    return print_summary(trajectory, terminal, gallery)


if __name__ == "__main__":
    sys.exit(exit_code(run))
