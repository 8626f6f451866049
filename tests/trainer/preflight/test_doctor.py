"""Claims about the doctor: it finds what was planted, by the check that should; a sound run has no finding at all."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from agents.checking.scores import check_gap, judge_sight, judge_update
from agents.engines.hf_batch import BatchCache, CachedPrefix, KeysAndValues
from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.rendering.images import ImageStore
from envs.checks import CheckRun, Finding, Verdict, combine, fault, ok, skipped, warning
from envs.config.cli import parse
from envs.config.settings import leaves
from envs.errors import UserError
from envs.success import Success
from tests.agents.rendering.template_cases import OWN_TEMPLATES, QWEN_TEMPLATES, renderer_for
from tests.by_architecture import VISION_TYPES
from tests.paths import ROOT
from tests.tiny_models import image_processor, tiny_config, write_tiny_model
from tests.trainer.preflight.planted_faults import (
    CONTROL,
    FAULTS,
    PlantedFault,
    change_template,
    checkpoint,
    examine,
    odd,
    zero_grader,
)
from trainer.config.algorithm import AggregationName, AlgorithmConfig
from trainer.config.inputs import ModelConfig
from trainer.config.learner import ClusterConfig, LearnerConfig
from trainer.config.rollout import EngineConfig
from trainer.config.run import RunConfig
from trainer.doctor import run as run_doctor
from trainer.learner.weights_io import meta_model
from trainer.planning.memory import GIB, MetaNetworks
from trainer.planning.qwen3_vl import qwen3_vl_config
from trainer.preflight.checks.aggregation import check_aggregation
from trainer.preflight.checks.chat_template import check_conventions
from trainer.preflight.checks.engine_agreement import check_agreement
from trainer.preflight.checks.free_memory import FreeMemory, host_free
from trainer.preflight.checks.gold_answers import AnswerRewards, check_answers
from trainer.preflight.checks.image_processing import check_patches, noise_image, read_settings
from trainer.preflight.checks.memory import check_memory, memory_need
from trainer.preflight.checks.prompt_lengths import check_lengths
from trainer.preflight.checks.storage import check_folder, disk_need
from trainer.preflight.checks.versions import RANGES, Versions, check_versions
from trainer.preflight.checks.weights import check_same, rows_of
from trainer.preflight.diagnosis import diagnose
from trainer.preflight.quick import RunRefused
from trainer.preflight.report import CHECKS, DoctorConfig, summary_line
from trainer.run import run as run_training
from trainer.types import StepStats

SMALL = ("--train-size", "8", "--max-new-tokens", "32", "--problems", "1", "--answers", "4")


@pytest.mark.parametrize("planted", FAULTS, ids=[planted.name for planted in FAULTS])
def test_a_planted_fault_is_found_by_its_check(planted: PlantedFault) -> None:
    findings = examine(planted, *SMALL, "--only", planted.expected)
    assert [finding.status for finding in findings if finding.check == planted.expected] == ["fault"]
    assert all(finding.fix for finding in odd(findings))


def test_every_kind_of_fault_is_planted_and_expected_of_a_check_that_there_is() -> None:
    assert {planted.kind for planted in FAULTS} == set("abcdefghij")
    assert {planted.expected for planted in FAULTS} <= set(CHECKS)


def test_a_sound_run_passes_every_check() -> None:
    findings = examine(CONTROL, *SMALL)
    assert [finding.check for finding in findings] == list(CHECKS)
    assert {finding.check: finding.found for finding in findings if finding.status != "ok"} == {}


def test_the_command_prints_a_table_writes_a_report_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, out = tmp_path / "report.json", tmp_path / "my" / "runs"
    argv = [*SMALL, "--eval-size", "0", "--only", "positions", "--only", "folder", "--out", str(out)]
    assert run_doctor([*argv, "--report", str(report)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ positions +sound ", shown, re.MULTILINE) and max(map(len, shown.splitlines())) <= 120
    assert re.search(r"^doctor: 3 checks sound, [\d.]+ s$", shown, re.MULTILINE)
    names = [finding["check"] for finding in json.loads(report.read_text())["findings"]]
    assert names == ["run folder", "set-up", "positions"] and not out.parent.exists()


def test_a_fault_makes_the_command_return_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run_doctor(["--only", "run folder", "--out", str(tmp_path / "file" / "runs")]) == 1
    assert "-> give a folder with --out that can be written" in capsys.readouterr().out
    with pytest.raises(UserError, match="--only: must be in the name of a check"):
        run_doctor(["--only", "hearing"])


START = ["--train-size", "8", "--eval-size", "0", "--steps", "1", "--problems-per-step", "1", "--group-size", "2"]
START += ["--max-new-tokens", "24", "--tracker", "tensorboard"]


def test_a_run_begins_with_one_line_of_the_short_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_training([*START, "--out", str(tmp_path)]) == 0
    lines = re.findall(r"^doctor: .*$", capsys.readouterr().out, re.MULTILINE)
    assert len(lines) == 1 and re.fullmatch(r"doctor: 8 checks sound, \d+\.\d s", lines[0])


def test_a_run_with_a_fault_stops_before_step_0_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with zero_grader(tmp_path) as flags:
        with pytest.raises(RunRefused, match=r"^gold answers: 0 of 4 gold answers get 1; .*\(--doctor warn"):
            run_training([*START, *flags, "--out", str(out), "--name", "mine"])
        assert not (out / "mine").exists()
        assert run_training([*START, *flags, "--out", str(out), "--name", "mine", "--doctor", "warn"]) == 0
        assert "doctor: fault: gold answers: 0 of 4 gold answers get 1" in capsys.readouterr().out
        assert run_training([*START, *flags, "--out", str(out), "--name", "other", "--doctor", "off"]) == 0
        assert "doctor" not in capsys.readouterr().out


def test_a_game_whose_label_is_no_answer_starts_once_its_entry_says_so(tmp_path: Path) -> None:
    with zero_grader(tmp_path) as flags:
        flags = [*SMALL, *flags, "--only", "gold answers"]
        (finding,) = odd(diagnose(parse(DoctorConfig, flags, "", "")))
        assert finding.fix.endswith(
            "where the label is no answer, as in a game, write grader: none in the "
            "entry; where another reward is a success, success: 0.9, a key of the info, or none"
        )
        registry = tmp_path / "registry.yaml"
        registry.write_text(registry.read_text() + "  grader: none\n")
        findings = {each.check: each for each in diagnose(parse(DoctorConfig, flags, "", ""))}
        assert findings["gold answers"].status == "skipped"
        assert findings["gold answers"].found.startswith("no solution() and no label that is an answer")


def test_each_fault_of_a_start_is_a_line_of_its_own() -> None:
    error = RunRefused(
        [Finding("memory", "fault", "too little", "take more"), Finding("positions", "fault", "are flat")]
    )
    assert str(error).splitlines() == [
        "memory: too little; take more (--doctor warn starts it anyway)",
        "error: positions: are flat (--doctor warn starts it anyway)",
    ]


def test_a_check_that_fails_itself_is_a_finding_and_hides_no_other() -> None:
    def crash() -> Verdict:
        raise ZeroDivisionError("division by zero")

    checks = CheckRun()
    checks.run("versions", crash)
    checks.run("memory", lambda: ok("fits"))
    first, second = checks.findings
    assert first.status == "fault" and re.match(r"ended with ZeroDivisionError: .* \(test_doctor.py:\d+\)", first.found)
    assert second.status == "ok"

    def refuse() -> Verdict:
        raise UserError("--model", "must have a tokenizer", "x", "add tokenizer.json")

    checks.run("set-up", refuse)
    assert checks.findings[2].line == "set-up: --model must have a tokenizer, got x; add tokenizer.json"


def test_several_verdicts_are_as_bad_as_the_worst_and_say_only_that() -> None:
    assert combine([ok("a"), warning("b", "mend b"), skipped("c")]) == warning("b", "mend b")
    assert combine([fault("a", "mend"), warning("b", ""), fault("c", "mend")]) == fault("a; c", "mend")
    assert combine([]).status == "skipped"


def test_the_last_line_counts_what_was_found() -> None:
    findings = [
        Finding("a", "ok", ""),
        Finding("b", "warning", ""),
        Finding("c", "fault", ""),
        Finding("d", "skipped", ""),
    ]
    assert summary_line(findings * 2, 1.26) == "doctor: 2 checks sound, 2 warnings, 2 faults, 2 skipped, 1.3 s"


# Versions


def test_supported_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [text for extra in extras.values() for text in extra]
    texts += extras["train"]  # another extra may ask for less
    asked = {match[1]: match[2] for text in texts if (match := re.match(r"([\w-]+)([<>=].*)", text))}
    assert {name: asked[name] for name in RANGES} == RANGES


HERE = Versions("3.12.3", {"torch": "2.11.0+cu130", "transformers": "5.12.1", "sglang": "0.5.15.post1"}, "13.0")


@pytest.mark.parametrize(
    ("package", "number", "status", "words"),
    [
        ("torch", "2.11.0+cu130", "ok", "torch 2.11.0"),
        ("torch", "2.10.1", "fault", "torch 2.10.1 is too old: >=2.11,<2.14"),
        ("torch", "2.14.0", "warning", "torch 2.14.0 is untried"),
        ("transformers", "5.11.0", "fault", "too old: >=5.12,<6"),
        ("transformers", "6.0.0", "warning", "untried"),
        ("sglang", "0.5.14", "fault", "sglang 0.5.14 is too old"),
        ("sglang", "0.5.23", "ok", "sglang 0.5.23"),
        ("sglang", "0.5.24", "warning", "untried"),
    ],
)
def test_versions_are_judged_by_their_ranges(package: str, number: str, status: str, words: str) -> None:
    versions = replace(HERE, packages={**HERE.packages, package: number})
    verdict = check_versions(versions, tuple(HERE.packages))
    assert (verdict.status, words in verdict.found) == (status, True), verdict
    others = [name for name in HERE.packages if name != package]
    assert check_versions(versions, others).status == "ok"


def test_sglang_must_be_built_for_the_torch_that_is_there() -> None:
    pinned = replace(HERE, sglang_requires=("torch==2.11.0", "transformers==5.12.1", "odd ==== x"))
    used = tuple(HERE.packages)
    assert check_versions(pinned, used).status == "ok"
    other = replace(pinned, packages={**HERE.packages, "torch": "2.13.0"})
    assert "asks for torch==2.11.0, 2.13.0 is there" in check_versions(other, used).found


# Memory and disk


@functools.cache
def networks(name: str = "2b") -> MetaNetworks:
    return MetaNetworks(meta_model(qwen3_vl_config(name)))


ON_GPU = RunConfig(model=ModelConfig(device="cuda", dtype="bfloat16"))


def test_a_gpu_that_is_too_small_is_a_fault_with_the_flags_that_help() -> None:
    need = memory_need(ON_GPU, networks())
    small = check_memory(ON_GPU, networks(), FreeMemory(64 * GIB, ((40 * GIB, 40 * GIB),)))
    assert (small.status, need.least + need.engine > 40 * GIB) == ("fault", True)
    most = (need.learner + need.engine + need.cache) / GIB
    assert small.found == f"a GPU with a learner may need {most:.1f} GiB, 40.0 GiB are free"
    assert "--recompute 1" in small.fix and "trainer.memory" in small.fix
    assert check_memory(ON_GPU, networks(), FreeMemory(64 * GIB, ((140 * GIB, 141 * GIB),))).status == "ok"
    helped = ON_GPU.model_copy(update={"learner": LearnerConfig(recompute=1.0, offload="optimizer")})
    assert memory_need(helped, networks()).learner < memory_need(ON_GPU, networks()).learner
    assert memory_need(helped, networks()).offloaded == 8 * 2_127_532_032


def test_a_server_on_the_learners_gpu_takes_its_share_of_it() -> None:
    alone = RunConfig(
        model=ModelConfig(device="cuda", dtype="bfloat16"),
        engine=EngineConfig(engine="sglang", sync="disk", first_gpu=1),
    )
    beside = alone.model_copy(update={"engine": EngineConfig(engine="sglang", sync="disk", mem_fraction=0.5)})
    two, one = FreeMemory(64 * GIB, ((80 * GIB, 80 * GIB),) * 2), FreeMemory(64 * GIB, ((80 * GIB, 80 * GIB),))
    assert "80.0 GiB are free" in check_memory(alone, networks(), two).found
    assert "39.0 GiB are free beside servers that take 0.5 of it" in check_memory(beside, networks(), one).found
    three = beside.model_copy(update={"engine": beside.engine.model_copy(update={"num_servers": 3})})
    assert "37.0 GiB are free beside servers that take 0.5 of it" in check_memory(three, networks(), one).found


def test_weights_are_split_over_gpus_and_gpus_elsewhere_are_not_judged() -> None:
    four = ON_GPU.model_copy(update={"cluster": ClusterConfig(num_gpus=4)})
    config, here = networks("8b"), FreeMemory(64 * GIB, ((80 * GIB, 80 * GIB),) * 5)  # one for the server
    assert memory_need(four, config).learner < memory_need(ON_GPU, config).learner - 80 * GIB
    assert check_memory(four, config, FreeMemory(64 * GIB)).status == "skipped"
    assert check_memory(four, config, here).status == "warning"  # it fits with shorter streams


def test_the_memory_of_megatron_is_said_not_to_be_predicted() -> None:
    cluster = ClusterConfig(backend="megatron", num_gpus=2)
    config = ON_GPU.model_copy(update={"cluster": cluster})
    found = check_memory(config, networks(), FreeMemory(64 * GIB, ((1, 80 * GIB),) * 2))
    assert found.status == "skipped" and "megatron is not predicted" in found.found


def test_a_host_is_at_fault_only_where_not_even_the_weights_fit() -> None:
    tiny = MetaNetworks(meta_model(tiny_config("qwen3_vl", AutoTokenizer.from_pretrained(STARTER_PATH), tied=True)))
    need = memory_need(RunConfig(), tiny)
    assert check_memory(RunConfig(), tiny, FreeMemory(2 * (need.learner + need.engine + need.cache))).status == "ok"
    assert check_memory(RunConfig(), tiny, FreeMemory(need.learner)).status == "warning"
    assert check_memory(RunConfig(), tiny, FreeMemory(need.least + need.engine - 1)).status == "fault"


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_what_an_embedded_engine_keeps_is_counted_by_its_layers(model_type: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type)
    network = PolicyModel.load(tmp_path)
    config = RunConfig()
    rows = config.rollout.problems_per_step * config.rollout.group_size
    cache = BatchCache([CachedPrefix()], config.data.max_prompt_tokens + config.env.max_new_tokens, torch.device("cpu"))
    one = torch.ones(1, 1, dtype=torch.bool)
    cache.begin(one)
    with torch.inference_mode():
        network.next_logits(torch.tensor([7]), torch.tensor([0]), one, cache)
    parts = [layer.store if isinstance(layer, KeysAndValues) else layer.states for layer in cache.layers]
    kept = sum(
        part.nbytes if isinstance(part, Tensor) else part.conv_SCW.nbytes + part.recurrent_SHKV.nbytes for part in parts
    )
    assert memory_need(config, MetaNetworks(meta_model(network.config))).cache == 2 * rows * kept


def test_a_control_group_limits_what_is_free(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:  3000 kB\n",
        "sys/fs/cgroup/memory.max": "2000000",
        "sys/fs/cgroup/memory.current": "1500000",
        "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 200000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_free(tmp_path) == 2_000_000 - 1_500_000 + 200_000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max")
    assert host_free(tmp_path) == 3000 * 1024


def test_disk_is_counted_from_parameters_and_held_against_what_is_free(tmp_path: Path) -> None:
    need = disk_need(RunConfig(), num_parameters=1000, num_trained=900)
    assert need == {"checkpoints": 12 * 900 * 3, "the model": 2000, "recordings": 24 * 50 * 64 * (1024 + 256)}
    served = RunConfig(engine=EngineConfig(engine="sglang"))
    assert disk_need(served, num_parameters=1000, num_trained=900)["weights for servers"] == 8000
    assert check_folder(tmp_path / "not" / "there", need).status == "ok" and not (tmp_path / "not").exists()
    assert check_folder(tmp_path, {**need, "checkpoints": 2**60}).status == "fault"
    assert check_folder(tmp_path, {**need, "recordings": 2**60}).status == "warning"
    assert check_folder(Path("/proc/nothing"), need).status == "fault"


# What the checks of a network judge


def test_gaps_are_judged_by_the_dtype() -> None:
    assert [check_gap(gap, "float32", "its").status for gap in (1e-6, 2e-3, 0.1, np.inf)] == [
        "ok",
        "warning",
        "fault",
        "fault",
    ]
    assert [check_gap(gap, "bfloat16", "its").status for gap in (0.01, 0.1, 0.5)] == ["ok", "warning", "fault"]


@pytest.mark.parametrize(
    ("noise", "changed", "status"),
    [(0.0, 0.5, "ok"), (0.01, 0.02, "fault"), (0.0, 1e-4, "warning"), (0.0, np.nan, "fault")],
)
def test_only_a_move_beyond_the_noise_is_sight(noise: float, changed: float, status: str) -> None:
    assert judge_sight(noise, changed).status == status


@pytest.mark.parametrize(
    ("moved", "last", "status"),
    [(0.8, 0.01, "ok"), (0.8, 0.2, "fault"), (0.8, np.nan, "fault"), (0.02, 0.01, "warning")],
)
def test_an_engine_that_keeps_anything_of_older_weights_is_stale(moved: float, last: float, status: str) -> None:
    assert judge_update(0.005, moved, {"scored again": 0.006, "new session": last}, "float32").status == status


@pytest.mark.parametrize(("dtype", "status"), [("float32", "fault"), ("bfloat16", "ok")])
def test_turns_may_be_off_by_the_rounding_of_the_dtype_after_new_weights(dtype: str, status: str) -> None:
    after = {"scored again": 0.0, "new session": 0.003, "open session": 0.007}
    assert judge_update(0.0, 0.8, after, dtype).status == status
    assert judge_update(0.0, 0.8, {"new session": 0.8}, dtype).status == "fault"


@pytest.mark.parametrize(
    ("aggregation", "max_turns", "status"),
    [("seq-mean-token-mean", 3, "warning"), ("seq-mean-token-mean", 1, "ok"), ("token-mean", 3, "ok")],
)
def test_an_aggregation_that_pays_for_turns_is_warned_of(
    aggregation: AggregationName, max_turns: int, status: str
) -> None:
    verdict = check_aggregation(AlgorithmConfig(aggregation=aggregation), max_turns)
    assert (verdict.status, bool(verdict.fix)) == (status, status == "warning")


def test_gold_answers_fail_as_a_whole_when_more_than_half_do() -> None:
    best = Success(1.0)
    right = AnswerRewards("a", "1", 1.0, is_solved=True, is_fooled=False)
    wrong = AnswerRewards("b", "2", 0.0)
    assert check_answers([right] * 3, best).status == "ok"
    assert check_answers([right, right, wrong, wrong], best).status == "warning"
    assert check_answers([right, wrong, wrong], best).status == "fault"
    assert "sample b (label '2') gets 0" in check_answers([right, wrong], best).found
    assert check_answers([replace(right, is_fooled=True)], best).status == "fault"
    # A reward with a cost is doubted, one with a bonus is sound.
    assert check_answers([replace(right, gold=0.99, is_solved=False)] * 3, best).status == "warning"
    assert check_answers([replace(right, gold=1.1)] * 3, best).status == "ok"
    assert check_answers([AnswerRewards("c", None, None)], best).status == "skipped"
    assert check_answers([AnswerRewards("d", "4", None, error="KeyError: 2 (shop.py:12)")], best).status == "fault"


def test_patches_must_have_the_familys_colours_and_the_images() -> None:
    settings = json.loads((STARTER_PATH / "preprocessor_config.json").read_text())
    store = ImageStore.find(STARTER_PATH)
    assert store
    patches = store.process(noise_image())
    assert check_patches(patches, settings, "qwen3_vl").status == "ok"
    other = check_patches(patches, {**settings, "image_std": [1.0] * 3}, "qwen3_vl")
    assert "image_std [1.0, 1.0, 1.0], qwen3_vl was trained with" in other.found
    grey = replace(patches, pixels_PD=np.zeros_like(patches.pixels_PD))
    assert "channels have the means [0.0, 0.0, 0.0]" in check_patches(grey, settings, "qwen3_vl").found


def test_the_colours_of_every_family_that_reads_images_are_known(tmp_path: Path) -> None:
    for model_type in VISION_TYPES:
        folder = tmp_path / model_type
        image_processor(model_type).save_pretrained(folder)
        store = ImageStore.find(folder)
        assert store
        verdict = check_patches(store.process(noise_image()), read_settings(folder), model_type)
        assert verdict.status == "ok", verdict


def test_what_the_learner_keeps_must_fit_beside_servers_that_free_their_memory_while_it_trains() -> None:
    def judged(mem_fraction: float) -> Verdict:
        engine = EngineConfig(engine="sglang", sync="disk", placement="colocate", mem_fraction=mem_fraction)
        config = ON_GPU.model_copy(update={"engine": engine, "cluster": ClusterConfig(num_gpus=1)})
        return check_memory(config, networks(), FreeMemory(64 * GIB, ((80 * GIB, 80 * GIB),)))

    kept = 12 * 2_127_532_032 / GIB + 1  # float32 weights, two moments, and the process
    tight = judged(0.75)
    assert tight.status == "fault" and tight.found.startswith(f"the learner keeps {kept:.1f} GiB while servers write")
    assert judged(0.5).status == "ok"


def stats(kl: float, mean: float, num_tokens: int = 10) -> StepStats:
    return StepStats(0.0, 0.0, 0.0, num_tokens, 0, 0, kl, (kl,), mean, mean, mean, 1.0, 1.0, {})


@pytest.mark.parametrize(
    ("kl", "mean", "status"),
    [(1e-5, 0.002, "ok"), (2e-3, 0.05, "warning"), (2e-2, 0.1, "fault"), (1e-5, 0.3, "fault"), (np.nan, 0.0, "fault")],
)
def test_agreement_is_judged_by_the_kl_and_by_the_runs_own_tolerance(kl: float, mean: float, status: str) -> None:
    assert check_agreement(stats(kl, mean), tolerance=0.2).status == status


def test_weights_are_compared_by_name_and_the_first_that_differs_is_placed() -> None:
    theirs = {"model.visual.a": torch.ones(3, 2), "model.b": torch.arange(4.0).bfloat16()}
    own = {f"backbone.{name}": tensor.float().clone() for name, tensor in theirs.items()}
    assert check_same(own, rows_of(theirs), "the engine", "the file").status == "ok"
    own["backbone.model.visual.a"][2, 1] = 5.0
    assert "model.visual.a has 5, not 1" in check_same(own, rows_of(theirs), "x", "y").found
    del theirs["model.visual.a"]
    assert "model.visual.a is not in y in this shape" in check_same(own, rows_of(theirs), "x", "y").found


def test_of_large_tensors_rows_at_both_ends_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.preflight.checks.weights.MAX_VALUES", 64)
    own = {"w": torch.arange(1000.0).view(500, 2)}
    verdict = check_same(own, rows_of(own), "x", "y")
    assert verdict.status == "ok" and "6% of 1,000 values" in verdict.found
    for row in (0, 499):
        other = own["w"].clone()
        other[row] += 1
        assert check_same(own, rows_of({"w": other}), "x", "y").status == "fault"


def test_a_template_that_the_renderer_refuses_is_a_fault_and_the_rest_is_skipped() -> None:
    said = "render(message.content or '')"
    planted = PlantedFault("f", "", "", "", checkpoint(change_template(said, f"({said} if loop.last else '')")))
    findings = examine(planted, *SMALL)
    by_status = {finding.check: finding.status for finding in findings}
    assert by_status["chat template"] == "fault" and by_status["memory"] == "ok"
    assert {by_status[check] for check in CHECKS[4:]} == {"skipped"}


@pytest.mark.parametrize("name", [*OWN_TEMPLATES, *QWEN_TEMPLATES])
def test_templates_that_are_as_their_families_were_trained_are_not_found_fault_with(name: str) -> None:
    renderer = renderer_for(name)
    assert check_conventions(renderer, "qwen3_vl" if renderer.closer == "<|im_end|>" else "llama") == []


def test_a_template_of_another_family_whose_tokenizer_agrees_is_doubted() -> None:
    (verdict,) = check_conventions(renderer_for("llama_style"), "qwen3_vl")
    assert verdict.status == "warning" and "closes a turn with <|eot_id|>, models of type qwen3_vl" in verdict.found


def test_the_page_names_every_check_and_every_planted_fault() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [check for check in CHECKS if f"- **{check}**\n" not in page] == []
    assert [planted.name for planted in FAULTS if f"| {planted.name} |" not in page] == []
    flags = {"--" + path[-1].replace("_", "-") for path, _ in leaves(DoctorConfig)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) <= flags


def test_a_checkpoint_that_cannot_be_read_is_one_fault(tmp_path: Path) -> None:
    planted = PlantedFault("", "", "", "", checkpoint(lambda folder: (folder / "config.json").unlink()))
    findings = examine(planted, *SMALL)
    (first, *rest) = findings
    assert (first.check, first.status) == ("set-up", "fault") and "must be a model folder or hub id" in first.found
    assert {finding.status for finding in rest} == {"skipped"} and len(findings) == len(CHECKS)


def test_prompts_that_leave_no_room_or_are_mostly_left_out_are_warned_of() -> None:
    assert check_lengths([100, 200], 90, 5, max_new_tokens=50, context_length=300).status == "ok"
    assert check_lengths([100, 280], 90, 0, max_new_tokens=50, context_length=300).status == "warning"
    assert "10 of 40 problems are left out" in check_lengths([100], 30, 10, 50, 300).found
