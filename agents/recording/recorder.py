"""Writes a recording: trajectories in; a line of compressed JSON each, and one PNG per distinct picture, out.

Everything is only ever appended, a whole line at a time, and an episode is written when it ends: a run that is killed
loses at most the episode that it was writing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from PIL import Image

from agents.appended import rewind
from agents.recording.members import MemberFile
from agents.recording.plain import is_plain, plain, plain_message
from agents.recording.schema import (
    EPISODES,
    IMAGES,
    MANIFEST,
    OUTCOMES,
    SCHEMA_VERSION,
    SCORES,
    TOKENS,
    TRAIN,
    Manifest,
    episode_id,
)
from agents.types import Trajectory, Turn
from envs.errors import UserError
from envs.images import image_digest

#: No tokenizer has ids beyond; an engine's answer may.
MAX_ID = 2**24


class Recorder:
    """Appends episodes to a folder.

    `spell` gives the bytes of a token id, so that a recording can be read without the tokenizer. `share` is the share
    of groups that are recorded, whole and always the same ones; what is written of others is passed over.

    Example::

        with Recorder(Path("runs/x/episodes"), manifest, renderer.encoder.spell) as recorder:
            recorder.write(trajectory, step=3)
            recorder.take(trajectory, step=3, fate="train", advantage=0.7)
            recorder.score(trajectory, step=3, logprobs_N=logprobs_N)
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        spell: Callable[[int], bytes] | None = None,
        share: float = 1.0,
    ) -> None:
        """Open the files; a folder that holds a recording is gone on with.

        Raises:
            UserError: the folder holds a recording of another schema or environment.
        """
        self.folder, self.manifest, self.share = folder, manifest, share
        (folder / IMAGES).mkdir(parents=True, exist_ok=True)
        self._begin()
        self._episodes, self._outcomes, self._scores = (
            MemberFile(folder / name) for name in (EPISODES, OUTCOMES, SCORES)
        )
        self._spell, self._known_V = spell, _known_tokens(folder / TOKENS)
        self._tokens = (folder / TOKENS).open("ab")
        self._saved: set[str] = set()
        #: How long all writing has taken so far.
        self.seconds = 0.0

    def _begin(self) -> None:
        path = self.folder / MANIFEST
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            found = before.get("schema_version"), before.get("env", {}).get("id")
            if found != (SCHEMA_VERSION, self.manifest.env.id):
                rule = f"must hold a recording of schema {SCHEMA_VERSION} of '{self.manifest.env.id}', or none"
                fix = "record in another folder"
                raise UserError(str(self.folder), rule, f"schema {found[0]} of '{found[1]}'", fix)
            ways = {**before.get("ways", {}), **self.manifest.model_dump(mode="json")["ways"]}
            if ways == before.get("ways"):
                return
            text = json.dumps({**before, "ways": ways}, indent=1)
        else:
            text = self.manifest.model_dump_json(indent=1)
        part = path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in (self._episodes, self._outcomes, self._scores, self._tokens):
            file.close()

    def sizes(self) -> dict[str, int]:
        """Return the bytes written so far to each file, which are on disk when this returns."""
        with self._timed():
            os.fsync(self._tokens.fileno())
            sizes = {file.path.name: file.size() for file in (self._episodes, self._outcomes, self._scores)}
            return sizes | {TOKENS: (self.folder / TOKENS).stat().st_size}

    def is_recorded(self, way: str, group: int) -> bool:
        """Return whether a group is one of those that are recorded."""
        drawn = int.from_bytes(hashlib.blake2b(f"{way}/{group}".encode(), digest_size=6).digest(), "big")
        return drawn < self.share * 2**48

    def write(self, trajectory: Trajectory, step: int, phase: str = TRAIN, way: str = TRAIN) -> None:
        """Append one episode and make sure that it is out of this process."""
        if self.is_recorded(way, trajectory.group):
            with self._timed():
                self._write_tokens(trajectory.ids_T)
                self._append(self._episodes, self._episode(trajectory, step, phase, way))

    def take(self, trajectory: Trajectory, step: int, fate: str, advantage: float | None = None) -> None:
        """Append what became of a training episode."""
        if self.is_recorded(TRAIN, trajectory.group):
            line = {"id": episode_id(TRAIN, TRAIN, trajectory), "step": step, "fate": fate, "advantage": advantage}
            with self._timed():
                self._append(self._outcomes, line)

    def score(self, trajectory: Trajectory, step: int, logprobs_N: NDArray[np.float32]) -> None:
        """Append the trainer's log-probs of the model tokens of an episode."""
        if self.is_recorded(TRAIN, trajectory.group):
            with self._timed():
                name = episode_id(TRAIN, TRAIN, trajectory)
                self._append(self._scores, {"id": name, "step": step, "logprobs": _floats(logprobs_N)})

    @staticmethod
    def _append(file: MemberFile, line: Mapping[str, Any]) -> None:
        # Of float32 as few digits as tell values apart, and null for what is not finite.
        file.append(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def _episode(self, t: Trajectory, step: int, phase: str, way: str) -> dict[str, Any]:
        messages = [plain_message(message, self._picture) for message in t.messages]
        # An answer that the model was shown stands in the conversation too, as the same object.
        known = {id(message): written for message, written in zip(t.messages, messages, strict=True)}
        return {
            "schema_version": SCHEMA_VERSION,
            "id": episode_id(phase, way, t),
            "phase": phase,
            "way": way,
            "step": step,
            "group": t.group,
            "sample_index": t.sample_index,
            "attempt": t.attempt,
            "env": self.manifest.env.id,
            "env_version": self.manifest.env.version,
            "sample_id": plain(str(t.sample_id)),
            "label": t.label if t.label is None else plain(str(t.label)),
            "metadata": plain(t.metadata),
            "is_exact": is_plain(t.metadata) and (t.label is None or (type(t.label) is str and is_plain(t.label))),
            "num_prompt_messages": t.num_prompt_messages,
            "seed": t.seed,
            "reward": float(t.reward) if math.isfinite(t.reward) else 0.0,
            "end_reason": t.end_reason.value,
            "error": plain(t.error)
            if math.isfinite(t.reward)
            else f"{t.error or ''}\nthe reward was {t.reward}".strip(),
            "messages": messages,
            "turns": [self._turn(turn, known) for turn in t.turns],
            "tools": tools_digest(t.tools),
            "prompt_length": t.prompt_length,
            "ids": np.ascontiguousarray(t.ids_T),
            "mask": t.mask_T.astype(np.int8),
            "logprobs": _floats(t.logprobs_T[t.mask_T]),
            "images": [
                {"digest": image.digest, "grid": list(image.grid_thw), "num_tokens": image.num_tokens}
                for image in t.images
            ],
            "began": round(t.timing.began, 3),
            **{f"{name}_s": round(value, 6) for name, value in _times(t).items()},
        }

    def _turn(self, turn: Turn, known: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        return {
            "start": turn.start,
            "end": turn.end,
            "text": plain(turn.text),
            "finish": turn.finish,
            "done": turn.done,
            "versions": [list(run) for run in turn.versions],
            "num_cached": turn.num_cached,
            "observations": [known.get(id(m)) or plain_message(m, self._picture) for m in turn.observations],
            "info": plain(turn.info),
            "engine_s": round(turn.engine_s, 6),
            "env_s": round(turn.env_s, 6),
        }

    def _picture(self, image: Image.Image) -> str:
        image = image.convert("RGB")
        digest = image_digest(image)
        name = f"{IMAGES}/{digest}.png"
        if digest not in self._saved:
            path = self.folder / name
            if not path.exists():
                # Under another name first: who is killed while writing leaves no half a picture behind.
                part = path.with_suffix(f".{os.getpid()}.part")
                image.save(part, format="PNG")
                part.replace(path)
            self._saved.add(digest)
        return name

    def _write_tokens(self, ids_T: NDArray[np.int64]) -> None:
        """Append the text of every id that no episode before had."""
        if self._spell is None:
            return
        ids_T = ids_T[(ids_T >= 0) & (ids_T < MAX_ID)]
        most = int(ids_T.max(initial=0))
        if most >= len(self._known_V):
            self._known_V = np.concatenate([self._known_V, np.zeros(most + 1, dtype=np.bool_)])
        new = sorted(set(ids_T[~self._known_V[ids_T]].tolist()))
        if new:
            self._tokens.write(b"".join(_token_line(each, self._spell(each)) for each in new))
            self._tokens.flush()
            self._known_V[new] = True


def rewind_recording(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Take a recording back to the sizes that it had; return the names of files that are shorter than that.

    Example: after `rewind_recording(folder, recorder.sizes())` nothing is changed, and `[]` is returned.
    """
    short_files = []
    for name in (EPISODES, OUTCOMES, SCORES, TOKENS):
        path, size = folder / name, sizes.get(name, 0)
        if size > (path.stat().st_size if path.exists() else 0):
            short_files.append(name)
        else:
            rewind(path, size)
    return short_files


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash of the schemas of tools, empty where there are none."""
    if not tools:
        return ""
    return hashlib.blake2b(json.dumps(plain(list(tools)), sort_keys=True).encode(), digest_size=8).hexdigest()


def _times(t: Trajectory) -> dict[str, float]:
    return {"total": t.timing.total_s, "engine": t.timing.engine_s, "env": t.timing.env_s, "check": t.timing.check_s}


def _token_line(token_id: int, spelled: bytes) -> bytes:
    text = spelled.decode("utf-8", errors="replace")
    line: dict[str, Any] = {"id": token_id, "text": text}
    if text.encode() != spelled:
        line["hex"] = spelled.hex()
    return orjson.dumps(line) + b"\n"


def _known_tokens(path: Path) -> NDArray[np.bool_]:
    """Return which ids a file has, and cut off the part of a line that a killed process has left."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        rewind(path, whole)
    known = [orjson.loads(line)["id"] for line in content[:whole].splitlines()]
    known_V = np.zeros(max(known, default=0) + 1, dtype=np.bool_)
    known_V[known] = True
    return known_V


def _floats(values_N: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values_N, dtype=np.float32)
