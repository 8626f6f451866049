"""What the page asks for: a run folder in, as far as it has come; an overview and single episodes out, as JSON.

Of an episode only its figures and its place in the file are kept; it is read again when it is asked for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from agents.recording import (
    EPISODES,
    MANIFEST,
    OUTCOMES,
    SCORES,
    TOKENS,
    EpisodeRecord,
    OutcomeRecord,
    Recording,
    ScoreRecord,
    TokenRecord,
)
from agents.recording.members import read_members
from agents.recording.schema import TRAIN
from agents.viewer.columns import LATER, Cell, Row, gap_cells, outcome_cells, row_of
from agents.viewer.cursor import Cursor
from agents.viewer.tail import Tail, read_lines
from agents.viewer.waiting import Waiting
from agents.viewer.wire import JSON, read_object
from envs.errors import UserError

FORMAT = 1
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
#: What a training run writes when it begins; its summary it writes at its end.
CONFIG = "config.yaml"


def everything(episode: EpisodeRecord) -> bool:
    """Return True: the selection of who selects nothing."""
    return True


class Source:
    """One run, read again and again as it goes on.

    `live` says whether more is to come; None looks for what a run writes when it begins, and when it ends. `keep` says
    which episodes are shown, at most `limit`.

    Example::

        source = Source(Path("runs/x"))
        overview = source.overview()                # everything
        source.overview(overview["cursor"])         # what came since
        source.episode(12)["turns"][0]["text"]
    """

    def __init__(
        self,
        path: Path,
        live: bool | None = None,
        keep: Callable[[EpisodeRecord], bool] = everything,
        limit: int | None = None,
    ) -> None:
        """Read what there is.

        Raises:
            UserError: there is no recording, and none is to come.
        """
        self.path, self.live, self.keep, self.limit = path, live, keep, limit
        self.recording: Recording | None = None
        self._lock = threading.RLock()
        self._state = 0
        self._clear()
        self.refresh()

    def _clear(self) -> None:
        self._state += 1
        self.columns: dict[str, list[Cell]] = {}
        self.places: list[tuple[int, int]] = []
        self.tokens: list[TokenRecord] = []
        self.metrics: list[JSON] = []
        self._indices: dict[str, int] = {}
        #: Where the outcome and the score of an episode begin in their files, by its index.
        self._outcomes: dict[int, int] = {}
        self._scores: dict[int, int] = {}
        self._changes: list[tuple[int, tuple[str, ...]]] = []
        self._waiting = Waiting()
        self._tails = {name: Tail() for name in (EPISODES, OUTCOMES, SCORES, TOKENS, METRICS)}

    def __len__(self) -> int:
        return len(self.places)

    @property
    def folder(self) -> Path:
        """The run's folder, which may be that of a recording by itself."""
        is_inner = self.recording is not None and self.recording.folder.name == "episodes"
        return self.recording.folder.parent if self.recording and is_inner else self.path

    @property
    def is_live(self) -> bool:
        """Whether more is to come."""
        if self.live is not None:
            return self.live
        return (self.folder / CONFIG).is_file() and not (self.folder / SUMMARY).is_file()

    # Reading ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what was appended since the last time; a recording that was taken back is read anew.

        Raises:
            UserError: a line is none of this schema.
        """
        with self._lock:
            if self.recording is None and not self._open():
                return
            if not all(tail.stands(self._file(name)) for name, tail in self._tails.items()):
                self._clear()
                with contextlib.suppress(UserError):  # of another run, maybe
                    self.recording = Recording.open(self.path)
            try:
                self._read()
            except ValidationError as error:
                got, fix = str(error).splitlines()[:2], "take a copy of the whole folder"
                raise UserError(str(self.folder), "must be a whole recording", " ".join(got), fix) from error

    def _read(self) -> None:
        # Sizes before the episodes: what is said of an episode comes after it, so that whose it is will be known.
        ends = {name: _size(self._file(name)) for name in (OUTCOMES, SCORES)}
        self._read_episodes()
        self._read_outcomes(ends[OUTCOMES])
        self._read_scores(ends[SCORES])
        self.tokens += map(TokenRecord.model_validate_json, self._read_lines(TOKENS))
        self.metrics += filter(None, map(read_object, self._read_lines(METRICS)))

    def _open(self) -> bool:
        is_there = any((folder / MANIFEST).is_file() for folder in (self.path, self.path / "episodes"))
        if is_there or not self.live:
            self.recording = Recording.open(self.path)
        return self.recording is not None

    def _opened(self) -> Recording:
        assert self.recording is not None, "nothing is read before a recording is there"
        return self.recording

    def _file(self, name: str) -> Path:
        return self.folder / name if name == METRICS else self._opened().folder / name

    def _read_lines(self, name: str) -> list[bytes]:
        lines, place = read_lines(self._file(name), self._tails[name].place)
        self._move(name, place)
        return lines

    def _move(self, name: str, place: int) -> None:
        if place != self._tails[name].place:
            self._tails[name] = Tail.at(self._file(name), place)

    def _read_episodes(self) -> None:
        start = self._tails[EPISODES].place
        for end, episode in self._opened().episodes_from(start):
            if self.keep(episode):
                self._add(episode, (start, end))
            start = end
        self._move(EPISODES, start)

    def _add(self, episode: EpisodeRecord, place: tuple[int, int]) -> None:
        row = row_of(episode)
        index = self._indices.get(episode.id)
        if index is None:
            if len(self.places) == self.limit:
                return
            index = self._indices[episode.id] = len(self.places)
            self.places.append(place)
            for name, cell in row.items():
                self.columns.setdefault(name, []).append(cell)
        else:
            later = {name for names in LATER.values() for name in names}
            self.places[index] = place
            self._set(index, {name: cell for name, cell in row.items() if name not in later})
        self._waiting.take(index)
        if index in self._scores:
            self._compare(index, episode.logprobs)
        elif episode.phase == TRAIN:
            self._waiting.put(index, episode.logprobs)

    def _compare(self, index: int, rollout: Sequence[float | None]) -> None:
        """Set the figures of the gap between an episode's log-probs and the trainer's."""
        _, score = next(self._opened().scores_from(self._scores[index]))
        self._set(index, gap_cells(rollout, score.logprobs))

    def _set(self, index: int, row: Row) -> None:
        for name, cell in row.items():
            self.columns[name][index] = cell
        self._changes.append((index, tuple(row)))

    def _read_outcomes(self, until: int) -> None:
        place = self._tails[OUTCOMES].place
        for end, outcome in self._opened().outcomes_from(place):
            if end > until:
                break
            index = self._indices.get(outcome.id)
            if index is not None:
                self._outcomes[index] = place
                self._set(index, outcome_cells(outcome))
                if outcome.fate != TRAIN:  # then nobody will score it
                    self._waiting.take(index)
            place = end
        self._move(OUTCOMES, place)

    def _read_scores(self, until: int) -> None:
        place = self._tails[SCORES].place
        for end, score in self._opened().scores_from(place):
            if end > until:
                break
            index = self._indices.get(score.id)
            if index is not None:
                self._scores[index] = place
                rollout = self._waiting.take(index)
                self._set(index, gap_cells(self.record(index).logprobs if rollout is None else rollout, score.logprobs))
            place = end
        self._move(SCORES, place)

    # Answers ------------------------------------------------------------------------------------------------------

    def overview(self, after: str = "") -> JSON:
        """Return what there is to see of the run, or what has come since an earlier answer with the cursor `after`."""
        with self._lock:
            live = self.is_live  # before: what a run writes last, and its summary, may come while this reads
            self.refresh()
            seen, now = Cursor.parse(after), self._now()
            if not seen.is_behind(now):
                seen = Cursor(now.state, 0, 0, 0, 0)
            new = self.tokens[seen.tokens :]
            summary = self.folder / SUMMARY
            return {
                "format": FORMAT,
                "name": self.folder.absolute().name,
                "folder": str(self.folder),
                "env": self.recording.manifest.env.id if self.recording else "",
                "live": live,
                "manifest": self.recording.manifest.model_dump(mode="json") if self.recording else None,
                "metrics": self.metrics[seen.metrics :],
                "first_metric": seen.metrics,
                "summary": read_object(summary.read_bytes()) if summary.is_file() else None,
                "num_episodes": len(self),
                "first": seen.episodes,
                "columns": {name: cells[seen.episodes :] for name, cells in self.columns.items()},
                "tokens": {str(token.id): token.text for token in new if not token.hex},
                "token_hex": {str(token.id): token.hex for token in new if token.hex},
                "updates": self._updates(seen),
                "cursor": str(now),
            }

    def _now(self) -> Cursor:
        return Cursor(self._state, len(self), len(self._changes), len(self.tokens), len(self.metrics))

    def _updates(self, seen: Cursor) -> dict[str, dict[str, Cell]]:
        updates: dict[str, dict[str, Cell]] = {}
        for index, names in self._changes[seen.changes :]:
            for name in names if index < seen.episodes else ():
                updates.setdefault(name, {})[str(index)] = self.columns[name][index]
        return updates

    def record(self, index: int) -> EpisodeRecord:
        """Return an episode. Raises LookupError where `line` does."""
        return EpisodeRecord.model_validate(self.line(index))

    def line(self, index: int) -> JSON:
        """Return an episode as it was recorded, to the letter, but for numbers that JSON does not know.

        Raises:
            LookupError: there is none of this number, or the recording was changed meanwhile.
        """
        with self._lock:
            if not 0 <= index < len(self):
                raise LookupError(f"there is no episode {index} of {len(self)}")
            start, end = self.places[index]
            found, text = next(read_members(self._file(EPISODES), start), (0, b""))
            line = (read_object(text) if found == end else None) or {}
            if line.get("id") != self.columns["id"][index]:
                raise LookupError(f"episode {index} is no longer at {start}")
            return line

    def outcome(self, index: int) -> OutcomeRecord | None:
        """Return what became of an episode, None while that is not known."""
        with self._lock:
            place = self._outcomes.get(index)
            return None if place is None else next(self._opened().outcomes_from(place))[1]

    def score(self, index: int) -> ScoreRecord | None:
        """Return the trainer's log-probs of an episode, None where it has not trained on it."""
        with self._lock:
            place = self._scores.get(index)
            return None if place is None else next(self._opened().scores_from(place))[1]

    def episode(self, index: int) -> JSON:
        """Return an episode with its outcome, its score and its index.

        Raises:
            LookupError: there is none of this number, or the recording was changed meanwhile.
        """
        with self._lock:
            parts = {"outcome": self.outcome(index), "score": self.score(index)}
            said = {name: None if part is None else part.model_dump(mode="json") for name, part in parts.items()}
            return {**self.line(index), **said, "index": index}

    def picture(self, name: str) -> Path:
        """Return the file of a picture, as messages name it. Raises `UserError` where it is no such name."""
        return self._opened().picture_path(name)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
