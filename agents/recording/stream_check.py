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
    if rule := _broken_places(episode):
        return rule
    for number, (record, stream) in enumerate(zip((episode, *episode.later), episode.streams, strict=True), 1):
        num_written = int(stream.mask_T.sum())
        # First: the rules below put each log-prob at its token.
        if len(record.logprobs) != num_written:
            rule = f"{len(record.logprobs)} log-probs for {num_written} masked tokens"
        # Its stream broke a rule when it was played: that is why it ended, and people want to see it.
        elif episode.end_reason is EndReason.INVALID_STREAM:
            rule = broken_spans(stream)
        elif vocabulary:
            rule = broken_invariant(stream, vocabulary)
        else:
            rule = broken_stream(stream)
        if rule is not None:
            return in_stream(number, rule)
    return None


def _broken_places(episode: EpisodeRecord) -> str | None:
    """Return why turns and messages cannot be put into their streams; None if they can."""
    num_streams = 1 + len(episode.later)
    most = max((turn.stream for turn in episode.turns), default=0)
    if most >= num_streams:
        return f"a turn of stream {most + 1}, there are {num_streams}"
    written = {turn.stream for turn in episode.turns}
    num_messages = len(episode.said)
    for number, stream in enumerate(episode.later, 1):
        # A stream begins where the model goes on.
        if number not in written:
            return in_stream(number + 1, "no turn was written in it")
        if (place := max(stream.said, default=-1)) >= num_messages:
            return in_stream(number + 1, f"message {place} of {num_messages}")
        if max(stream.num_opening, stream.num_given) > len(stream.said):
            count = max(stream.num_opening, stream.num_given)
            return in_stream(number + 1, f"the first {count} of {len(stream.said)} messages")
    return None
