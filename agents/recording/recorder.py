"""Writes a recording: one line of compressed JSON per trajectory, and one PNG file per distinct image.

Lines are only ever appended, each whole, and an episode is written when it ends: a run that is killed loses at most the
episode that it was writing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from PIL import Image

from agents.recording.append_log import rewind
from agents.recording.gzip_lines import GzipLines
from agents.recording.json_values import MessageTable, cut, json_text, to_json
from agents.recording.safe_files import MAX_LINE, MAX_VALUES, check_real_folder, memory_of, read_lines, read_regular
from agents.recording.schema import (
    EPISODES,
    IMAGES,
    MANIFEST,
    OUTCOMES,
    READ_VERSIONS,
    SCHEMA_VERSION,
    SCORES,
    TOKENS,
    TRAIN,
    Manifest,
    episode_id,
    read_token,
)
from agents.recording.stream_schema import RoutesRecord, StreamRecord
from agents.types import TokenStream, Trajectory, Turn
from envs.contract import is_json
from envs.errors import UserError
from envs.images import image_digest
from envs.safe_text import write_text

#: No tokenizer has larger ids; a broken completion may.
MAX_ID = 2**24

#: Parts of an episode's line whose size an environment decides.
_OF_ENVIRONMENT = ("sample_id", "label", "metadata", "error", "messages", "later_messages", "turns")


class Recorder:
    """Appends episodes to a folder.

    `spell` gives the bytes of a token id, so that a recording can be read without the tokenizer. `share` is the share
    of groups that are recorded, always the same ones and with all their episodes; other episodes are skipped. The
    experts of a mixture are recorded `with_routes`.

    Example::

        with Recorder(Path("runs/x/episodes"), manifest, renderer.encoder.spell) as recorder:
            recorder.write(trajectory, step=3)
            recorder.write_outcome(trajectory, step=3, fate="train", advantage=0.7)
            recorder.write_scores(trajectory, step=3, logprobs_N=logprobs_N)
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        spell: Callable[[int], bytes] | None = None,
        share: float = 1.0,
        with_routes: bool = False,
    ) -> None:
        """Open the files; a recording that is already in the folder is continued.

        Raises:
            UserError: the folder holds a recording of another schema or environment.
        """
        self.folder = folder
        self.manifest = manifest
        self.share = share
        self.with_routes = with_routes
        #: What was wrong with the files before, in a sentence each.
        self.notes = list[str]()
        # A link in a stranger's folder would have images written wherever it leads.
        check_real_folder(folder / IMAGES)
        (folder / IMAGES).mkdir(parents=True, exist_ok=True)
        self._write_manifest()
        self._episodes, self._outcomes, self._scores = (
            GzipLines(folder / name) for name in (EPISODES, OUTCOMES, SCORES)
        )
        self.notes += [note for file in (self._episodes, self._outcomes, self._scores) for note in file.notes]
        self._spell = spell
        self._known_V = _known_tokens(folder / TOKENS)
        self._tokens = (folder / TOKENS).open("ab")
        self._saved: set[str] = set()
        #: Seconds that all writing has taken so far.
        self.seconds = 0.0

    def _write_manifest(self) -> None:
        """Write the manifest, or add its ways to the one in the folder; one that cannot be read is kept aside."""
        path = self.folder / MANIFEST
        before = None
        if path.exists() and (before := self._manifest_before(path)) is None:
            aside = path.with_name(f"{MANIFEST}.damaged")
            path.replace(aside)
            self.notes.append(f"{path} was damaged and is written anew; it is now {aside}")
        manifest = before or self.manifest
        # A page or a command may read the file now, so it is replaced only where a way is new.
        if before and before == (manifest := self._joined(before)):
            return
        # Replaced whole: a reader never sees half a manifest.
        part = path.with_suffix(".part")
        write_text(part, json_text(manifest))
        part.replace(path)

    def _joined(self, before: Manifest) -> Manifest:
        """Return the manifest in the folder with the ways of this one, and the schema of what is appended now."""
        ways = before.ways | self.manifest.ways
        return before.model_copy(update={"ways": ways, "schema_version": SCHEMA_VERSION})

    def _manifest_before(self, path: Path) -> Manifest | None:
        """Return the manifest in the folder, None where it is damaged."""
        try:
            found = json.loads(text := read_regular(path))
            schema = found["schema_version"]
            env = found["env"]["id"]
            if schema not in READ_VERSIONS or env != self.manifest.env.id:
                rule = f"must hold a recording of schema {SCHEMA_VERSION} of '{self.manifest.env.id}', or none"
                raise UserError(str(self.folder), rule, f"schema {schema} of '{env}'", "record in another folder")
            return Manifest.model_validate_json(text)
        except UserError:
            raise
        except (ValueError, LookupError, TypeError, RecursionError):
            return None

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
        """Return whether a group belongs to the share that is recorded."""
        # A hash instead of a random number: a resumed run records the same groups.
        drawn = int.from_bytes(hashlib.blake2b(f"{way}/{group}".encode(), digest_size=6).digest(), "big")
        return drawn < self.share * 2**48

    def write(self, trajectory: Trajectory, step: int, phase: str = TRAIN, way: str = TRAIN) -> None:
        """Append one episode; it has left this process when this returns."""
        if self.is_recorded(way, trajectory.group):
            with self._timed():
                # First, so that whoever reads the episode finds the text of each of its tokens.
                self._write_tokens(np.concatenate([stream.ids_T for stream in trajectory.streams]))
                self._append(self._episodes, self._episode(trajectory, step, phase, way))

    def write_outcome(
        self, trajectory: Trajectory, step: int, fate: str, advantage: float | tuple[float, ...] | None = None
    ) -> None:
        """Append the outcome of a training episode; `advantage` is that of all its tokens, or of each turn."""
        if self.is_recorded(TRAIN, trajectory.group):
            name = episode_id(TRAIN, TRAIN, trajectory)
            line = {"id": name, "step": step, "fate": fate, "advantage": advantage}
            if isinstance(advantage, tuple):
                line |= {"advantage": statistics.fmean(advantage), "turn_advantages": advantage}
            with self._timed():
                self._append(self._outcomes, line)

    def write_scores(self, trajectory: Trajectory, step: int, logprobs_N: NDArray[np.float32]) -> None:
        """Append the trainer's log-probs of the model tokens of an episode."""
        if self.is_recorded(TRAIN, trajectory.group):
            with self._timed():
                name = episode_id(TRAIN, TRAIN, trajectory)
                self._append(self._scores, {"id": name, "step": step, "logprobs": _floats(logprobs_N)})

    @staticmethod
    def _append(file: GzipLines, line: Mapping[str, Any]) -> None:
        file.append(_written(line))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def _episode(self, t: Trajectory, step: int, phase: str, way: str) -> dict[str, Any]:
        said = MessageTable(t.messages, self._image)
        later = [self._later(stream, said) for stream in t.later]
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
            # A data set may hold half of a surrogate pair, which no reader of JSON takes.
            "sample_id": to_json(str(t.sample_id)),
            "label": t.label if t.label is None else to_json(str(t.label)),
            "metadata": to_json(t.metadata),
            "is_exact": t.is_exact and is_json(t.metadata) and is_json(t.label),
            "num_prompt_messages": t.num_prompt_messages,
            "seed": t.seed,
            "reward": float(t.reward) if math.isfinite(t.reward) else 0.0,
            # Left out where there are none: most runs have the environment's reward alone.
            **({"rewards": dict(t.rewards)} if t.rewards else {}),
            **({"verdicts": to_json(t.verdicts)} if t.verdicts else {}),
            "end_reason": t.end_reason.value,
            "error": to_json(t.error)
            if math.isfinite(t.reward)
            else f"{t.error or ''}\nthe reward was {t.reward}".strip(),
            "messages": said.written[: len(t.messages)],
            "turns": [self._turn(turn, said) for turn in t.turns],
            "tools": tools_digest(t.tools),
            "ids": np.ascontiguousarray(t.ids_T),
            "mask": t.mask_T.astype(np.int8),
            **self._sampled(t),
            **({"later": later, "later_messages": said.written[len(t.messages) :]} if later else {}),
            "began": round(t.timing.began, 3),
            "total_s": round(t.timing.total_s, 6),
            "engine_s": round(t.timing.engine_s, 6),
            "env_s": round(t.timing.env_s, 6),
            "check_s": round(t.timing.check_s, 6),
        }

    def _sampled(self, t: Trajectory | TokenStream) -> dict[str, Any]:
        """Return what is recorded of every stream."""
        return {
            "prompt_length": t.prompt_length,
            "logprobs": _floats(t.logprobs_T[t.mask_T]),
            **({} if t.kept_NK is None else {"kept": base64.b64encode(t.kept_NK.astype("<i4").tobytes()).decode()}),
            **({} if t.routes_RLK is None or not self.with_routes else {"routes": RoutesRecord.line(t.routes_RLK)}),
            "images": [
                {"digest": image.digest, "grid": list(image.grid_thw), "num_tokens": image.num_tokens}
                for image in t.images
            ],
        }

    def _later(self, stream: TokenStream, said: MessageTable) -> dict[str, Any]:
        places = [said.place(message) for message in stream.messages]
        return StreamRecord.line(stream) | self._sampled(stream) | {"said": places}

    def _turn(self, turn: Turn, said: MessageTable) -> dict[str, Any]:
        return {
            "start": turn.start,
            "end": turn.end,
            "text": to_json(turn.text),
            "finish": turn.finish,
            "done": turn.done,
            "versions": [list(run) for run in turn.versions],
            "num_cached": turn.num_cached,
            "observations": [said.recorded(message) for message in turn.observations],
            "info": to_json(turn.info),
            "engine_s": round(turn.engine_s, 6),
            "env_s": round(turn.env_s, 6),
            **({"reward": turn.reward} if turn.reward else {}),
            **({"usage": dict(turn.usage)} if turn.usage else {}),
            **({"stream": turn.stream} if turn.stream else {}),
        }

    def _image(self, image: Image.Image) -> str:
        image = image.convert("RGB")
        digest = image_digest(image)
        name = f"{IMAGES}/{digest}.png"
        if digest not in self._saved:
            path = self.folder / name
            if not path.exists():
                # Renamed when complete: a killed writer leaves no half an image under the name.
                part = path.with_suffix(f".{os.getpid()}.part")
                image.save(part, format="PNG")
                part.replace(path)
            self._saved.add(digest)
        return name

    def _write_tokens(self, ids_T: NDArray[np.int64]) -> None:
        """Append the text of every id that is new to the recording."""
        if self._spell is None:
            return
        # An engine that breaks its promise may give any number; the episode says so by its end.
        ids_T = ids_T[(ids_T >= 0) & (ids_T < MAX_ID)]
        most = int(ids_T.max(initial=0))
        # The largest id is not known before: recorders get no tokenizer.
        if most >= len(self._known_V):
            self._known_V = np.concatenate([self._known_V, np.zeros(most + 1, dtype=np.bool_)])
        new = sorted(set(ids_T[~self._known_V[ids_T]].tolist()))
        if new:
            self._tokens.write(b"".join(_token_line(each, self._spell(each)) for each in new))
            self._tokens.flush()
            self._known_V[new] = True


def rewind_recording(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Roll a recording back to the sizes that its files had; return the names of files that are shorter than that.

    Example: `rewind_recording(folder, recorder.sizes())` changes nothing and returns `[]`.
    """
    short_files = []
    for name in (EPISODES, OUTCOMES, SCORES, TOKENS):
        path = folder / name
        size = sizes.get(name, 0)
        # Named and not cut: the run is then resumed without its recording.
        if size > (path.stat().st_size if path.exists() else 0):
            short_files.append(name)
        else:
            rewind(path, size)
    return short_files


def tools_digest(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash of the schemas of tools, empty where there are none."""
    if not tools:
        return ""
    return hashlib.blake2b(json.dumps(to_json(list(tools)), sort_keys=True).encode(), digest_size=8).hexdigest()


def _token_line(token_id: int, spelled: bytes) -> bytes:
    text = spelled.decode("utf-8", errors="replace")
    line: dict[str, Any] = {"id": token_id, "text": text}
    # Part of a character, which several tokens share, is no text of its own.
    if text.encode() != spelled:
        line["hex"] = spelled.hex()
    return orjson.dumps(line) + b"\n"


def _known_tokens(path: Path) -> NDArray[np.bool_]:
    """Return which ids a file has in whole lines, and cut off the part of a line that a killed writer has left."""
    lines = list(read_lines(path))
    rewind(path, lines[-1][0] if lines else 0)
    known = [record.id for _, line in lines if (record := read_token(line)) and record.id < MAX_ID]
    known_V = np.zeros(max(known, default=0) + 1, dtype=np.bool_)
    known_V[known] = True
    return known_V


def _floats(values_N: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(values_N, dtype=np.float32)


def _written(line: Mapping[str, Any]) -> bytes:
    """Return a line as it is written, such that our own reader takes it: what a run records is never lost.

    An environment may give texts of any size. Where the line would be too long, these are cut, from 2**20 characters
    or items on and then from fewer, and the episode is marked as not exact. The experts of so long a stream are left
    out before that. Where messages have to go, later streams name none.
    """
    text = _dumped(line)
    later = line.get("later", [])
    if len(text) > MAX_LINE and any("routes" in stream for stream in (line, *later)):
        later = [{**stream, "routes": None} for stream in later]
        line = {**line, "routes": None} | ({"later": later} if later else {})
        text = _dumped(line)
    limit = 2**20
    while (len(text) > MAX_LINE or memory_of(text) > MAX_VALUES) and limit > 1:
        parts = {key: cut(value, limit) for key, value in line.items() if key in _OF_ENVIRONMENT}
        # A place in a list that was cut would be that of another message, or of none.
        if later and any(len(parts[name]) < len(line[name]) for name in ("messages", "later_messages")):
            parts["later"] = [{**stream, "said": [], "num_opening": 0, "num_given": 0} for stream in later]
        text = _dumped({**line, **parts, "is_exact": False})
        limit //= 4
    return text


def _dumped(line: Mapping[str, Any]) -> bytes:
    # Writes a float32 with the fewest digits that identify it, and null where it is not finite.
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)
