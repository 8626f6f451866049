"""Reads a run while it grows, and answers the page's requests: an overview, single episodes, images.

In memory are only the table row of each episode and its offset in the file; an episode is read again when it is opened.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from agents.recording import (
    EPISODES,
    OUTCOMES,
    SCORES,
    TOKENS,
    EpisodeRecord,
    OutcomeRecord,
    Recording,
    ScoreRecord,
    TokenRecord,
)
from agents.recording.gzip_lines import read_gzip_lines
from agents.recording.manifest import own_registry
from agents.recording.run_files import CONFIG, METRICS, SUMMARY
from agents.recording.safe_files import read_lines, read_regular
from agents.recording.schema import TRAIN
from agents.types import messages_before_turns
from agents.viewer.columns import UNKNOWN, Cell, Row, gap_cells, outcome_cells, row_of
from agents.viewer.positions import Cursor, FilePosition
from agents.viewer.strict_json import JSON, finite, read_object
from envs.errors import UserError

FORMAT = 1
#: Numbers of 8 bytes that are kept, so that most episodes need not be read again for their score.
MAX_KEPT = 2**23
R = TypeVar("R", OutcomeRecord, ScoreRecord)


class Source:
    """One run, read again and again while it grows.

    `keep` selects the episodes to show, at most `limit` of them.

    Example::

        source = Source(Path("runs/x"))
        overview = source.overview()                # everything
        source.overview(overview["cursor"])         # only what is new
        source.episode(12)["turns"][0]["text"]
    """

    def __init__(
        self,
        path: Path,
        keep: Callable[[EpisodeRecord], bool] = lambda episode: True,
        limit: int | None = None,
    ) -> None:
        """Read what is there.

        Raises:
            UserError: there is no recording, or a line of it does not match the schema.
        """
        self.path = path
        self.keep = keep
        self.limit = limit
        self.recording = Recording.open(path)
        self._lock = threading.RLock()
        self._state = 0
        self._clear()
        self.refresh()

    def _clear(self) -> None:
        self._state += 1
        self.columns: dict[str, list[Cell]] = {}
        #: Start and end of each episode in its file.
        self.spans: list[tuple[int, int]] = []
        #: Bytes of each episode, unpacked.
        self.sizes: list[int] = []
        self.tokens: list[TokenRecord] = []
        self.metrics: list[JSON] = []
        self._indices: dict[str, int] = {}
        #: Offsets of an episode's outcome and score in their files, by the episode's index.
        self._outcomes: dict[int, int] = {}
        self._scores: dict[int, int] = {}
        self._changes: list[tuple[int, tuple[str, ...]]] = []
        #: Log-probs of the first episodes until their score is read; the file has those of the others.
        self._unscored: dict[int, NDArray[np.float64]] = {}
        self._num_kept = 0
        self._positions = {name: FilePosition() for name in (EPISODES, OUTCOMES, SCORES, TOKENS, METRICS)}

    def __len__(self) -> int:
        return len(self.spans)

    def check_has_episodes(self) -> None:
        """Raise `UserError` if there is nothing to show: no episode was recorded, or none was selected."""
        if len(self):
            return
        if self._positions[EPISODES].offset == 0:
            fix = "give a run that has ended an episode"
            raise UserError(str(self.path), "must hold an episode", "none", fix)
        rule = "must hold an episode that is selected"
        raise UserError(str(self.path), rule, "none", "widen the selection")

    @property
    def folder(self) -> Path:
        """The run folder, or the folder of a recording without a run."""
        if self.recording.folder.name == "episodes":
            return self.recording.folder.parent
        return self.path

    @property
    def is_live(self) -> bool:
        """Whether the run will still grow: it has begun and not ended. One that was killed may be resumed."""
        return (self.folder / CONFIG).is_file() and not (self.folder / SUMMARY).is_file()

    # Reading ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what is new; if a resumed run has rolled its recording back, read all of it again.

        Raises:
            UserError: a line does not match the schema.
        """
        with self._lock:
            # Before reading on: behind a rollback, a known place holds other lines.
            if not all(position.is_valid(self._file(name)) for name, position in self._positions.items()):
                self._clear()
                with contextlib.suppress(UserError):  # the manifest may be another run's now
                    self.recording = Recording.open(self.path)
            self._read()

    def _read(self) -> None:
        # An outcome or score is written after its episode. With sizes taken first, its episode is always known.
        ends = {name: _size(self._file(name)) for name in (OUTCOMES, SCORES)}
        self._read_episodes()
        self._read_later(OUTCOMES, ends[OUTCOMES], self.recording.outcomes_from, self._outcomes, _outcome_cells)
        self._read_later(SCORES, ends[SCORES], self.recording.scores_from, self._scores, self._score_cells)
        tokens = list(self.recording.tokens_from(self._positions[TOKENS].offset))
        self.tokens += [token for _, token in tokens]
        self._advance_behind(TOKENS, tokens)
        rows = list(read_lines(self._file(METRICS), self._positions[METRICS].offset))
        self.metrics += filter(None, [read_object(line) for _, line in rows])
        self._advance_behind(METRICS, rows)

    def _file(self, name: str) -> Path:
        if name == METRICS:
            return self.folder / name
        return self.recording.folder / name

    def _advance(self, name: str, offset: int) -> None:
        if offset != self._positions[name].offset:
            self._positions[name] = FilePosition.at(self._file(name), offset)

    def _advance_behind(self, name: str, lines: Sequence[tuple[int, object]]) -> None:
        if lines:
            self._advance(name, lines[-1][0])

    def _read_episodes(self) -> None:
        start = self._positions[EPISODES].offset
        for end, episode in self.recording.episodes_from(start):
            if self.keep(episode):
                self._add(episode, (start, end))
            start = end
        self._advance(EPISODES, start)

    def _add(self, episode: EpisodeRecord, span: tuple[int, int]) -> None:
        manifest = self.recording.manifest
        way = manifest.ways.get(episode.way)
        row = row_of(episode, way.thinking if way else None, manifest.env.success_rule)
        index = self._indices.get(episode.id)
        if index is None:
            if len(self.spans) == self.limit:
                return
            index = self._indices[episode.id] = len(self.spans)
            self.spans.append(span)
            self.sizes.append(episode.num_bytes)
            for name, cell in row.items():
                self.columns.setdefault(name, []).append(cell)
        else:
            # The same id a second time: the later line counts, and its outcome and score stay.
            self._unscored.pop(index, None)
            self.spans[index], self.sizes[index] = span, episode.num_bytes
            self._set(index, {name: cell for name, cell in row.items() if name not in UNKNOWN})
        if index in self._scores:
            _, score = next(self.recording.scores_from(self._scores[index]))
            self._set(index, gap_cells(episode.all_logprobs, score.logprobs))
        elif episode.phase == TRAIN and self._num_kept < MAX_KEPT:
            self._unscored[index] = np.array(episode.all_logprobs, dtype=np.float64)
            self._num_kept += len(self._unscored[index])

    def _set(self, index: int, row: Row) -> None:
        for name, cell in row.items():
            self.columns[name][index] = cell
        self._changes.append((index, tuple(row)))

    def _read_later(
        self,
        name: str,
        until: int,
        records_from: Callable[[int], Iterator[tuple[int, R]]],
        offsets: dict[int, int],
        cells_of: Callable[[int, R], Row],
    ) -> None:
        """Read new outcomes or scores, up to an offset, and fill the cells of their episodes."""
        start = self._positions[name].offset
        for end, record in records_from(start):
            # Its episode may have been written after the episodes were read.
            if end > until:
                break
            index = self._indices.get(record.id)
            if index is not None:
                offsets[index] = start
                self._set(index, cells_of(index, record))
            start = end
        self._advance(name, start)

    def _score_cells(self, index: int, score: ScoreRecord) -> Row:
        rollout = self._unscored.pop(index, None)
        if rollout is None:
            _, text = next(read_gzip_lines(self._file(EPISODES), self.spans[index][0]))
            rollout = EpisodeRecord.read(text).all_logprobs
        return gap_cells(rollout, score.logprobs)

    # Answers ------------------------------------------------------------------------------------------------------

    def overview(self, after: str = "") -> JSON:
        """Return the overview of the run, or only what is new after the cursor of an earlier answer."""
        with self._lock:
            live = self.is_live  # read first: the run may write its last lines and its summary during the refresh
            self.refresh()
            seen = Cursor.parse(after)
            now = self._now()
            # The cursor is that of files which were rolled back since, or of another run: everything is new.
            if not seen.is_behind(now):
                seen = Cursor(now.state)
            new = self.tokens[seen.tokens :]
            return {
                "format": FORMAT,
                "name": self.folder.absolute().name,
                "folder": str(self.folder.absolute()),
                "env": self.recording.manifest.env.id,
                "live": live,
                "registry": own_registry(self.recording.manifest),
                "manifest": finite(self.recording.manifest.model_dump(mode="json")),
                "metrics": self.metrics[seen.metrics :],
                "first_metric": seen.metrics,
                "summary": self._summary(),
                "num_episodes": len(self),
                "first": seen.episodes,
                "columns": {name: cells[seen.episodes :] for name, cells in self.columns.items()},
                # Apart, because part of a character is bytes, which JSON does not have.
                "tokens": {str(token.id): token.text for token in new if not token.hex},
                "token_hex": {str(token.id): token.hex for token in new if token.hex},
                "updates": self._updates(seen),
                "cursor": str(now),
            }

    def _summary(self) -> JSON | None:
        try:
            return read_object(read_regular(self.folder / SUMMARY))
        except FileNotFoundError:
            return None

    def _now(self) -> Cursor:
        return Cursor(self._state, len(self), len(self._changes), len(self.tokens), len(self.metrics))

    def _updates(self, seen: Cursor) -> dict[str, dict[str, Cell]]:
        """Return the changed cells of the episodes that the page already has."""
        updates: dict[str, dict[str, Cell]] = {}
        for index, names in self._changes[seen.changes :]:
            for name in names if index < seen.episodes else ():
                updates.setdefault(name, {})[str(index)] = self.columns[name][index]
        return updates

    def line(self, index: int) -> JSON:
        """Return an episode exactly as recorded, except that NaN and infinity become None.

        Raises:
            LookupError: there is no such episode, or the file has changed since it was read.
        """
        with self._lock:
            if not 0 <= index < len(self):
                raise LookupError(f"there is no episode {index} of {len(self)}")
            start, end = self.spans[index]
            found, text = next(read_gzip_lines(self._file(EPISODES), start), (0, b""))
            line = (read_object(text) if found == end else None) or {}
            # A resumed run may have written another episode to the same place.
            if line.get("id") != self.columns["id"][index]:
                raise LookupError(f"episode {index} is no longer at offset {start}")
            return line

    def outcome(self, index: int) -> OutcomeRecord | None:
        """Return an episode's outcome; None until it is recorded."""
        with self._lock:
            offset = self._outcomes.get(index)
            if offset is None:
                return None
            return next(self.recording.outcomes_from(offset))[1]

    def score(self, index: int) -> ScoreRecord | None:
        """Return the trainer's log-probs of an episode; None until they are recorded."""
        with self._lock:
            offset = self._scores.get(index)
            if offset is None:
                return None
            return next(self.recording.scores_from(offset))[1]

    def episode(self, index: int) -> JSON:
        """Return an episode with its outcome, its score and its index. Raises LookupError like `line`.

        `num_opening` counts the messages before the first turn. Where thinking was separated, each turn has `parts`:
        pairs of whether it is a thought, and the text.
        """
        with self._lock:
            line = self.line(index)
            # Most of a line that has them, and no part of the page.
            for stream in (line, *line.get("later", ())):
                stream.pop("routes", None)
            ways = self.recording.manifest.ways
            if (way := ways.get(line["way"])) and way.thinking:
                line["turns"] = [{**turn, "parts": way.thinking.parts(turn["text"])} for turn in line["turns"]]
            later = {"outcome": self.outcome(index), "score": self.score(index)}
            dumped = {name: record and record.model_dump(mode="json") for name, record in later.items()}
            observations = [turn["observations"] for turn in line["turns"] if not turn.get("stream")]
            opening = messages_before_turns(line["messages"], line["num_prompt_messages"], observations)
            return {**line, **dumped, "index": index, "num_opening": len(opening)}

    def image(self, name: str) -> bytes:
        """Return the PNG file of an image by its recorded name. Raises `UserError` if it is not what was recorded."""
        return self.recording.image_file(name)


def _outcome_cells(index: int, outcome: OutcomeRecord) -> Row:
    return outcome_cells(outcome)


def _size(path: Path) -> int:
    if path.exists():
        return path.stat().st_size
    return 0
