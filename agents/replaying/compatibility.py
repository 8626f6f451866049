"""Notes what has changed since a recording was made: the environment's entry, its code, the chat template."""

from __future__ import annotations

import json
from pathlib import Path

from agents.recording.manifest import template_digest
from agents.recording.schema import Manifest
from agents.rendering.renderer import Renderer
from envs.errors import UserError, did_you_mean
from envs.registry import load_registry
from envs.spec import EnvSpec

#: Keys of an entry that have no effect on a recorded episode; its thinking is that of its way.
_IGNORED = ("id", "description", "dataset", "dataset_options", "system_prompt", "thinking")


def find_spec(manifest: Manifest, env_id: str, registry: tuple[Path, ...]) -> tuple[EnvSpec, list[str]]:
    """Return the environment to replay through, and a note if no registry has it.

    The default id is the recorded one, and the default registry the recorded file if it still exists. If no registry
    has the recorded environment, its recorded entry is used.

    Raises:
        UserError: there is no such environment, or a registry is invalid.
    """
    overlays = registry or _recorded_registry(manifest)
    entries, wanted = load_registry(*overlays), env_id or manifest.env.id
    if wanted in entries:
        return entries[wanted], []
    if wanted != manifest.env.id:
        raise UserError("--env", "must be in the registry", wanted, did_you_mean(wanted, entries))
    return manifest.env, [f"'{wanted}' is in no registry: its entry is taken from the recording (or give --registry)"]


def _recorded_registry(manifest: Manifest) -> tuple[Path, ...]:
    file = Path(manifest.registry)
    try:
        return (file,) if manifest.registry and file.is_file() else ()
    except OSError:  # such as a name that is too long
        return ()


def env_notes(manifest: Manifest, spec: EnvSpec) -> list[str]:
    """Return notes on what has changed: the environment, values of its entry, its code.

    Example: `["the entry of 'geo3k' has other values: grader numeric (recorded: math)"]`.
    """
    old, notes = manifest.env, list[str]()
    if old.id != spec.id:
        notes.append(f"recorded in '{old.id}', replayed through '{spec.id}'")
    then, now = old.model_dump(mode="json"), spec.model_dump(mode="json")
    changed = [key for key in now if key not in _IGNORED and now[key] != then[key]]
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
    """Return a note if the chat template is not the recorded one."""
    digest = template_digest(renderer)
    if digest == manifest.template:
        return []
    return [f"the chat template is not the recorded one: {digest} (recorded: {manifest.template})"]


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
