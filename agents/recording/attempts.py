"""Records single episodes that a person or `--fork` played. Calls append to one recording, each as the next attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from agents.recording.recorder import Recorder
from agents.recording.recording import Recording
from agents.recording.schema import MANIFEST, PLAY, Manifest, WayRecord
from agents.rendering.renderer import Renderer
from agents.types import Trajectory
from envs.errors import UserError

_FIX = "record in another folder"


def check_record_folder(folder: Path, manifest: Manifest) -> None:
    """Check, before the episode is played, that a folder can record it; create the folder if needed.

    Raises:
        UserError: it cannot be written, is a run folder, or holds episodes of another environment or chat template.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--record", "must be a writable folder", str(folder), f"{_FIX} ({error.strerror})") from error
    if (folder / "episodes" / MANIFEST).exists():
        raise UserError("--record", "must not hide the recording of a run", str(folder), _FIX)
    if not (folder / MANIFEST).exists():
        return
    before = Recording.open(folder).manifest
    if (found := before.env.id) != manifest.env.id:
        raise UserError("--record", f"must hold episodes of '{manifest.env.id}', or none", f"'{found}'", _FIX)
    if before.template != manifest.template or before.template_options != manifest.template_options:
        rule = f"must hold episodes of the same chat template ({manifest.template}), or none"
        raise UserError("--record", rule, before.template, _FIX)


def record_attempts(
    folder: Path, trajectories: Sequence[Trajectory], manifest: Manifest, renderer: Renderer | None = None
) -> list[str]:
    """Append episodes of one problem to a recording, as the next attempt at it; return what was wrong with its files.

    `manifest` has their limits as the way "play". Where the recording has a way of that name with other limits, the new
    one is called "play2". Without a renderer, there are no token ids to spell.
    """
    before = dict[str, WayRecord]()
    groups = {trajectory.group for trajectory in trajectories}
    if (folder / MANIFEST).exists():
        before = Recording.open(folder).manifest.ways
    limits = manifest.ways[PLAY]
    names = (PLAY if number == 1 else f"{PLAY}{number}" for number in count(1))
    way = next(name for name in names if before.get(name, limits) == limits)
    manifest = manifest.model_copy(update={"ways": {way: limits}})
    spell = renderer.encoder.spell if renderer else None
    with Recorder(folder, manifest, spell) as recorder:
        # Read now, because the recorder has just created or mended the files.
        attempts = [episode.attempt for episode in Recording.open(folder).episodes() if episode.group in groups]
        for trajectory in trajectories:
            again = replace(trajectory, attempt=max(attempts, default=-1) + 1)
            recorder.write(again, step=0, phase=PLAY, way=way)
    return recorder.notes
