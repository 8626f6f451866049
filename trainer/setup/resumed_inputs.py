"""What a resumed run finds changed since its beginning: data, the environment's entry and code, the chat template.

Settings are compared elsewhere, by value; here the content that they name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from agents.recording import Recording
from agents.rendering.renderer import Renderer
from agents.replaying.compatibility import env_notes, model_notes
from envs.errors import UserError
from envs.safe_text import write_text
from envs.spec import EnvSpec
from trainer.checkpoint.run_dir import EPISODES

#: In the run folder: the fingerprints of its data files by flag, as they were when the run began.
DATA = "data.json"
#: A fingerprint reads so many bytes at most, of so many files: every start waits for it.
MAX_BYTES = 32 * 2**20
MAX_FILES = 8


def changed_environment(run: Path, spec: EnvSpec, renderer: Renderer) -> list[str]:
    """Return what has changed since the run began to record; nothing where it does not record."""
    try:
        manifest = Recording.open(run / EPISODES).manifest
    except UserError:
        return []
    return [*env_notes(manifest, spec), *model_notes(manifest, renderer)]


def changed_data(run: Path, sources: Mapping[str, str]) -> list[str]:
    """Keep the fingerprints of the data, by flag, where the run has none; return which flags' files differ from them.

    Example: `changed_data(run, {"--data": "train.jsonl"})` returns `["--data train.jsonl has other content"]`.
    """
    found = {flag: fingerprint(Path(source)) for flag, source in sources.items() if source and Path(source).exists()}
    file = run / DATA
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # a new run, or one of an earlier version
        write_text(file, json.dumps(found, indent=1) + "\n")
        return []
    return [
        f"{flag} {sources[flag]} has other content" for flag in found if before.get(flag) not in (None, found[flag])
    ]


def fingerprint(source: Path) -> str:
    """Return a hash of a file, or of the files of a folder: names, sizes, and both ends of a few of them."""
    hashed = hashlib.blake2b(digest_size=8)
    if source.is_file():
        files = [source]
    else:
        files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        hashed.update(f"{path.name}\0{path.stat().st_size}\0".encode(errors="surrogateescape"))
    # Evenly spaced: shards that are written anew in one go differ in any of them.
    sampled = files[:: math.ceil(len(files) / MAX_FILES) or 1]
    for path in sampled:
        end = MAX_BYTES // 2 // len(sampled)
        with path.open("rb") as content:
            hashed.update(content.read(end))
            content.seek(max(0, path.stat().st_size - end))
            hashed.update(content.read(end))
    return hashed.hexdigest()
