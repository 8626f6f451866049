"""Claims about playing on from a turn of a recorded episode: the same tokens up to there, and then somebody else."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents.engines.base import Engine
from agents.engines.scripted import ScriptedEngine
from agents.model import STARTER_PATH
from agents.recording import EpisodeRecord, Recorder, Recording
from agents.recording.manifest import build_manifest
from agents.rendering.renderer import Renderer
from agents.replay import run
from agents.replaying.continuation import changes_of
from agents.replaying.fork import Fork, check_tokenizer
from agents.replaying.recorded_engine import RecordedEngine, recorded_completions
from agents.replaying.replayer import ReplayContext
from agents.rollout.episode import Episode, Limits
from agents.types import Completion, EndReason, GenerateRequest, SamplingParams, Trajectory
from envs.checking.hostile import write_call
from envs.config.cli import exit_code
from envs.errors import UserError
from envs.execution.load import load_env
from envs.geo3k.zoom import Geo3kZoomEnv
from envs.registry import get_spec
from envs.types import Sample
from tests.paths import ROOT

SECRET = 11
GAME = Sample("game", ({"role": "user", "content": "Guess my number from 1 to 20."},), str(SECRET))


def played(
    renderer: Renderer, env: str, sample: Sample, texts: Sequence[str], max_turns: int, group: int = 0
) -> tuple[Trajectory, Episode]:
    """Play a script, as it would have been recorded in a run: with log-probs and versions that tell tokens apart."""
    spec = get_spec(env)
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: texts[turn])
    params = SamplingParams(1.0, renderer.stop_ids, renderer.suppressed_ids)
    episode = Episode(engine, renderer, Limits(max_turns, 300), params)
    build, args = load_env(spec), spec.args(max_turns)
    t = asyncio.run(episode.run(sample, lambda: build(sample, args), seed=7, group=group))
    logprobs_T = np.where(t.mask_T, -np.arange(len(t.mask_T)) / 256, 0.0).astype(np.float32)
    turns = tuple(replace(turn, versions=((4, 1), (5, turn.end - turn.start - 1))) for turn in t.turns)
    return replace(t, logprobs_T=logprobs_T, turns=turns), episode


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, renderer: Renderer, checkpoint: Path) -> Recording:
    """Two games of guessing: one that is won in turn 3, one whose three turns run out."""
    folder = tmp_path_factory.mktemp("recording")
    won, episode = played(renderer, "guess", GAME, ["I say 5.", "So 15.", "11"], 3)
    lost, _ = played(renderer, "guess", GAME, ["1", "2", "3"], 3, group=1)
    manifest = build_manifest(get_spec("guess"), renderer, str(checkpoint), {"train": episode})
    with Recorder(folder, manifest, renderer.encoder.spell) as recorder:
        recorder.write(won, step=0)
        recorder.write(lost, step=0)
    return Recording.open(folder)


def episode_of(recording: Recording, name: str) -> EpisodeRecord:
    return next(episode for episode in recording.episodes() if episode.id == name)


def forked(
    recording: Recording, episode: EpisodeRecord, turn: int, renderer: Renderer, engine: Engine, max_turns: int = 8
) -> tuple[Trajectory, list[str]]:
    """Play on with an engine; return the episode, and what was not as recorded."""
    way = recording.manifest.ways["train"].model_copy(update={"max_turns": max_turns})
    fork = Fork(episode, turn, ReplayContext(recording, recording.manifest.env), renderer, way)
    told = changes_of(fork)
    (trajectory,) = asyncio.run(fork.play(fork.loop(engine, 1), (7,)))
    return trajectory, told


def guesses(renderer: Renderer, *texts: str) -> ScriptedEngine:
    return ScriptedEngine(renderer.tokenizer, lambda turn, request: texts[turn])


# The engine ----------------------------------------------------------------------------------------------------------


def session_of(engine: RecordedEngine, *requests: GenerateRequest) -> list[Completion]:
    async def ask() -> list[Completion]:
        async with engine.session() as session:
            return [await session.generate(request) for request in requests]

    return asyncio.run(ask())


def asked(*ids: int, room: int = 10) -> GenerateRequest:
    return GenerateRequest(ids, (), room, SamplingParams(stop_ids=(9,)), seed=0)


TURN = Completion((3, 4, 9), (-1.0, -2.0, -3.0), "stop", 99, ((6, 2), (7, 1)))


def test_an_engine_answers_with_what_was_recorded_and_the_length_that_was_asked() -> None:
    (answer,) = session_of(RecordedEngine([[TURN]], 64), asked(1, 2))
    assert answer == replace(TURN, prompt_length=2)


def test_a_recorded_turn_that_does_not_fit_is_cut_with_its_log_probs_and_versions() -> None:
    (answer,) = session_of(RecordedEngine([[TURN]], 64), asked(1, room=2))
    assert answer == Completion((3, 4), (-1.0, -2.0), "length", 1, ((6, 2),))


class Writes59(ScriptedEngine):
    def turn(self, number: int, request: GenerateRequest) -> tuple[int, ...]:
        return (5, 9)


WRITES_5_9 = Writes59(None, lambda turn, request: "")


def test_after_the_recorded_turns_the_other_engine_writes_or_the_episode_is_aborted() -> None:
    on = session_of(RecordedEngine([[TURN]], 64, after=WRITES_5_9), asked(1), asked(1, 3, 4, 9, 2))
    assert [answer.ids for answer in on] == [(3, 4, 9), (5, 9)]
    (_, stopped) = session_of(RecordedEngine([[TURN]], 64), asked(1), asked(1, 3, 4, 9, 2))
    assert (stopped.ids, stopped.finish, stopped.prompt_length) == ((), "abort", 5)


def test_every_session_has_its_own_turns() -> None:
    other = replace(TURN, ids=(8, 8, 9))
    engine = RecordedEngine([[TURN], [other]], 64, WRITES_5_9)
    assert session_of(engine, asked(1))[0].ids == (3, 4, 9)
    assert session_of(engine, asked(1), asked(1, 2))[0].ids == (8, 8, 9)


def test_a_turn_that_ended_in_no_way_of_ours_is_refused(recording: Recording) -> None:
    episode = episode_of(recording, "train-0-0")
    odd = episode.model_copy(update={"turns": (episode.turns[0].model_copy(update={"finish": "tired"}),)})
    with pytest.raises(UserError, match="must end with stop, length or abort, got tired"):
        recorded_completions(odd)


# Up to the turn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_fork_has_the_recorded_tokens_up_to_its_turn_and_no_others_after_it(
    recording: Recording, renderer: Renderer, turn: int
) -> None:
    episode = episode_of(recording, "train-0-0")
    trajectory, told = forked(recording, episode, turn, renderer, guesses(renderer, "11"))
    start = episode.turns[turn].start
    assert told == []
    assert trajectory.ids_T[:start].tolist() == list(episode.ids[:start])
    assert trajectory.mask_T[:start].tolist() == [bool(each) for each in episode.mask[:start]]
    assert np.array_equal(trajectory.logprobs_T[:start], episode.streams[0].logprobs_T[:start])
    assert [t.versions for t in trajectory.turns[:turn]] == [t.versions for t in episode.turns[:turn]]
    assert [t.text for t in trajectory.turns] == [*(t.text for t in episode.turns[:turn]), "11"]
    assert renderer.decode(trajectory.ids_T[start:].tolist()) == "11"
    assert (trajectory.reward, trajectory.end_reason) == (1.0, EndReason.COMPLETED)


def test_the_versions_of_the_recorded_turns_are_kept_beside_those_of_who_goes_on(
    recording: Recording, renderer: Renderer
) -> None:
    trajectory, _ = forked(recording, episode_of(recording, "train-0-0"), 1, renderer, guesses(renderer, "11"))
    assert trajectory.turns[0].versions[0] == (4, 1)
    assert [version for version, _ in trajectory.turns[1].versions] == [0]


def test_an_episode_whose_turns_ran_out_is_played_on_with_more_of_them(
    recording: Recording, renderer: Renderer
) -> None:
    episode = episode_of(recording, "train-1-0")
    trajectory, told = forked(recording, episode, 3, renderer, guesses(renderer, "11"))
    assert told == []
    assert trajectory.ids_T[: len(episode.ids)].tolist() == list(episode.ids)
    assert [t.text for t in trajectory.turns] == ["1", "2", "3", "11"]
    assert trajectory.messages[-2]["content"] == "Higher."  # which nobody had been shown


CHANGED = """
from envs.guess import GuessEnv

class Changed(GuessEnv):
    calls = 0

    def step(self, text):
        observation, done, info = super().step(text)
        self.calls += 1
        if self.args.options["from"] <= self.calls:
            if self.args.options["done"] == "always":
                return {}, True, info
            done = done and self.args.options["done"] != "never"
            observation = {**observation, "obs_str": "Warmer."}
        return observation, done, info
"""


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Flags for an environment that answers otherwise from a turn on, or ends there."""
    (tmp_path / "changed_guess.py").write_text(CHANGED)
    monkeypatch.syspath_prepend(str(tmp_path))

    def flags(turn: int, done: str = "") -> list[str]:
        entry = {
            "entry_point": "changed_guess:Changed", "description": "x", "max_turns": 3,
            "options": {"from": turn, "done": done},
        }  # fmt: skip
        (tmp_path / "registry.yaml").write_text(json.dumps({"guess": entry}))
        return ["--registry", str(tmp_path / "registry.yaml")]

    yield flags
    sys.modules.pop("changed_guess", None)


@pytest.fixture
def command(recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Fork through the command line, by default with the recorded model; returns exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def running(*argv: str, text: str = "", run_folder: Path | None = None) -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        model = () if {"--model", "model"} & {*argv} else ("--model", "recorded")
        code = exit_code(lambda: run([str(run_folder or recording.folder), *argv, *model]))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return running


def test_what_the_environment_answers_otherwise_is_said_before_anybody_plays_on(command, changed) -> None:
    code, shown = command("--id", "train-0-0", "--fork", "2", *changed(2), text="11\n")
    assert code == 0
    told = "--- not as recorded: observation, turn 2 [0].content\n  recorded: Lower.\n  now:      Warmer.\n"
    assert told in shown
    assert shown.index(told) < shown.index("--- turn 3,")
    assert "Warmer." in shown[shown.index("--- the environment answers turn 2") :]  # it goes on from that


def test_a_change_after_the_turn_is_no_difference(command, changed) -> None:
    assert "not as recorded" not in command("--id", "train-0-0", "--fork", "1", *changed(2), text="11\n")[1]


def test_an_environment_that_ends_the_episode_before_the_turn_is_told(command, changed) -> None:
    _, shown = command("--id", "train-0-0", "--fork", "2", *changed(1, "always"), text="11\n")
    assert "--- end: completed, reward 0, 1 turn," in shown
    assert shown.splitlines()[-1] == "--- no turn was added: the episode ended before turn 3"
    assert "> 11" not in shown


def test_an_environment_that_no_longer_ends_the_episode_is_told(command, changed) -> None:
    flags = ("--id", "train-0-0", "--fork", "3", "--max-turns", "4")
    _, shown = command(*flags, *changed(3, "never"), text="11\n")
    assert "--- not as recorded: done, turn 3\n  recorded: true\n  now:      false\n" in shown
    assert "--- turn 4," in shown


def test_a_recording_names_the_bundled_model_so_that_a_fork_needs_no_path(renderer: Renderer) -> None:
    assert build_manifest(get_spec("guess"), renderer, str(STARTER_PATH), {}).model == "starter"


def test_another_prompt_is_told(recording: Recording, renderer: Renderer) -> None:
    episode = episode_of(recording, "train-0-0")
    other = episode.model_copy(update={"messages": ({"role": "user", "content": "Guess!"}, *episode.messages[1:])})
    _, told = forked(recording, other, 0, renderer, guesses(renderer, "11"))
    assert [text.split(",")[0] for text in told] == ["tokens"]


def zoom_recording(renderer: Renderer, checkpoint: Path, folder: Path) -> tuple[Recording, str]:
    """A recording of one episode that zooms twice before it answers, and the right answer."""
    sample = get_spec("geo3k_zoom").load_dataset("train", 1, 0)[0]
    zoom = write_call("zoom", {"left": 0, "top": 0, "right": 500, "bottom": 500}, "hermes")
    trajectory, episode = played(renderer, "geo3k_zoom", sample, [zoom, zoom, "\\boxed{1}"], 4)
    with Recorder(
        folder, build_manifest(get_spec("geo3k_zoom"), renderer, str(checkpoint), {"train": episode})
    ) as recorder:
        recorder.write(trajectory, step=0)
    return Recording.open(folder), str(sample.label)


class Blotted(Geo3kZoomEnv):
    """Shows images with another first pixel; with the option "hides", the first one not at all."""

    shown = 0

    def format_observation(self, observation):
        messages = super().format_observation(observation)
        self.shown += 1
        for message in messages:
            if self.shown == 1 and self.args.options.get("hides"):
                message["content"] = "No image."
            for part in message["content"]:
                if isinstance(part, dict) and part["type"] == "image":
                    part["image"].putpixel((0, 0), (1, 2, 3))
        return messages


def test_other_pixels_are_told(
    renderer: Renderer, checkpoint: Path, tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, answer = zoom_recording(renderer, checkpoint, tmp_path / "zoom")
    flags = ("--id", "train-0-0", "--fork", "2")
    assert "not as recorded" not in command(*flags, text=f"\\boxed{{{answer}}}\n", run_folder=recording.folder)[1]
    monkeypatch.setattr("envs.geo3k.zoom.Geo3kZoomEnv", Blotted)
    _, shown = command(*flags, text=f"\\boxed{{{answer}}}\n", run_folder=recording.folder)
    told = [line for line in shown.splitlines() if "as recorded" in line]
    assert told[:2] == [f"--- not as recorded: image, turn {n} [0].content[0].image" for n in (1, 2)], shown


def test_a_image_that_is_no_longer_shown_is_told_and_so_are_the_pixels_of_the_next(
    renderer: Renderer, checkpoint: Path, tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, answer = zoom_recording(renderer, checkpoint, tmp_path / "zoom")
    monkeypatch.setattr("envs.geo3k.zoom.Geo3kZoomEnv", Blotted)
    entry = get_spec("geo3k_zoom").model_dump(exclude={"id", "origin", "parts"}) | {"options": {"hides": True}}
    (tmp_path / "registry.yaml").write_text(json.dumps({"geo3k_zoom": entry}))
    flags = ("--id", "train-0-0", "--fork", "2", "--registry", "registry.yaml")
    code, shown = command(*flags, text=f"\\boxed{{{answer}}}\n", run_folder=recording.folder)
    assert code == 0 and "now:      " in shown and "No image." in shown
    assert "not as recorded: image, turn 2" in shown


# By hand and by a script ---------------------------------------------------------------------------------------------


def test_a_person_plays_on_through_a_pipe_and_sees_what_was_before(command, recording: Recording) -> None:
    code, shown = command("--id", "train-1-0", "--fork", "1", text="20\n.\n11\n.\n")
    episode = episode_of(recording, "train-1-0")
    assert code == 0
    written, read = sum(episode.mask), len(episode.mask) - sum(episode.mask)
    places = [
        shown.index(text)
        for text in (
            "train-1-0: guess, sample game, 3 turns",
            f"--- recorded: max_turns, reward 0, 3 turns, {written} tokens written, {read} read",
            "--- the environment answers turn 1: done False, info {'guess': 1}",
            "<|im_start|>user\nGuess my number from 1 to 20.<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
            "<|im_start|>user\nHigher.<|im_end|>",
            "--- turn 2,",
            "> 20",
            "--- the environment answers turn 2: done False, info {'guess': 20}",
            "Lower.",
            "--- turn 3,",
            "> 11",
            "--- the environment answers turn 3: done True, info {'guess': 11}",
            "--- end: completed, reward 1, 3 turns,",
        )
    ]
    assert places == sorted(places)
    assert shown.splitlines()[-1].startswith("--- recorded: max_turns, reward 0, 3 turns,")


def test_images_of_the_turns_before_are_named(renderer: Renderer, checkpoint: Path, tmp_path: Path, command) -> None:
    recording, answer = zoom_recording(renderer, checkpoint, tmp_path / "zoom")
    argv = ("--id", "train-0-0", "--fork", "2")
    code, shown = command(*argv, text=f"\\boxed{{{answer}}}\n", run_folder=recording.folder)
    assert code == 0
    assert re.findall(r"\[(play/\S+)", shown) == [
        f"play/train-0-0-fork2-{name}-1.png" for name in ("prompt", "turn1", "turn2")
    ]
    assert "--- end: completed, reward 1, 3 turns" in shown


def test_more_turns_and_fewer_tokens_can_be_given(command) -> None:
    flags = ("--id", "train-1-0", "--fork", "3")
    assert "--max-turns: must be over 3 to continue after turn 3, got 3" in command(*flags, text="11\n")[1]
    assert "--- end: completed, reward 1, 4 turns," in command(*flags, "--max-turns", "4", text="11\n")[1]
    _, shown = command(*flags, "--max-turns", "4", "--max-new-tokens", "12", text="11\n")
    assert "--- end: token_budget" in shown and "no turn was added" in shown


def test_what_is_played_on_is_recorded_as_played(command, tmp_path: Path, recording: Recording) -> None:
    command("--id", "train-1-0", "--fork", "2", "--record", "forks", text="11\n")
    (played,) = Recording.open(tmp_path / "forks").episodes()
    assert (played.id, played.phase, played.reward, played.sample_id) == ("play-1-0", "play", 1.0, "game")
    episode = episode_of(recording, "train-1-0")
    start = episode.turns[2].start
    assert played.ids[:start] == episode.ids[:start]


# By a model ----------------------------------------------------------------------------------------------------------


def texts_of(folder: Path) -> list[list[str]]:
    return [[turn.text for turn in episode.turns] for episode in Recording.open(folder).episodes()]


def test_a_model_plays_on_alike_with_one_seed_and_else_with_another(command, checkpoint: Path, tmp_path: Path) -> None:
    model = ("--id", "train-1-0", "--fork", "2", "--by", "model", "--model", str(checkpoint))
    for name, seed in (("one", "3"), ("again", "3"), ("other", "4")):
        code, shown = command(*model, "--max-new-tokens", "60", "--seed", seed, "--record", name)
        assert code == 0 and "--- turn 3\n" in shown and "--- end: " in shown
        assert "user: Guess my number from 1 to 20.\n--- turn 1, recorded\n1\n--- the environment answers" in shown
    one, again, other = (texts_of(tmp_path / name)[0] for name in ("one", "again", "other"))
    assert one[:2] == other[:2] == ["1", "2"] and len(one) == 3
    assert one == again != other


def test_the_same_weights_write_what_they_had_written(command, checkpoint: Path, tmp_path: Path) -> None:
    model = ("--by", "model", "--model", str(checkpoint), "--max-new-tokens", "60")
    command("--id", "train-1-0", "--fork", "2", *model, "--seed", "5", "--record", "first")
    (recorded,) = Recording.open(tmp_path / "first").episodes()
    command("--id", recorded.id, "--fork", "2", *model, "--record", "second", run_folder=tmp_path / "first")
    (repeated,) = Recording.open(tmp_path / "second").episodes()
    assert repeated.ids == recorded.ids and len(recorded.turns) == 3
    assert np.allclose(repeated.streams[0].logprobs_T, recorded.streams[0].logprobs_T, atol=1e-5)


def test_several_continuations_are_counted_beside_what_was_recorded(command, checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--by", "model", "--model", str(checkpoint), "--samples", "5", "--max-new-tokens", "60")
    code, shown = command("--id", "train-0-0", "--fork", "2", *flags, "--record", "forks")
    episodes = list(Recording.open(tmp_path / "forks").episodes())
    assert code == 0 and [episode.id for episode in episodes] == [f"play-0-{n}" for n in range(5)]
    assert len({episode.turns[-1].text for episode in episodes}) == 5
    rows = re.findall(r"^(\d) +(\S+) +(\d+) +(\d+) +(\S+)$", shown, re.MULTILINE)
    assert [(float(r), int(n), int(w), end) for _, r, n, w, end in rows] == [
        (e.reward, len(e.turns), sum(e.mask), e.end_reason) for e in episodes
    ]
    mean = sum(episode.reward for episode in episodes) / 5
    assert (
        f"--- end: 5 of 5 samples count, mean reward {mean:.3g}, best {max(e.reward for e in episodes):.3g}\n" in shown
    )
    assert "--- recorded: completed, reward 1, 3 turns," in shown.splitlines()[-1]


def test_a_person_plays_on_without_torch(recording: Recording) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['torchvision'] = None\n"
        "from agents.replay import run\n"
        f"code = run(['{recording.folder}', '--id', 'train-1-0', '--fork', '2', '--model', 'recorded'])\n"
        "print(code, 'trainer' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input="11\n", capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"


def test_the_path_of_a_model_is_not_taken_from_a_recording(recording: Recording) -> None:
    flags = [str(recording.folder), "--id", "train-0-0", "--fork", "1"]
    with pytest.raises(UserError, match="--model: must be given: no path is taken from a recording, got nothing"):
        run(flags)


# What a user can mend ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--fork", "4", "--id", "train-0-0"], "--fork: must be at most 3, got 4; train-0-0 has 3 turns"),
        (["--fork", "1"], "--id: must select one episode to continue, got train-0-0, train-1-0; name one"),
        (["--fork", "1", "--id", "train-9-0"], "--id: must select one episode to continue, got none"),
        (
            ["--fork", "1", "--id", "train-0-0", "--samples", "2"],
            "--samples: must be 1 unless a model continues, got 2",
        ),
        (["--fork", "1", "--id", "train-0-0", "--by", "model"], "--model: must name the model for --by model"),
        (
            [
                "--fork",
                "1",
                "--id",
                "train-0-0",
                "--by",
                "model",
                "--model",
                "m",
                "--samples",
                "2",
                "--temperature",
                "0",
            ],
            "--samples: must be 1 at temperature 0, because all samples would be equal, got 2",
        ),
        (["--fork", "1", "--id", "train-0-0", "--by", "hands"], "--by: must be"),
        (["--fork", "-1", "--id", "train-0-0"], "--fork: must be"),
    ],
)
def test_what_a_user_can_mend_is_exit_code_2(command, argv: list[str], error: str) -> None:
    code, shown = command(*argv)
    assert code == 2 and error in shown, shown


def test_a_turn_that_was_never_finished_cannot_be_forked_at(
    renderer: Renderer, checkpoint: Path, tmp_path: Path, command
) -> None:
    cut, episode = played(renderer, "guess", GAME, ["I say 5.", "x" * 400], 3)
    assert cut.end_reason is EndReason.TOKEN_BUDGET
    with Recorder(
        tmp_path / "cut", build_manifest(get_spec("guess"), renderer, str(checkpoint), {"train": episode})
    ) as recorder:
        recorder.write(cut, step=0)
    code, shown = command("--id", "train-0-0", "--fork", "2", run_folder=tmp_path / "cut")
    assert code == 2 and "--fork: must be at most 1, got 2; turn 2 was never finished: its tokens ran out" in shown


def test_ids_that_mean_something_else_to_the_tokenizer_are_refused(recording: Recording, renderer: Renderer) -> None:
    episode = episode_of(recording, "train-0-0")
    turns = (episode.turns[0], episode.turns[1].model_copy(update={"text": "So 14."}), episode.turns[2])
    other = episode.model_copy(update={"turns": turns})
    check_tokenizer(episode, 3, renderer)
    check_tokenizer(other, 1, renderer)
    with pytest.raises(UserError, match=r"--model: must have the tokenizer of the recording, where turn 2 is 'So 14.'"):
        check_tokenizer(other, 2, renderer)
