"""Checks the token stream of a recorded episode, which may be a stranger's, before anything indexes by it.

Legend: T tokens of one stream.
"""

from __future__ import annotations

from agents.recording.schema import EpisodeRecord
from agents.rollout.invariants import broken_spans, broken_stream
from agents.types import EndReason


def broken_record(episode: EpisodeRecord, is_converted: bool = False) -> str | None:
    """Return the first rule of `agents.rollout.invariants` that a recorded stream breaks; None when all hold.

    Rules that need a vocabulary are the model's to check (`trainer.rollouts.recording_check`). An episode that ended as
    `invalid_stream`, or was converted from another framework, keeps only those that readers rely on.
    """
    num_written = sum(episode.mask)
    if len(episode.logprobs) != num_written:
        return f"{len(episode.logprobs)} log-probs for {num_written} masked tokens"
    keeps_all = not is_converted and episode.end_reason is not EndReason.INVALID_STREAM
    return (broken_stream if keeps_all else broken_spans)(episode)
