"""Checks the token stream of a recorded episode, which may be a stranger's, before anything indexes by it.

Legend: T tokens of one stream.
"""

from __future__ import annotations

from agents.recording.schema import EpisodeRecord
from agents.rollout.invariants import Vocabulary, broken_invariant, broken_spans, broken_stream, in_stream
from agents.types import EndReason


def broken_record(episode: EpisodeRecord, vocabulary: Vocabulary | None = None) -> str | None:
    """Return the first rule of `agents.rollout.invariants` that a recorded stream breaks; None when all hold.

    Without a vocabulary, the rules that need one are left out. An episode that ended as `invalid_stream` must keep
    only those that readers rely on.
    """
    num_written = sum(episode.mask)
    # First: the rules below put each log-prob at its token.
    if len(episode.logprobs) != num_written:
        return f"{len(episode.logprobs)} log-probs for {num_written} masked tokens"
    # Its stream broke a rule when it was played: that is why it ended, and people want to see it.
    for number, stream in enumerate(episode.streams, 1):
        if episode.end_reason is EndReason.INVALID_STREAM:
            rule = broken_spans(stream)
        elif vocabulary:
            rule = broken_invariant(stream, vocabulary)
        else:
            rule = broken_stream(stream)
        if rule is not None:
            return in_stream(number, rule)
    return None
