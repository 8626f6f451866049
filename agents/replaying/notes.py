"""What is not as it was when a recording was made: a manifest, today's environment and model in, lines out."""

from __future__ import annotations

import json
from pathlib import Path

from agents.recording.manifest import template_digest
from agents.recording.schema import Manifest
from agents.renderer import Renderer
from envs.errors import UserError, did_you_mean
from envs.registry import load_registry
from envs.spec import EnvSpec

#: Keys of an entry that say nothing about how a recorded episode goes on.
_OTHERS = ("id", "description", "dataset", "dataset_options", "system_prompt")


def find_spec(manifest: Manifest, env_id: str, registry: tuple[Path, ...]) -> tuple[EnvSpec, list[str]]:
    """Return the environment to replay through, and a note where no registry has it.

    Without an id, it is the recorded one. Without a registry, the file that it stood in is read where it still exists;
    an environment that is in no registry is taken as it was recorded.

    Raises:
        UserError: there is no such environment, or a registry is wrong.
    """
    file = Path(manifest.registry)
    overlays = registry or ((file,) if manifest.registry and file.is_file() else ())
    found, wanted = load_registry(*overlays), env_id or manifest.env.id
    if wanted in found:
        return found[wanted], []
    if wanted != manifest.env.id:
        raise UserError("--env", "must be in the registry", wanted, did_you_mean(wanted, found))
    return manifest.env, [f"'{wanted}' is in no registry: its entry is taken from the recording (or give --registry)"]


def env_notes(manifest: Manifest, spec: EnvSpec) -> list[str]:
    """Return what is not as recorded: the environment, keys of its entry, its code.

    Example: `["the entry of 'geo3k' has other values: grader numeric (recorded: math)"]`.
    """
    old, notes = manifest.env, list[str]()
    if old.id != spec.id:
        notes.append(f"recorded in '{old.id}', replayed through '{spec.id}'")
    then, now = old.model_dump(mode="json"), spec.model_dump(mode="json")
    changed = [key for key in now if key not in _OTHERS and now[key] != then[key]]
    values = ", ".join(f"{key} {_shown(now[key])} (recorded: {_shown(then[key])})" for key in changed)
    if values:
        notes.append(f"the entry of '{spec.id}' has other values: {values}")
    digest = spec.source_digest()
    if digest != manifest.env_source and manifest.env_source:
        notes.append(
            f"the code of '{spec.id}' is not that of the recording: {digest} (recorded: {manifest.env_source})"
        )
    return notes


def model_notes(manifest: Manifest, renderer: Renderer) -> list[str]:
    """Return a note where the chat template is not the recorded one."""
    digest = template_digest(renderer)
    if digest == manifest.template:
        return []
    return [f"the chat template is not the recorded one: {digest} (recorded: {manifest.template})"]


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
