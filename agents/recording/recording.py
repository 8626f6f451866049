"""Reads a recording as records, samples and trajectories.

It skips lines that are half written, so a recording can be read while a run writes it, and damaged ones, which
`Recording.damage` counts. A recording may be a stranger's: everything in it is checked, and nothing is opened but the
regular files of its folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from pydantic import ValidationError

from agents.recording.gzip_lines import num_skipped, read_gzip_lines
from agents.recording.images import MAX_KEPT, DecodedImages, image_bytes, read_image
from agents.recording.safe_files import MAX_LINE, MAX_VALUES, check_real_folder, read_lines, read_regular
from agents.recording.schema import (
    EPISODES,
    MANIFEST,
    OUTCOMES,
    READ_VERSIONS,
    SCORES,
    TOKENS,
    EpisodeRecord,
    Manifest,
    OutcomeRecord,
    ScoreRecord,
    TokenRecord,
    image_names,
    read_token,
)
from agents.recording.stream_check import broken_record
from agents.rendering.images import ImageStore
from agents.types import Timing, TokenStream, Trajectory, Turn
from envs.errors import UserError, first_line
from envs.types import Message, Sample, message_images

R = TypeVar("R", EpisodeRecord, OutcomeRecord, ScoreRecord, TokenRecord)
_IMAGE = re.compile(r"images/[0-9a-f]{8,64}\.png")
_FIX = "take a copy of the whole folder"


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
    _images: DecodedImages = field(default_factory=DecodedImages, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path | str) -> Recording:
        """Open the recording of a run folder, or of a folder of its own.

        Raises:
            UserError: there is none, or it has another schema.
        """
        path = Path(path)
        # A link there could lead to another user's run, whose data an export would then carry.
        check_real_folder(path / "episodes")
        found = [folder for folder in (path, path / "episodes") if os.path.lexists(folder / MANIFEST)]
        if not found:
            got = "none" if path.exists() else "no such folder"
            raise UserError(str(path), f"must hold a recording ({MANIFEST})", got, "give a run folder that recorded")
        try:
            text = read_regular(found[0] / MANIFEST).decode("utf-8")
            # Before the rest is checked: another version is told so, not that a field is wrong.
            _check_schema(str(found[0]), json.loads(text).get("schema_version"))
            return cls(found[0], Manifest.model_validate_json(text))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(str(found[0]), f"must hold a whole {MANIFEST}", first_line(error), _FIX) from error

    def episodes(self) -> Iterator[EpisodeRecord]:
        """Yield the episodes in the order in which they ended."""
        for _, episode in self.episodes_from(0):
            yield episode

    def episodes_from(self, place: int) -> Iterator[tuple[int, EpisodeRecord]]:
        """Yield (place behind it, episode) for each episode, beginning at a place in the file; 0 is the first.

        Raises:
            UserError: a line is no episode of this schema, or its token stream breaks a rule.
        """
        for end, episode in self._records_from(EpisodeRecord, EPISODES, place):
            _check_schema(f"{self.folder / EPISODES} {episode.id}", episode.schema_version)
            # Readers index the stream by the places of the turns; here they are known to be right.
            if rule := broken_record(episode):
                raise UserError(
                    f"{self.folder / EPISODES} {episode.id}", "must keep the rules of a token stream", rule, _FIX
                )
            yield end, episode

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
        return {record.id: record.spelled for _, record in self.tokens_from(0)}

    def tokens_from(self, place: int) -> Iterator[tuple[int, TokenRecord]]:
        """Yield (place behind it, token) for each token, beginning at a place in the file; skips damaged lines."""
        for end, line in read_lines(self.folder / TOKENS, place):
            if token := read_token(line):
                yield end, token

    def damage(self) -> list[str]:
        """Return a sentence for each file of lines of which readers skip a part."""
        counts = {name: num_skipped(self.folder / name) for name in (EPISODES, OUTCOMES, SCORES)}
        return [
            f"{self.folder / name} is damaged, or has a line over {MAX_LINE} bytes or with values over {MAX_VALUES}, "
            f"at {count} place{'s' * (count > 1)}: what stands there is left out"
            for name, count in counts.items()
            if count
        ] + [
            f"{self.folder / TOKENS} is damaged at {count} line{'s' * (count > 1)}: what stands there is left out"
            for count in (sum(read_token(line) is None for _, line in read_lines(self.folder / TOKENS)),)
            if count
        ]

    def _records_from(self, kind: type[R], name: str, place: int) -> Iterator[tuple[int, R]]:
        for end, line in read_gzip_lines(self.folder / name, place):
            yield end, self._record(kind, name, line)

    def _record(self, kind: type[R], name: str, line: bytes) -> R:
        try:
            return kind.read(line)
        except ValidationError as error:
            # Never the values: they may be megabytes, or meant to steer the terminal.
            first = error.errors(include_url=False, include_input=False)[0]
            count = error.error_count()
            place = ".".join(map(str, first["loc"]))
            got = f"{count} validation error{'s' * (count > 1)} for {kind.__name__}, first {place}: {first['msg']}"
            raise UserError(str(self.folder / name), "must be a whole recording", got, _FIX) from error

    def image_path(self, name: str) -> Path:
        """Return the path of an image that a message names.

        Raises:
            UserError: the name has another form than a recorder writes, and could lead anywhere.
        """
        # The name is text of the recording, and could be a path to anywhere.
        if not _IMAGE.fullmatch(name):
            rule = "must name an image as images/HASH.png"
            fix = "take a recording as it was written"
            raise UserError(f"{self.folder} image", rule, name[:200], fix)
        return self.folder / name

    def image(self, name: str) -> Image.Image:
        """Return a decoded image; those read last are kept.

        Raises:
            UserError: there is no such image, or it is damaged or another one.
        """
        return self._images.read(self.image_path(name))

    def image_file(self, name: str) -> bytes:
        """Return the PNG file of an image, after a check of its pixels. Raises `UserError` like `image`."""
        return read_image(self.image_path(name))[0]

    def messages(self, records: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
        """Return messages with images instead of their names.

        Raises:
            UserError: a message or an image is not as it was recorded, or the images are too large together.
        """
        num_bytes = 0
        # Summed before any message is built, because it holds all of its images at once.
        for name in dict.fromkeys(image_names(records)):
            num_bytes += image_bytes(self.image(name))
            if num_bytes > MAX_KEPT:
                rule = f"must have images of at most {MAX_KEPT} bytes together"
                fix = "leave the episode out"
                raise UserError(f"{self.folder} messages", rule, f"more, with {name}", fix)
        return tuple(self._message(record) for record in records)

    def _message(self, record: Mapping[str, Any]) -> Message:
        content = record.get("content")
        if content is None or isinstance(content, str):
            return dict(record)
        if not isinstance(content, list):
            raise UserError(f"{self.folder} message", "must have a text or a list of parts", content, _FIX)
        return {**record, "content": [self._part(part) for part in content]}

    def _part(self, part: object) -> dict[str, Any]:
        if not isinstance(part, Mapping):
            raise UserError(f"{self.folder} message", "must have parts that are objects", part, _FIX)
        if part.get("type") != "image":
            return dict(part)
        return {**part, "image": self.image(str(part.get("image")))}

    def sample(self, episode: EpisodeRecord) -> Sample:
        """Return the problem of an episode."""
        prompt = self.messages(episode.messages[: episode.num_prompt_messages])
        return Sample(episode.sample_id, prompt, episode.label, episode.metadata)

    def trajectory(self, episode: EpisodeRecord, images: ImageStore | None = None) -> Trajectory:
        """Return the trajectory of an episode; `images` processes its images again, None leaves them out.

        Raises:
            UserError: the images give other patch grids than recorded.
        """
        said = self.messages(episode.said)
        # A `TurnRecord` has the fields of a `Turn`.
        turns = [Turn(**{**dict(turn), "observations": self.messages(turn.observations)}) for turn in episode.turns]
        streams = episode.streams_of(turns, said)
        # Whoever does not compute with pixels needs no processor, which loads Transformers.
        if images:
            shown = [self._with_pixels(stream, episode.id, images) for stream in streams]
        else:
            shown = [replace(stream, images=()) for stream in streams]
        return Trajectory.of_streams(
            shown,
            sample_id=episode.sample_id,
            sample_index=episode.sample_index,
            seed=episode.seed,
            turns=tuple(turns),
            reward=episode.reward,
            rewards=episode.rewards,
            verdicts=episode.verdicts,
            end_reason=episode.end_reason,
            error=episode.error,
            metadata=episode.metadata,
            timing=Timing(episode.began, episode.total_s, episode.engine_s, episode.env_s, episode.check_s),
            label=episode.label,
            num_prompt_messages=episode.num_prompt_messages,
            group=episode.group,
            attempt=episode.attempt,
        )

    def _with_pixels(self, stream: TokenStream, episode_id: str, images: ImageStore) -> TokenStream:
        """Return a stream with its images as the model reads them."""
        # Where the stream has fewer images than the messages, the last ones did not fit.
        raw_images = message_images(stream.messages)[: len(stream.images)]
        processed = tuple(images.process(raw_image) for raw_image in raw_images)
        found = [(image.digest, image.grid_thw) for image in processed]
        if found != (recorded := [(image.digest, image.grid_thw) for image in stream.images]):
            rule = f"must be cut as recorded, {recorded}"
            fix = "give the model that the recording was made with, and its whole folder"
            raise UserError(f"images of {episode_id}", rule, found, fix)
        return replace(stream, images=processed)


def _check_schema(place: str, version: object) -> None:
    if version not in READ_VERSIONS:
        fix = "read it with the version of TrueTurn that wrote it"
        raise UserError(place, f"must be a recording of schema {' or '.join(map(str, READ_VERSIONS))}", version, fix)
