"""The command, end to end on a tiny random model: what it leaves behind, that it repeats, and that nothing stops it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from envs.registry import load_registry
from trainer.run import run

SMALL = ["--train-size", "8", "--problems-per-step", "2", "--group-size", "2", "--max-new-tokens", "24"]


def train(checkpoint: Path, folder: Path, *argv: str, steps: int = 2, eval_size: int = 3) -> dict[str, Any]:
    """Run the command in this process; return the summary."""
    common = ["--model", str(checkpoint), "--steps", str(steps), "--eval-size", str(eval_size), *SMALL]
    assert run([*common, "--out", str(folder.parent), "--name", folder.name, *argv]) == 0
    return json.loads((folder / "summary.json").read_text())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return folder, train(checkpoint, folder)


def test_a_run_leaves_metrics_summary_curve_tensorboard_and_config(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    rows = lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["rollout_train_kl"] < 1e-8 and row["entropy"] > 0 and row["num_tokens"] > 0 for row in rows)
    assert summary["steps_done"] == 2 and not summary["interrupted"] and summary["seed"] == 0
    assert set(summary["accuracy_before"]) == set(summary["accuracy_after"]) == {"with_tool", "without_tool"}
    assert sum(summary["end_reasons"].values()) == 2 * 2 * 2
    assert summary["seconds"] > 0 and 0.1 < summary["peak_memory_gib"] < 24
    assert summary["max_rollout_train_kl"] == max(row["rollout_train_kl"] for row in rows)
    assert Image.open(folder / "reward_curve.png").size[0] > 100
    assert list((folder / "tensorboard").glob("events.*"))
    assert json.loads((folder / "config.json").read_text())["registry_entry"]["max_turns"] == 3


def test_episodes_are_recorded_with_streams_and_pictures(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    episodes = lines(folder / "episodes" / "episodes.jsonl")
    assert len(episodes) == 8
    for episode in episodes:
        assert len(episode["ids"]) == len(episode["mask"]) == len(episode["logprobs"])
        assert sum(episode["mask"]) == sum(turn["end"] - turn["start"] for turn in episode["turns"])
        pictures = [
            p["image"] for m in episode["messages"] for p in m["content"] if isinstance(p, dict) and "image" in p
        ]
        assert len(pictures) == 1
        assert Image.open(folder / "episodes" / pictures[0]).size == (160, 128)


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
    timed = {"tokens_per_s", "rollout_s", "train_s", "env_s"}

    def untimed(path: Path) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k not in timed} for row in lines(path / "metrics.jsonl")]

    assert untimed(folder) == untimed(tmp_path / "again")
    assert summary["evaluation_after"] == again["evaluation_after"]
    streams = [[e["ids"] for e in lines(f / "episodes" / "episodes.jsonl")] for f in (folder, tmp_path / "again")]
    assert sorted(streams[0]) == sorted(streams[1])


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
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert any(row["grad_norm"] > 0 for row in rows)
    versions = [e["turns"][0]["versions"][0][0] for e in lines(tmp_path / "run" / "episodes" / "episodes.jsonl")]
    assert versions == [0] * 16 + [1] * 16
    assert summary["accuracy_before"] == {}  # own data without --eval-data has no held-out problems


@pytest.mark.parametrize("env_id", [name for name in load_registry() if name != "geo3k"])
def test_every_bundled_environment_trains(env_id: str, checkpoint: Path, tmp_path: Path) -> None:
    argv = ["--env", env_id, "--group-size", "2", "--max-new-tokens", "300", "--max-prompt-tokens", "4000"]
    summary = train(checkpoint, tmp_path / "run", *argv, steps=1)
    assert sum(summary["end_reasons"].values()) == 4
    assert not {"env_error", "env_timeout", "invalid_stream"} & summary["end_reasons"].keys()
    spec = json.loads((tmp_path / "run" / "config.json").read_text())["registry_entry"]
    assert (spec["id"], spec["max_turns"]) == (env_id, load_registry()[env_id].max_turns)
    expected = {"with_tool"} if env_id in ("geo3k_single", "guess") else {"with_tool", "without_tool"}
    assert set(summary["accuracy_after"]) == expected


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
    broken = [e for e in lines(tmp_path / "run" / "episodes" / "episodes.jsonl") if e["end_reason"] == "env_error"]
    assert summary["end_reasons"]["env_error"] == len(broken) >= 2
    assert {e["metadata"].get("answer", e["sample_id"]) for e in broken}
    assert all(e["advantage"] is None and e["error"] for e in broken)
    assert any("no such file" in e["error"] for e in broken) or any("nan" in e["error"] for e in broken)


def test_ctrl_c_ends_cleanly_with_everything_so_far_saved(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    argv = [
        sys.executable,
        "-m",
        "trainer.run",
        "--model",
        str(checkpoint),
        "--steps",
        "500",
        "--eval-size",
        "0",
        *SMALL,
    ]
    command = [*argv, "--out", str(tmp_path), "--name", "stopped"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, as a CI run may be, hands down an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err and "interrupted" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"] and 2 <= summary["steps_done"] < 500
    assert (folder / "model" / "model.safetensors").exists()
    assert (folder / "reward_curve.png").exists()
