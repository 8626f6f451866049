"""Recorded episodes: every trajectory of a run as one line of compressed JSON, its pictures as files.

`schema` says what is in a recording, `recorder` writes one, `recording` reads one; `members` is the form of the files.
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
