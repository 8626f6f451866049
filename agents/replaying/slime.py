"""Opens slime's dumps (.pt files) as a recording.

`python -m agents.replay dumps/rollout_3.pt --env geo3k --model path/to/model`. A dump has no observations as messages
and no infos, so they are empty in the recording, and `DumpReplayer` leaves them out of the comparison.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from agents.recording import EpisodeRecord, Manifest, Recorder, Recording, WayRecord
from agents.recording.manifest import build_manifest
from agents.recording.schema import EVALUATE, MANIFEST, TRAIN
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.replaying.episode_result import EpisodeResult
from agents.replaying.replayer import Replayer
from agents.replaying.slime_dump import read_dump
from agents.replaying.slime_samples import Converter
from agents.types import EndReason, Trajectory
from envs.config.settings import Section
from envs.errors import UserError
from envs.spec import EnvSpec

SLIME = "slime"


class DumpConfig(Section):
    """How slime's dumps are read."""

    convert: Path | None = Field(
        default=None, description="folder for a recording made from slime's dumps; empty: none"
    )
    reward_key: str = Field(
        default="",
        description="name of the reward in slime's dumps, as in slime's --reward-key; empty: the only one",
    )


@dataclass(frozen=True, eq=False)
class DumpReplayer:
    """Replays converted episodes; clears what a dump does not record, so that it is not compared.

    Example::

        result = await DumpReplayer(EnvReplayer(context)).play(episode)
        result.reward, result.turns[0].done, result.turns[0].observations      # (1.0, False, ())
    """

    replayer: Replayer

    async def play(self, episode: EpisodeRecord, num_turns: int | None = None) -> EpisodeResult:
        """Return the texts, whether each turn ended the task, reward and end reason."""
        result = await self.replayer.play(episode, num_turns)
        return replace(
            result,
            first=None,
            tools=None,
            turns=tuple(turn and replace(turn, observations=(), info={}) for turn in result.turns),
            reward=None if episode.end_reason is EndReason.ABORTED else result.reward,
        )


@dataclass(frozen=True)
class _ObservedLimits:
    """The limits that the episodes of a dump imply: their largest numbers of turns and tokens.

    `limited_turns` counts only episodes that a limit ended. The token limits are at least those of `agents.play`.
    """

    turns: int = 1
    limited_turns: int = 0
    response: int = 2048
    stream: int = 8192

    def with_episode(self, t: Trajectory) -> _ObservedLimits:
        """Return the limits after one more episode."""
        num_turns, num_tokens = len(t.turns), len(t.ids_T)
        is_limited = t.end_reason is EndReason.MAX_TURNS
        return _ObservedLimits(
            max(self.turns, num_turns),
            max(self.limited_turns, num_turns * is_limited),
            max(self.response, num_tokens - t.prompt_length),
            max(self.stream, num_tokens),
        )

    def way(self, spec: EnvSpec, max_turns: int | None, use_tools: bool) -> WayRecord:
        """Return the limits of the agent loop; slime's own limits are not in its dumps."""
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
    """Return dumps as a recording, with notes on what they lack. Without `--convert` it is deleted at exit.

    Without `max_turns`, the turn limit is that of the longest episode that only a limit ended; if there is none, that
    of the registry entry, or of the longest episode.

    Raises:
        UserError: a dump cannot be read or has another tokenizer, or the folder already holds a recording.
    """
    if not model:
        raise UserError("--model", "must name the model of a dump, for its tokenizer", "none", "give its folder")
    if config.convert:
        folder = config.convert
        if (folder / MANIFEST).exists():
            raise UserError("--convert", "must name a folder without a recording", str(folder), "give another one")
        if not folder.name or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
            raise UserError("--convert", "must name a new folder, or an empty one", str(folder), "give another one")
    else:
        folder = Path(tempfile.mkdtemp(prefix="trueturn-slime-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    renderer = Renderer.from_checkpoint(model_folder(model))
    manifest = build_manifest(spec, renderer, model, {}).model_copy(update={"converted_from": SLIME, "env_source": ""})
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
    """Write the recording and rename it when it is complete; return the converter with its counts."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    converter, limits = Converter(renderer), dict[str, _ObservedLimits]()
    try:
        with Recorder(part, manifest, renderer.encoder.spell) as recorder:
            for file in files:
                number, samples = read_dump(file, reward_key)
                phase = EVALUATE if "eval_" in file.stem else TRAIN
                for trajectory in converter.trajectories(samples, phase):
                    recorder.write(trajectory, number, phase, phase)
                    limits[phase] = limits.get(phase, _ObservedLimits()).with_episode(trajectory)
        converter.check_tokenizer()
        use_tools = not converter.has_texts
        ways = {phase: each.way(manifest.env, max_turns, use_tools) for phase, each in limits.items()}
        Recorder(part, manifest.model_copy(update={"ways": ways})).close()
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return converter
