"""Recorded episodes: trajectories in; one JSON line each, and one PNG per distinct picture, out.

`episodes.jsonl` is only ever appended to, a whole line at a time, so a run that is killed loses at most its last line.
Pictures are named by the hash of their pixels; messages refer to them as
`{"type": "image", "image": "images/HASH.png"}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from PIL import Image

from agents.types import Trajectory
from envs.images import image_digest

SCHEMA_VERSION = 3
MAX_DEPTH = 32
MAX_BITS = 4096
MAX_CHARS = 10_000


class Recorder:
    """Appends episodes to a folder.

    Example::

        with Recorder(Path("runs/x/episodes"), env="geo3k") as recorder:
            recorder.write(trajectory, step=3, phase="train", advantage=0.7)
    """

    def __init__(self, folder: Path, env: str) -> None:
        self.folder, self.env = folder, env
        (folder / "images").mkdir(parents=True, exist_ok=True)
        self.path = folder / "episodes.jsonl"
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def size(self) -> int:
        """Return the bytes written so far, which are on disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def write(self, trajectory: Trajectory, step: int, phase: str, advantage: float | None = None) -> None:
        """Append one episode and make sure that it is out of this process."""
        t = trajectory
        line = {
            "schema": SCHEMA_VERSION,
            "env": self.env,
            "phase": phase,
            "step": step,
            "sample_id": str(t.sample_id),
            "sample_index": t.sample_index,
            "seed": t.seed,
            "reward": t.reward,
            "advantage": advantage,
            "end_reason": t.end_reason.value,
            "error": t.error,
            "metadata": plain(t.metadata),
            "messages": [self._message(message) for message in t.messages],
            "turns": [
                {
                    "start": turn.start,
                    "end": turn.end,
                    "text": turn.text,
                    "finish": turn.finish,
                    "versions": [list(run) for run in turn.versions],
                    "num_cached": turn.num_cached,
                    "observations": [self._message(message) for message in turn.observations],
                    "info": plain(turn.info),
                    "engine_s": round(turn.engine_s, 6),
                    "env_s": round(turn.env_s, 6),
                }
                for turn in t.turns
            ],
            "prompt_length": t.prompt_length,
            "ids": t.ids_T.tolist(),
            "mask": t.mask_T.astype(int).tolist(),
            "logprobs": [round(float(x), 6) for x in t.logprobs_T],
            "image_grids": [list(image.grid_thw) for image in t.images],
        }
        self._file.write(json.dumps(line, ensure_ascii=True) + "\n")
        self._file.flush()

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [self._part(part) for part in content]
        return plain({**message, "content": content})

    def _part(self, part: object) -> object:
        if isinstance(part, Mapping) and isinstance(part.get("image"), Image.Image):
            return {**part, "image": self._picture(part["image"])}
        return part

    def _picture(self, image: Image.Image) -> str:
        image = image.convert("RGB")
        digest = image_digest(image)
        path = self.folder / "images" / f"{digest}.png"
        if not path.exists():
            # Under another name first: who is killed while writing leaves no half a picture behind.
            part = path.with_suffix(f".{os.getpid()}.part")
            image.save(part, format="PNG")
            part.replace(path)
        return f"images/{digest}.png"


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return the value as JSON can hold it; what it cannot, or what nests too deeply, becomes text. Never raises."""
    if depth and isinstance(value, Mapping):
        return {_text(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    if type(value) is int and value.bit_length() > MAX_BITS:
        return _text(hex(value))
    return value if value is None or type(value) in (bool, int, float, str) else _text(value)


def _text(value: Any) -> str:
    try:
        return str.__str__(value) if isinstance(value, str) else repr(value)[:MAX_CHARS]
    except Exception:  # a `__repr__` of somebody else, or a value that nests too deeply for it
        return f"<{type(value).__name__} that cannot be shown>"
