"""Plays one episode with the model of an endpoint in place of a person, for `agents.play`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agents.cli.terminal import Gallery, Terminal, run_interruptible, show_episode
from agents.endpoints.client import EndpointClient
from agents.endpoints.demonstrations import Demonstrations
from agents.endpoints.episode import EndpointEpisode
from agents.recording.manifest import text_manifest
from agents.recording.played import check_record_folder, record_played
from agents.recording.schema import PLAY
from envs.config.settings import with_absolute_paths
from envs.spec import BuildEnv, EnvSpec
from envs.types import Sample

if TYPE_CHECKING:
    from agents.play import PlayConfig


def play_endpoint(config: PlayConfig, spec: EnvSpec, build_env: BuildEnv, sample: Sample) -> int:
    """Let the model of an endpoint play in place of the person, and show the episode when it has ended."""
    endpoint = config.endpoints.only(config.model)
    args = spec.args(config.max_turns)
    own = with_absolute_paths(config.endpoints)  # code of the environment may change the working directory
    # Raises before anything is asked.
    demonstrations = Demonstrations(own.save_demonstrations, spec, args.tool_format)
    client = EndpointClient(endpoint, args.tool_format, own.endpoint_cache)
    episode = EndpointEpisode(client, spec, args.max_turns, config.max_new_tokens)
    manifest = text_manifest(spec, endpoint.title, {PLAY: episode}, args.tool_format)
    record = config.record and config.record.absolute()
    if record:
        # Before the model is asked, which may cost money.
        check_record_folder(record)
    terminal = Terminal.standard()
    gallery = Gallery.named(config.images, f"{spec.id}-{config.index}")
    terminal.say(f"{spec.id}: {spec.description}\nsample {sample.id}, played by {endpoint.title}\n---")
    trajectory = run_interruptible(
        episode.run(sample, lambda: build_env(sample, args), seed=config.problems.seed, group=config.index)
    )
    code = show_episode(trajectory, "prompt", terminal, gallery)
    demonstrations.add(trajectory)
    if record:
        record_played(record, [trajectory], manifest)
        terminal.say(f"recorded in {config.record}")
    return code
