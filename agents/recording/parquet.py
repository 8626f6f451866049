"""Writes a recording as one Parquet file, one row per episode, for Hugging Face datasets, pandas or DuckDB.

`python -m agents.recording.parquet RUN --out episodes.parquet`
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from agents.recording.recording import Recording
from agents.recording.schema import EpisodeRecord, OutcomeRecord, ScoreRecord, image_names
from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.errors import UserError

#: Rows are written in groups of so many, or fewer large ones.
ROWS_PER_GROUP = 256
MAX_GROUP_BYTES = 2**28


class ParquetConfig(Section):
    """The flags of `python -m agents.recording.parquet`."""

    run: Path = Field(description="run folder, or folder of a recording")
    out: Path = Field(default=Path("episodes.parquet"), description="file to write")


def write_parquet(recording: Recording, out: Path) -> int:
    """Write all episodes with their outcomes, the trainer's log-probs and their images; return their number.

    Conversations, turns and metadata, whose structure depends on the environment, are columns of JSON text. Images
    are PNG files in a column that Hugging Face datasets shows as images.

    Raises:
        UserError: an image is missing or another one, or the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    outcomes = recording.outcomes()
    # Outcomes are a few numbers each and fit into memory; scores have one for every token.
    scores = _ScorePlaces(recording)
    schema = _schema()
    count = 0
    rows = list[dict[str, Any]]()
    num_bytes = 0
    part = Path(f"{out}.part")  # renamed when complete: a killed writer leaves no half a file under the name
    try:
        with pq.ParquetWriter(part, schema, compression="zstd") as writer:
            for episode in recording.episodes():
                rows.append(_row(recording, episode, outcomes.get(episode.id), scores.find(episode.id)))
                num_bytes += episode.num_bytes + sum(len(image["bytes"]) for image in rows[-1]["images"])
                if len(rows) == ROWS_PER_GROUP or num_bytes >= MAX_GROUP_BYTES:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    count = count + len(rows)
                    rows = []
                    num_bytes = 0
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema))
        part.replace(out)
    except OSError as error:
        raise UserError("--out", "must be writable", str(out), f"give another file ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return count + len(rows)


def _schema() -> Any:
    import pyarrow as pa

    texts = "id phase way env env_version sample_id label end_reason error metadata messages turns tools fate"
    numbers = "step group sample_index attempt seed num_prompt_messages prompt_length"
    floats = "reward advantage began total_s engine_s env_s check_s"
    logprobs = pa.list_(pa.float32())
    fields = [
        *((name, pa.string()) for name in texts.split()),
        *((name, pa.int64()) for name in numbers.split()),
        *((name, pa.float64()) for name in floats.split()),
        ("is_exact", pa.bool_()),
        ("ids", pa.list_(pa.int64())),
        ("mask", pa.list_(pa.int8())),
        ("logprobs", logprobs),
        ("train_logprobs", logprobs),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
    ]
    # Tells Hugging Face datasets that a column holds images; it knows the other columns by their types.
    features = {name: _feature(kind) for name, kind in fields}
    note = json.dumps({"info": {"features": features}})
    return pa.schema(fields, metadata={"huggingface": note})


def _feature(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_list(kind):
        is_image = pa.types.is_struct(kind.value_type)
        return {"feature": {"_type": "Image"} if is_image else _feature(kind.value_type), "_type": "List"}
    return {"dtype": {"double": "float64", "float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


def _row(
    recording: Recording, episode: EpisodeRecord, outcome: OutcomeRecord | None, score: ScoreRecord | None
) -> dict[str, Any]:
    row = episode.model_dump(mode="json", exclude={"schema_version", "images"})
    for name in ("metadata", "messages", "turns"):
        row[name] = json.dumps(row[name])
    return row | {
        "fate": outcome.fate if outcome else None,
        "advantage": outcome.advantage if outcome else None,
        "train_logprobs": list(score.logprobs) if score else None,
        "images": [_image(recording, name) for name in image_names(episode.messages)],
    }


def _image(recording: Recording, name: str) -> dict[str, Any]:
    return {"bytes": recording.image_file(name), "path": recording.image_path(name).name}


class _ScorePlaces:
    """Finds scores by their place in the file: all of them may not fit into memory."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._places = dict[str, int]()
        start = 0
        for end, score in recording.scores_from(0):
            self._places[score.id] = start
            start = end

    def find(self, id: str) -> ScoreRecord | None:
        place = self._places.get(id)
        if place is None:
            return None
        return next(self._recording.scores_from(place))[1]


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, write, report."""
    config = parse(ParquetConfig, argv, "python -m agents.recording.parquet", "Write a recording as a Parquet file.")
    recording = Recording.open(config.run)
    count = write_parquet(recording, config.out)
    for note in recording.damage():
        print(f"note: {note}")
    print(f"{count} episodes, {config.out.stat().st_size / 2**20:.2f} MiB in {config.out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
