"""Reads a recording as records, samples and trajectories.

It skips lines that are half written, so a recording can be read while a run writes it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from pydantic import BaseModel, ValidationError

from agents.recording.gzip_lines import read_gzip_lines
from agents.recording.schema import (
    EPISODES,
    MANIFEST,
    OUTCOMES,
    SCHEMA_VERSION,
    SCORES,
    TOKENS,
    EpisodeRecord,
    Manifest,
    OutcomeRecord,
    ScoreRecord,
    TokenRecord,
    TurnRecord,
)
from agents.rendering.images import ImageStore
from agents.types import ProcessedImage, Timing, Trajectory, Turn
from envs.errors import UserError, first_line
from envs.images import image_digest
from envs.types import Message, Sample, message_images

R = TypeVar("R", bound=BaseModel)
_PICTURE = re.compile(r"images/[0-9a-f]{8,64}\.png")
#: Decoded pictures to keep: a gigabyte of large ones.
MAX_PICTURES = 256


@dataclass(frozen=True)
class Recording:
    """A folder of recorded episodes.

    Example::

        recording = Recording.open(Path("runs/x"))
        for episode in recording.episodes():
            print(episode.id, episode.reward, episode.turns[0].text)
        recording.outcomes()["train-12-3"].advantage      # 0.7
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path | str) -> Recording:
        """Open the recording of a run folder, or of a folder of its own.

        Raises:
            UserError: there is none, or it has another schema.
        """
        path = Path(path)
        found = [folder for folder in (path, path / "episodes") if (folder / MANIFEST).is_file()]
        if not found:
            old = [folder for folder in (path, path / "episodes") if (folder / "episodes.jsonl").is_file()]
            got = "episodes of an earlier version" if old else "none" if path.exists() else "no such folder"
            raise UserError(str(path), f"must hold a recording ({MANIFEST})", got, "give a run folder that recorded")
        try:
            text = (found[0] / MANIFEST).read_text(encoding="utf-8")
            version = json.loads(text).get("schema_version")
            if version != SCHEMA_VERSION:
                fix = "read it with the version of TrueTurn that wrote it"
                raise UserError(str(found[0]), f"must be a recording of schema {SCHEMA_VERSION}", version, fix)
            return cls(found[0], Manifest.model_validate_json(text))
        except (ValidationError, ValueError, AttributeError) as error:
            rule, fix = f"must hold a whole {MANIFEST}", "take a copy of the whole folder"
            raise UserError(str(found[0]), rule, first_line(error), fix) from error

    def episodes(self) -> Iterator[EpisodeRecord]:
        """Yield the episodes in the order in which they ended."""
        for _, episode in self.episodes_from(0):
            yield episode

    def episodes_from(self, place: int) -> Iterator[tuple[int, EpisodeRecord]]:
        """Yield (place behind it, episode) for each episode, beginning at a place in the file; 0 is the first."""
        return self._records_from(EpisodeRecord, EPISODES, place)

    def episode(self, end: int, start: int) -> EpisodeRecord:
        """Return the episode between two places of the file."""
        for found, episode in self.episodes_from(start):
            assert found == end, f"an episode at {start} ends at {found}, not {end}"
            return episode
        raise AssertionError(f"there is no episode at {start}")

    def outcomes(self) -> dict[str, OutcomeRecord]:
        """Return what became of each training episode, by id."""
        return {record.id: record for _, record in self.outcomes_from(0)}

    def outcomes_from(self, place: int) -> Iterator[tuple[int, OutcomeRecord]]:
        """Yield (place behind it, outcome) for each outcome, beginning at a place in the file."""
        return self._records_from(OutcomeRecord, OUTCOMES, place)

    def scores(self) -> dict[str, ScoreRecord]:
        """Return the trainer's log-probs of each episode that it has trained on, by id."""
        return {record.id: record for _, record in self.scores_from(0)}

    def scores_from(self, place: int) -> Iterator[tuple[int, ScoreRecord]]:
        """Yield (place behind it, log-probs) for each episode trained on, beginning at a place in the file."""
        return self._records_from(ScoreRecord, SCORES, place)

    def tokens(self) -> dict[int, bytes]:
        """Return the bytes of every token id in the recording."""
        path = self.folder / TOKENS
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        records = (self._record(TokenRecord, TOKENS, line) for line in whole.splitlines())
        return {r.id: bytes.fromhex(r.hex) if r.hex else r.text.encode() for r in records}

    def _records_from(self, kind: type[R], name: str, place: int) -> Iterator[tuple[int, R]]:
        for end, line in read_gzip_lines(self.folder / name, place):
            yield end, self._record(kind, name, line)

    def _record(self, kind: type[R], name: str, line: bytes) -> R:
        try:
            return kind.model_validate_json(line)
        except ValidationError as error:
            got, fix = " ".join(str(error).splitlines()[:2])[:200], "take a copy of the whole folder"
            raise UserError(str(self.folder / name), "must be a whole recording", got, fix) from error

    def picture_path(self, name: str) -> Path:
        """Return the path of a picture that a message names.

        Raises:
            UserError: the name has another form than a recorder writes, and could lead anywhere.
        """
        if not _PICTURE.fullmatch(name):
            rule, fix = "must name a picture as images/HASH.png", "take a recording as it was written"
            raise UserError(f"{self.folder} image", rule, name[:200], fix)
        return self.folder / name

    def picture(self, name: str) -> Image.Image:
        """Return a decoded picture; the last `MAX_PICTURES` are kept.

        Raises:
            UserError: there is no such picture, or it is damaged.
        """
        return _read_picture(self.picture_path(name))

    def messages(self, records: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        """Return messages with pictures instead of their names."""
        return tuple(self._message(record) for record in records)

    def _message(self, record: Mapping[str, Any]) -> Message:
        content = record.get("content")
        if not isinstance(content, list):
            return dict(record)
        parts = [
            {**part, "image": self.picture(part["image"])} if part.get("type") == "image" else dict(part)
            for part in content
        ]
        return {**record, "content": parts}

    def sample(self, episode: EpisodeRecord) -> Sample:
        """Return the problem of an episode."""
        prompt = self.messages(episode.messages[: episode.num_prompt_messages])
        return Sample(episode.sample_id, prompt, episode.label, episode.metadata)

    def trajectory(self, episode: EpisodeRecord, images: ImageStore | None = None) -> Trajectory:
        """Return the trajectory of an episode; `images` processes its pictures again, None leaves them out.

        Raises:
            UserError: the pictures give other patch grids than recorded.
        """
        messages = self.messages(episode.messages)
        processed = self._processed(episode, messages, images) if images else ()
        return Trajectory(
            sample_id=episode.sample_id,
            sample_index=episode.sample_index,
            seed=episode.seed,
            ids_T=np.array(episode.ids, dtype=np.int64),
            mask_T=np.array(episode.mask, dtype=np.bool_),
            logprobs_T=episode.logprobs_T,
            images=processed,
            turns=tuple(self._turn(turn) for turn in episode.turns),
            reward=episode.reward,
            end_reason=episode.end_reason,
            prompt_length=episode.prompt_length,
            messages=messages,
            error=episode.error,
            metadata=episode.metadata,
            timing=Timing(episode.began, episode.total_s, episode.engine_s, episode.env_s, episode.check_s),
            label=episode.label,
            num_prompt_messages=episode.num_prompt_messages,
            group=episode.group,
            attempt=episode.attempt,
        )

    def _processed(
        self, episode: EpisodeRecord, messages: Sequence[Message], images: ImageStore
    ) -> tuple[ProcessedImage, ...]:
        # Where the stream has fewer pictures than the messages, the last ones did not fit.
        pictures = list(message_images(messages))[: len(episode.images)]
        processed = tuple(images.process(picture) for picture in pictures)
        found = [(image.digest, image.grid_thw) for image in processed]
        if found != (recorded := [(image.digest, image.grid) for image in episode.images]):
            rule = f"must be cut as recorded, {recorded}"
            fix = "give the model that the recording was made with, and its whole folder"
            raise UserError(f"pictures of {episode.id}", rule, found, fix)
        return processed

    def _turn(self, turn: TurnRecord) -> Turn:
        # A `TurnRecord` has the fields of a `Turn`.
        return Turn(**{**dict(turn), "observations": self.messages(turn.observations)})


@functools.lru_cache(MAX_PICTURES)
def _read_picture(path: Path) -> Image.Image:
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except Exception as error:  # Pillow raises what it likes
        fix = "take a copy of the whole folder"
        raise UserError(str(path), "must be a whole picture", first_line(error), fix) from error
    if (digest := image_digest(image)) != path.stem:
        fix = "take a copy of the whole folder"
        raise UserError(str(path), "must be the picture that was recorded", f"pixels of hash {digest}", fix)
    return image
