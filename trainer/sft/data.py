"""Checks conversations and makes training samples of them.

A conversation that breaks a rule is left out, and counted under that rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from agents.model.architectures import ModelFacts
from agents.rollout.conversation import ConversationRenderer, ConversationStream
from envs.datasets.conversations import Conversation, ConversationSource
from envs.errors import UserError
from trainer.algorithms.aggregation import token_weights
from trainer.config.sft import LIKELIHOOD
from trainer.data.packing import episode_samples
from trainer.types import TrainingSample

#: Conversations read at once, by several threads: bounds the decoded images that wait.
READ_AT_ONCE = 64


@dataclass(frozen=True)
class LeftOut:
    """The bad conversations of a source: how many break each rule, and the error of the first."""

    num_all: int
    by_rule: Counter[str]
    first: UserError | None

    @property
    def count(self) -> int:
        """The number of bad conversations."""
        return self.by_rule.total()

    def __str__(self) -> str:
        rules = "; ".join(f"{count} {rule}" for rule, count in self.by_rule.most_common())
        return f"{self.count} of {self.num_all} conversations are left out: {rules}; the first: {self.first}"


@dataclass(frozen=True)
class ConversationSet:
    """The good conversations of a source; each is read again whenever a step needs it.

    `indices` are their places in the source. `num_tokens` counts all their tokens, `num_taught` those of the loss.
    """

    source: ConversationSource
    renderer: ConversationRenderer
    facts: ModelFacts
    indices: tuple[int, ...]
    num_tokens: int
    num_taught: int
    left_out: LeftOut

    def __len__(self) -> int:
        return len(self.indices)

    def streams(self, places: Sequence[int]) -> list[ConversationStream]:
        """Return the streams of conversations by their places in this set."""
        return [self.renderer.stream(self.source[self.indices[place]]) for place in places]

    def samples(self, places: Sequence[int]) -> list[TrainingSample]:
        """Return the samples of an update on these conversations."""
        return training_samples(self.streams(places), self.facts.image_token_id, self.facts.merge_size)


def check_conversations(
    source: ConversationSource, renderer: ConversationRenderer, facts: ModelFacts, max_bad_frac: float = 0.0
) -> ConversationSet:
    """Read all conversations once, images included, and return the set of the good ones.

    Raises:
        UserError: more than `max_bad_frac` are bad, or all: the first one's, which names its row, rule and fix.
    """
    good: list[int] = []
    # By rule: a thousand rows with one fault are one line.
    rules: Counter[str] = Counter()
    first: UserError | None = None
    num_tokens = num_taught = 0

    def read(index: int) -> Conversation | UserError:
        try:
            return source[index]
        except UserError as error:
            # An error of a thread must not end the others; it is counted below.
            return error

    # Decoding images leaves Python's lock free, so threads help.
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(source), READ_AT_ONCE):
            indices = range(start, min(start + READ_AT_ONCE, len(source)))
            for index, found in zip(indices, pool.map(read, indices), strict=True):
                try:
                    if isinstance(found, UserError):
                        raise found
                    stream = renderer.stream(found)
                except UserError as error:
                    rules[error.rule] += 1
                    # The first names its row: people mend that and run again.
                    first = first or error
                    continue
                good.append(index)
                num_tokens += len(stream.ids_T)
                num_taught += stream.num_taught
    left_out = LeftOut(len(source), rules, first)
    # Nothing good left is an error, whatever share may be bad.
    if first is not None and (left_out.count > max_bad_frac * len(source) or not good):
        share = f"{left_out.count} of {len(source)} conversations are bad"
        if good:
            fix = f"{first.fix}; {share}, --max-bad-frac leaves them out"
        else:
            fix = f"{first.fix}; {share}"
        raise UserError(first.field, first.rule, first.got, fix)
    return ConversationSet(source, renderer, facts, tuple(good), num_tokens, num_taught, left_out)


def training_samples(
    streams: Sequence[ConversationStream], image_token_id: int, merge_size: int
) -> list[TrainingSample]:
    """Return the samples of one update: advantage 1, and the weight 1 / number of tokens of the loss.

    There was no rollout: rollout log-probs are 0 and not used.
    """
    weights_S = token_weights([stream.num_taught for stream in streams], LIKELIHOOD.aggregation, 0)
    samples: list[TrainingSample] = []
    for stream, weight in zip(streams, weights_S.tolist(), strict=True):
        [sample] = episode_samples(stream.trajectory, 1.0, weight, image_token_id, merge_size)
        samples.append(replace(sample, mask_T=stream.mask_T))
    return samples
