"""Claims about learners in several processes: they train as one does, and none of them dies unnoticed."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from agents.rendering.renderer import Renderer
from agents.types import ProcessedImage
from envs.config.cli import leaves
from envs.errors import UserError
from starter.demonstrations import run as write_demonstrations
from tests.builders import sampling
from tests.environments import lucky_lengths
from tests.listening import listening, open_to_others
from tests.paths import DOCS
from tests.recordings import episodes_in, lines_of
from trainer.config.learner import ClusterConfig, LearnerConfig
from trainer.config.run import RunConfig
from trainer.config.sources import read_config, write_config
from trainer.learner.build import build_learner
from trainer.learner.protocol import LearnerLost
from trainer.learner.rank_split import light, shares, split_samples
from trainer.rollouts.live import LiveContext
from trainer.run import run
from trainer.setup.servers import first_server_gpu
from trainer.sft.__main__ import run as fine_tune
from trainer.types import Row, TrainingSample

ray = pytest.importorskip("ray")


def sample_of(prompt: int, own: int, prefix: int = 3, image: ProcessedImage | None = None) -> TrainingSample:
    """A sample of `prefix` prompt tokens, which `prompt` tells apart, and `own` more."""
    length = prefix + own
    return TrainingSample(
        ids_T=np.array([prompt] * prefix + list(range(own))),
        mask_T=np.arange(length) >= prefix,
        turns_T=(np.arange(length) >= prefix).astype(np.int64),
        logprobs_T=np.zeros(length, dtype=np.float32),
        positions_3T=np.zeros((3, length), dtype=np.int64),
        images=(image,) if image else (),
        prefix_length=prefix,
        num_prefix_images=1 if image else 0,
        advantage=0.5,
        weight=0.1,
    )


def tokens(samples: list[TrainingSample]) -> int:
    """Tokens of samples, a shared prompt counted once."""
    prompts = {sample.ids_T[0] for sample in samples}
    rows = [Row(tuple(s for s in samples if s.ids_T[0] == prompt)) for prompt in prompts]
    return sum(row.num_tokens for row in rows)


def test_what_a_rank_failed_of_is_said_from_the_beginning_of_each_line() -> None:
    from trainer.learner.ray_group import LESS_MEMORY, end_of_traceback

    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. " + "Process 7 has 1 GiB. " * 40
    text = f"\x1b[36mray::Rank.step()\x1b[39m\n  File x.py, line 3\n    self.backward()\n    ^^^^^^^\n{error}\n"
    said = end_of_traceback(text)
    assert said.startswith("ray::Rank.step() | File x.py, line 3 | self.backward() | torch.OutOfMemoryError: CUDA out")
    assert said.endswith(LESS_MEMORY) and len(said) < 600
    assert end_of_traceback("a\nValueError: b\n") == "a | ValueError: b"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=40), st.integers(1, 5))
def test_shares_hold_every_sample_once_prompts_whole_and_are_balanced(
    kinds: list[tuple[int, int]], num_ranks: int
) -> None:
    samples = [sample_of(prompt, own) for prompt, own in kinds]
    parts = split_samples(samples, num_ranks)
    assert len(parts) == num_ranks
    assert sorted(id(s) for part in parts for s in part) == sorted(id(s) for s in samples)
    places = {id(sample): place for place, sample in enumerate(samples)}
    for part in parts:
        assert [places[id(s)] for s in part] == sorted(places[id(s)] for s in part)
    owners = [{s.ids_T[0] for s in part} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners))
    loads = [tokens(part) for part in parts]
    largest = max((tokens([s for s in samples if s.ids_T[0] == prompt]) for prompt, _ in kinds), default=0)
    assert max(loads) - min(loads) <= largest
    again = split_samples(samples, num_ranks)
    assert [[id(s) for s in part] for part in again] == [[id(s) for s in part] for part in parts]


def test_the_example_of_the_split() -> None:
    parts = split_samples([sample_of(0, 17), sample_of(1, 47), sample_of(2, 27), sample_of(3, 37)], 2)
    assert [[len(s.ids_T) for s in part] for part in parts] == [[20, 50], [30, 40]]


def test_ranks_are_sent_their_part_of_every_minibatch_without_images() -> None:
    image = ProcessedImage("a", np.zeros((4, 2), dtype=np.float32), (1, 2, 2), 1, Image.new("RGB", (32, 32)))
    assert image.png
    one, other, third = sample_of(1, 5, image=image), sample_of(1, 9, image=replace(image)), sample_of(2, 4)
    first, second = shares([[one, other, third], []], num_ranks=2)
    assert [[len(s.ids_T) for s in part] for part in first] == [[8, 12], []]
    assert [[len(s.ids_T) for s in part] for part in second] == [[7], []]
    sent = [s.images[0] for s in first[0]]
    assert sent[0] is sent[1] and sent[0].resized is None and "png" not in vars(sent[0])
    assert sent[0].pixels_PD is image.pixels_PD
    assert light([[third]])[0][0].images == ()


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of this process, which commands here share; its address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context = ray.init("local", num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def flags(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of a small run on the tiny network, in an environment whose rewards differ."""
    with lucky_lengths(tmp_path_factory.mktemp("lucky"), "lucky_thirds", "float(len(text) % 3)", 6) as flags:
        common = [*flags, "--model", str(checkpoint), "--group-size", "4", "--max-new-tokens", "24"]
        yield [*common, "--eval-size", "0", "--tracker="]


# Advantages of a group add up to 0, so the policy loss alone is rounding noise; with a bonus the loss says something.
BONUS = ["--entropy-coef", "0.05"]


# Three prompts on two ranks: shares are uneven.
@pytest.mark.slow
def test_two_learners_train_as_one_does(
    cluster: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveContext, "save_model", lambda parts, folder: parts.learner.save(folder, torch.float32))
    for name, more in (("one", []), ("two", ["--num-learners", "2"])):
        argv = [*flags, *BONUS, "--problems-per-step", "3", "--steps", "2", "--out", str(tmp_path), "--name", name]
        assert run([*argv, *more]) == 0
    one, two = lines_of(tmp_path / "one" / "metrics.jsonl"), lines_of(tmp_path / "two" / "metrics.jsonl")
    assert len(one) == len(two) == 2 and one[0]["grad_norm"] > 0
    for ours, theirs in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "entropy", "num_tokens", "reward"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4), name
        assert theirs["rollout_train_kl"] < 1e-8 and ours["rollout_train_kl"] < 1e-8
        assert theirs["train_tokens_per_s"] > 0
    assert two[0]["probe_gap"] < 1e-5
    ours, theirs = (load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    assert len(ray.util.list_named_actors(all_namespaces=True)) == 0


@pytest.mark.slow
def test_no_process_of_a_run_on_one_host_listens_for_other_hosts_or_obeys_without_a_token(
    flags: list[str], tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "trainer.run", *flags, "--problems-per-step", "2", "--steps", "1", "--doctor", "off"]
    argv += ["--out", str(tmp_path), "--name", "run", "--num-learners", "2"]
    free = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_"))}
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    seen, reachable = set[str](), set[tuple[str, str, int]]()
    with subprocess.Popen(
        argv, env={**free, "PYTHONPATH": paths, "HOME": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            found = listening(process.pid)
            seen |= {name for name, _, _ in found}
            reachable |= open_to_others(found)
            time.sleep(0.1)
        assert process.returncode == 0, process.stdout and process.stdout.read()
    assert {"gcs_server", "raylet"} < seen and any("LearnerWorker" in name for name in seen)
    assert not reachable
    token = tmp_path / ".ray" / "auth_token"  # Ray makes it where it asks for one
    assert token.stat().st_size > 0 and token.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_run_on_two_learners_goes_on_with_one(cluster: str, flags: list[str], tmp_path: Path) -> None:
    argv = [*flags, *BONUS, "--problems-per-step", "3", "--out", str(tmp_path), "--save-every", "1"]
    assert run([*argv, "--steps", "3", "--name", "unbroken"]) == 0
    assert run([*argv, "--steps", "2", "--name", "run", "--num-learners", "2"]) == 0
    shards = [path.name for path in (tmp_path / "run/checkpoints/step-2/learner").glob("*.distcp")]
    assert sorted(shards) == ["__0_0.distcp", "__1_0.distcp"]
    assert run(["--resume", str(tmp_path / "run"), "--steps", "3", "--num-learners", "0"]) == 0
    ours, theirs = lines_of(tmp_path / "run" / "metrics.jsonl"), lines_of(tmp_path / "unbroken" / "metrics.jsonl")
    assert [row["step"] for row in ours] == [1, 2, 3]
    for name in ("loss", "grad_norm", "entropy", "num_tokens", "reward"):
        assert ours[2][name] == pytest.approx(theirs[2][name], rel=1e-3), name


# Three conversations on two ranks, of which the last step has one alone: a rank may have nothing.
@pytest.mark.slow
def test_supervised_training_on_two_learners_is_that_of_one(cluster: str, checkpoint: Path, tmp_path: Path) -> None:
    demos = tmp_path / "demos.jsonl"
    assert write_demonstrations(["--num", "4", "--out", str(demos)]) == 0
    argv = ["--model", str(checkpoint), "--data", str(demos), "--eval-data", str(demos), "--batch-size", "3"]
    argv += ["--tracker=", "--save-every", "0", "--out", str(tmp_path)]
    for name, more in (("one", []), ("two", ["--num-learners", "2"])):
        assert fine_tune([*argv, "--name", name, *more]) == 0
    one, two = lines_of(tmp_path / "one" / "metrics.jsonl"), lines_of(tmp_path / "two" / "metrics.jsonl")
    assert len(one) == len(two) == 2 and one[0]["grad_norm"] > 0
    for ours, theirs in zip(one, two, strict=True):
        for name in ("loss", "grad_norm", "entropy", "num_tokens"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4), name
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    for name in ("eval_loss_before", "eval_loss_after"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_with_its_name_and_keeps_what_was_played(
    cluster: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.learner.ray_group import LearnerGroup

    step, killed = LearnerGroup.step, []

    def step_and_kill(group: LearnerGroup, minibatches: Any) -> Any:
        if group.steps_done == 1:
            killed.append(group.places[1].pid)
            threading.Timer(0.05, os.kill, (group.places[1].pid, signal.SIGSTOP)).start()
            threading.Timer(1.0, os.kill, (group.places[1].pid, signal.SIGKILL)).start()
        return step(group, minibatches)

    monkeypatch.setattr(LearnerGroup, "step", step_and_kill)
    argv = [*flags, "--problems-per-step", "3", "--steps", "500", "--out", str(tmp_path), "--name", "run"]
    assert run([*argv, "--num-learners", "2"]) == 1
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert f"error: learner rank 1 of 2 (process {killed[0]} on" in error and "died" in error, error
    folder = tmp_path / "run"
    done = len(lines_of(folder / "metrics.jsonl"))
    summary = json.loads((folder / "summary.json").read_text())
    assert done == summary["steps_done"] == 1
    assert len(episodes_in(folder)) == 2 * 12
    assert not (folder / "model").exists()


@pytest.mark.slow
def test_a_group_takes_empty_shares_and_names_the_rank_that_fails(
    cluster: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    from trainer.learner.ray_group import LearnerGroup

    def start(folder: Path, num_learners: int) -> LearnerGroup:
        config = RunConfig.model_validate({"cluster": {"num_learners": num_learners}})
        return LearnerGroup(config, folder, sampling(renderer))

    with pytest.raises(UserError, match="--model"):
        start(tmp_path / "nowhere", 1)
    group = start(checkpoint, 2)
    try:
        before = group.weights()
        scored = group.score([5, 6, 7, 8], ())
        text = replace(sample_of(1, 1, prefix=2), positions_3T=np.tile(np.arange(3), (3, 1)))
        assert group.step([[]]).num_tokens == 0
        other = replace(text, ids_T=text.ids_T + 1, stream=1)  # another prompt, for the other rank
        stats = group.step([[text, other]])
        assert stats.num_tokens == 2 and group.steps_done == 2
        assert {key: len(found) for key, found in stats.logprobs.items()} == {(0, 0, 0, 0): 1, (0, 0, 0, 1): 1}
        after = group.weights()
        assert any(not torch.equal(after[name], before[name]) for name in before)
        assert np.abs(group.score([5, 6, 7, 8], ()) - scored).max() > 0
        with pytest.raises(
            LearnerLost, match=r"learner rank 0 of 2 .*failed in step: .*IndexError: index out of range"
        ):
            group.step([[replace(text, ids_T=text.ids_T + 10**9)]])
        with pytest.raises(LearnerLost, match="rank 0 of 2"):
            group.score([5, 6], ())
    finally:
        group.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_group_has_the_adapter_of_one_learner(cluster: str, checkpoint: Path, renderer: Renderer) -> None:
    from trainer.learner.ray_group import LearnerGroup

    config = RunConfig(learner=LearnerConfig(lora_rank=3), cluster=ClusterConfig(num_learners=2))
    group = LearnerGroup(config, checkpoint, sampling(renderer))
    try:
        alone = build_learner(config, checkpoint, sampling(renderer), torch.device("cpu"))
        one, other = (pickle.loads(base64.b64decode(each.adapter().tensors)) for each in (group, alone))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    finally:
        group.close()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-learners", "2", "--num-gpus", "2"], ["--num-learners", "--num-gpus"]),
        (["--num-gpus", str(torch.cuda.device_count() + 1)], ["--num-gpus", f"{torch.cuda.device_count()} GPUs"]),
        (["--num-learners", "2", "--device", "cuda"], ["--device", "--num-learners", "cuda"]),
        (["--num-gpus", "1", "--device", "mps"], ["--device", "--num-gpus", "mps"]),
        (["--ray-address", "auto"], ["--ray-address", "--num-gpus"]),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_starts(argv: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        run(argv)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_settings_of_a_run_on_gpus_are_accepted_when_it_is_resumed(tmp_path: Path) -> None:
    write_config(RunConfig(cluster=ClusterConfig(num_gpus=2, ray_address="auto")), tmp_path / "config.yaml")
    config = read_config(tmp_path / "config.yaml")
    assert config.cluster.num_gpus == 2
    config.cluster.check(config.model.device)


@pytest.mark.parametrize(
    ("given", "learners", "num_gpus", "first"),
    [(None, (0, 1), 4, 2), (None, (0,), 1, 0), (None, (), 2, 0), (None, (1,), 2, 0), (1, (0, 1), 4, 1)],
)
def test_servers_take_the_gpus_after_the_learners_where_there_are_any(
    given: int | None, learners: tuple[int, ...], num_gpus: int, first: int
) -> None:
    assert first_server_gpu(given, learners, num_gpus) == first


def test_every_flag_of_the_page_on_clusters_is_one_of_the_command() -> None:
    text = (DOCS / "cluster.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    known = {"--" + path[-1].replace("_", "-") for path, _ in leaves(RunConfig)}
    of_others = {
        "--generate",
        "--head",
        "--address",
        "--node-ip-address",
        "--nccl-port",
        "--model-path",
        "--host",
        "--port",
        "--enable-fp32-lm-head",
        "--config",
        "--api-key",
    }
    assert len(named) > 12 and named <= known | of_others, sorted(named - known)


@pytest.mark.slow
def test_more_learners_than_the_cluster_has_cpus_are_refused(cluster: str, flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--num-learners: must be at most the 3 CPUs of the cluster, got 4"):
        run([*flags, "--num-learners", "4", "--out", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "trainer.config.learner.importlib.util.find_spec", lambda name: None if name == "ray" else find(name)
    )
    with pytest.raises(UserError, match=r"needs the package ray, got 2; pip install 'trueturn\[cluster\]'"):
        run(["--num-learners", "2"])


@pytest.mark.slow
def test_one_process_does_not_load_ray() -> None:
    code = "import sys, trainer.setup.components, trainer.loop, trainer.run; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# As a shell does: the interrupt goes to every process of the group.
@pytest.mark.slow
def test_ctrl_c_on_a_cluster_saves_the_weights_and_leaves_no_learners(
    cluster: str, flags: list[str], tmp_path: Path
) -> None:
    folder, paths = tmp_path / "run", os.pathsep.join([str(Path.cwd()), *sys.path])
    argv = [*flags, "--problems-per-step", "2", "--steps", "500", "--out", str(tmp_path), "--name", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.run", *argv, "--num-learners", "2", "--ray-address", cluster],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or not lines_of(folder / "metrics.jsonl"):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err and "interrupted" in out
    assert json.loads((folder / "summary.json").read_text())["interrupted"]
    assert (folder / "model/model.safetensors").exists()
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 3:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.2)


def test_an_address_where_nothing_answers_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.learner.ray_group import start_ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with free_port() as port, pytest.raises(UserError, match="--ray-address: must be a running Ray cluster"):
        start_ray(ClusterConfig(num_learners=1, ray_address=f"127.0.0.1:{port}"))


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port that is taken, and on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
