"""Claims about layouts: the groups of ranks, and every rule that a network or a host sets, each with its line."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

from agents.model import STARTER_PATH
from agents.model.architectures import ARCHITECTURES, read_config
from envs.config.cli import parse
from envs.errors import UserError
from tests.paths import ROOT
from trainer.config.learner import ClusterConfig, LearnerConfig
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES, check_resumable
from trainer.learner.layout import Layout
from trainer.learner.layout_rules import MODEL_TYPES, check_layout
from trainer.planning.qwen3_vl import qwen3_vl_config
from trainer.setup.backend import INSTALL, check_backend

STARTER = read_config(STARTER_PATH)


def parsed(*argv: str) -> ClusterConfig:
    return parse(RunConfig, argv, "prog", "", SOURCES).cluster


def complaint(layout: Layout, num_ranks: int, config: Any) -> str:
    with pytest.raises(UserError) as caught:
        check_layout(layout, num_ranks, config)
    return str(caught.value)


def test_ranks_are_divided_into_groups_as_megatron_does() -> None:
    layout = Layout(tensor=2, pipeline=4, context=2)
    assert (layout.model_parallel, layout.data_parallel(64), Layout().data_parallel(3)) == (16, 4, 3)
    experts = Layout(tensor=4, pipeline=2, expert=8, expert_tensor=2, sequence=True)
    assert (experts.expert_parallel, experts.expert_data_parallel(64), experts.data_parallel(64)) == (32, 2, 8)


def test_the_flags_are_the_layout() -> None:
    argv = [
        "--backend",
        "megatron",
        "--num-gpus",
        "64",
        "--tp",
        "2",
        "--pp",
        "4",
        "--ep",
        "8",
        "--etp",
        "2",
    ]
    argv += ["--cp", "2", "--sp"]
    assert Layout.of(parsed(*argv)) == Layout(2, 4, 8, 2, 2, True)
    assert Layout.of(ClusterConfig()) == Layout() and ClusterConfig().backend == "fsdp"


@pytest.mark.parametrize("flag", ["--tp 2", "--pp 2", "--ep 2", "--etp 2", "--cp 2", "--sp"])
def test_a_layout_needs_the_backend_that_reads_it(flag: str) -> None:
    with pytest.raises(UserError, match=rf"^{flag.split()[0]}: needs --backend megatron, or nothing reads it, got "):
        parsed(*flag.split())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--sp", r"--sp: needs --tp of at least 2, whose ranks share the tokens, got True; see --help"),
        ("--cp 0", r"--cp: must be greater than or equal to 1, got 0"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_before_the_model_is_read(argv: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parsed("--backend", "megatron", *argv.split())


@pytest.mark.parametrize(
    ("name", "layout", "num_ranks", "line"),
    [
        ("2b", Layout(2, 2), 6, "--num-gpus: must be a multiple of 4 = --tp 2 x --pp 2, got 6; give --num-gpus 8"),
        ("2b", Layout(context=3), 4, "--num-gpus: must be a multiple of 3 = --cp 3, got 4; give --num-gpus 6"),
        ("2b", Layout(3), 3, "--tp: must divide the 16 attention heads, got 3; give one of 1, 2, 4, 8, 16"),
        ("2b", Layout(pipeline=3), 3, "--pp: must divide the 28 layers, got 3; give one of 1, 2, 4, 7, 14, 28"),
        (
            "2b",
            Layout(pipeline=14),
            14,
            "--pp: must leave the first stage 3 layers, into which DeepStack's features go, got 14; "
            "give at most 9 for 28 layers",
        ),
        ("8b", Layout(expert=2), 2, "--ep: needs a mixture of experts, got 2; leave it out"),
        ("8b", Layout(expert_tensor=2), 2, "--etp: needs a mixture of experts, got 2; leave it out"),
        ("30b-a3b", Layout(expert=3), 3, "--ep: must divide the 128 experts, got 3; give one of 1, 2, 4, 8, 16, 32"),
        (
            "30b-a3b",
            Layout(expert=8, pipeline=2),
            8,
            "--num-gpus: must be a multiple of 16 = --ep 8 x --pp 2, got 8; give --num-gpus 16",
        ),
        (
            "30b-a3b",
            Layout(4),
            4,
            "--sp: must be given where a mixture of experts shares matrices (--tp), got false; "
            "give --sp, or --tp 1 with more --ep",
        ),
        (
            "30b-a3b",
            Layout(expert_tensor=512),
            512,
            "--etp: must divide the 768 columns of an expert, got 512; give one of 1, 2, 3, 4, 6, 8",
        ),
    ],
)
def test_a_layout_that_does_not_divide_is_one_line(name: str, layout: Layout, num_ranks: int, line: str) -> None:
    config = qwen3_vl_config(name)
    assert complaint(layout, num_ranks, config) == line


def test_the_page_shows_lines_that_are_said() -> None:
    shown = re.findall(r"^error: (.*)$", (ROOT / "docs" / "backends.md").read_text(encoding="utf-8"), re.MULTILINE)
    cases = [
        ("2b", Layout(3), 3),
        ("2b", Layout(2, 2), 6),
        ("2b", Layout(pipeline=14), 14),
        ("30b-a3b", Layout(4), 4),
        ("8b", Layout(expert=2), 2),
    ]
    said = [complaint(layout, num_ranks, qwen3_vl_config(name)) for name, layout, num_ranks in cases]
    with pytest.raises(UserError) as caught:
        parsed("--tp", "2")
    assert shown == [*said, str(caught.value)]


def test_key_value_heads_may_be_shared_or_copied_evenly() -> None:
    config = qwen3_vl_config("30b-a3b")  # 32 heads, 4 key-value heads
    for size in (1, 2, 4, 8, 16):
        check_layout(Layout(size, sequence=size > 1), size, config)
    config.text_config.num_key_value_heads = 3
    assert complaint(Layout(2, sequence=True), 2, config) == (
        "--tp: must divide the 3 key-value heads, or be a multiple of them, got 2; give one of 1, 3"
    )


def test_the_starter_can_share_its_matrices_between_two() -> None:
    said = [complaint(Layout(size), size, STARTER) for size in (3, 4)]
    assert said[0] == "--tp: must divide the 4 attention heads, got 3; give one of 1, 2, 4"
    assert said[1] == "--tp: must divide the 6 heads of the vision tower, got 4; give one of 1, 2, 3, 6"
    for layout in (Layout(2), Layout(pipeline=2), Layout(context=2)):
        check_layout(layout, 2, STARTER)


def test_an_architecture_that_the_bridge_computes_in_another_way_is_refused() -> None:
    from transformers import AutoConfig

    others = set(ARCHITECTURES) - set(MODEL_TYPES)
    assert "qwen2_5_vl" in others
    for model_type in others:
        line = complaint(Layout(), 1, AutoConfig.for_model(model_type))
        assert line.startswith(f"--model: must be one of {', '.join(MODEL_TYPES)} with --backend megatron")
        assert line.endswith(f"got {model_type}; leave --backend out: FSDP2 trains it")


def check(cluster: str = "", learner: LearnerConfig = LearnerConfig(), **model: Any) -> None:
    config = parse(RunConfig, f"--backend megatron {cluster}".split(), "prog", "", SOURCES)
    check_backend(config.cluster, config.model.model_copy(update=model), learner, STARTER)


def refusal(*args: Any, **model: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(*args, **model)
    return str(caught.value)


def test_what_a_host_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    there = {"megatron.core"}

    def find_spec(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] not in ("megatron", "transformer_engine"):
            return real(name, package)
        if name == "megatron.bridge":
            raise ModuleNotFoundError(name)
        return object() if name in there else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert refusal() == (
        "--backend megatron: needs the packages megatron-core, megatron-bridge, transformer-engine, got no "
        f"megatron-bridge and no transformer-engine; {INSTALL}"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    assert refusal() == (
        "--backend megatron: needs GPUs, got --device cpu; give --num-gpus, or --device cuda for one GPU"
    )
    assert refusal("--num-learners 3 --pp 2").startswith("--num-learners: must be a multiple of 2 = --pp 2, got 3")
    assert refusal("--num-learners 2").startswith(
        "--backend megatron: needs GPUs, got --num-learners 2; give --num-gpus"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(device="cuda").startswith("--backend megatron: needs a GPU that torch sees, got none; leave it out")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(device="cuda")
    check("--num-gpus 4 --pp 2 --cp 2")


def test_a_setting_that_the_backend_cannot_follow_is_refused() -> None:
    assert refusal("", LearnerConfig(offload="optimizer")).startswith(
        "--offload: must be none with --backend megatron, got optimizer; leave it out"
    )


def test_without_the_backend_nothing_is_checked() -> None:
    check_backend(ClusterConfig(), RunConfig().model, LearnerConfig(offload="all"), None)


def test_a_run_resumes_under_another_layout_and_not_under_another_backend() -> None:
    base = RunConfig(cluster=parsed("--backend", "megatron", "--num-gpus", "4", "--tp", "2"))
    check_resumable(RunConfig(cluster=parsed("--backend", "megatron", "--num-gpus", "8", "--pp", "2")), base)
    with pytest.raises(UserError) as caught:
        check_resumable(RunConfig(), base)
    assert str(caught.value) == (
        "--backend: must stay as in the run, which has megatron, got fsdp; leave it out of flags, files and "
        "TRUETURN_BACKEND, or begin a new run from this one's weights, --model RUN"
    )
