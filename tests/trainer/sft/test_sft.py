"""Claims about supervised fine-tuning: what is optimised, what a bad conversation does, and the command end to end."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from agents.engines.scripted import ScriptedEngine
from agents.model.architectures import ModelFacts
from agents.model.mrope import mrope_positions
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.conversation import ConversationRenderer
from agents.rollout.episode import Episode, Limits
from agents.types import SamplingParams, Trajectory
from envs.config.cli import exit_code
from envs.config.settings import leaves
from envs.datasets.conversations import Conversation, ConversationOptions, open_conversations
from envs.env import EnvArgs
from envs.errors import UserError
from envs.geo3k.env import build_env
from envs.geo3k.problem import Problem
from envs.geo3k.procedural import ProceduralGeo3k
from envs.spec import EnvLimits
from envs.types import Message
from starter.demonstrations import demonstration_sample, solved
from starter.demonstrations import run as write_demonstrations
from starter.plans import MAX_TURNS, Mixture, Plan
from tests.builders import fresh_model
from tests.paths import DOCS
from tests.prompts import make_image
from tests.recordings import lines_of
from tests.trainer.runs import drawing
from tests.trainer.steps import Stepped, relative, take_step
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.config.sft import LIKELIHOOD, SftConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.run import run as reinforce
from trainer.sft.__main__ import run
from trainer.sft.data import check_conversations, training_samples
from trainer.sft.session import SftSession, step_places
from trainer.sft.setup import load_data
from trainer.types import TrainingSample

OPTIM = OptimConfig(lr=1e-3, warmup_steps=0)


def says(text: str, **others: Any) -> Message:
    return {"role": "assistant", "content": text, **others}


def asks(text: str, *seeds: int) -> Message:
    shown = [{"type": "image", "image": make_image(64, 32 * seed, seed)} for seed in seeds]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


#: Streams of one to three turns, with and without images, two of them from one prompt.
SPOKEN: tuple[tuple[Message, ...], ...] = (
    (asks("Find x.", 2), says("68")),
    (asks("Find x.", 2), says("70.", train=False), asks("No."), says("So it is 68.")),
    (asks("2 + 2?"), says("Five"), asks("Sure?", 3, 2), says("Oh."), {"role": "user", "content": "?"}, says("4, then")),
    (asks("What is the perimeter of the triangle?"), says("12")),
)


@pytest.fixture(scope="module")
def samples(renderer: Renderer) -> list[TrainingSample]:
    conversations = ConversationRenderer(renderer, 4096)
    streams = [conversations.stream(Conversation(f"row {n}", spoken)) for n, spoken in enumerate(SPOKEN)]
    assert renderer.image_token_id is not None
    return training_samples(streams, renderer.image_token_id, renderer.merge_size)


@pytest.fixture(scope="module")
def stepped(checkpoint: Path, samples: list[TrainingSample]) -> Stepped:
    return take_step(checkpoint, samples, SamplingParams(), OPTIM, algorithm=LIKELIHOOD)


def padded_loss(model: PolicyModel, samples: Sequence[TrainingSample]) -> Tensor:
    """Return torch's cross entropy over a padded batch of whole streams, labels -100 off the mask."""
    width = max(len(s.ids_T) for s in samples)
    ids_BT = torch.zeros(len(samples), width, dtype=torch.int64)
    labels_BT = torch.full((len(samples), width), -100)
    positions_3BT = torch.zeros(3, len(samples), width, dtype=torch.int64)
    for row, s in enumerate(samples):
        length, grids = len(s.ids_T), [image.grid_thw for image in s.images]
        ids_BT[row, :length] = torch.from_numpy(s.ids_T)
        labels_BT[row, :length][torch.from_numpy(s.mask_T)] = torch.from_numpy(s.ids_T[s.mask_T])
        positions = mrope_positions(s.ids_T, grids, model.image_token_id, model.merge_size)
        positions_3BT[:, row, :length] = torch.from_numpy(positions)
    vision = VisionBatch.build([s.images for s in samples], "cpu")
    everywhere = torch.ones_like(ids_BT, dtype=torch.bool)
    logits_BTV = model(ids_BT, positions_3BT, None, everywhere, vision).view(*ids_BT.shape, -1)
    return functional.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), labels_BT[:, 1:])


def test_loss_and_gradient_are_torchs_cross_entropy_on_padded_rows(
    model: PolicyModel, samples: list[TrainingSample], stepped: Stepped
) -> None:
    loss = padded_loss(model, samples)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert stepped.stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert relative(stepped.gradients, expected) < 1e-5
    assert stepped.stats.num_tokens == sum(int(s.mask_T.sum()) for s in samples)
    assert stepped.stats.objective["clip_frac"] == 0


def test_each_token_weighs_one_over_all_of_the_update(samples: list[TrainingSample]) -> None:
    total = sum(int(s.mask_T.sum()) for s in samples)
    assert [s.weight for s in samples] == [1 / total] * 4 and {s.advantage for s in samples} == {1.0}
    assert sum(s.weight * s.mask_T.sum() for s in samples) == pytest.approx(1)
    learnt = [sorted(set(s.turns_T[s.mask_T].tolist())) for s in samples]
    assert learnt == [[1], [2], [1, 2, 3], [1]]  # a turn keeps its number


@pytest.mark.parametrize(
    ("max_tokens", "order", "config"),
    [
        (1, [0, 1, 2, 3], LearnerConfig()),
        (120, [3, 1, 0, 2], LearnerConfig()),
        (100_000, [2, 3, 1, 0], LearnerConfig(recompute=1.0, offload="all")),
    ],
)
def test_packing_order_and_memory_settings_change_nothing(
    checkpoint: Path,
    samples: list[TrainingSample],
    stepped: Stepped,
    max_tokens: int,
    order: list[int],
    config: LearnerConfig,
) -> None:
    moved = [samples[index] for index in order]
    got = take_step(checkpoint, moved, SamplingParams(), OPTIM, max_tokens, LIKELIHOOD, config)
    assert got.stats.loss == pytest.approx(stepped.stats.loss, rel=1e-5)
    assert relative(got.gradients, stepped.gradients) < 1e-5
    assert relative(got.weights, stepped.weights) < 1e-5


@pytest.mark.parametrize("max_tokens", [1, 100_000])
def test_the_likelihood_of_held_out_conversations_is_the_loss_and_changes_nothing(
    checkpoint: Path, samples: list[TrainingSample], stepped: Stepped, max_tokens: int
) -> None:
    config = LearnerConfig(max_tokens_per_microbatch=max_tokens)
    learner = FSDPLearner(fresh_model(checkpoint), SamplingParams(), 1, algorithm=LIKELIHOOD, config=config)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    nats, tokens = learner.sum_logprobs(samples)
    assert -nats / tokens == pytest.approx(stepped.stats.loss, rel=1e-5) and tokens == stepped.stats.num_tokens
    assert learner.sum_logprobs([]) == (0.0, 0)
    assert relative(learner.weights(), before) == 0 and learner.steps_done == 0


def test_adapters_learn_and_the_rest_stays(checkpoint: Path, samples: list[TrainingSample]) -> None:
    config = LearnerConfig(lora_rank=4)
    learner = FSDPLearner(fresh_model(checkpoint), SamplingParams(), 8, OPTIM, LIKELIHOOD, config, path=checkpoint)
    losses = [learner.step([samples]).loss for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(".lora_" in name for name, p in learner.model.named_parameters() if p.requires_grad)


def write(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


GOOD = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
ENDS_WRONG = {"messages": [*GOOD["messages"], {"role": "user", "content": "Sure?"}]}
NO_IMAGE = {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "4"}]}


def test_bad_rows_are_counted_by_rule_and_left_out_up_to_a_share(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    rows = [GOOD, ENDS_WRONG, GOOD, NO_IMAGE, ENDS_WRONG, GOOD, GOOD, GOOD]
    source = open_conversations(str(write(tmp_path / "demos.jsonl", rows)), ConversationOptions())
    conversations, facts = ConversationRenderer(renderer, 4096), ModelFacts.load(checkpoint)
    found = check_conversations(source, conversations, facts, max_bad_frac=3 / 8)
    assert found.indices == (0, 2, 5, 6, 7) and len(found) == 5
    assert found.num_taught == 5 * found.streams([3])[0].num_taught
    rules = ["must end with an assistant's turn", "must have as many <image> placeholders as images"]
    assert dict(found.left_out.by_rule) == dict(zip(rules, (2, 1), strict=True))
    assert str(found.left_out).startswith(
        f"3 of 8 conversations are left out: 2 {rules[0]}; 1 {rules[1]}; the first: demos.jsonl row 1: {rules[0]}"
    )
    for most in (0.0, 0.37):
        with pytest.raises(UserError) as caught:
            check_conversations(source, conversations, facts, most)
        assert str(caught.value).startswith(f"demos.jsonl row 1: {rules[0]}, got the role user; drop what follows it")
        assert "3 of 8 conversations are bad, --max-bad-frac leaves them out" in str(caught.value)


def test_a_set_with_nothing_good_is_refused_whatever_may_be_left_out(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    source = open_conversations(str(write(tmp_path / "demos.jsonl", [ENDS_WRONG])), ConversationOptions())
    with pytest.raises(UserError, match="row 0: must end with an assistant's turn"):
        check_conversations(source, ConversationRenderer(renderer, 4096), ModelFacts.load(checkpoint), 1.0)


def test_demonstrations_are_one_stream_as_messages_and_as_they_were_played(renderer: Renderer, tmp_path: Path) -> None:
    habits = Mixture(tools_offered=0.8, checks=0.8, first_wrong=0.7, second_wrong=0.5)
    problems = ProceduralGeo3k("demonstrations", 24, seed=4)
    drawn = [problems.item(index) for index in range(24)]
    plans = [Plan.draw(problem, habits, random.Random(index)) for index, (problem, _) in enumerate(drawn)]
    rows = [solved(*item, plan) for item, plan in zip(drawn, plans, strict=True)]
    source = open_conversations(str(write(tmp_path / "demos.jsonl", rows)), ConversationOptions())
    conversations = ConversationRenderer(renderer, 4096)
    num_left_out = 0
    for index, (item, plan) in enumerate(zip(drawn, plans, strict=True)):
        stream, played = conversations.stream(source[index]), played_by_script(renderer, plan, *item)
        taught_T = played.mask_T.copy()
        for turn, planned in zip(played.turns, plan.turns(), strict=True):
            taught_T[turn.start : turn.end] &= planned.is_taught
        assert stream.ids_T.tolist() == played.ids_T.tolist()
        assert stream.mask_T.tolist() == taught_T.tolist()
        assert [image.digest for image in stream.trajectory.images] == [image.digest for image in played.images]
        num_left_out += int(stream.trajectory.mask_T.sum()) > stream.num_taught
    assert 3 < num_left_out < 20


def played_by_script(renderer: Renderer, plan: Plan, problem: Problem, image: Image.Image) -> Trajectory:
    """Return the episode of a plan in the agent loop."""
    texts = [turn.text for turn in plan.turns()]
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: texts[turn])
    limits = Limits(MAX_TURNS, 1024, EnvLimits(inline=True))
    sampling = SamplingParams(stop_ids=renderer.stop_ids)
    episode = Episode(engine, renderer, limits, sampling, use_tools=plan.use_tools)
    sample = demonstration_sample(problem, image)
    return asyncio.run(episode.run(sample, lambda: build_env(sample, EnvArgs(MAX_TURNS)), seed=0))


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    assert write_demonstrations(["--num", "12", "--seed", "3", "--out", str(file), "--checks", "0.5"]) == 0
    return file


def test_demonstrations_are_of_the_style_that_is_asked_for_and_say_what_was_wrong(tmp_path: Path) -> None:
    def rows(name: str, *argv: str) -> list[dict[str, Any]]:
        common = ["--num", "16", "--checks", "1", "--first-wrong", "1", "--out", str(tmp_path / name)]
        assert write_demonstrations([*common, *argv]) == 0
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    overprinted, plain = rows("a"), rows("b", "--style", "plain", "--no-corrects")
    assert all(one["images"] != other["images"] for one, other in zip(overprinted[:4], plain[:4], strict=True))
    assert sum("Look again: " in json.dumps(row) for row in overprinted) > 8
    assert "Look again: " not in json.dumps(plain)


def tune(checkpoint: Path, demos: Path, folder: Path, *argv: str, code: int = 0) -> dict[str, Any]:
    """Run the command in this process; return the summary."""
    common = ["--model", str(checkpoint), "--data", str(demos), "--batch-size", "4", "--tracker", ""]
    assert run([*common, "--out", str(folder.parent), "--name", folder.name, *argv]) == code
    return json.loads((folder / "summary.json").read_text())


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith("_s")}


@pytest.fixture(scope="module")
def tuned(checkpoint: Path, demos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole run; beside it, under the name `killed`, what a kill would have left of it in the seventh step."""
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    argv = ["--eval-data", str(demos), "--epochs", "3", "--eval-every", "4", "--lr", "2e-3", "--save-every", "4"]
    original = SftSession.begin_update

    async def begin_update(self: SftSession) -> None:
        if self.step == 7:
            self.checkpoints.finish()
            shutil.copytree(folder, folder.with_name("killed"))
        await original(self)

    with drawing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SftSession, "begin_update", begin_update)
        return folder, tune(checkpoint, demos, folder, *argv)


def test_sizes_count_the_first_conversations_of_files(
    checkpoint: Path, demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--eval-data", str(demos), "--train-size", "8", "--eval-size", "3"]
    tune(checkpoint, demos, tmp_path / "run", *sizes, "--steps", "1")
    shown = capsys.readouterr().out
    assert "\n8 conversations of" in shown and "; 3 held out; 1 steps" in shown


def test_the_command_lowers_the_loss_and_leaves_everything_behind(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = tuned
    rows = lines_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 10)) and summary["steps_done"] == 9
    assert summary["eval_loss_after"] < 0.8 * summary["eval_loss_before"]
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8]
    assert rows[-1]["loss"] < rows[0]["loss"] == summary["loss_first"]
    assert not any("rollout" in name or "logprob_gap" in name for row in rows for name in row)
    assert sum(row["num_tokens"] for row in rows) == 3 * summary["num_tokens_taught"]
    assert summary["num_conversations"] == 12 and not summary["interrupted"] and summary["left_out"] == {}
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "model"}


def test_a_run_that_was_killed_goes_on_with_the_same_losses_to_the_bit(tuned: tuple[Path, dict[str, Any]]) -> None:
    whole, killed = tuned[0], tuned[0].with_name("killed")
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step-4"] and not (killed / "model").exists()
    assert len(lines_of(killed / "metrics.jsonl")) == 6
    assert run(["--resume", str(killed)]) == 0
    assert [timeless(row) for row in lines_of(killed / "metrics.jsonl")] == [
        timeless(row) for row in lines_of(whole / "metrics.jsonl")
    ]
    summary = json.loads((killed / "summary.json").read_text())
    for name in ("eval_loss_before", "eval_loss_after", "loss_first", "steps_done"):
        assert summary[name] == tuned[1][name], name
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (killed, whole)]
    assert weights[0] == weights[1]
    with pytest.raises(UserError, match="--batch-size: must stay as in the run, which has 4, got 2"):
        run(["--resume", str(killed), "--batch-size", "2"])


def test_sigterm_ends_the_step_and_saves(checkpoint: Path, demos: Path, tmp_path: Path) -> None:
    original = SftSession.begin_update

    async def begin_and_stop(self: SftSession) -> None:
        if self.step == 2:
            signal.raise_signal(signal.SIGTERM)
        await original(self)

    folder, before = tmp_path / "stopped", signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SftSession, "begin_update", begin_and_stop)
        summary = tune(checkpoint, demos, folder, "--steps", "6", code=130)
    assert summary["interrupted"] and summary["steps_done"] == 2 and summary["eval_loss_after"] is None
    assert (folder / "model" / "model.safetensors").exists() and (folder / "checkpoints" / "step-2").is_dir()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_skipped_an_update_does_not_pass_for_one_that_went_well(
    checkpoint: Path, demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = tune(checkpoint, demos, tmp_path / "run", "--steps", "3", "--lr", "1e38", "--save-every", "0", code=1)
    assert summary["steps_done"] == 3 and summary["steps_skipped"] == [2, 3]
    assert (
        "error: updates were skipped in 2 steps (2, 3): loss or gradient was not finite; give"
        in capsys.readouterr().err
    )


def test_reinforcement_goes_on_from_the_model(tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    small = ["--steps", "1", "--problems-per-step", "2", "--group-size", "2", "--train-size", "4", "--eval-size", "2"]
    argv = ["--model", str(tuned[0] / "model"), *small, "--max-new-tokens", "40", "--tracker", ""]
    assert reinforce([*argv, "--out", str(tmp_path), "--name", "run"]) == 0
    assert lines_of(tmp_path / "run" / "metrics.jsonl")[0]["rollout_train_kl"] < 1e-6


def test_transformers_reads_the_model(tuned: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    folder = tuned[0] / "model"
    assert Qwen3VLForConditionalGeneration.from_pretrained(folder).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert (folder / "preprocessor_config.json").exists()


def places(config: SftConfig, num_steps: int, size: int) -> list[list[int]]:
    """Return which conversations each step takes."""
    return [step_places(config, size, step) for step in range(1, num_steps + 1)]


def test_every_epoch_takes_each_conversation_once_in_an_order_of_its_own() -> None:
    config = SftConfig(epochs=2, batch_size=4, seed=5)
    found = places(config, config.num_steps(10), 10)
    assert [len(step) for step in found] == [4, 4, 4, 4, 4]  # the third takes the end of one epoch and the next's start
    flat = [place for step in found for place in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    assert places(replace_seed(config, 6), 5, 10) != found == places(config, 5, 10)
    one = SftConfig(batch_size=4)
    assert [len(step) for step in places(one, one.num_steps(10), 10)] == [4, 4, 2]
    fixed = SftConfig(batch_size=4, steps=6)
    assert fixed.num_steps(10) == 6 and [len(step) for step in places(fixed, 6, 10)] == [4] * 6


def replace_seed(config: SftConfig, seed: int) -> SftConfig:
    return config.model_copy(update={"seed": seed})


def test_an_environment_gives_problems_answers_system_prompt_and_tools(checkpoint: Path) -> None:
    config = SftConfig.model_validate({"env": "geo3k", "model": {"model": str(checkpoint)}, "data": {"train_size": 3}})
    data = load_data(config.model_copy(update={"data": config.data.model_copy(update={"eval_size": 2})}))
    assert (len(data.train), len(data.evaluation or ())) == (3, 2)
    (stream,) = data.train.streams([0])
    before, said = (text for _, text in data.train.renderer.spans(stream))
    assert before.startswith("<|im_start|>system\nSolve the problem. Check answers with calc_score.")
    assert '"name": "calc_score"' in before
    assert said.startswith("Answer: \\boxed{") and said.endswith("}<|im_end|>")


def test_an_environments_prompt_and_tools_go_with_rows_that_bring_none(checkpoint: Path, tmp_path: Path) -> None:
    own = {"messages": [{"role": "system", "content": "Own."}, *GOOD["messages"]], "tools": [{"name": "mine"}]}
    file = write(tmp_path / "demos.jsonl", [GOOD, own])
    model = {"model": {"model": str(checkpoint)}, "data": {"data": str(file)}}
    data = load_data(SftConfig.model_validate({"env": "geo3k", **model}))
    given, kept = (next(data.train.renderer.spans(stream))[1] for stream in data.train.streams([0, 1]))
    assert "Check answers with calc_score." in given and '"name": "calc_score"' in given
    assert "Own." in kept and "calc_score" not in kept and '"mine"' in kept
    assert data.evaluation is None


def test_show_prints_what_is_learnt_and_trains_nothing(
    checkpoint: Path, demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(checkpoint), "--data", str(demos), "--show", "1", "--out", str(tmp_path / "runs")]
    assert run(argv) == 0
    shown = capsys.readouterr().out
    assert "demos.jsonl row 0: " in shown and re.search(
        r"<.im_start.>assistant\n\[\[.*\\boxed\{.*<.im_end.>\]\]", shown, re.DOTALL
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--data: must name conversations, got nothing; give a file with --data, or an environment with --env"),
        (["--data", "none.jsonl"], "none.jsonl: no such file"),
        (["--env", "geo3"], "did you mean 'geo3k'?"),
        (["--epochs", "0"], "--epochs: must be greater than or equal to 1"),
        (["--answer-format", "It is."], "must hold the word ANSWER"),
        (["--env", "geo3k", "--train-size", "4", "--eval-size", "0"], "--batch-size: must be at most the 4"),
        (["--env", "geo3k", "--context-length", "99999"], "--context-length: must be at most the model's"),
        (["--lora-alpha", "8"], "--lora-alpha: needs --lora-rank"),
        (["--bath-size", "4"], "did you mean '--batch-size'?"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_before_anything_is_made(
    argv: list[str], words: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda: run(["--model", str(checkpoint), "--out", str(tmp_path / "runs"), *argv])) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line
    assert not (tmp_path / "runs").exists()


def test_every_flag_of_the_page_is_one_of_a_command_and_the_ready_configuration_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (DOCS / "sft.md").read_text(encoding="utf-8")
    known = {"--" + path[-1].replace("_", "-") for path, _ in leaves(SftConfig)} | {"--config", "--print-config"}
    others = {"--num", "--out", "--help", "--policy-loss"}
    named = set(re.findall(r"--[a-z][a-z-]+", page))
    assert len(named) > 30 and named <= known | others, sorted(named - known - others)
    with pytest.raises(SystemExit):
        run(["--config", "geometry3k", "--print-config"])
    assert "batch_size: 128  # default: 32; from geometry3k" in capsys.readouterr().out
