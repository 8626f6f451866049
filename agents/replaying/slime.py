"""Opens dumps of slime as a recording: .pt files and the name of an environment in, a `Recording` out.

`python -m agents.replay dumps/rollout_3.pt --env geo3k --model path/to/model`. What a dump does not hold, what the
environment answered as messages and its infos, is empty in the recording, and `OutcomePlayer` compares the rest.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agents.recording import EpisodeRecord, Manifest, Recorder, Recording, WayRecord
from agents.recording.manifest import describe
from agents.recording.schema import EVALUATE, MANIFEST, TRAIN
from agents.renderer import Renderer
from agents.rendering.checkpoint import model_folder
from agents.replaying.played import Played
from agents.replaying.player import Player
from agents.replaying.slime_dump import read_dump
from agents.replaying.slime_samples import Converter
from agents.types import EndReason, Trajectory
from envs.errors import UserError
from envs.spec import EnvSpec

SLIME = "slime"


class DumpConfig(BaseModel):
    """How dumps of slime are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    convert: str = Field(default="", description="folder to keep slime's dumps in as a recording; empty: none")
    reward_key: str = Field(
        default="",
        description="which of several rewards counts in slime's dumps, as its own --reward-key; empty: the one",
    )


@dataclass(frozen=True, eq=False)
class OutcomePlayer:
    """Plays converted episodes: what the environment says is not compared, for nobody knows what it said.

    Example::

        played = await OutcomePlayer(EnvPlayer(stage)).play(episode)
        played.reward, played.turns[0].done, played.turns[0].observations      # (1.0, False, ())
    """

    player: Player

    async def play(self, episode: EpisodeRecord, num_turns: int | None = None) -> Played:
        """Return the texts, whether each turn ended the task, reward and end reason."""
        played = await self.player.play(episode, num_turns)
        return replace(
            played,
            first=None,
            tools=None,
            turns=tuple(turn and replace(turn, observations=(), info={}) for turn in played.turns),
            reward=None if episode.end_reason is EndReason.ABORTED else played.reward,
        )


@dataclass(frozen=True)
class _Lengths:
    """The longest of some episodes: turns, turns where only a limit ended them, tokens; these at least as many as
    `python -m agents.play` allows."""

    turns: int = 1
    limited_turns: int = 0
    response: int = 2048
    stream: int = 8192

    def with_(self, t: Trajectory) -> _Lengths:
        """Return these, with one more episode."""
        num_turns, num_tokens = len(t.turns), len(t.ids_T)
        is_limited = t.end_reason is EndReason.MAX_TURNS
        return _Lengths(
            max(self.turns, num_turns),
            max(self.limited_turns, num_turns * is_limited),
            max(self.response, num_tokens - t.prompt_length),
            max(self.stream, num_tokens),
        )

    def way(self, spec: EnvSpec, max_turns: int | None, use_tools: bool) -> WayRecord:
        """Return the limits as far as they can be told: slime's own are not in its dumps."""
        turns = max_turns or self.limited_turns or max(self.turns, spec.max_turns)
        return WayRecord(
            max_turns=turns,
            use_tools=use_tools,
            max_new_tokens=self.response,
            context_length=self.stream,
            temperature=1.0,
        )


def open_dumps(
    files: Sequence[Path], spec: EnvSpec, model: str, config: DumpConfig, max_turns: int | None = None
) -> tuple[Recording, list[str]]:
    """Return dumps as a recording, and what must be known of it; it is gone with the process unless it is to be kept.

    Without `max_turns`, an episode may take as many turns as the longest that only a limit has ended; where there is
    none, as many as the entry says, or as were played.

    Raises:
        UserError: a dump cannot be read, was written with another tokenizer, or the folder holds a recording already.
    """
    if not model:
        raise UserError("--model", "must name the model of a dump, for its tokenizer", "none", "give its folder")
    if config.convert:
        folder = Path(config.convert)
        if (folder / MANIFEST).exists():
            raise UserError("--convert", "must name a folder without a recording", str(folder), "give another one")
        if not folder.name or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
            raise UserError("--convert", "must name a new folder, or an empty one", str(folder), "give another one")
    else:
        folder = Path(tempfile.mkdtemp(prefix="trueturn-slime-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    renderer = Renderer.from_checkpoint(model_folder(model))
    manifest = describe(spec, renderer, model, {}).model_copy(update={"converted_from": SLIME, "env_source": ""})
    read = _convert(files, folder, manifest, renderer, config.reward_key, max_turns)
    notes = [f"{count} of {read.num_samples} samples {what}" for what, count in read.missing.items() if count]
    if config.convert:
        notes.append(f"kept as a recording in {folder}")
    return Recording.open(folder), notes


def _convert(
    files: Sequence[Path],
    folder: Path,
    manifest: Manifest,
    renderer: Renderer,
    reward_key: str,
    max_turns: int | None,
) -> Converter:
    """Write a recording, which has its name only when it is whole; return what was read."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    converter, lengths = Converter(renderer), dict[str, _Lengths]()
    try:
        with Recorder(part, manifest, renderer.encoder.spell) as recorder:
            for file in files:
                number, samples = read_dump(file, reward_key)
                phase = EVALUATE if "eval_" in file.stem else TRAIN
                for trajectory in converter.trajectories(samples, phase):
                    recorder.write(trajectory, number, phase, phase)
                    lengths[phase] = lengths.get(phase, _Lengths()).with_(trajectory)
        converter.check_tokenizer()
        use_tools = not converter.has_texts
        ways = {phase: each.way(manifest.env, max_turns, use_tools) for phase, each in lengths.items()}
        Recorder(part, manifest.model_copy(update={"ways": ways})).close()
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return converter
