"""Claims about slime's debug dumps: what they hold is replayed, what they lack is said, and no code of theirs runs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agents.engines.scripted import ScriptedEngine
from agents.recording import EpisodeRecord, Recording
from agents.rendering.renderer import Renderer
from agents.replay import ReplayConfig, open_all, replay_all, run
from agents.replaying.report import kinds
from agents.replaying.runner import ReplaySummary
from agents.replaying.slime import DumpConfig, open_dumps
from agents.rollout.episode import Episode, Limits
from agents.types import EndReason, SamplingParams, Trajectory
from envs.checking.hostile import write_call
from envs.config.cli import exit_code
from envs.errors import UserError
from envs.execution.load import load_env
from envs.registry import get_spec
from envs.types import message_images
from tests.paths import ROOT
from tests.slime_dumps import OLD_FIELDS, save_dump, slime_sample

SPEC = get_spec("geo3k")
PROBLEMS = SPEC.load_dataset("train", 3, 0)
WRONG = write_call("calc_score", {"answer": "no"}, "hermes")


def play(renderer: Renderer, group: int, index: int, texts: Sequence[str], max_turns: int = 3) -> Trajectory:
    """Play a script with the real loop."""
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: texts[turn])
    params = SamplingParams(1.0, renderer.stop_ids, renderer.suppressed_ids)
    episode = Episode(engine, renderer, Limits(max_turns, 400), params)
    build, args, problem = load_env(SPEC), SPEC.args(max_turns), PROBLEMS[group]
    t = asyncio.run(episode.run(problem, lambda: build(problem, args), seed=1, sample_index=index, group=group))
    logprobs_T = np.where(t.mask_T, -np.arange(len(t.mask_T)) / 256, 0.0).astype(np.float32)
    return replace(t, logprobs_T=logprobs_T)  # so that tokens can be told apart


@pytest.fixture(scope="module")
def trajectories(renderer: Renderer) -> list[Trajectory]:
    """Two groups of two: right in turn 2, wrong at once; right at once, wrong in turn 3."""
    right = [f"So \\boxed{{{problem.label}}}" for problem in PROBLEMS]
    return [
        play(renderer, 0, 0, [WRONG, right[0]]),
        play(renderer, 0, 1, ["\\boxed{-1}"]),
        play(renderer, 1, 0, [right[1]]),
        play(renderer, 1, 1, [WRONG, WRONG, "\\boxed{-1}"]),
    ]


@pytest.fixture
def samples(trajectories: list[Trajectory], renderer: Renderer) -> list[dict[str, Any]]:
    return [slime_sample(trajectory, renderer) for trajectory in trajectories]


def outcome_of(dump: Path, model: Path, **settings: Any) -> ReplaySummary:
    config = ReplayConfig.model_validate({"run": str(dump), "env": "geo3k", "model": str(model), **settings})
    return replay_all(config, open_all(config))


def opened(dump: Path, model: Path, spec: str = "geo3k", **settings: Any) -> tuple[list[EpisodeRecord], list[str]]:
    """Return the records that a dump becomes, and what is said of them."""
    recording, notes = open_dumps([dump], get_spec(spec), str(model), DumpConfig(**settings))
    return list(recording.episodes()), notes


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path):
    """Replay a dump through the command line; returns the exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def running(dump: Path, *argv: str) -> tuple[int, str]:
        code = exit_code(lambda: run([str(dump), "--env", "geo3k", "--model", str(checkpoint), *argv]))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return running


# What is there -------------------------------------------------------------------------------------------------------


def test_a_dump_of_episodes_that_go_as_they_went_has_no_difference(
    samples: list[dict[str, Any]], checkpoint: Path, tmp_path: Path
) -> None:
    outcome = outcome_of(save_dump(tmp_path / "rollout_4.pt", samples), checkpoint)
    assert (outcome.num_replayed, outcome.num_turns, outcome.found) == (4, 7, [])


def test_a_dump_becomes_the_record_that_we_would_have_made(
    trajectories: list[Trajectory], samples: list[dict[str, Any]], checkpoint: Path, tmp_path: Path
) -> None:
    episodes, notes = opened(save_dump(tmp_path / "rollout_4.pt", samples, 4), checkpoint)
    assert notes == []
    for t, episode in zip(trajectories, episodes, strict=True):
        assert episode.id == f"train-{t.group}-{t.sample_index}" and episode.step == 4
        assert (episode.ids, episode.mask) == (tuple(t.ids_T.tolist()), tuple(t.mask_T.astype(int).tolist()))
        assert np.array_equal(episode.logprobs_T, t.logprobs_T)
        assert (episode.prompt_length, episode.label, episode.reward) == (t.prompt_length, t.label, t.reward)
        assert (episode.end_reason, episode.metadata) == (t.end_reason, dict(t.metadata))
        assert [(turn.start, turn.end, turn.text, turn.done) for turn in episode.turns] == [
            (turn.start, turn.end, turn.text, turn.done) for turn in t.turns
        ]
        assert [image.digest for image in episode.images] == [image.digest for image in t.images]
        assert all(turn.versions == ((3, turn.end - turn.start),) for turn in episode.turns)


def test_a_prompt_that_was_rendered_to_text_is_read_back_with_its_pictures(
    trajectories: list[Trajectory], samples: list[dict[str, Any]], checkpoint: Path, tmp_path: Path
) -> None:
    recording, _ = open_dumps([save_dump(tmp_path / "0.pt", samples)], SPEC, str(checkpoint), DumpConfig())
    episode = next(recording.episodes())
    system, user = recording.messages(episode.messages[: episode.num_prompt_messages])
    assert system["role"] == "system" and "calc_score" in system["content"]  # the template has written the tools there
    assert not recording.manifest.ways["train"].use_tools
    (picture,) = message_images([user])
    (shown,) = message_images([dict(message) for message in trajectories[0].messages])
    assert picture.tobytes() == shown.tobytes()
    assert [part.get("text") for part in user["content"]] == [None, "Find x."]


@pytest.mark.parametrize("has_fields", ["all", "old"])
def test_prompts_of_messages_and_old_samples_replay_too(
    trajectories: list[Trajectory], renderer: Renderer, checkpoint: Path, tmp_path: Path, has_fields: str
) -> None:
    samples = [
        slime_sample(t, renderer, [dict(message) for message in t.messages[: t.num_prompt_messages]])
        for t in trajectories
    ]
    if has_fields == "old":
        samples = [{name: sample[name] for name in OLD_FIELDS} for sample in samples]
    dump = save_dump(tmp_path / "0.pt", samples)
    assert outcome_of(dump, checkpoint).found == []
    episodes, _ = opened(dump, checkpoint)
    assert [len(episode.images) for episode in episodes] == [1] * 4 if has_fields == "all" else [0] * 4


def test_turns_are_the_runs_of_the_mask(samples: list[dict[str, Any]], checkpoint: Path, tmp_path: Path) -> None:
    ids = list(range(40, 50))
    sample = {**samples[0], "tokens": ids, "response_length": 6, "loss_mask": [1, 1, 0, 0, 1, 0], "response": ""}
    sample |= {"rollout_log_probs": [-1.0, -2.0, 0.0, 0.0, -3.0, 0.0], "multimodal_inputs": None, "status": "truncated"}
    ((episode,), _) = opened(save_dump(tmp_path / "0.pt", [sample]), checkpoint)
    assert [(turn.start, turn.end, turn.finish) for turn in episode.turns] == [(4, 6, "stop"), (8, 9, "length")]
    assert (episode.ids, episode.mask) == (tuple(ids[:9]), (0, 0, 0, 0, 1, 1, 0, 0, 1))
    assert episode.logprobs == (-1.0, -2.0, -3.0)


@pytest.mark.parametrize(
    ("status", "shows_more", "end_reason", "finish"),
    [
        ("completed", False, EndReason.COMPLETED, "stop"),
        ("completed", True, EndReason.MAX_TURNS, "stop"),
        ("truncated", False, EndReason.TOKEN_BUDGET, "length"),
        ("truncated", True, EndReason.TOKEN_BUDGET, "length"),
        ("aborted", False, EndReason.ABORTED, "abort"),
        ("failed", False, EndReason.ENV_ERROR, "stop"),
    ],
)
def test_every_status_is_an_end_reason(
    samples: list[dict[str, Any]],
    checkpoint: Path,
    tmp_path: Path,
    status: str,
    shows_more: bool,
    end_reason: EndReason,
    finish: str,
) -> None:
    more = [50, 51] * shows_more
    length = 3 + len(more)
    sample = {**samples[1], "tokens": [40, 41, 42, 43, *more], "response_length": length, "status": status}
    sample |= {"loss_mask": [1, 1, 1] + [0] * len(more), "rollout_log_probs": [-1.0] * length, "response": ""}
    ((episode,), _) = opened(save_dump(tmp_path / "0.pt", [sample]), checkpoint)
    assert (episode.end_reason, episode.turns[0].finish, len(episode.ids)) == (end_reason, finish, 4)
    assert episode.turns[0].done == (end_reason is EndReason.COMPLETED)


def test_turns_that_ran_out_replay_with_as_many_turns_as_there_were(
    renderer: Renderer, checkpoint: Path, tmp_path: Path, command
) -> None:
    t = play(renderer, 0, 0, [WRONG, WRONG], max_turns=2)
    assert t.end_reason is EndReason.MAX_TURNS
    sample = slime_sample(t, renderer)
    answer = renderer.suffix([dict(m) for m in t.turns[-1].observations], last_id=int(t.ids_T[-1])).ids
    sample["tokens"] += answer  # which slime appends before it counts the turns
    sample["loss_mask"] += [0] * len(answer)
    sample["rollout_log_probs"] += [0.0] * len(answer)
    sample["response_length"] += len(answer)
    sample["response"] += renderer.tokenizer.decode(answer, skip_special_tokens=False)
    dump = save_dump(tmp_path / "0.pt", [sample])
    ((episode,), _) = opened(dump, checkpoint)
    assert episode.end_reason is EndReason.MAX_TURNS and episode.ids == tuple(t.ids_T.tolist())
    assert outcome_of(dump, checkpoint).found == []  # although the registry allows three turns
    (tmp_path / "script").write_text("\\boxed{-1}\n")
    flags = ("--id", "train-0-0", "--fork", "2", "--max-turns", "3", "--by", "script", "--script", "script")
    code, shown = command(dump, *flags)
    assert code == 0 and "--- end: completed, reward 0, 3 turns," in shown
    assert "answers turn 2 differently" not in shown  # what was said then is not known


# What differs --------------------------------------------------------------------------------------------------------


def test_a_reward_and_an_end_that_are_others_now_are_found(
    samples: list[dict[str, Any]], checkpoint: Path, tmp_path: Path
) -> None:
    samples[0]["reward"] = 0.0
    outcome = outcome_of(save_dump(tmp_path / "0.pt", samples), checkpoint)
    assert [found.id for found in outcome.differing] == ["train-0-0"]
    (difference,) = outcome.differing[0].differences
    assert (difference.kind, difference.recorded, difference.replayed) == ("reward", 0.0, 1.0)
    samples[0]["reward"], samples[2]["label"] = 1.0, "-5"  # a problem with another answer
    outcome = outcome_of(save_dump(tmp_path / "0.pt", samples), checkpoint)
    assert ([found.id for found in outcome.differing], set(kinds(outcome.differing))) == (["train-1-0"], {"reward"})


def test_slimes_lost_newline_is_found_in_the_kept_recording(
    trajectories: list[Trajectory], renderer: Renderer, checkpoint: Path, tmp_path: Path, command
) -> None:
    sample = slime_sample(trajectories[0], renderer)
    t, start = trajectories[0], trajectories[0].turns[0].end - trajectories[0].prompt_length
    assert renderer.tokenizer.decode([int(t.ids_T[t.turns[0].end])]) == "\n"
    del sample["tokens"][t.prompt_length + start]
    for name in ("loss_mask", "rollout_log_probs"):
        del sample[name][start]
    sample["response_length"] -= 1
    sample["response"] = renderer.tokenizer.decode(sample["tokens"][t.prompt_length :], skip_special_tokens=False)
    assert command(save_dump(tmp_path / "0.pt", [sample]), "--convert", "kept")[0] == 0
    code, shown = command(tmp_path / "kept")
    assert code == 1 and re.search(r"tokens +1 +train-0-0 turn 2 token \d+", shown), shown


def test_the_report_says_what_is_not_compared(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    code, shown = command(save_dump(tmp_path / "0.pt", samples))
    assert code == 0
    assert shown.splitlines()[0] == (
        "note: converted from slime: observations and infos were not recorded and are not compared"
    )
    assert shown.splitlines()[-1].startswith("geo3k: 4 episodes, 4 replayed, 0 differ (")


# What is done with it ------------------------------------------------------------------------------------------------


def test_a_dump_can_be_kept_as_a_recording_that_replays_alike(
    samples: list[dict[str, Any]], tmp_path: Path, command
) -> None:
    samples[1]["reward"] = 1.0
    dump = save_dump(tmp_path / "0.pt", samples)
    assert command(dump, "--convert", "kept")[0] == 1
    assert Recording.open(tmp_path / "kept").manifest.converted_from == "slime"
    code, shown = command(tmp_path / "kept")
    assert (
        code == 1 and "were not recorded and are not compared" in shown and "token streams compared, 1 differ" in shown
    )
    code, shown = command(dump, "--convert", "kept")
    assert code == 2 and "--convert: must name a folder without a recording, got kept" in shown
    assert not list(tmp_path.glob("*.part"))


def test_a_conversion_that_fails_leaves_nothing(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    samples[3]["reward"] = None
    code, shown = command(save_dump(tmp_path / "0.pt", samples), "--convert", "kept")
    assert code == 2 and "0.pt sample 3 reward: must be a number in a sample that has ended, got none" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]


@pytest.mark.parametrize("folder", ["full", ".", "file"])
def test_a_dump_is_not_kept_in_what_is_no_empty_folder(
    folder: str, samples: list[dict[str, Any]], tmp_path: Path, command
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    code, shown = command(save_dump(tmp_path / "0.pt", samples), "--convert", folder)
    assert code == 2 and f"--convert: must name a new folder, or an empty one, got {folder}" in shown
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("token", [2**70, float("inf"), -(2**63)])
def test_tokens_of_no_size_that_a_token_has_are_refused(
    token: float, samples: list[dict[str, Any]], tmp_path: Path, command
) -> None:
    samples[1]["tokens"] = [token, *samples[1]["tokens"][1:]]
    code, shown = command(save_dump(tmp_path / "0.pt", samples))
    assert code == 2 and "0.pt sample 1 tokens: must be a list of numbers" in shown


def test_a_group_of_no_size_that_a_number_has_is_no_group(
    samples: list[dict[str, Any]], tmp_path: Path, command
) -> None:
    assert command(save_dump(tmp_path / "0.pt", [{**each, "group_index": 2**80} for each in samples]))[0] == 0


def test_an_episode_of_a_dump_is_played_on_from_a_turn(
    trajectories: list[Trajectory], samples: list[dict[str, Any]], tmp_path: Path, command
) -> None:
    (tmp_path / "script").write_text(f"\\boxed{{{PROBLEMS[1].label}}}\n")
    flags = ("--id", "train-1-1", "--fork", "1", "--by", "script", "--script", "script", "--record", "fork")
    code, shown = command(save_dump(tmp_path / "0.pt", samples), *flags)
    assert code == 0 and "not as recorded" not in shown, shown
    assert "--- end: completed, reward 1, 2 turns," in shown and "--- recorded: completed, reward 0, 3 turns," in shown
    (fork,) = Recording.open(tmp_path / "fork").episodes()
    start = trajectories[3].turns[1].start
    assert fork.ids[:start] == tuple(trajectories[3].ids_T[:start].tolist())


def test_an_episode_without_log_probs_is_played_on_too(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    (tmp_path / "script").write_text("\\boxed{-1}\n")
    dump = save_dump(tmp_path / "0.pt", [{**sample, "rollout_log_probs": None} for sample in samples])
    code, shown = command(dump, "--id", "train-1-1", "--fork", "1", "--by", "script", "--script", "script")
    assert code == 0 and "--- end: completed, reward 0, 2 turns," in shown
    assert "note: 4 of 4 samples have no log-probs" in shown


def test_rewards_of_a_dump_can_be_given_again(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    code, shown = command(save_dump(tmp_path / "0.pt", samples), "--rescore", "geo3k_strict")
    assert code == 0 and "mean reward 0.5 recorded, 0.5 with geo3k_strict; 0 of 4 flip" in shown


def test_a_folder_of_dumps_is_read_in_order_and_its_samples_are_told_apart(
    samples: list[dict[str, Any]], tmp_path: Path, checkpoint: Path, command
) -> None:
    (tmp_path / "dumps").mkdir()
    for number, some in ((10, samples[:2]), (2, samples[2:]), (11, samples[:1])):
        save_dump(tmp_path / "dumps" / f"{number}.pt", some, number)
    save_dump(tmp_path / "dumps" / "eval_2.pt", samples[:1], 2)
    code, shown = command(tmp_path / "dumps", "--convert", "kept")
    assert code == 0 and "6 episodes, 6 replayed, 0 differ" in shown
    assert [(e.id, e.step, e.phase) for e in Recording.open(tmp_path / "kept").episodes()] == [
        ("train-1-0", 2, "train"),
        ("train-1-1", 2, "train"),
        ("train-0-0", 10, "train"),
        ("train-0-1", 10, "train"),
        ("train-0-0-1", 11, "train"),
        ("evaluate-0-0", 2, "evaluate"),
    ]


def test_samples_without_a_group_are_grouped_by_their_problem(
    samples: list[dict[str, Any]], tmp_path: Path, checkpoint: Path
) -> None:
    dump = save_dump(tmp_path / "0.pt", [{**sample, "group_index": None} for sample in samples])
    assert [episode.id for episode in opened(dump, checkpoint)[0]] == [
        "train-0-0", "train-0-1", "train-1-0", "train-1-1",
    ]  # fmt: skip


def test_one_of_several_rewards_is_named(
    samples: list[dict[str, Any]], tmp_path: Path, checkpoint: Path, command
) -> None:
    several = [{**sample, "reward": {"score": sample["reward"], "acc": 1, "pred": "x"}} for sample in samples]
    dump = save_dump(tmp_path / "0.pt", several)
    code, shown = command(dump)
    assert code == 2 and "name one with --reward-key, as in slime's own: score, acc" in shown
    assert [episode.reward for episode in opened(dump, checkpoint, reward_key="score")[0]] == [1.0, 0.0, 1.0, 0.0]
    one = save_dump(tmp_path / "1.pt", [{**sample, "reward": {"score": 0.5, "pred": "x"}} for sample in samples])
    assert [episode.reward for episode in opened(one, checkpoint)[0]] == [0.5] * 4


# What is not there ---------------------------------------------------------------------------------------------------


def test_what_is_missing_is_counted(
    trajectories: list[Trajectory], renderer: Renderer, samples: list[dict[str, Any]], tmp_path: Path, checkpoint: Path
) -> None:
    path = [{"role": "user", "content": [{"type": "image", "image": "/data/1.png"}, {"type": "text", "text": "x?"}]}]
    elsewhere = slime_sample(trajectories[0], renderer, path, multimodal_inputs=None)
    text = "<|vision_start|><|image_pad|><|vision_end|>Question: x?\nAnswer:"
    strange = {**samples[1], "prompt": text}
    silent = {**samples[2], "loss_mask": [0] * samples[2]["response_length"]}
    dump = save_dump(tmp_path / "0.pt", [elsewhere, strange, silent, samples[3]])
    episodes, notes = opened(dump, checkpoint)
    assert [episode.id for episode in episodes] == ["train-0-0", "train-0-1", "train-1-1"]
    assert episodes[0].messages[0]["content"][0] == {"type": "text", "text": "[a picture that is not in the dump]"}
    (message,) = episodes[1].messages[: episodes[1].num_prompt_messages]
    assert message["role"] == "user" and message["content"][-1] == {"type": "text", "text": text}
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert sorted(notes) == [
        "1 of 4 samples have a prompt that is known only as text",
        "1 of 4 samples have loss mask 0 throughout, and are left out",
        "1 of 4 samples have pictures that do not match their tokens",
        "1 of 4 samples show a picture that is not in the dump",
    ]


class Hostile:
    """Makes a file when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_dump_runs(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    dump = save_dump(tmp_path / "0.pt", [{**samples[0], "metadata": {"x": Hostile(tmp_path / "made")}}])
    code, shown = command(dump)
    assert code == 2 and "so that reading it runs no code from it, got posix.mkdir;" in shown
    assert not (tmp_path / "made").exists()
    torch.load(dump, weights_only=False)
    assert (tmp_path / "made").exists()  # as slime itself would have read it


def test_what_a_dump_holds_besides_plain_values_is_named(
    samples: list[dict[str, Any]], tmp_path: Path, command
) -> None:
    code, shown = command(save_dump(tmp_path / "0.pt", [{**samples[0], "reward": np.float64(1.0)}]))
    assert code == 2 and "multiarray.scalar" in shown and "save it again without them" in shown


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (
            [{}, "RGB", (60_000, 60_000), None, b"abc"],
            "multimodal_inputs: must be a picture, got RGB of 60000x60000 pixels",
        ),
        ([{}, "RGB", (4, 4), None, b"abc"], "multimodal_inputs: must be a picture, got not enough image data"),
        ([{}, "X", (4, 4), None, b"abc"], "multimodal_inputs: must be a picture, got X of 4x4 pixels"),
        ("RGB", "multimodal_inputs: must be a picture, got"),
    ],
)
def test_a_picture_that_is_none_is_refused(
    samples: list[dict[str, Any]], tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch, state: Any, error: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "__getstate__", lambda self: state)
        save_dump(tmp_path / "0.pt", samples)
    code, shown = command(tmp_path / "0.pt")
    assert code == 2 and error in shown, shown


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tokens": None}, "sample 0 tokens: must be a list of numbers, got None"),
        ({"response_length": 10_000}, "sample 0 response_length: must be from 0 to the"),
        ({"loss_mask": [1]}, "sample 0 loss_mask: must have one for each of the"),
        ({"rollout_log_probs": [0.0]}, "sample 0 rollout_log_probs: must have one for each of the"),
        (
            {"status": "happy"},
            "sample 0 status: must be one of pending, completed, truncated, aborted, failed, got happy",
        ),
        ({"prompt": [1]}, "sample 0 prompt: must be a text or a list of messages, got [1]"),
        ({"reward": "good"}, "sample 0 reward: must be a number, got 'good'"),
        ({"reward": None}, "sample 0 reward: must be a number in a sample that has ended, got none"),
    ],
)
def test_a_sample_that_does_not_fit_together_is_named(
    samples: list[dict[str, Any]], tmp_path: Path, command, changes: dict[str, Any], error: str
) -> None:
    code, shown = command(save_dump(tmp_path / "0.pt", [samples[0] | changes]))
    assert code == 2 and f"0.pt {error}" in shown, shown


def test_a_file_that_is_no_dump_is_named(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    (tmp_path / "text.pt").write_text("hello")
    torch.save({"rollout_id": 0, "rewards": [1.0]}, tmp_path / "train.pt")
    save_dump(tmp_path / "half.pt", samples)
    (tmp_path / "half.pt").write_bytes((tmp_path / "half.pt").read_bytes()[:-200])
    for name, error in (
        ("text.pt", "must be a file of torch.save, got another file"),
        ("half.pt", "must be a file of torch.save, got another file"),
        ("none.pt", "must be a file of torch.save, got no such file"),
        (
            "train.pt",
            "must be a dump of --save-debug-rollout-data, with rollout_id and samples, got rollout_id, rewards",
        ),
    ):
        code, shown = command(tmp_path / name)
        assert code == 2 and f"{name}: {error}" in shown, shown
    code, shown = command(save_dump(tmp_path / "1.pt", [{"prompt": "x", "token": []}]))
    assert (
        code == 2
        and "sample 0: must have tokens and response_length and status, got prompt, token; did you mean" in shown
    )


def test_environment_and_tokenizer_must_be_given(samples: list[dict[str, Any]], tmp_path: Path) -> None:
    dump = save_dump(tmp_path / "0.pt", samples)
    with pytest.raises(UserError, match="--env: must name the environment of the dump"):
        run([str(dump), "--model", "m"])
    with pytest.raises(UserError, match="--model: must name the model of a dump"):
        run([str(dump), "--env", "geo3k"])


def test_another_tokenizer_is_found_out(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    shifted = [{**sample, "tokens": [each + 1 for each in sample["tokens"]]} for sample in samples]
    code, shown = command(save_dump(tmp_path / "0.pt", shifted))
    assert code == 2 and "--model: must be the model that wrote the dump, got" in shown
    few = save_dump(tmp_path / "1.pt", [shifted[0], *samples])  # a sample of which somebody has changed the text
    assert command(few, "--convert", "kept")[0] == 1


def test_convert_is_for_dumps(samples: list[dict[str, Any]], tmp_path: Path, command) -> None:
    command(save_dump(tmp_path / "0.pt", samples), "--convert", "kept")
    code, shown = command(tmp_path / "kept", "--convert", "more")
    assert code == 2 and "--convert: must be given with slime dumps" in shown


@pytest.mark.slow
def test_a_dump_leaves_nothing_behind(samples: list[dict[str, Any]], tmp_path: Path, checkpoint: Path) -> None:
    dump, place = save_dump(tmp_path / "0.pt", samples), tmp_path / "tmp"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "agents.replay", str(dump), "--env", "geo3k", "--model", str(checkpoint)],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(place)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, list(place.iterdir())) == (0, []), done.stderr
