"""Continues a recorded episode from one of its turns with another engine.

Up to that turn the agent loop gets the recorded completions, token by token, and the environment answers again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from agents.cli.text import counted
from agents.engines.base import Engine
from agents.recording import EpisodeRecord, WayRecord
from agents.rendering.renderer import Renderer
from agents.replaying.difference import Difference, differences
from agents.replaying.recorded_engine import RecordedEngine, recorded_completions
from agents.replaying.replayer import ReplayContext
from agents.replaying.stream_replayer import StreamReplayer, recorded_loop
from agents.rollout.episode import Episode
from agents.types import Completion, Trajectory
from envs.config.settings import Section
from envs.contract import EpisodeEnv
from envs.errors import UserError


class ForkConfig(Section):
    """How an episode is continued."""

    fork: int | None = Field(
        default=None, ge=0, description="continue the one episode that --id names after this turn; 0: from its start"
    )
    by: Literal["hand", "model"] = Field(default="hand", description="with --fork, who writes the next turns")
    samples: int = Field(default=1, ge=1, description="number of continuations by --by model")
    temperature: float | None = Field(
        default=None, ge=0, description="sampling temperature of --by model; empty: the recorded one"
    )
    seed: int | None = Field(default=None, ge=0, description="seed of --by model; empty: the episode's own seed")
    device: str = Field(default="cpu", description="torch device of --by model")
    max_turns: int | None = Field(
        default=None,
        ge=1,
        description="with --fork, largest number of turns; empty: as recorded",
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="with --fork, largest number of tokens after the prompt; empty: as recorded"
    )
    context_length: int | None = Field(
        default=None, ge=2, description="with --fork, longest stream in tokens; empty: as recorded"
    )
    images: Path = Field(default=Path("play"), description="with --fork, folder to save images in")
    record: Path | None = Field(default=None, description="with --fork, folder to record the episodes in; empty: none")


@dataclass(frozen=True, eq=False)
class Fork:
    """A recorded episode, the turn after which it continues, and the environment and limits for this.

    Example::

        fork = Fork(episode, 2, ReplayContext(recording, spec), renderer, way)
        await fork.changes()                # (): the environment answers the first two turns as recorded
        trajectories = await fork.play(fork.loop(HFEngine(model), 2), seeds=(7, 8))
        start = episode.turns[2].start
        trajectories[0].ids_T[:start].tolist() == list(episode.ids[:start])     # True
    """

    episode: EpisodeRecord
    turn: int
    context: ReplayContext
    renderer: Renderer
    way: WayRecord

    async def changes(self) -> tuple[Difference, ...]:
        """Replay the turns before the fork, and return what the engine will read otherwise than recorded."""
        result = await StreamReplayer(self.context, self.renderer).play(self.episode, self.turn)
        return differences(self.episode, result, self.turn)

    def loop(self, engine: Engine, num_plays: int) -> Episode:
        """Return the agent loop for `num_plays` episodes in which an engine continues after the recorded turns."""
        completions = _completions(self.episode)[: self.turn]
        sample = self.context.source.sample(self.episode)
        recorded = RecordedEngine([completions] * num_plays, self.way.context_length, engine)
        return recorded_loop(recorded, self.context, self.renderer, sample, self.way)

    async def play(
        self, loop: Episode, seeds: Sequence[int], watch: Callable[[EpisodeEnv], EpisodeEnv] = lambda env: env
    ) -> list[Trajectory]:
        """Play the episode once for each seed, concurrently; `watch` may wrap each new environment."""
        sample = self.context.source.sample(self.episode)

        def make_env() -> EpisodeEnv:
            return watch(self.context.make_env(sample, self.way))

        group = self.episode.group
        return await asyncio.gather(*(loop.run(sample, make_env, seed, n, group) for n, seed in enumerate(seeds)))


def _completions(episode: EpisodeRecord) -> tuple[Completion, ...]:
    """Return the recorded completions; missing log-probs of a valid episode, as from another program, become 0."""
    completions = recorded_completions(episode)
    if not episode.end_reason.is_valid:
        return completions
    return tuple(replace(c, logprobs=tuple(0.0 if math.isnan(x) else x for x in c.logprobs)) for c in completions)


def checked_turn(episode: EpisodeRecord, config: ForkConfig) -> int:
    """Return the turn to continue from.

    Raises:
        UserError: there are fewer turns, the turn was never finished, or the flags contradict each other.
    """
    turn = config.fork
    num_turns = len(episode.turns)
    assert turn is not None, "--fork is given"
    if turn > num_turns:
        fix = f"{episode.id} has {counted(num_turns, 'turn')}; 0 plays it from its start"
        raise UserError("--fork", f"must be at most {num_turns}", turn, fix)
    # The environment never saw that turn, so there is no answer to continue from.
    if turn and (last := episode.turns[turn - 1]).finish != "stop":
        if last.finish == "length":
            why = "its tokens ran out"
        else:
            why = "the engine stopped"
        raise UserError("--fork", f"must be at most {turn - 1}", turn, f"turn {turn} was never finished: {why}")
    # A person would have to play them all at once.
    if config.samples > 1 and config.by != "model":
        raise UserError("--samples", "must be 1 unless a model continues", config.samples, "add --by model")
    return turn


def way_of_fork(recorded: WayRecord, turn: int, config: ForkConfig) -> WayRecord:
    """Return limits and temperature: the flags' values, else the recorded ones.

    Raises:
        UserError: they allow no further turn, or all samples would be equal.
    """
    # A flag that is not given is None here, and the recorded value stays.
    names = {"max_turns", "max_new_tokens", "context_length", "temperature"}
    way = recorded.model_copy(update=config.model_dump(include=names, exclude_none=True))
    if way.max_turns <= turn:
        rule = f"must be over {turn} to continue after turn {turn}"
        raise UserError("--max-turns", rule, way.max_turns, "allow more turns than were recorded")
    if config.samples > 1 and way.temperature == 0:
        rule = "must be 1 at temperature 0, because all samples would be equal"
        raise UserError("--samples", rule, config.samples, "give --temperature 1")
    return way


def check_tokenizer(episode: EpisodeRecord, turn: int, renderer: Renderer) -> None:
    """Raise `UserError` if this tokenizer decodes the recorded ids to another text."""
    written = recorded_completions(episode)
    for number, (recorded, completion) in enumerate(zip(episode.turns[:turn], written, strict=False), 1):
        try:
            text = renderer.decode(completion.ids)
        except (OverflowError, TypeError):  # ids outside the vocabulary
            text = ""
        # In a broken episode, text and tokens may differ: that can be why it ended.
        if text != recorded.text and episode.end_reason.is_valid:
            rule = f"must have the tokenizer of the recording, where turn {number} is {recorded.text[:60]!r}"
            raise UserError("--model", rule, repr(text[:60]), "give the model that was recorded")
