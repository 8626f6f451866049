"""Builds the manifest of a recording from the environment, the renderer and the agent loops of a run."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agents.model import STARTER_PATH
from agents.recording.schema import Manifest, WayRecord
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode
from envs.registry import PACKAGED, plugin_files
from envs.spec import EnvSpec
from envs.tool_calls import ToolFormat, detect_format

_NAMED = ("trueturn", "transformers", "tokenizers", "pillow", "numpy", "torch")


def build_manifest(spec: EnvSpec, renderer: Renderer, model: str, ways: Mapping[str, Episode]) -> Manifest:
    """Return the manifest of the episodes to record; `ways` are the agent loops that play them, by name.

    Example: `build_manifest(spec, renderer, "starter", {"train": episode}).ways["train"].max_turns` is 3.
    """
    manifest = text_manifest(spec, model, ways, detect_format(renderer.chat_template))
    template = {"template": template_digest(renderer), "template_options": dict(renderer.template.options)}
    return manifest.model_copy(update=template)


def text_manifest(spec: EnvSpec, model: str, ways: Mapping[str, Episode], tool_format: ToolFormat) -> Manifest:
    """Return the manifest of episodes without token ids, whose model has no chat template here."""
    return Manifest(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        env=spec,
        # Only shown to a reader, who is told which file the run had it in; it is never opened by itself.
        registry=str(Path(spec.origin).absolute()) if spec.origin else "",
        env_source=spec.source_digest(),
        tool_format=spec.args(tool_format=tool_format).tool_format,
        model="starter" if Path(model) == STARTER_PATH else model,  # wherever a reader has it
        ways={name: way_record(episode) for name, episode in ways.items()},
        versions=software_versions(),
    )


def own_registry(manifest: Manifest) -> str:
    """Return the registry file that a command has to name for a run's environment; empty where none is needed.

    That is the recorded one, if it is on this machine and no command reads it by itself.
    """
    # Commands read these without being told, so a printed command needs no flag for them.
    known = {PACKAGED, *(file for _, file in plugin_files())}
    file = Path(manifest.registry)
    if file.is_absolute() and file not in known and file.is_file():
        return str(file)
    return ""


def software_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    return {"python": platform.python_version()} | {name: found for name in _NAMED if (found := _version(name))}


def way_record(episode: Episode) -> WayRecord:
    """Return the record of an agent loop's limits, temperature and thinking."""
    return WayRecord(
        max_turns=episode.limits.max_turns,
        use_tools=episode.use_tools,
        max_new_tokens=episode.limits.max_new_tokens,
        context_length=episode.engine.context_length,
        temperature=episode.sampling.temperature,
        thinking=episode.thinking,
    )


def template_digest(renderer: Renderer) -> str:
    """Return a hash of a model's chat template, or of both where it has another one for tools."""
    sources = dict.fromkeys((renderer.template.source, renderer.tool_template.source))
    return hashlib.blake2b("".join(sources).encode(), digest_size=8).hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
