"""Recorded episodes: each trajectory of a run is one line of compressed JSON, each image a file.

`schema` defines the lines, `recorder` writes a recording, `recording` reads one, `gzip_lines` is the file format.
`docs/recording.md` shows how to read a recording without TrueTurn.
"""

from agents.recording.recorder import Recorder
from agents.recording.recording import Recording
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
    WayRecord,
    episode_id,
)

__all__ = [
    "EPISODES",
    "MANIFEST",
    "OUTCOMES",
    "SCHEMA_VERSION",
    "SCORES",
    "TOKENS",
    "EpisodeRecord",
    "Manifest",
    "OutcomeRecord",
    "Recorder",
    "Recording",
    "ScoreRecord",
    "TokenRecord",
    "TurnRecord",
    "WayRecord",
    "episode_id",
]
