"""Finds the environment of a recording, and notes what has changed since: its entry, its code, the chat template."""

from __future__ import annotations

import shlex
from pathlib import Path

from agents.cli.text import excerpt
from agents.recording.manifest import own_registry, template_digest
from agents.recording.schema import Manifest
from agents.rendering.renderer import Renderer
from envs.config.commands import flag_words
from envs.errors import UserError, did_you_mean
from envs.mixture import mix
from envs.registry import known, load_registry
from envs.spec import EnvSpec

#: Keys of an entry that have no effect on a recorded episode; its thinking is that of its way.
_IGNORED = ("id", "description", "dataset", "dataset_options", "system_prompt", "thinking", "success", "tools")


def find_spec(manifest: Manifest, env_id: str, registry: tuple[Path, ...]) -> EnvSpec:
    """Return the environment to replay through, from the user's own registries; the default id is the recorded one.

    The recorded entry and the file that it came from are never used: they may be a stranger's, and name code to run.

    Raises:
        UserError: there is no such environment, or a registry is invalid.
    """
    # Never `manifest.registry`: a file of that name here may be the stranger's, and names code to run.
    entries = load_registry(*registry)
    wanted = env_id or manifest.env.id
    if not env_id and manifest.env.mixture and wanted not in entries:  # made by flags, not by an entry
        parts = [known(entries, part, *registry) for part in manifest.env.mixture]
        return mix(manifest.env.mixture, parts, wanted)
    if wanted in entries:
        return entries[wanted]
    if env_id:
        fix = f"give the file that has it with --registry; {did_you_mean(wanted, entries)}"
        raise UserError("--env", "must be in the registry", wanted, fix)
    where = "the file that has it with --registry"
    source = ""
    if file := own_registry(manifest):
        where = shlex.join(flag_words("registry", file))
    elif manifest.registry:
        source = f"; the run had it in {manifest.registry}"
    fix = f"give {where} (no code is taken from a recording{source}), or another --env"
    raise UserError("environment", "must be in the registry", wanted, fix)


def env_notes(manifest: Manifest, spec: EnvSpec) -> list[str]:
    """Return notes on what has changed: the environment, values of its entry, its code.

    Example: `["the entry of 'geo3k' has other values: grader numeric (recorded: math)"]`.
    """
    old = manifest.env
    notes = list[str]()
    if old.id != spec.id:
        notes.append(f"recorded in '{old.id}', replayed through '{spec.id}'")
    pairs = [(old.parts[part.id], part) for part in spec.entries if part.id in old.parts]
    for then, now in pairs or [(old, spec)]:
        before = then.model_dump(mode="json")
        values = [
            f"{key} {excerpt(value)} (recorded: {excerpt(before[key])})"
            for key, value in now.model_dump(mode="json").items()
            if key not in _IGNORED and value != before[key]
        ]
        if values:
            notes.append(f"the entry of '{now.id}' has other values: {', '.join(values)}")
    digest = spec.source_digest()
    # Empty where the source could not be found, as of a class typed into a notebook.
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
