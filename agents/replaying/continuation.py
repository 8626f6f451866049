"""Who plays an episode on, a person, a script or a model, and what came of it: a record in, the outcome on the console.

`python -m agents.replay runs/x --id train-12-3 --fork 2 --by model --model runs/x --samples 8`
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

from agents.engines.scripted import ScriptedEngine
from agents.episode import Episode
from agents.recording import EpisodeRecord, Recording
from agents.recording.manifest import describe
from agents.recording.plays import check_record, record
from agents.recording.schema import PLAY
from agents.recording.selection import SelectionConfig, selected
from agents.renderer import Renderer
from agents.rendering.checkpoint import model_folder
from agents.replaying.fork import Fork, ForkConfig, check_tokenizer, checked_turn, way_of_fork
from agents.replaying.notes import model_notes
from agents.replaying.player import Stage
from agents.rollout import derive_seed
from agents.terminal import (
    HELP,
    Gallery,
    Interrupted,
    Player,
    Quit,
    Terminal,
    count_turns,
    run_interruptible,
    show_answer,
    summarise,
)
from agents.types import Trajectory
from envs.env import ToolFormat
from envs.errors import UserError
from envs.spec import EnvSpec
from envs.tool_calls import detect_format
from envs.types import message_images

#: How long a batch waits for a continuation whose environment still answers the recorded turns.
BATCH_WAIT_S = 60.0


class Script(Terminal):
    """A terminal in which all turns are written already.

    Example: `Script(["3", "4"], sys.stdout)` answers the first question with "3", the second with "4", and then quits.
    """

    def __init__(self, turns: Sequence[str], target: TextIO) -> None:
        super().__init__(io.StringIO(), target)
        self._turns = iter(turns)

    def ask(self, tool_format: ToolFormat) -> str:
        """Return the next turn, and show it."""
        turn = next(self._turns, None)
        if turn is None:
            raise Quit
        self.say("\n".join(self.mark + line for line in turn.split("\n")))
        return turn


def the_one(recording: Recording, selection: SelectionConfig) -> EpisodeRecord:
    """Return the one episode that is meant. Raises `UserError` where none is, or several are."""
    found = list(islice(selected(recording.episodes(), selection), 3))
    if len(found) != 1:
        got = f"{', '.join(episode.id for episode in found[:2])}{' and more' * (len(found) > 2)}" or "none"
        raise UserError("--fork", "must be given with one episode", got, "name it with --id, as train-12-3")
    return found[0]


def play_on(
    recording: Recording,
    episode: EpisodeRecord,
    spec: EnvSpec,
    model: str,
    config: ForkConfig,
    notes: Sequence[str] = (),
) -> int:
    """Play an episode on, say how it ends, and return the exit code: 1 where it comes to no end that counts.

    `model` is the model whose tokenizer, and for `--by model` whose weights, are used; empty for that of the recording.
    `notes` say what is not as when it was recorded.

    Raises:
        UserError: the episode has no such turn, or was written with another tokenizer; flags do not go together.
    """
    turn = checked_turn(episode, config)
    stage = Stage(recording, spec)
    way = way_of_fork(stage.way(episode), turn, config)
    if config.by == "model" and not model:
        raise UserError("--model", "must name who plays on with --by model", "none", "give a model or run folder")
    folder = model_folder(model or recording.manifest.model)
    terminal = _terminal(config)
    renderer = Renderer.from_checkpoint(folder, recording.manifest.template_options)
    check_tokenizer(episode, turn, renderer)
    if config.record:
        check_record(Path(config.record), describe(spec, renderer, model or folder, {}))
    fork = Fork(
        recording, episode, turn, stage, renderer, way, lambda told: terminal.say(f"--- not as recorded: {told}")
    )
    gallery = Gallery.named(config.pictures, f"{episode.id}-fork{turn}")
    terminal.say(f"{episode.id}: {spec.id}, sample {episode.sample_id}, {count_turns(way.max_turns)}\n{_then(episode)}")
    for note in (*notes, *model_notes(recording.manifest, renderer)):
        terminal.say(f"note: {note}")
    try:
        if config.by == "model":
            loop, trajectories = _by_model(fork, folder, config)
        else:
            loop, trajectories = _by_hand(fork, terminal, gallery, config)
    except (Interrupted, KeyboardInterrupt):
        terminal.say("--- interrupted")
        return 130
    except Quit:
        terminal.say("--- quit" if config.by == "hand" else "--- the script ends here, the episode does not")
        return 0 if config.by == "hand" else 1
    if config.record:
        record(Path(config.record), trajectories, describe(spec, renderer, model or folder, {PLAY: loop}), renderer)
        terminal.say(f"recorded in {config.record}")
    code = _report_one(fork, trajectories[0], terminal, gallery, config) if len(trajectories) == 1 else None
    return _tabulate(fork, trajectories, terminal) if code is None else code


def _then(episode: EpisodeRecord) -> str:
    num_written = sum(episode.mask)
    return (
        f"--- recorded: {episode.end_reason}, reward {episode.reward:g}, {count_turns(len(episode.turns))}, "
        f"{num_written} tokens written, {len(episode.mask) - num_written} read"
    )


def _terminal(config: ForkConfig) -> Terminal:
    """Return where the turns come from: the person, or the file of a script."""
    terminal = Terminal.standard()
    if config.script is None:
        return terminal
    try:
        text = config.script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--script", "must be a readable file of text", str(config.script), str(error)) from error
    try:
        turns = json.loads(text)
    except ValueError:
        turns = None
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return Script(turns, terminal.target)
    return Terminal(io.StringIO(text), terminal.target)


def _by_hand(fork: Fork, terminal: Terminal, gallery: Gallery, config: ForkConfig) -> tuple[Episode, list[Trajectory]]:
    """Let a person or a script play on."""
    renderer = fork.renderer
    tool_format = fork.stage.spec.args(tool_format=detect_format(renderer.chat_template)).tool_format
    player = Player(terminal, gallery, renderer, tool_format)
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: player.take_turn(fork.turn + turn, request))
    loop = fork.loop(engine, 1, fork.way.temperature)
    terminal.say(f"{HELP}\n---" if config.by == "hand" else "---")
    gallery.save(list(message_images(fork.recording.sample(fork.episode).prompt)), "prompt")
    return loop, run_interruptible(fork.play(loop, (fork.episode.seed,), player.watch))


def _by_model(fork: Fork, folder: str, config: ForkConfig) -> tuple[Episode, list[Trajectory]]:
    """Let a model play on, as often as is asked for."""
    from transformers.utils import logging

    from agents.engines.hf import HFEngine
    from agents.model import PolicyModel

    logging.disable_progress_bar()

    engine = HFEngine(
        PolicyModel.load(folder), fork.way.context_length, config.samples, config.device, max_wait_s=BATCH_WAIT_S
    )
    loop = fork.loop(engine, config.samples, fork.way.temperature)
    return loop, run_interruptible(fork.play(loop, seeds_of(fork.episode, config)))


def seeds_of(episode: EpisodeRecord, config: ForkConfig) -> tuple[int, ...]:
    """Return the seed of every continuation; without --seed, the first has the recorded episode's own.

    Example: `--samples 2` of an episode of seed 7 gives `(7, derive_seed(7, 1))`.
    """
    if config.seed is not None:
        return tuple(derive_seed(config.seed, number) for number in range(config.samples))
    return (episode.seed, *(derive_seed(episode.seed, number) for number in range(1, config.samples)))


# What came of it ------------------------------------------------------------------------------------------------------


def _report_one(fork: Fork, played: Trajectory, terminal: Terminal, gallery: Gallery, config: ForkConfig) -> int:
    """Say how one continuation ended; what a model wrote was not seen yet."""
    if config.by == "model":
        for number, turn in enumerate(played.turns[fork.turn :], fork.turn + 1):
            terminal.say(f"--- turn {number}\n{turn.text}")
            if number < len(played.turns):
                show_answer(turn, number, turn.done, terminal, gallery)
    code = summarise(played, terminal, gallery)
    _say_where_it_ended(fork, terminal)
    return code


def _tabulate(fork: Fork, trajectories: Sequence[Trajectory], terminal: Terminal) -> int:
    """Say how all continuations ended."""
    terminal.say(f"{'sample':<6}  {'reward':>7}  {'turns':>5}  {'written':>7}  end")
    for n, t in enumerate(trajectories):
        terminal.say(f"{n:<6}  {t.reward:>7.3g}  {len(t.turns):>5}  {t.num_model_tokens:>7}  {t.end_reason}")
    rewards = [t.reward for t in trajectories if t.end_reason.is_valid]
    outcome = f"mean reward {sum(rewards) / len(rewards):.3g}, best {max(rewards):.3g}" if rewards else "no reward"
    terminal.say(f"--- end: {len(rewards)} of {len(trajectories)} samples count, {outcome}")
    _say_where_it_ended(fork, terminal)
    return 0 if rewards else 1


def _say_where_it_ended(fork: Fork, terminal: Terminal) -> None:
    terminal.say(_then(fork.episode))
    if not fork.num_handed_over:
        terminal.say(f"--- nobody has played on: there was no turn {fork.turn + 1}")
