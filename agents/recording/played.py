"""Records the episodes that one call of `agents.play` or `--fork` played, in a new folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agents.recording.recorder import Recorder
from agents.recording.schema import MANIFEST, PLAY, Manifest
from agents.types import Trajectory
from envs.errors import UserError

_FIX = "record in another folder"


def check_record_folder(folder: Path) -> None:
    """Check, before the episode is played, that a folder can record it; create the folder if needed.

    Raises:
        UserError: it cannot be written, or has a recording already.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--record", "must be a writable folder", str(folder), f"{_FIX} ({error.strerror})") from error
    # Readers take `MANIFEST` of the folder itself first, so it would hide that of a run.
    if any((place / MANIFEST).exists() for place in (folder, folder / "episodes")):
        raise UserError("--record", "must be a folder without a recording", str(folder), _FIX)


def record_played(
    folder: Path, played: Sequence[Trajectory], manifest: Manifest, spell: Callable[[int], bytes] | None = None
) -> None:
    """Record episodes that were played in the way "play" of the manifest; `spell` is that of a `Recorder`."""
    with Recorder(folder, manifest, spell) as recorder:
        for trajectory in played:
            recorder.write(trajectory, step=0, phase=PLAY, way=PLAY)
