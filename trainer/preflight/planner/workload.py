"""What episodes look like: lengths of prompts, turns and observations, and the seconds of tools; drawn or recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from envs.errors import UserError


@dataclass(frozen=True)
class TurnShape:
    """A turn: tokens that the model writes, and those of the environment's answer, which takes `tool_s`."""

    tokens: int
    observation: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True)
class EpisodeShape:
    """An episode: its prompt and its turns; nothing follows the last one.

    Example: `EpisodeShape(100, (TurnShape(50, 20, 0.1), TurnShape(30)))` has a stream of 200 tokens, 80 of them the
    model's.
    """

    prompt: int
    turns: tuple[TurnShape, ...]

    @property
    def model_tokens(self) -> int:
        """Tokens that the model writes."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def stream(self) -> int:
        """All tokens; what the environment answers to the last turn is not among them."""
        return self.prompt + self.model_tokens + sum(turn.observation for turn in self.turns[:-1])


@dataclass(frozen=True)
class GroupShape:
    """The episodes of one problem, and how many tokens of their prompt belong to pictures."""

    episodes: tuple[EpisodeShape, ...]
    images: int = 0

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.episodes[0].prompt

    @property
    def model_tokens(self) -> int:
        """Tokens that the model writes in all episodes."""
        return sum(episode.model_tokens for episode in self.episodes)

    @property
    def stream_tokens(self) -> int:
        """Tokens of all streams, each whole: what the learner's throughput is counted in."""
        return sum(episode.stream for episode in self.episodes)

    @property
    def trained_tokens(self) -> int:
        """Tokens that go through the network: the prompt once."""
        return self.stream_tokens - self.prompt * (len(self.episodes) - 1)


@dataclass(frozen=True)
class Lengths:
    """Means of what is drawn. Lengths and tool seconds are log-normal with `spread`, the standard deviation of their
    logarithm (0: all equal), turns binomial.
    """

    prompt: int = 400
    images: int = 256
    turns: float = 3.0
    turn_tokens: int = 300
    observation: int = 60
    tool_s: float = 0.1
    spread: float = 0.6

    def groups(self, group_size: int, seed: int) -> Iterator[GroupShape]:
        """Yield groups without end."""
        rng = np.random.default_rng(seed)
        most = int(np.ceil(2 * (self.turns - 1))) if self.spread else 0
        while True:
            episodes = []
            prompt = self._draw(rng, self.prompt)
            for _ in range(group_size):
                count = 1 + rng.binomial(most, (self.turns - 1) / most) if most else round(self.turns)
                turns = tuple(
                    TurnShape(
                        self._draw(rng, self.turn_tokens),
                        self._draw(rng, self.observation),
                        self.tool_s * self._factor(rng),
                    )
                    for _ in range(count)
                )
                episodes.append(EpisodeShape(prompt + self.images, turns))
            yield GroupShape(tuple(episodes), self.images)

    def _draw(self, rng: np.random.Generator, mean: int) -> int:
        return max(1, round(mean * self._factor(rng)))

    def _factor(self, rng: np.random.Generator) -> float:
        return float(np.exp(self.spread * rng.standard_normal() - self.spread**2 / 2)) if self.spread else 1.0

    @property
    def longest(self) -> int:
        """The tokens of a stream that hardly any exceeds: three times the mean."""
        return self.images + round(3 * (self.prompt + self.turns * (self.turn_tokens + self.observation)))


@dataclass(frozen=True)
class Recorded:
    """Groups of a recorded run, in the order of their steps, again and again."""

    recorded: tuple[GroupShape, ...]

    @classmethod
    def read(cls, run: Path) -> Recorded:
        """Read the training episodes of a run folder.

        Raises:
            UserError: the folder has no recording, or no group in it.
        """
        from agents.recording import Recording
        from agents.recording.schema import TRAIN

        found: dict[tuple[int, int], GroupShape] = {}
        for record in Recording.open(run).episodes():
            if record.phase != TRAIN or not record.turns:
                continue
            starts = (*(turn.start for turn in record.turns[1:]), record.turns[-1].end)
            turns = tuple(
                TurnShape(turn.end - turn.start, start - turn.end, turn.env_s)
                for turn, start in zip(record.turns, starts, strict=True)
            )
            key, episode = (record.group, record.attempt), EpisodeShape(record.prompt_length, turns)
            before = found[key].episodes if key in found else ()
            found[key] = GroupShape((*before, episode), sum(image.num_tokens for image in record.images))
        if not found:
            raise UserError("--like", "must be a run with recorded training episodes", str(run), "give another run")
        return cls(tuple(group for _, group in sorted(found.items())))

    def groups(self, group_size: int, seed: int) -> Iterator[GroupShape]:
        """Yield the recorded groups; of one that is larger or smaller than `group_size` as many episodes as wanted."""
        while True:
            for group in self.recorded:
                episodes = [group.episodes[index % len(group.episodes)] for index in range(group_size)]
                yield GroupShape(tuple(episodes), group.images)

    @property
    def longest(self) -> int:
        """The tokens of the longest stream."""
        return max(episode.stream for group in self.recorded for episode in group.episodes)


Workload = Lengths | Recorded
