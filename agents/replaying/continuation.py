"""Lets a person, a script or a model continue a recorded episode, and prints how it ends.

`python -m agents.replay runs/x --id train-12-3 --fork 2 --by model --model runs/x --samples 8`
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

from agents.cli.terminal import (
    HELP,
    Gallery,
    InputEnded,
    PlayerQuit,
    Terminal,
    TerminalPlayer,
    print_early_end,
    print_summary,
    run_interruptible,
    show_answer,
    show_messages,
)
from agents.cli.text import counted
from agents.engines.base import Engine, EngineSetup
from agents.engines.own import make_engine
from agents.engines.scripted import ScriptedEngine
from agents.recording import EpisodeRecord, Recording
from agents.recording.attempts import check_record_folder, record_attempts
from agents.recording.manifest import build_manifest
from agents.recording.schema import PLAY
from agents.recording.selection import SelectionConfig, select_episodes
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.replaying.compatibility import model_notes
from agents.replaying.fork import Fork, ForkConfig, check_tokenizer, checked_turn, way_of_fork
from agents.replaying.replayer import ReplayContext
from agents.rollout.episode import Episode
from agents.rollout.groups import derive_seed
from agents.types import Trajectory
from envs.env import ToolFormat
from envs.errors import UserError
from envs.spec import EnvSpec
from envs.tool_calls import detect_format
from envs.types import message_images

#: How long a batch waits for continuations whose environment is still answering the recorded turns.
BATCH_WAIT_S = 60.0


class ScriptedTerminal(Terminal):
    """A terminal that reads its turns from a list.

    Example: `ScriptedTerminal(["3", "4"], sys.stdout)` answers the first question with "3", the second with "4", and
    then quits.
    """

    def __init__(self, turns: Sequence[str], target: TextIO) -> None:
        super().__init__(io.StringIO(), target)
        self._turns = iter(turns)

    def ask(self, tool_format: ToolFormat) -> str:
        """Return the next turn, and print it."""
        turn = next(self._turns, None)
        if turn is None:
            raise InputEnded
        self.say("\n".join(self.mark + line for line in turn.split("\n")))
        return turn


def only_episode(recording: Recording, selection: SelectionConfig) -> EpisodeRecord:
    """Return the one selected episode. Raises `UserError` if the flags select none or several."""
    # A third one is all that the message needs to know of the others.
    found = list(islice(select_episodes(recording.episodes(), selection), 3))
    if len(found) != 1:
        got = f"{', '.join(episode.id for episode in found[:2])}{' and more' * (len(found) > 2)}" or "none"
        raise UserError("--id", "must select one episode to continue", got, "name one, as train-12-3")
    return found[0]


def run_fork(
    recording: Recording,
    episode: EpisodeRecord,
    spec: EnvSpec,
    model: str,
    config: ForkConfig,
    notes: Sequence[str] = (),
) -> int:
    """Continue an episode, print how it ends, and return the exit code: 1 if it has no valid end.

    `model` gives the tokenizer, and the weights for `--by model`. `notes` say what has changed since the recording was
    made.

    Raises:
        UserError: the episode has no such turn or another tokenizer, or the flags contradict each other.
    """
    folder = model_folder(model)
    fork = open_fork(
        recording, episode, spec, folder, config, lambda text: terminal.say(f"--- not as recorded: {text}")
    )
    terminal = _terminal(config)
    renderer = fork.renderer
    record = config.record and config.record.absolute()
    if record:
        check_record_folder(record, build_manifest(spec, renderer, model, {}))
    gallery = Gallery.named(config.images, f"{episode.id}-fork{fork.turn}")
    terminal.say(f"{episode.id}: {spec.id}, sample {episode.sample_id}, {counted(fork.way.max_turns, 'turn')}")
    terminal.say(_recorded_end(episode))
    for note in (*notes, *model_notes(recording.manifest, renderer)):
        terminal.say(f"note: {note}")
    try:
        if config.by == "model":
            loop, trajectories = fork_by_model(fork, folder, config)
        else:
            loop, trajectories = _by_hand(fork, terminal, gallery, config)
    except (PlayerQuit, KeyboardInterrupt) as quit_by:
        return print_early_end(quit_by, terminal, config.record)
    if record:
        manifest = build_manifest(spec, renderer, model, {PLAY: loop})
        for note in (*record_attempts(record, trajectories, manifest, renderer), f"recorded in {config.record}"):
            terminal.say(note)
    if len(trajectories) == 1:
        return _report_one(fork, trajectories[0], terminal, gallery, config)
    return _tabulate(fork, trajectories, terminal)


def open_fork(
    recording: Recording,
    episode: EpisodeRecord,
    spec: EnvSpec,
    folder: str,
    config: ForkConfig,
    on_difference: Callable[[str], None],
) -> Fork:
    """Return the fork of an episode, with the tokenizer of a model folder.

    Raises:
        UserError: the episode has no such turn or another tokenizer, or the flags contradict each other.
    """
    turn = checked_turn(episode, config)
    context = ReplayContext(recording, spec)
    way = way_of_fork(context.way(episode), turn, config)
    renderer = Renderer.from_checkpoint(folder, recording.manifest.template_options)
    check_tokenizer(episode, turn, renderer)
    return Fork(recording, episode, turn, context, renderer, way, on_difference)


def _recorded_end(episode: EpisodeRecord) -> str:
    num_written = sum(episode.mask)
    return (
        f"--- recorded: {episode.end_reason}, reward {episode.reward:g}, {counted(len(episode.turns), 'turn')}, "
        f"{num_written} tokens written, {len(episode.mask) - num_written} read"
    )


def _terminal(config: ForkConfig) -> Terminal:
    """Return the terminal that the turns come from: the person's, or the script's."""
    terminal = Terminal.standard()
    if config.script is None:
        return terminal
    try:
        text = config.script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--script", "must be a readable file of text", str(config.script), str(error)) from error
    try:
        turns = json.loads(text)
    except (ValueError, RecursionError):
        turns = None
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return ScriptedTerminal(turns, terminal.target)
    return Terminal(io.StringIO(text), terminal.target)


def _by_hand(fork: Fork, terminal: Terminal, gallery: Gallery, config: ForkConfig) -> tuple[Episode, list[Trajectory]]:
    """Let a person or a script continue."""
    renderer = fork.renderer
    tool_format = fork.context.spec.args(tool_format=detect_format(renderer.chat_template)).tool_format
    player = TerminalPlayer(terminal, gallery, renderer, tool_format, fork.way.thinking)
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: player.take_turn(fork.turn + turn, request))
    loop = fork.loop(engine, 1, fork.way.temperature)
    terminal.say(f"{HELP}\n---" if config.by == "hand" else "---")
    gallery.save(message_images(fork.recording.sample(fork.episode).prompt), "prompt")
    return loop, run_interruptible(fork.play(loop, (fork.episode.seed,), player.watch))


def fork_by_model(fork: Fork, folder: str, config: ForkConfig) -> tuple[Episode, list[Trajectory]]:
    """Let the model in a folder continue, once for each sample; return the agent loop and the episodes."""
    from transformers.utils import logging

    logging.disable_progress_bar()

    engine = _engine_of(fork, folder, config)
    loop = fork.loop(engine, config.samples, fork.way.temperature)

    async def play() -> list[Trajectory]:
        await engine.start()
        try:
            return await fork.play(loop, seeds_of(fork.episode, config))
        finally:
            await engine.close()

    return loop, run_interruptible(play())


def _engine_of(fork: Fork, folder: str, config: ForkConfig) -> Engine:
    """Return the embedded engine or a user's own, with the model in a folder."""
    if config.engine == "hf":
        from agents.engines.hf import HFEngine
        from agents.model.policy import PolicyModel

        network = PolicyModel.load(folder)
        context_length = fork.way.context_length
        return HFEngine(network, context_length, config.samples, config.device, max_wait_s=BATCH_WAIT_S)
    setup = EngineSetup(
        model_path=folder,
        dtype="float32",
        device=config.device,
        context_length=fork.way.context_length,
        max_batch=config.samples,
        image_token_id=fork.renderer.image_token_id,
        log_folder=Path(tempfile.gettempdir()) / "trueturn-engine",
    )
    return make_engine(config.engine, setup)


def seeds_of(episode: EpisodeRecord, config: ForkConfig) -> tuple[int, ...]:
    """Return the seed of each continuation; without --seed, the first one is the episode's own.

    Example: `--samples 2` and an episode with seed 7 give `(7, derive_seed(7, 1))`.
    """
    if config.seed is not None:
        return tuple(derive_seed(config.seed, number) for number in range(config.samples))
    return (episode.seed, *(derive_seed(episode.seed, number) for number in range(1, config.samples)))


# The end --------------------------------------------------------------------------------------------------------------


def _report_one(fork: Fork, played: Trajectory, terminal: Terminal, gallery: Gallery, config: ForkConfig) -> int:
    """Print how one continuation ended; for a model's, print the episode first, as a person sees it while playing."""
    if config.by == "model":
        show_messages(played.opening, "start", terminal, gallery)
        for number, turn in enumerate(played.turns, 1):
            if number <= fork.turn:
                note = ", recorded"
            else:
                note = ""
            terminal.say(f"--- turn {number}{note}\n{turn.text}")
            if number < len(played.turns):
                show_answer(turn, number, turn.done, terminal, gallery)
    code = print_summary(played, terminal, gallery)
    _say_where_it_ended(fork, terminal)
    return code


def _tabulate(fork: Fork, trajectories: Sequence[Trajectory], terminal: Terminal) -> int:
    """Print how each continuation ended."""
    terminal.say(f"{'sample':<6}  {'reward':>7}  {'turns':>5}  {'written':>7}  end")
    for n, t in enumerate(trajectories):
        terminal.say(f"{n:<6}  {t.reward:>7.3g}  {len(t.turns):>5}  {t.num_model_tokens:>7}  {t.end_reason}")
    rewards = [t.reward for t in trajectories if t.end_reason.is_valid]
    if rewards:
        outcome = f"mean reward {sum(rewards) / len(rewards):.3g}, best {max(rewards):.3g}"
    else:
        outcome = "no reward"
    terminal.say(f"--- end: {len(rewards)} of {len(trajectories)} samples count, {outcome}")
    _say_where_it_ended(fork, terminal)
    if rewards:
        return 0
    return 1


def _say_where_it_ended(fork: Fork, terminal: Terminal) -> None:
    terminal.say(_recorded_end(fork.episode))
    if not fork.num_handed_over:
        terminal.say(f"--- no turn was added: the episode ended before turn {fork.turn + 1}")
