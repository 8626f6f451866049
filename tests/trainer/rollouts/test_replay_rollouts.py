"""Claims about doing one side of a run: training on recorded rollouts is the recorded run to the bit, and rollouts that
nothing is trained on are those of its first step."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from agents.recording import Recording
from agents.recording.gzip_lines import GzipLines
from agents.recording.schema import EPISODES
from agents.rendering.renderer import Renderer
from agents.types import SamplingParams
from envs.config.cli import parse
from envs.config.settings import is_under, leaves, takes_code, values_of
from envs.errors import UserError
from envs.images import image_digest
from tests.environments import lucky_geometry
from tests.flags import last_of_each
from tests.recordings import episodes_in, lines_of
from tests.servers import serving
from tests.tiny_models import write_tiny_model
from tests.trainer.checkpoint.test_checkpointer import largest_file
from tests.trainer.runs import PATIENT, metrics_of, state_of
from trainer.config.inputs import ModelConfig
from trainer.config.run import RunConfig, StagesConfig
from trainer.config.sources import INHERITED, REPLAY, SOURCES, read_config
from trainer.export import run as export
from trainer.learner.build import build_learner
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.preflight.checks.memory import memory_need
from trainer.preflight.checks.storage import disk_need
from trainer.preflight.config_only import ConfigChecks
from trainer.preflight.diagnosis import trial
from trainer.rollouts.compare_runs import COMPARED, compare
from trainer.rollouts.live import plan_to_read
from trainer.rollouts.recorded_groups import RecordedSteps
from trainer.run import run
from trainer.weight_sync.sync import WeightSync

STEPS = 4
SMALL = ["--train-size", "12", "--problems-per-step", "3", "--group-size", "4", "--max-new-tokens", "24",
         "--eval-size", "2", "--tracker=", "--config", PATIENT, "--save-every", "2", "--lr", "1e-3"]  # fmt: skip
FILTERED = ["--filter-equal", "--oversample", "1.5", "--minibatches", "2", "--epochs", "2"]


@pytest.fixture(scope="module")
def uneven(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of a small run of an environment that is gone when the test is."""
    # Rewards depend on how much is written; some episodes break, so that groups are played again; some are equal.
    rewards = (
        "if right: return right",
        "if len(text) % 2: raise RuntimeError('no such file')",
        "return float(len(text) % 4 == 2)",
    )
    with lucky_geometry(tmp_path_factory.mktemp("uneven"), "uneven", *rewards) as flags:
        yield [*flags, "--model", str(checkpoint), *SMALL]


def started(folder: Path, *argv: str, code: int = 0) -> Path:
    """Run the command in this process; return the run folder."""
    assert run(last_of_each([*argv, "--out", str(folder.parent), "--name", folder.name])) == code
    return folder


@pytest.fixture(scope="module")
def recorded(uneven: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with images, broken episodes, groups played again and groups left out, of two updates on three groups."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    return started(folder, *uneven, *FILTERED, "--steps", str(STEPS))


def replayed(folder: Path, recorded: Path, *argv: str, code: int = 0) -> Path:
    model = () if "--model" in argv else ("--model", read_config(recorded / "config.yaml").model.model)
    return started(folder, "--replay-rollouts", str(recorded), "--tracker=", *model, *argv, code=code)


@pytest.fixture
def nothing_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine, no environment, no data, no weights sent: whoever asks for one fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is to be played")

    for place in (
        "trainer.setup.engines.build_engine",
        "trainer.rollouts.live.load_problems",
        "trainer.rollouts.live.load_env",
        "trainer.config.inputs.get_mixture",
        "trainer.weight_sync.sync.WeightSync.__init__",
        "envs.execution.runner.EnvRunner.open",
        "trainer.config.rollout.ServersConfig.check",
    ):
        monkeypatch.setattr(place, refuse)


def assert_same_training(folder: Path, other: Path, steps: int = STEPS) -> None:
    assert metrics_of(folder) == metrics_of(other)
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, steps + 1))
    ours, theirs = state_of(folder, steps), state_of(other, steps)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_recorded_run_has_every_kind_of_group(recorded: Path) -> None:
    rows, outcomes = metrics_of(recorded), {e["fate"] for e in episodes_in(recorded)}
    assert all(row["grad_norm"] > 0 and row["num_updates"] == 4 for row in rows)
    assert outcomes >= {"train", "discarded", "filtered"}
    assert any(e["fate"] == "train" and e["end_reason"] == "env_error" for e in episodes_in(recorded))


def test_training_on_recorded_rollouts_repeats_the_run_to_the_bit(
    recorded: Path, nothing_plays: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = replayed(tmp_path / "replay", recorded)
    out = said(capsys)
    assert "entropy are equal to the bit in 4 of 4 steps" in out
    assert "doctor: 7 checks sound" in out
    assert_same_training(folder, recorded)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (folder, recorded)]
    for name in ("steps_done", "end_reasons", "groups", "unused_groups", "max_rollout_train_kl"):
        assert summaries[0][name] == summaries[1][name], name
    assert summaries[0]["compared"]["num_equal"] == STEPS and summaries[0]["accuracy_after"] == {}
    assert not (folder / "episodes").exists()
    assert export([str(folder)]) == 0
    exported, model = (load_file(folder / name / "model.safetensors") for name in (f"model-step-{STEPS}", "model"))
    assert all(torch.equal(exported[name], model[name]) for name in model)
    assert read_config(folder / "config.yaml").stages.replay_rollouts == recorded


def test_the_ids_that_tokens_were_drawn_from_are_recorded_and_trained_on_again(
    uneven: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--top-k", "20", "--top-p", "0.8", "--steps", "2", "--eval-size", "0", "--epochs", "2", "--kl-coef", "0.01"]
    recorded = started(tmp_path / "recorded", *uneven, *argv)
    assert all(row["rollout_train_kl"] < 1e-10 and row["grad_norm"] > 0 for row in metrics_of(recorded))
    capsys.readouterr()
    folder = replayed(tmp_path / "replay", recorded)
    assert "are equal to the bit in 2 of 2 steps" in said(capsys)
    assert_same_training(folder, recorded, steps=2)
    lines = lines_of(recorded / "episodes" / EPISODES)
    assert all(line["kept"] for line in lines if line["logprobs"] and line["end_reason"] != "aborted")
    for line in lines:
        line.pop("kept", None)
    (recorded / "episodes" / EPISODES).unlink()
    file = GzipLines(recorded / "episodes" / EPISODES)
    for line in lines:
        file.append(json.dumps(line).encode())
    with pytest.raises(UserError, match=r"must have 20 ids that each token was drawn from, .*, got 0"):
        replayed(tmp_path / "without", recorded)
    with pytest.raises(UserError, match="--top-k: must stay as in the recorded run, which has 20, got 30"):
        replayed(tmp_path / "other", recorded, "--top-k", "30")


@pytest.mark.slow
def test_adapters_and_episodes_that_saw_two_versions_repeat_too(
    uneven: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("TRUETURN_MAX_BATCH", "8")
    argv = ["--lora-rank", "2", "--max-staleness", "2", "--eval-size", "0"]
    recorded = started(tmp_path / "recorded", *uneven, *argv, "--steps", "3", "--kl-coef", "0.01")
    assert max(row["staleness/max"] for row in metrics_of(recorded)) >= 1
    capsys.readouterr()
    folder = replayed(tmp_path / "replay", recorded)
    assert "equal to the bit in 3 of 3 steps" in said(capsys)
    # What was still being played after the last step is known to be aborted then.
    ours, theirs = (metrics_of(path) for path in (folder, recorded))
    assert ours[:2] == theirs[:2] and ours[2]["loss"] == theirs[2]["loss"]
    assert sum(row["grad_norm"] > 0 for row in ours) >= 2
    state, other = state_of(folder, 3), state_of(recorded, 3)
    assert all(torch.equal(state[name], other[name]) for name in other)


def test_another_loss_is_compared_from_the_first_step_that_differs(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = replayed(
        tmp_path / "replay", recorded, "--lr", "2e-3", "--steps", "2", "--minibatches", "1", "--epochs", "1"
    )
    ours, theirs, out = metrics_of(folder), metrics_of(recorded), said(capsys)
    assert ours[0]["rollout_train_kl"] == pytest.approx(theirs[0]["rollout_train_kl"], abs=1e-11)
    assert ours[0]["loss"] != theirs[0]["loss"]
    loss = f"loss {theirs[0]['loss']} there, {ours[0]['loss']} here"
    assert f"equal to the bit in 0 of 2 steps; step 1: {loss}" in out
    assert [row["num_updates"] for row in ours] == [1, 1]


@pytest.mark.slow
def test_a_replay_that_is_stopped_goes_on_at_its_step(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = FSDPLearner.step

    def interrupted(self: FSDPLearner, minibatches: Any) -> Any:
        if self.steps_done == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, minibatches)

    with monkeypatch.context() as patched:
        patched.setattr(FSDPLearner, "step", interrupted)
        folder = replayed(tmp_path / "replay", recorded, code=130)
    assert len(metrics_of(folder)) == 2
    assert json.loads((folder / "summary.json").read_text())["interrupted"]
    assert run(["--resume", str(folder)]) == 0
    assert_same_training(folder, recorded)
    with pytest.raises(UserError, match="--replay-rollouts: must stay as in the run"):
        run(["--resume", str(folder), "--replay-rollouts", str(tmp_path)])


@pytest.mark.slow
def test_several_learners_train_on_recorded_rollouts(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = replayed(tmp_path / "replay", recorded, "--num-learners", "2", "--steps", "1")
    (ours,), theirs = metrics_of(folder), metrics_of(recorded)[0]
    for name in ("loss", "grad_norm", "entropy", "num_tokens", "reward"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@pytest.fixture(scope="module")
def rollouts(uneven: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without its training side."""
    folder = tmp_path_factory.mktemp("runs") / "rollouts"
    with pytest.MonkeyPatch.context() as patched:
        for name in ("step", "begin_checkpoint", "save"):
            patched.setattr(FSDPLearner, name, None)  # nobody asks for them
        return started(folder, *uneven, *FILTERED, "--steps", "2", "--rollout-only")


def test_rollouts_alone_are_recorded_with_their_metrics_and_nothing_is_kept_of_the_model(
    rollouts: Path, recorded: Path
) -> None:
    ours, theirs = metrics_of(rollouts), metrics_of(recorded)
    assert ours[0] == {name: value for name, value in theirs[0].items() if name in ours[0]}
    assert not ours[0].keys() & set(COMPARED)
    raw = json.loads((rollouts / "metrics.jsonl").read_text().splitlines()[1])
    assert raw["step"] == 2 and raw["rollout_s"] > 0 and "train_s" not in raw and "loss" not in raw
    assert not (rollouts / "model").exists() and not list((rollouts / "checkpoints").iterdir())
    summary = json.loads((rollouts / "summary.json").read_text())
    assert summary["steps_done"] == 2 and summary["max_rollout_train_kl"] is None
    played = episodes_in(rollouts)
    assert {v for e in played for t in e["turns"] for v, _ in t["versions"]} == {0}
    assert all(e["fate"] for e in played) and len(list(Recording.open(rollouts).episodes())) == len(played)
    first = [e["ids"] for e in played if e["step"] == 1]
    assert first == [e["ids"] for e in episodes_in(recorded) if e["step"] == 1]


@pytest.mark.usefixtures("recorded")  # a run before this one has started the process that watches calls
def test_a_full_disk_ends_rollouts_alone_in_one_line_without_a_word_of_going_on(
    uneven: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(20_000):  # room for the configuration, not for the episodes
        started(tmp_path / "run", *uneven, "--rollout-only", "--steps", "9", code=1)
    error = capsys.readouterr().err
    assert "error: [Errno 27] File too large" in error and "--resume" not in error and "Traceback" not in error
    assert list(Recording.open(tmp_path / "run").episodes())


def test_rollouts_and_then_training_on_them_begin_as_the_ordinary_run(
    rollouts: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = replayed(tmp_path / "replay", rollouts)
    assert "there are no figures of training to compare with" in said(capsys)
    ours, theirs = metrics_of(folder), metrics_of(recorded)
    # Both runs played for themselves. A group that is played again shares its decode batch with whatever is still being
    # written, so log-probs may differ in the last bits; what they are of does not.
    played = metrics_of(rollouts)[0]
    assert {name: ours[0][name] for name in played} == {name: theirs[0][name] for name in played}
    assert ours[0].keys() == theirs[0].keys() and ours[0]["loss"] != 0
    for name in ("loss", "grad_norm", "entropy", "num_tokens", "num_updates"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-3, abs=1e-6), name
    assert ours[1]["staleness/max"] == 1 and ours[1]["rollout_train_kl"] > theirs[1]["rollout_train_kl"]


@pytest.fixture
def server(checkpoint: Path) -> Iterator[str]:
    """The address of a server that speaks SGLang's protocol, on the same checkpoint."""
    with serving(checkpoint) as url:
        yield url


@pytest.mark.slow
def test_servers_are_probed_and_play_rollouts_alone(
    uneven: list[str], server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, gaps = WeightSync.start, []

    async def probed(sync: WeightSync, version: int) -> Any:
        gap = await start(sync, version)
        gaps.append(gap)
        return gap

    monkeypatch.setattr(WeightSync, "start", probed)
    folder = started(tmp_path / "run", *uneven, "--rollout-only", "--engine-url", server, "--steps", "2")
    assert len(gaps) == 1 and gaps[0] < 1e-5
    assert {v for e in episodes_in(folder) for t in e["turns"] for v, _ in t["versions"]} == {0}
    assert not (folder / "sync").exists() and not (folder / "model").exists()
    replay = replayed(tmp_path / "replay", folder, "--steps", "1")
    assert metrics_of(replay)[0]["rollout_train_kl"] < 1e-8


def test_a_learner_that_is_only_read_keeps_no_float32_and_no_optimizer_state(checkpoint: Path) -> None:
    config = RunConfig(model=ModelConfig(model=str(checkpoint), dtype="bfloat16"))
    for plan, dtype in ((config, torch.float32), (plan_to_read(config), torch.bfloat16)):
        learner = build_learner(plan, checkpoint, SamplingParams(), torch.device("cpu"))
        assert {parameter.dtype for parameter in learner.model.parameters()} == {dtype}
        assert not learner.optimizer.state


def test_memory_and_disk_are_counted_for_the_side_that_is_done(checkpoint: Path, tmp_path: Path) -> None:
    both = RunConfig(model=ModelConfig(model=str(checkpoint), dtype="bfloat16"))
    replay = both.model_copy(update={"stages": StagesConfig(replay_rollouts=tmp_path)})
    rollout = both.model_copy(update={"stages": StagesConfig(rollout_only=True)})
    need = {name: memory_need(config, ConfigChecks(config).networks) for name, config in
            {"both": both, "replay": replay, "rollout": rollout}.items()}  # fmt: skip
    assert need["both"].engine == need["rollout"].engine > need["replay"].engine == need["replay"].cache == 0
    assert need["both"].learner == need["replay"].learner
    num = ConfigChecks(both).networks.num_parameters
    assert need["rollout"].learner == 2 * num + 2**30 and need["both"].learner >= 16 * num + 2**30
    disk = {name: disk_need(config, num, num) for name, config in
            {"both": both, "replay": replay, "rollout": rollout}.items()}  # fmt: skip
    assert disk["both"].keys() == {"checkpoints", "the model", "recordings"}
    assert disk["replay"] == {name: disk["both"][name] for name in ("checkpoints", "the model")}
    assert disk["rollout"] == {"recordings": disk["both"]["recordings"]}


def test_a_printed_configuration_repeats_the_replay(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--replay-rollouts", str(recorded), "--clip-high", "0.3"]
    with pytest.raises(SystemExit):
        run([*argv, "--print-config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)

    def parsed(*argv: str) -> RunConfig:
        return parse(RunConfig, argv, "python -m trainer.run", "Train.", SOURCES)

    config = parsed(*argv)
    assert parsed("--config", str(tmp_path / "printed.yaml")) == config
    assert config.algorithm.clip_high == 0.3 and config.optim.minibatches == 2 and config.rollout.group_size == 4
    assert config.log == RunConfig().log and not config.stages.rollout_only
    assert trial(config, tmp_path, 64).plays  # the doctor looks at a run that does both sides


def test_flags_that_cannot_be_are_refused(
    recorded: Path, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, *argv: str) -> None:
        with pytest.raises(UserError, match=words):
            run(argv)
        assert not (tmp_path / "runs").exists()

    monkeypatch.chdir(tmp_path)

    replay = ["--replay-rollouts", str(recorded), "--model", read_config(recorded / "config.yaml").model.model]
    refused("--replay-rollouts: cannot be given together with --rollout-only", *replay, "--rollout-only")
    refused("--steps: must be at most the 4 steps that .* has recorded, got 9; give --steps 4", *replay, "--steps", "9")
    refused("--group-size: must stay as in the recorded run, which has 4, got 8", *replay, "--group-size", "8")
    refused("must hold a recording .*, got no such folder", "--replay-rollouts", str(tmp_path / "none"))
    refused("must be a run folder, with config.yaml", "--replay-rollouts", str(recorded / "episodes"))
    refused("--resume: must be a run that trains", "--resume", str(rollouts))


def test_what_is_taken_of_recorded_settings_is_numbers_and_words_alone() -> None:
    # Names of layers, which are looked up and never called, and pairs and triples of numbers.
    lists = {"lora_targets", "curriculum_shares", "curriculum_bounds"}
    for path, field in leaves(RunConfig):
        if is_under(path, INHERITED) and path[-1] not in lists:
            is_plain = field.annotation in (int, float, bool) or get_origin(field.annotation) is Literal
            assert is_plain or takes_code(field), path  # which `Sources.read_base` takes only if it is a word of ours


HOSTILE = {
    ("cluster", "num_learners"): 2,
    ("cluster", "ray_address"): "198.51.100.7:6379",
    ("engine", "engine"): "sglang",
    ("engine", "engine_url"): ["http://198.51.100.7:30000"],
    ("engine", "engine_args"): "--model-path evil",
    ("env", "env"): ["evil"],
    ("env", "registry"): ["evil.yaml"],
    ("env", "isolation"): "inline",
    ("data", "data"): "evil/data",
    ("model", "model"): "evil/model",
    ("model", "template_options"): '{"evil": 1}',
    ("log", "out"): "/evil",
    ("log", "tracker"): ["wandb"],
    ("log", "project"): "evil",
    ("doctor",): "off",
    ("checkpoint", "keep_checkpoints"): 9,
}


def test_a_strangers_settings_choose_no_place_and_start_nothing(
    recorded: Path, nothing_plays: None, tmp_path: Path
) -> None:
    run_folder = copied(recorded, tmp_path / "run")
    tree = yaml.safe_load((run_folder / "config.yaml").read_text())
    for (*sections, name), value in HOSTILE.items():
        functools.reduce(dict.__getitem__, sections, tree)[name] = value
    (run_folder / "config.yaml").write_text(yaml.safe_dump(tree))
    argv = ("--replay-rollouts", str(run_folder))
    config, mine = parse(RunConfig, argv, "python -m trainer.run", "Train.", SOURCES), values_of(RunConfig())
    taken = {path for path, value in values_of(config).items() if value != mine[path]}
    assert taken > {("optim", "minibatches")} and all(is_under(path, (*INHERITED, REPLAY)) for path in taken)
    with pytest.raises(UserError, match=r"--model: must be given: .* the recorded run had evil/model"):
        started(tmp_path / "replay", *argv)
    own = read_config(recorded / "config.yaml").model.model
    replay = started(tmp_path / "replay", *argv, "--model", own, "--tracker=", "--steps", "1")
    assert metrics_of(replay)[0] == metrics_of(recorded)[0]


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("metrics.jsonl", b"{", "metrics.jsonl line 1: must be an object of numbers"),
        ("metrics.jsonl", b'{"loss": "x"}', "metrics.jsonl line 1: must be an object of numbers"),
        ("metrics.jsonl", b"[" * 100_000, "metrics.jsonl line 1: must be an object of numbers"),
        ("metrics.jsonl", b'{"step": 1}', "must have recorded every group .*, got no count in step 1"),
        ("config.yaml", b"steps: " + b"[" * 100_000, "must be YAML, got lists that nest too deeply"),
        ("config.yaml", b"a: &a [x,x,x,x]\n" + b"".join(b"%c: &%c [*%c,*%c,*%c,*%c]\n" % (c, c, *[c - 1] * 4)
                        for c in range(98, 123)) + b"optim: *z", "aliases stand for more than"),
        ("config.yaml", b"optim: &a [x,x]\nsteps: [" + b"*a," * 9 + b"]", "must be a section with settings"),
        ("config.yaml", b"#" * 2**20 + b"\n", "must have at most 1048576 bytes"),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_file_of_a_run_is_an_error_in_one_line(
    file: str, line: bytes, words: str, recorded: Path, tmp_path: Path
) -> None:
    run_folder = copied(recorded, tmp_path / "run")
    own = read_config(recorded / "config.yaml").model.model
    (run_folder / file).write_bytes(line + b"\n")
    with pytest.raises(UserError, match=words):
        replayed(tmp_path / "replay", run_folder, "--model", own, "--steps", "1")


def test_streams_are_checked_with_the_models_vocabulary(recorded: Path, tmp_path: Path, renderer: Renderer) -> None:
    image = renderer.image_token_id

    def moved(line: dict[str, Any]) -> None:  # a placeholder changes places with the token before the first
        place = line["ids"].index(image)
        line["ids"][place - 1], line["ids"][place + 5] = image, line["ids"][place - 1]

    def sampled(line: dict[str, Any]) -> None:
        line["ids"][line["turns"][0]["start"]] = renderer.suppressed_ids[0]

    def negative(line: dict[str, Any]) -> None:
        line["ids"][0] = -1

    def rich(line: dict[str, Any]) -> None:
        line["reward"] = -1e39

    def unknown(line: dict[str, Any]) -> None:
        line["reward"] = math.nan

    for number, (change, words) in enumerate(
        (
            (moved, "a run of"),
            (sampled, "sampled suppressed ids"),
            (negative, "must have ids below"),
            (rich, "must have a reward within"),
            (unknown, "reward: Input should be a finite number"),
        )
    ):
        run_folder = copied(recorded, tmp_path / str(number))
        path = run_folder / "episodes" / "episodes.jsonl.gz"
        lines = lines_of(path)
        trained = {e["id"] for e in episodes_in(recorded) if e["fate"] == "train" and e["step"] == 1}
        change(next(e for e in lines if e["id"] in trained and e["turns"]))
        path.unlink()
        file = GzipLines(path)
        for each in lines:
            file.append(json.dumps(each).encode())
        with pytest.raises(UserError, match=words):
            replayed(tmp_path / "replay", run_folder, "--steps", "1")


def copied(recorded: Path, folder: Path) -> Path:
    shutil.copytree(recorded, folder, ignore=shutil.ignore_patterns("checkpoints", "model"))
    return folder


def first_image(run: Path) -> Path:
    return next(iter(sorted((run / "episodes" / "images").iterdir())))


def test_a_share_of_the_groups_is_not_trained_on(uneven: list[str], tmp_path: Path) -> None:
    recorded = started(tmp_path / "run", *uneven, "--record", "0.5", "--steps", "2", "--rollout-only")
    with pytest.raises(UserError, match=r"must have recorded every group that was trained on, got \d of 3 in step 1"):
        replayed(tmp_path / "replay", recorded)
    assert not (tmp_path / "replay").exists()


@pytest.mark.parametrize("fault", ["missing", "cut off", "others"])
def test_a_image_that_is_not_whole_is_said_before_anything_is_loaded(
    recorded: Path, tmp_path: Path, fault: str
) -> None:
    run = copied(recorded, tmp_path / "run")
    image = first_image(run)
    if fault == "missing":
        image.unlink()
    elif fault == "cut off":
        image.write_bytes(image.read_bytes()[:-200])
    else:
        Image.open(image).transpose(Image.Transpose.ROTATE_180).save(image)
    words = {
        "missing": "No such file",
        "cut off": "must be a whole image",
        "others": "must be the image that was recorded",
    }
    with pytest.raises(UserError, match=words[fault]):
        replayed(tmp_path / "replay", run)
    assert not (tmp_path / "replay").exists()


def test_another_schema_is_refused(recorded: Path, tmp_path: Path) -> None:
    run = copied(recorded, tmp_path / "run")
    manifest = run / "episodes" / "recording.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema_version": 99}))
    with pytest.raises(UserError, match="must be a recording of schema"):
        replayed(tmp_path / "replay", run)


def test_another_model_is_refused(recorded: Path, checkpoint: Path, tmp_path: Path) -> None:
    def refused(words: str, name: str) -> None:
        with pytest.raises(UserError, match=words):
            replayed(tmp_path / "replay", recorded, "--model", str(tmp_path / name))
        assert not (tmp_path / "replay").exists()

    write_tiny_model(tmp_path / "starter", "qwen3_vl")  # the same template over another vocabulary
    refused("--model: must read id", "starter")

    other = shutil.copytree(checkpoint, tmp_path / "template")
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{# other #}")
    refused("--model: must have the recorded chat template", "template")

    def configured(name: str, **changes: Any) -> None:
        config = shutil.copytree(checkpoint, tmp_path / name) / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))

    settings = json.loads((checkpoint / "config.json").read_text())
    image_id = settings["image_token_id"]
    configured("short", text_config={**settings["text_config"], "vocab_size": image_id})
    refused(f"must read id {image_id} as '<.image_pad.>', as recorded, got no such id", "short")
    configured("unseen", image_token_id=7)
    refused("must have .* image tokens, of id 7, for its images", "unseen")

    cutting = shutil.copytree(checkpoint, tmp_path / "coarse") / "preprocessor_config.json"
    limits = {"shortest_edge": 64 * 64, "longest_edge": 96 * 96}
    cutting.write_text(json.dumps({**json.loads(cutting.read_text()), "size": limits}))
    refused("--model: must cut images/.*png as recorded, into 1x8x10 patches", "coarse")


@pytest.mark.parametrize("size", [(160, 128), (33, 700), (1, 9), (900, 31), (64, 64)])
def test_the_grid_of_a_image_is_known_without_cutting_it(size: tuple[int, int], renderer: Renderer) -> None:
    assert renderer.images is not None
    image = Image.new("RGB", size)
    assert renderer.images.grid(image) == renderer.images.process(image).grid_thw


def test_a_step_is_read_as_it_was_taken(recorded: Path, renderer: Renderer) -> None:
    steps = RecordedSteps.open(recorded, STEPS, group_size=4)
    assert len(steps.steps) == STEPS and steps.num_episodes == len(episodes_in(recorded))
    lines = [e for e in episodes_in(recorded) if e["step"] == 2]
    rollout = steps.rollout(2, renderer.images)
    for fate, groups in {"train": rollout.groups, **rollout.unused}.items():
        expected = [(e["group"], e["sample_index"], e["attempt"]) for e in lines if e["fate"] == fate]
        tries = [t.key for group in groups for t in group.trajectories]
        assert sorted(tries + [t.key for g in groups for t in g.discarded if fate != "train"]) == sorted(expected)
        assert [group.trajectories[0].group for group in groups] == sorted({number for number, _, _ in expected})
    found = {t.key: t for group in rollout.groups for t in group.trajectories}
    for line in (e for e in lines if e["fate"] == "train"):
        t = found[line["group"], line["sample_index"], line["attempt"]]
        assert (t.ids_T.tolist(), t.reward, t.end_reason) == (line["ids"], line["reward"], line["end_reason"])
        assert [
            image_digest(p["image"]) for m in t.messages for p in m["content"] if isinstance(p, dict) and "image" in p
        ]
        assert [image.digest for image in t.images] == [image["digest"] for image in line["images"]]


def test_steps_are_compared_by_what_training_reports() -> None:
    row = {"step": 1.0, "reward": 0.5, "train_s": 3.0, **dict.fromkeys(COMPARED, 0.5)}
    same = compare([row, row], [row, {**row, "reward": 0.7, "train_s": 1.0}])
    assert (same.num_steps, same.num_equal, same.differing) == (2, 2, ())
    nan = {**row, "loss": float("nan")}
    assert compare([nan], [nan]).differing == ()
    other = compare([row, row, row], [row, {**row, "loss": 0.75, "entropy": 0.5000000000000001}])
    assert (other.num_steps, other.num_equal) == (2, 1)
    assert other.differing == ("loss 0.5 there, 0.75 here", "entropy 0.5 there, 0.5000000000000001 here")
    assert other.line("runs/x").endswith(
        "in 1 of 2 steps; step 2: loss 0.5 there, 0.75 here, entropy 0.5 there, 0.5000000000000001 here"
    )
    assert compare([{"step": 1.0, "reward": 0.5}], [row]).num_steps == 0
