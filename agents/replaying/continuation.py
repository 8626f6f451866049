"""Lets a person or a model continue a recorded episode, and prints how it ends.

`python -m agents.replay runs/x --id train-12-3 --fork 2 --by model --model runs/x --samples 8`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from agents.cli.terminal import (
    HELP,
    Gallery,
    PlayerQuit,
    Terminal,
    TerminalPlayer,
    print_early_end,
    print_summary,
    run_interruptible,
    show_episode,
)
from agents.cli.text import counted
from agents.engines.scripted import ScriptedEngine
from agents.recording import EpisodeRecord, Recording
from agents.recording.manifest import build_manifest
from agents.recording.played import check_record_folder, record_played
from agents.recording.schema import PLAY
from agents.recording.selection import SelectionConfig, select_episodes
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.replaying.compatibility import model_notes
from agents.replaying.fork import Fork, ForkConfig, check_tokenizer, checked_turn, way_of_fork
from agents.replaying.replayer import ReplayContext
from agents.replaying.report import values
from agents.rollout.episode import Episode
from agents.rollout.groups import derive_seed
from agents.types import Trajectory
from envs.errors import UserError
from envs.spec import EnvSpec
from envs.tool_calls import detect_format
from envs.types import message_images

#: How long a batch waits for continuations whose environment is still answering the recorded turns.
BATCH_WAIT_S = 60.0


def only_episode(recording: Recording, selection: SelectionConfig) -> EpisodeRecord:
    """Return the one selected episode. Raises `UserError` if the flags select none or several."""
    # A third one is all that the message needs to know of the others.
    found = list(islice(select_episodes(recording.episodes(), selection), 3))
    if len(found) != 1:
        got = ", ".join(episode.id for episode in found[:2]) or "none"
        if len(found) > 2:
            got += " and more"
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
    fork = open_fork(recording, episode, spec, folder, config)
    terminal = Terminal.standard()
    renderer = fork.renderer
    # Absolute now: code of the environment may change the working directory.
    record = config.record and config.record.absolute()
    if record:
        check_record_folder(record)
    gallery = Gallery.named(config.images, f"{episode.id}-fork{fork.turn}")
    terminal.say(f"{episode.id}: {spec.id}, sample {episode.sample_id}, {counted(fork.way.max_turns, 'turn')}")
    terminal.say(_recorded_end(episode))
    for note in (*notes, *model_notes(recording.manifest, renderer)):
        terminal.say(f"note: {note}")
    try:
        # Before anybody writes a turn: what follows depends on what was read.
        for text in changes_of(fork):
            terminal.say(f"--- not as recorded: {text}")
        if config.by == "model":
            loop, trajectories = fork_by_model(fork, folder, config)
        else:
            loop, trajectories = _by_hand(fork, terminal, gallery, config)
    except (PlayerQuit, KeyboardInterrupt) as quit_by:
        return print_early_end(quit_by, terminal, config.record)
    if record:
        manifest = build_manifest(spec, renderer, model, {PLAY: loop})
        record_played(record, trajectories, manifest, renderer.encoder.spell)
        terminal.say(f"recorded in {config.record}")
    if len(trajectories) > 1:
        code = _tabulate(trajectories, terminal)
    elif config.by == "model":
        code = show_episode(trajectories[0], "start", terminal, gallery, fork.turn)
    else:
        code = print_summary(trajectories[0], terminal, gallery)
    terminal.say(_recorded_end(episode))
    if all(len(trajectory.turns) <= fork.turn for trajectory in trajectories):
        terminal.say(f"--- no turn was added: the episode ended before turn {fork.turn + 1}")
    return code


def open_fork(recording: Recording, episode: EpisodeRecord, spec: EnvSpec, folder: str, config: ForkConfig) -> Fork:
    """Return the fork of an episode, with the tokenizer of a model folder.

    Raises:
        UserError: the episode has no such turn or another tokenizer, or the flags contradict each other.
    """
    turn = checked_turn(episode, config)
    context = ReplayContext(recording, spec)
    way = way_of_fork(context.way(episode), turn, config)
    renderer = Renderer.from_checkpoint(folder, recording.manifest.template_options)
    check_tokenizer(episode, turn, renderer)
    return Fork(episode, turn, context, renderer, way)


def changes_of(fork: Fork) -> list[str]:
    """Return what the environment answers otherwise than recorded in the turns before a fork, in three lines each."""
    told = list[str]()
    for change in run_interruptible(fork.changes()):
        old, new = values(change)
        told.append(f"{change.kind}, {change.where}\n  recorded: {old}\n  now:      {new}")
    return told


def _recorded_end(episode: EpisodeRecord) -> str:
    num_written = episode.num_model_tokens
    return (
        f"--- recorded: {episode.end_reason}, reward {episode.reward:g}, {counted(len(episode.turns), 'turn')}, "
        f"{num_written} tokens written, {episode.num_tokens - num_written} read"
    )


def _by_hand(fork: Fork, terminal: Terminal, gallery: Gallery, config: ForkConfig) -> tuple[Episode, list[Trajectory]]:
    """Let a person continue."""
    renderer = fork.renderer
    tool_format = fork.context.spec.args(tool_format=detect_format(renderer.chat_template)).tool_format
    player = TerminalPlayer(terminal, gallery, renderer, tool_format, fork.way.thinking)
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: player.take_turn(fork.turn + turn, request))
    loop = fork.loop(engine, 1)
    terminal.say(f"{HELP}\n---")
    gallery.save(message_images(fork.context.source.sample(fork.episode).prompt), "prompt")
    return loop, run_interruptible(fork.play(loop, (fork.episode.seed,), player.watch))


def fork_by_model(fork: Fork, folder: str, config: ForkConfig) -> tuple[Episode, list[Trajectory]]:
    """Let the model in a folder continue, once for each sample; return the agent loop and the episodes."""
    from transformers.utils import logging

    from agents.engines.hf import HFEngine
    from agents.model.policy import PolicyModel

    # Bars of loaded weights would stand between the lines of the episode.
    logging.disable_progress_bar()
    network = PolicyModel.load(folder)
    engine = HFEngine(network, fork.way.context_length, config.samples, config.device, max_wait_s=BATCH_WAIT_S)
    loop = fork.loop(engine, config.samples)

    # One coroutine: the engine starts, plays and closes on one event loop.
    async def play() -> list[Trajectory]:
        await engine.start()
        try:
            return await fork.play(loop, seeds_of(fork.episode, config))
        finally:
            await engine.close()

    return loop, run_interruptible(play())


def seeds_of(episode: EpisodeRecord, config: ForkConfig) -> tuple[int, ...]:
    """Return the seed of each continuation; without --seed, the first one is the episode's own.

    Example: `--samples 2` and an episode with seed 7 give `(7, derive_seed(7, 1))`.
    """
    start = episode.seed if config.seed is None else config.seed
    seeds = [derive_seed(start, number) for number in range(config.samples)]
    if config.seed is None:
        seeds[0] = episode.seed
    return tuple(seeds)


# The end --------------------------------------------------------------------------------------------------------------


def _tabulate(trajectories: Sequence[Trajectory], terminal: Terminal) -> int:
    """Print how each continuation ended."""
    terminal.say(f"{'sample':<6}  {'reward':>7}  {'turns':>5}  {'written':>7}  end")
    for n, t in enumerate(trajectories):
        terminal.say(f"{n:<6}  {t.reward:>7.3g}  {len(t.turns):>5}  {t.num_model_tokens:>7}  {t.end_reason}")
    # The mean of what would count in training; a broken episode has no reward.
    rewards = [t.reward for t in trajectories if t.end_reason.is_valid]
    outcome = "no reward"
    if rewards:
        outcome = f"mean reward {sum(rewards) / len(rewards):.3g}, best {max(rewards):.3g}"
    terminal.say(f"--- end: {len(rewards)} of {len(trajectories)} samples count, {outcome}")
    return int(not rewards)
