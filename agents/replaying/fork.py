"""A recorded episode that is played on from one of its turns: a record and an engine in, trajectories out.

Up to that turn the agent loop is given what the engine had answered, token by token, and the environment is asked
again; what it answers otherwise than recorded is told before the engine goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agents.engine import Engine
from agents.engines.recorded import RecordedEngine, recorded_completions
from agents.episode import Episode, Limits
from agents.recording import EpisodeRecord, Recording, WayRecord
from agents.renderer import Renderer
from agents.replaying.player import Stage
from agents.replaying.prefix import Prefix
from agents.terminal import count_turns
from agents.types import Completion, GenerateRequest, SamplingParams, Trajectory
from envs.errors import UserError
from envs.runner import EpisodeEnv


class ForkConfig(BaseModel):
    """How an episode is played on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fork: int | None = Field(
        default=None, ge=0, description="play the one episode of --id on from this turn; 0: from its start"
    )
    by: Literal["hand", "script", "model"] = Field(default="hand", description="who plays on, with --fork")
    script: Path | None = Field(
        default=None, description="turns for --by script: each ends with a line that is only a dot, or a JSON list"
    )
    samples: int = Field(default=1, ge=1, description="how often --by model plays on")
    temperature: float | None = Field(
        default=None, ge=0, description="sampling temperature of --by model; empty: the recorded one"
    )
    seed: int | None = Field(
        default=None, ge=0, description="seed of --by model; empty: the episode's own, with which it was drawn"
    )
    device: str = Field(default="cpu", description="torch device of --by model")
    max_turns: int | None = Field(
        default=None,
        ge=1,
        description="turns of an episode, with --fork or for slime's dumps; empty: as many as were allowed",
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="with --fork, tokens of the whole episode after its prompt; empty: as recorded"
    )
    context_length: int | None = Field(
        default=None, ge=2, description="with --fork, longest stream in tokens; empty: as recorded"
    )
    pictures: Path = Field(default=Path("play"), description="with --fork, folder that pictures are saved in")
    record: str = Field(default="", description="with --fork, folder to record what is played in; empty: none")


@dataclass(eq=False)
class Fork:
    """A recorded episode, the turn that it is played on from, and what that takes.

    `tell` is called with each difference between what the environment answers and what it had answered, before the
    engine goes on; `num_handed_over` counts the episodes that came as far as that.

    Example::

        fork = Fork(recording, episode, 2, Stage(recording, spec), renderer, way)
        trajectories = await fork.play(fork.loop(HFEngine(model), 2, temperature=1.0), seeds=(7, 8))
        start = episode.turns[2].start
        trajectories[0].ids_T[:start].tolist() == list(episode.ids[:start])     # True where nothing was told
    """

    recording: Recording
    episode: EpisodeRecord
    turn: int
    stage: Stage
    renderer: Renderer
    way: WayRecord
    tell: Callable[[str], None] = lambda difference: None
    num_handed_over: int = 0
    _told: set[str] = field(default_factory=set)

    def loop(self, engine: Engine, num_plays: int, temperature: float) -> Episode:
        """Return the agent loop in which an engine goes on after the recorded turns, for so many episodes."""
        completions = _completions(self.episode)[: self.turn]
        prefixes = [Prefix(self.recording, self.episode, self.renderer) for _ in range(num_plays)]

        def see(session: int, turn: int, request: GenerateRequest) -> None:
            if turn <= self.turn:
                prefixes[session].see(turn, request)
                self._tell_new(prefixes[session].differences)
            if turn == self.turn:
                self.num_handed_over += 1

        return Episode(
            RecordedEngine([completions] * num_plays, self.way.context_length, engine, see),
            self.renderer,
            Limits(self.way.max_turns, self.way.max_new_tokens, self.stage.limits),
            SamplingParams(temperature, self.renderer.stop_ids, self.renderer.suppressed_ids),
            self.way.use_tools,
        )

    def _tell_new(self, differences: Sequence[str]) -> None:
        for difference in differences:
            if difference not in self._told:
                self.tell(difference)
        self._told.update(differences)

    async def play(
        self, loop: Episode, seeds: Sequence[int], watch: Callable[[EpisodeEnv], EpisodeEnv] = lambda env: env
    ) -> list[Trajectory]:
        """Play the episode once for each seed, all at once; `watch` is given each environment when it is built."""
        sample = self.recording.sample(self.episode)

        def make_env() -> EpisodeEnv:
            return watch(self.stage.make_env(sample, self.way))

        group = self.episode.group
        return await asyncio.gather(*(loop.run(sample, make_env, seed, n, group) for n, seed in enumerate(seeds)))


def _completions(episode: EpisodeRecord) -> tuple[Completion, ...]:
    """Return the recorded turns; where a sound episode has no log-probs, as one of another program, they are 0."""
    completions = recorded_completions(episode)
    if not episode.end_reason.is_valid:
        return completions
    return tuple(replace(c, logprobs=tuple(0.0 if math.isnan(x) else x for x in c.logprobs)) for c in completions)


def checked_turn(episode: EpisodeRecord, config: ForkConfig) -> int:
    """Return the turn to play on from.

    Raises:
        UserError: there are fewer, it was never finished, or the flags do not go together.
    """
    turn, num_turns = config.fork, len(episode.turns)
    assert turn is not None, "a turn to play on from is given"
    if turn > num_turns:
        fix = f"{episode.id} has {count_turns(num_turns)}; 0 plays it from its start"
        raise UserError("--fork", f"must be at most {num_turns}", turn, fix)
    if turn and (last := episode.turns[turn - 1]).finish != "stop":
        why = "its tokens ran out" if last.finish == "length" else "the engine stopped"
        raise UserError("--fork", f"must be at most {turn - 1}", turn, f"turn {turn} was never finished: {why}")
    if config.samples > 1 and config.by != "model":
        raise UserError("--samples", "must be 1 unless a model plays on", config.samples, "add --by model")
    if (config.script is None) == (config.by == "script"):
        got = "none" if config.script is None else config.script
        raise UserError("--script", "must be given with --by script, and only then", got, "give both, or neither")
    return turn


def way_of_fork(recorded: WayRecord, turn: int, config: ForkConfig) -> WayRecord:
    """Return limits and temperature: the recorded ones, as far as flags do not change them.

    Raises:
        UserError: they leave no turn to play, or all samples would be the same.
    """
    names = {"max_turns", "max_new_tokens", "context_length", "temperature"}
    way = recorded.model_copy(update=config.model_dump(include=names, exclude_none=True))
    if way.max_turns <= turn:
        rule = f"must be over {turn} to play on from turn {turn}"
        raise UserError("--max-turns", rule, way.max_turns, "allow more turns than were recorded")
    if config.samples > 1 and way.temperature == 0:
        rule = "must be 1 at temperature 0, where all are the same"
        raise UserError("--samples", rule, config.samples, "give --temperature 1")
    return way


def check_tokenizer(episode: EpisodeRecord, turn: int, renderer: Renderer) -> None:
    """Raise `UserError` where the recorded ids mean something else to this tokenizer."""
    for number, recorded in enumerate(episode.turns[:turn], 1):
        try:
            text = renderer.decode(episode.ids[recorded.start : recorded.end])
        except (OverflowError, TypeError):  # ids that are no tokens
            text = ""
        if text != recorded.text and episode.end_reason.is_valid:
            rule = f"must have the tokenizer of the recording, where turn {number} is {recorded.text[:60]!r}"
            raise UserError("--model", rule, repr(text[:60]), "give the model that was recorded")
