"""The command, end to end on a tiny random model: what it leaves behind, that it repeats, and that nothing stops it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine
from envs.config.plugins import give
from envs.errors import UserError
from envs.registry import load_registry
from envs.types import message_images
from tests.agents.engines.test_sglang_engine import misbehave
from tests.environments import lucky_lengths
from tests.flags import last_of_each
from tests.processes import Command
from tests.recordings import episodes_in, lines_of
from tests.servers import TAKES_ADAPTERS, serving
from tests.tiny_models import write_tiny_model
from tests.trainer.runs import drawing
from trainer.algorithms.policy_loss import PolicyTerms, ppo
from trainer.checkpoint.checkpointer import found_steps
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig
from trainer.config.sources import read_config
from trainer.evaluate import run as evaluate
from trainer.export import run as export
from trainer.learner.lora import add_lora
from trainer.learner.sharding import trainable_parameters
from trainer.learner.weights_io import empty_model
from trainer.rollouts.live import with_image
from trainer.run import run
from trainer.types import ModelTokens
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import WeightPush

COLOCATE = "--keep-kv-cache: needs servers that keep their memory .* --placement colocate"
SMALL = ["--train-size", "8", "--problems-per-step", "2", "--group-size", "2", "--max-new-tokens", "24"]


def train(checkpoint: Path, folder: Path, *argv: str, steps: int = 2, eval_size: int = 3) -> dict[str, Any]:
    """Run the command in this process, without TensorBoard; return the summary."""
    held_out = [] if "--data" in argv else ["--eval-size", str(eval_size)]
    common = ["--model", str(checkpoint), "--steps", str(steps), *held_out, *SMALL]
    own = ["--out", str(folder.parent), "--name", folder.name, *argv]
    assert run(last_of_each([*common, "--tracker=", *own])) == 0
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that draws its curve and writes TensorBoard's files, as runs do."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    argv = ["--model", str(checkpoint), "--steps", "2", "--eval-size", "3", *SMALL]
    with drawing():
        assert run([*argv, "--out", str(folder.parent), "--name", folder.name]) == 0
    return folder, json.loads((folder / "summary.json").read_text())


def test_a_run_that_skipped_an_update_ends_with_code_1(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def infinite_at_first(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
        terms = ppo(tokens, config)
        calls.append(math.inf if len(calls) == 1 else 1.0)  # the first call is the trial before step 0
        return replace(terms, loss_N=terms.loss_N + calls[-1] * tokens.logprobs_N)

    argv = ["--model", str(checkpoint), "--steps", "2", "--eval-size", "0", *SMALL, "--policy-loss"]
    assert run([*argv, give(infinite_at_first), "--tracker=", "--out", str(tmp_path), "--name", "run"]) == 1
    assert "error: updates were skipped in 1 step (1): loss or gradient was not finite" in capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps_done"] == 2 and summary["steps_skipped"] == [1]


def test_half_of_a_surrogate_pair_in_any_text_of_a_user_ends_no_command(checkpoint: Path, tmp_path: Path) -> None:
    entry = ["entry_point: envs.calculator:CalculatorEnv", r'description: "half \ud83d"']
    entry += ["dataset: envs.calculator:samples", "max_turns: 2"]
    (tmp_path / "registry.yaml").write_text("\n  ".join(["sums:", *entry]))
    row = {"problem": "1+1? \ud83d", "answer": "2", "family": "\udc00", "id": "\ud83d"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))  # as an escape, which any JSON file may hold
    own = ["--env", "sums", "--registry", str(tmp_path / "registry.yaml"), "--model", str(checkpoint)]
    own += ["--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path)]
    argv = [*own, *SMALL, "--steps", "1", "--eval-data", str(tmp_path / "rows.jsonl"), "--tracker=", "--name", "run"]
    assert run(last_of_each(argv)) == 0
    assert run(["--resume", str(tmp_path / "run"), "--steps", "2"]) == 0
    spec = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert spec["description"] == "half \ufffd"
    assert evaluate([*own, "--size", "1", "--name", "evaluation"]) == 0
    assert export([str(tmp_path / "run"), "--to", str(tmp_path / "exported")]) == 0


def test_a_run_leaves_metrics_summary_curve_tensorboard_and_config(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    rows = lines_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["rollout_train_kl"] < 1e-8 and row["entropy"] > 0 and row["num_tokens"] > 0 for row in rows)
    assert summary["steps_done"] == 2 and not summary["interrupted"] and summary["seed"] == 0
    assert set(summary["accuracy_before"]) == set(summary["accuracy_after"]) == {"with_tool", "without_tool"}
    assert sum(summary["end_reasons"].values()) == 2 * 2 * 2
    assert summary["seconds"] > 0 and 0.1 < summary["peak_memory_gib"] < 24
    assert summary["max_rollout_train_kl"] == max(row["rollout_train_kl"] for row in rows)
    assert Image.open(folder / "reward_curve.png").size[0] > 100
    assert list((folder / "tensorboard").glob("events.*"))
    assert json.loads((folder / "environment.json").read_text())["max_turns"] == 3
    assert read_config(folder / "config.yaml").rollout.group_size == 2


def test_the_metrics_say_where_time_and_tokens_went(finished: tuple[Path, dict[str, Any]]) -> None:
    for row in lines_of(finished[0] / "metrics.jsonl"):
        shares = [row[f"{name}_time_frac"] for name in ("engine", "env", "check", "loop")]
        assert sum(shares) == pytest.approx(1) and all(share > 0 for share in shares)
        assert row["rollout_tokens_per_s"] > row["tokens_per_s"] > 0 and row["rollout_turns_per_s"] > 0
        assert 0 <= row["cache_hit_frac"] < 1 and row["staleness/max"] == 0
        assert 0 <= row["rollout_train_kl/turn_1"] < 1e-8
        assert row["logprob_gap_mean"] <= row["logprob_gap_p99"] <= row["logprob_gap_max"] < 1e-4
        assert row["length/stream_max"] >= row["length/prompt_max"] + 1


def test_episodes_are_recorded_with_streams_and_images(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    episodes = episodes_in(folder)
    assert len(episodes) == 8
    for episode in episodes:
        assert len(episode["ids"]) == len(episode["mask"])
        assert (
            len(episode["logprobs"])
            == sum(episode["mask"])
            == sum(turn["end"] - turn["start"] for turn in episode["turns"])
        )
        images = [p["image"] for m in episode["messages"] for p in m["content"] if isinstance(p, dict) and "image" in p]
        assert len(images) == 1
        assert Image.open(folder / "episodes" / images[0]).size == (160, 128)


def test_the_trained_model_is_a_hugging_face_folder(finished: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    folder, _ = finished
    network = Qwen3VLForConditionalGeneration.from_pretrained(folder / "model")
    assert network.config.vision_config.patch_size == 16
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template
    assert (folder / "model" / "preprocessor_config.json").exists()


def test_a_seed_repeats_a_run_to_the_bit(
    finished: tuple[Path, dict[str, Any]], checkpoint: Path, tmp_path: Path
) -> None:
    folder, summary = finished
    again = train(checkpoint, tmp_path / "again")

    def untimed(path: Path) -> list[dict[str, Any]]:
        rows = lines_of(path / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.endswith(("_s", "_time_frac"))} for row in rows]

    assert untimed(folder) == untimed(tmp_path / "again")
    assert summary["evaluation_after"] == again["evaluation_after"]
    streams = [[e["ids"] for e in episodes_in(f)] for f in (folder, tmp_path / "again")]
    assert streams[0] == streams[1]


def test_training_changes_the_weights_that_roll_out(checkpoint: Path, tmp_path: Path) -> None:
    """A reward that the random model earns at times moves the weights, and the next step is sampled with new ones."""
    (tmp_path / "lucky.py").write_text(
        "from envs.env import Env\n"
        "class Lucky(Env):\n"
        "    def reset(self): return {}, {}\n"
        "    def step(self, text): return {}, True, {}\n"
        "    def reward(self, text): return float(len(text) % 2)\n"
        "def build_env(sample=None, args=None, **_): return Lucky()\n"
    )
    registry = tmp_path / "registry.yaml"
    registry.write_text("lucky:\n  entry_point: lucky\n  description: Odd lengths win.\n  max_turns: 1\n")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"problem": f"Say {n}.", "answer": str(n)}) + "\n" for n in range(4)))
    sys.path.insert(0, str(tmp_path))
    try:
        argv = ["--env", "lucky", "--registry", str(registry), "--data", str(data), "--group-size", "8"]
        summary = train(checkpoint, tmp_path / "run", *argv)
    finally:
        sys.path.remove(str(tmp_path))
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert any(row["grad_norm"] > 0 for row in rows)
    versions = [e["turns"][0]["versions"][0][0] for e in episodes_in(tmp_path / "run")]
    assert versions == [0] * 16 + [1] * 16
    assert summary["accuracy_before"] == {}  # own data without --eval-data has no held-out problems


@pytest.mark.parametrize("env_id", [name for name in load_registry() if name != "geo3k"])
def test_every_bundled_environment_trains(env_id: str, checkpoint: Path, tmp_path: Path) -> None:
    argv = ["--env", env_id, "--group-size", "2", "--max-new-tokens", "300", "--max-prompt-tokens", "4000"]
    summary = train(checkpoint, tmp_path / "run", *argv, steps=1)
    assert sum(summary["end_reasons"].values()) == 4
    assert not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()
    spec = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (spec["id"], spec["max_turns"]) == (env_id, load_registry()[env_id].max_turns)
    without_tools = ("geo3k_single", "guess", "coins", "desktop")
    others = {"frozen_lake": {"with_tool"}, **{name: {"no_tools"} for name in without_tools}}
    expected = others.get(env_id, {"with_tool", "without_tool"})
    assert set(summary["mean_reward_after"]) == expected


def test_a_broken_environment_is_counted_and_stops_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(
        "from envs.env import Env\n"
        "class Fragile(Env):\n"
        "    def __init__(self, label): self.label = label\n"
        "    def reset(self): return {}, {}\n"
        "    def step(self, text):\n"
        "        if self.label == '0': raise RuntimeError('no such file')\n"
        "        return {}, True, {}\n"
        "    def reward(self, text): return float('nan') if self.label == '1' else 1.0\n"
        "def build_env(sample=None, args=None, **_): return Fragile(sample.label)\n"
    )
    registry = tmp_path / "registry.yaml"
    registry.write_text("fragile:\n  entry_point: fragile\n  description: Breaks.\n  max_turns: 1\n")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"problem": f"Say {n}.", "answer": str(n)}) + "\n" for n in range(4)))
    sys.path.insert(0, str(tmp_path))
    try:
        argv = ["--env", "fragile", "--registry", str(registry), "--data", str(data), "--problems-per-step", "4"]
        summary = train(checkpoint, tmp_path / "run", *argv, "--max-new-tokens", "400", steps=1)
    finally:
        sys.path.remove(str(tmp_path))
    broken = [e for e in episodes_in(tmp_path / "run") if e["end_reason"] == "env_error"]
    assert summary["end_reasons"]["env_error"] == len(broken) >= 2
    assert {e["metadata"].get("answer", e["sample_id"]) for e in broken}
    assert all(e["advantage"] is None and e["error"] for e in broken)
    assert any("no such file" in e["error"] for e in broken) or any("nan" in e["error"] for e in broken)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_cleanly_with_everything_so_far_saved(
    sent: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "stopped"
    argv = ["--model", str(checkpoint), "--steps", "500", "--eval-size", "0", *SMALL]
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 90
    with Command("trainer.run", *argv, "--out", str(tmp_path), "--name", "stopped") as process:
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2) and time.monotonic() < deadline:
            assert process.poll() is None, process.output("stderr")
            time.sleep(0.2)
        process.send_signal(sent)
        code, out, err = process.wait(60), process.output("stdout"), process.output("stderr")
    assert code == 130, (out, err)
    assert "Traceback" not in err and "interrupted" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"] and 2 <= summary["steps_done"] < 500
    assert (folder / "model" / "model.safetensors").exists()
    assert (folder / "reward_curve.png").exists()


@pytest.fixture
def lucky(tmp_path: Path) -> Iterator[list[str]]:
    """Flags of an environment in which every second problem gives all its episodes one reward."""
    reward = "float(len(text) % 2) if int(self.label) % 2 else 0.5"
    with lucky_lengths(tmp_path, "half_lucky", reward, 8) as flags:
        yield [*flags, "--group-size", "8"]


def test_a_run_without_an_update_says_so_and_why(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(checkpoint, tmp_path / "run", steps=2)
    shown = capsys.readouterr().out
    assert {row["reward"] for row in lines_of(tmp_path / "run" / "metrics.jsonl")} == {0.0}
    assert summary["num_updates"] == 0
    for step in (1, 2):
        reason = "the episodes of each group have equal rewards (0 in 2 groups)"
        assert f"step {step} made no update: {reason}\n" in shown
    assert "the weights did not change: no step made an update" in shown


def test_a_run_with_updates_counts_them(
    checkpoint: Path, tmp_path: Path, lucky: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(checkpoint, tmp_path / "run", *lucky, steps=1)
    assert summary["num_updates"] == 1 and "no update" not in capsys.readouterr().out


def test_groups_with_equal_rewards_are_recorded_and_not_trained_on(
    checkpoint: Path, tmp_path: Path, lucky: list[str]
) -> None:
    argv = [*lucky, "--filter-equal", "--oversample", "1.5", "--max-new-tokens", "400"]
    summary = train(checkpoint, tmp_path / "run", *argv, steps=2)
    rows, episodes = lines_of(tmp_path / "run/metrics.jsonl"), episodes_in(tmp_path / "run")
    for step, row in enumerate(rows, 1):
        played = [e for e in episodes if e["step"] == step]
        trained = [e for e in played if e["fate"] == "train"]
        assert len(trained) == 8 * row["groups_trained"] == 16
        assert all(int(e["sample_id"][-1]) % 2 or e["reward"] != 0.5 for e in trained)
        assert sum(e["fate"] == "filtered" for e in played) == 8 * row["groups_filtered"]
        assert row["num_tokens"] == sum(sum(e["mask"]) for e in trained)
    filtered = [e for e in episodes if e["fate"] == "filtered"]
    assert len(filtered) == 8 * summary["unused_groups"]["filtered"] > 0
    assert all(e["advantage"] is None for e in filtered)
    assert sum(summary["end_reasons"].values()) == len(episodes) == len({e["seed"] for e in episodes})


@pytest.mark.parametrize("where", ["embedded", "servers"])
def test_an_asynchronous_run_trains_on_tokens_of_several_versions_and_on_none_that_is_too_old(
    checkpoint: Path, tmp_path: Path, lucky: list[str], where: str, request: pytest.FixtureRequest
) -> None:
    servers = ["--engine-url", request.getfixturevalue("server")] if where == "servers" else []
    argv = [*lucky, *servers, "--max-new-tokens", "200", "--max-staleness", "1"]
    summary = train(checkpoint, tmp_path / "run", *argv, steps=4)
    rows, episodes = lines_of(tmp_path / "run/metrics.jsonl"), episodes_in(tmp_path / "run")
    trained = [e for e in episodes if e["fate"] == "train"]
    assert len(trained) == 4 * 2 * 8 and [row["groups_trained"] for row in rows] == [2] * 4
    assert len(episodes) == len({e["seed"] for e in episodes}) == sum(summary["end_reasons"].values())
    ages = [{e["step"] - 1 - version for turn in e["turns"] for version, _ in turn["versions"]} for e in trained]
    assert set.union(*ages) == {0, 1} and max(row["staleness/max"] for row in rows) == 1
    assert all(0 <= row["idle/learner_time_frac"] <= 1 and -1e-6 <= row["idle/servers_time_frac"] <= 1 for row in rows)
    assert all(row["rollout_train_kl"] < 1 for row in rows)
    assert {e["fate"] for e in episodes} == {"train"}  # nothing is left over after the last step


def test_a_failing_engine_ends_the_run_with_its_error_and_keeps_what_was_played(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = HFEngine.write, []

    def failing(self: HFEngine, turns: Any) -> None:
        calls.append(len(turns))
        if len(calls) == 2:
            raise ConnectionError("the network is gone")
        write(self, turns)

    monkeypatch.setattr(HFEngine, "write", failing)
    monkeypatch.setenv("TRUETURN_MAX_BATCH", "3")
    with pytest.raises(ConnectionError, match="the network is gone"):
        train(checkpoint, tmp_path / "run", eval_size=0)
    episodes = episodes_in(tmp_path / "run")
    assert {e["fate"] for e in episodes} == {"aborted"} and len(episodes) == len({e["seed"] for e in episodes}) == 4
    assert any("the network is gone" in (e["error"] or "") for e in episodes)
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps_done"] == 0


def test_too_many_broken_streams_stop_the_run_with_the_rule_that_broke(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agents.rollout.episode.broken_invariant", lambda *_: "turn 1: token 17 is 5, and was 6")
    argv = ["--model", str(checkpoint), "--out", str(tmp_path), "--name", "run", *SMALL]
    monkeypatch.setenv("TRUETURN_RESAMPLE", "0")
    assert run([*argv, "--doctor", "off", "--eval-size", "0", "--tracker="]) == 1
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert re.match(r"error: 4 of 4 episodes .* 0\.01; episode 0 of .*: turn 1: token 17", line), line
    episodes = episodes_in(tmp_path / "run")
    assert [e["end_reason"] for e in episodes] == ["invalid_stream"] * 4
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps_done"] == 0


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--oversample", "4"], "max_oversample: must be at least --oversample 4"),
        (["--keep-kv-cache"], "--keep-kv-cache: needs --max-staleness above 0"),
        (["--keep-kv-cache", "--max-staleness", "1", "--placement", "colocate", "--engine", "sglang"], COLOCATE),
        (["--keep-kv-cache", "--max-staleness", "1", "--engine", "mine.py:make"], "--keep-kv-cache: is for .*mine.py"),
    ],
)
def test_flags_of_the_rollout_that_contradict_each_other_are_refused(
    argv: list[str], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=flag):
        run(argv)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[str]:
    """The address of a server that speaks SGLang's protocol, on the same checkpoint."""
    with serving(checkpoint) as url:
        yield url


def test_the_same_command_trains_on_servers(checkpoint: Path, server: str, tmp_path: Path) -> None:
    summary = train(checkpoint, tmp_path / "run", "--engine-url", server)
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    episodes = episodes_in(tmp_path / "run")
    assert summary["steps_done"] == 2 and all(row["rollout_train_kl"] < 1e-8 for row in rows)
    assert all(row["probe_gap"] < 1e-5 for row in rows)
    assert [{run[0] for turn in e["turns"] for run in turn["versions"]} for e in episodes] == [{0}] * 4 + [{1}] * 4
    assert not (tmp_path / "run" / "sync").exists()


def test_servers_are_probed_with_an_image_even_if_no_problem_shows_one() -> None:
    """What a server has encoded outlives new weights unless its key changes, which text alone does not show."""
    text = ({"role": "system", "content": "Count."}, {"role": "user", "content": "3 + 4?"})
    shown = with_image(text)
    assert [len(message_images([message])) for message in shown] == [0, 1]
    assert with_image(shown) is shown


def test_a_run_on_servers_goes_on_with_the_weights_of_its_checkpoint(
    checkpoint: Path, server: str, tmp_path: Path
) -> None:
    train(checkpoint, tmp_path / "run", "--engine-url", server, steps=1, eval_size=0)
    assert run(["--resume", str(tmp_path / "run"), "--steps", "2"]) == 0
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["rollout_train_kl"] < 1e-8
    last = episodes_in(tmp_path / "run")[-4:]
    assert [{run[0] for turn in e["turns"] for run in turn["versions"]} for e in last] == [{1}] * 4


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_run_that_trains_adapters_sends_servers_those_alone_also_when_it_is_resumed(
    checkpoint: Path, tmp_path: Path
) -> None:
    adapters = (
        "--lora-rank",
        "2",
        "--sync",
        "adapter",
        "--entropy-coef",
        "0.01",
        "--warmup-steps",
        "0",
        "--lr",
        "1e-2",
    )
    with serving(checkpoint, *TAKES_ADAPTERS) as url:
        train(checkpoint, tmp_path / "run", "--engine-url", url, *adapters, steps=1)
        assert run(["--resume", str(tmp_path / "run"), "--steps", "2"]) == 0
        with pytest.raises(UserError, match=r"--sync adapter: needs servers that take the adapter.*--max-lora-rank"):
            train(checkpoint, tmp_path / "larger", "--engine-url", url, "--lora-rank", "16", "--sync", "adapter")
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and all(row["rollout_train_kl"] < 1e-8 for row in rows)
    model = empty_model(checkpoint)
    add_lora(model, LearnerConfig(lora_rank=2))
    values = sum(parameter.numel() for parameter in trainable_parameters(model))
    assert [row["sync_bytes"] for row in rows] == [4 * values] * 2
    assert all(row["probe_gap"] < 1e-5 and row["num_updates"] == 1 for row in rows)
    versions = [{run[0] for turn in e["turns"] for run in turn["versions"]} for e in episodes_in(tmp_path / "run")]
    assert versions == [{0}] * 4 + [{1}] * 4
    assert not (tmp_path / "run" / "sync").exists()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_run_says_before_its_first_step_that_its_servers_take_no_adapters(
    checkpoint: Path, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(checkpoint, tmp_path / "merged", "--engine-url", server, "--lora-rank", "2", steps=1)
    shown = capsys.readouterr().out
    assert 0 < shown.find("merged weights, not the adapter alone") < shown.find("evaluate before")
    assert lines_of(tmp_path / "merged" / "metrics.jsonl")[0]["probe_gap"] < 1e-5


def test_a_server_of_another_kind_of_network_is_refused(server: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other", "qwen2_5_vl")
    with pytest.raises(UserError, match="must serve the kind of network"):
        train(tmp_path / "other", tmp_path / "run", "--engine-url", server)


def test_a_run_says_what_happens_to_its_servers(
    checkpoint: Path, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = WeightSync.start

    async def lose_one_first(sync: WeightSync, version: int) -> Any:
        probe = await start(sync, version)
        engine = sync.engine
        assert isinstance(engine, SGLangEngine)
        engine.servers.report_lost(engine.servers.all[0], "a test")
        return probe

    monkeypatch.setattr(WeightSync, "start", lose_one_first)
    summary = train(checkpoint, tmp_path / "run", "--engine-url", server, steps=1, eval_size=0)
    assert summary["steps_done"] == 1
    shown = capsys.readouterr().out
    assert "server 0 lost: a test" in shown
    assert "server 0 is back" in shown


OPTIONS = {
    "lora": ["--lora-rank", "2", "--kl-coef", "0.01", "--entropy-coef", "0.01"],
    "several updates": ["--minibatches", "2", "--epochs", "2", "--kl-coef", "0.01", "--entropy-coef", "0.01"],
    "memory": [
        "--recompute",
        "1",
        "--offload",
        "all",
        "--reshard",
        "always",
        "--freeze-vision",
        "--entropy-coef",
        "0.01",
    ],
    "other algorithm": [
        "--policy-loss",
        "gspo",
        "--advantage",
        "rloo",
        "--aggregation",
        "constant",
        "--correction",
        "mis",
    ],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_settings_of_learner_and_algorithm_reach_the_learner(
    options: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    train(checkpoint, tmp_path / "run", "--warmup-steps", "0", "--lr", "1e-2", *options, eval_size=0)
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(row["rollout_train_kl"] < 1e-8 for row in rows)  # the engine follows, whatever is trained
    # Random weights win nothing, so only what has a regulariser is moved.
    moves = [row["num_updates"] for row in rows]
    assert moves == [4, 4] if "--epochs" in options else moves == [int("-coef" in " ".join(options))] * 2
    assert all(("ref_kl" in row) == ("--kl-coef" in options) for row in rows)
    if "--kl-coef" in options:
        assert rows[1]["ref_kl"] > 1e-3
        assert rows[0]["ref_kl"] < 1e-6 or "--epochs" in options  # before the first update
    before = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint).state_dict()
    after = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "run" / "model").state_dict()
    still = {name for name in after if not ((before[name] - after[name]).abs() > 0.01 * before[name].abs()).any()}
    assert before.keys() == after.keys()
    if "--freeze-vision" in options:
        assert {name for name in before if ".visual." in name} <= still < before.keys()


def test_weights_that_cannot_be_written_lose_nothing_else(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("trainer.rollouts.live.LiveContext.save_model", full)
    with pytest.raises(OSError, match="No space left"):
        train(checkpoint, tmp_path / "run", steps=1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps_done"] == 1 and set(summary["accuracy_after"]) == {"with_tool", "without_tool"}
    assert len(episodes_in(tmp_path / "run")) == 4


def test_a_run_whose_servers_fail_ends_with_one_line_that_says_how_to_resume_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    push = WeightSync.push

    async def push_and_break(sync: WeightSync, version: int) -> WeightPush:
        pushed = await push(sync, version)
        misbehave(url, "generate", *["status 400"] * 64)
        return pushed

    monkeypatch.setattr(WeightSync, "push", push_and_break)
    argv = ["--model", str(checkpoint), "--steps", "2", "--eval-size", "0", "--tracker="]
    argv += last_of_each([*SMALL, "--group-size", "16"])
    with serving(checkpoint) as url:
        assert run([*argv, "--engine-url", url, "--out", str(tmp_path), "--name", "run"]) == 1
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: 32 turns in a row were given up, the last one: ")
    assert error.endswith(f"resume with: python -m trainer.run --resume {tmp_path / 'run'}")
    assert [found.step for found in found_steps(tmp_path / "run" / "checkpoints")] == [1]
