"""Claims about `--from-slime`: the variables of slime's scripts become settings, each said in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envs.config.cli import parse
from envs.errors import UserError
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLIME_SCRIPT_")]:
        monkeypatch.delenv(name)


def parsed(*argv: str) -> RunConfig:
    return parse(RunConfig, argv, "python -m trainer.run", "Train.", SOURCES)


def test_the_variables_of_the_scripts_become_settings_and_each_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "MODEL_NAME": "Qwen3-VL-4B-Instruct",
        "DATASET_NAME": "chenhegu/geo3k_imgurl",
        "NUM_GPUS": "4",
        "TRAIN_BACKEND": "megatron",
        "EXTERNAL_RAY": "1",
        "ENABLE_RAY_SUBMIT": "0",
    }.items():
        monkeypatch.setenv(f"SLIME_SCRIPT_{name}", value)
    config = parsed("--from-slime")
    assert config.model.model == "Qwen/Qwen3-VL-4B-Instruct"
    assert config.data.data == "chenhegu/geo3k_imgurl"
    assert (config.cluster.num_gpus, config.engine.num_servers, config.cluster.ray_address) == (4, 4, "auto")
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "SLIME_SCRIPT_DATASET_NAME=chenhegu/geo3k_imgurl: --data chenhegu/geo3k_imgurl",
        "SLIME_SCRIPT_ENABLE_RAY_SUBMIT=0: nothing is set; no setting here does this",
        "SLIME_SCRIPT_EXTERNAL_RAY=1: --ray-address auto",
        "SLIME_SCRIPT_MODEL_NAME=Qwen3-VL-4B-Instruct: --model Qwen/Qwen3-VL-4B-Instruct",
        "SLIME_SCRIPT_NUM_GPUS=4: --num-gpus 4 --num-servers 4",
        "SLIME_SCRIPT_TRAIN_BACKEND=megatron: --backend megatron --tp 4 --sp",
    ]


def test_the_variables_are_read_only_with_the_flag_above_files_and_below_our_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIME_SCRIPT_MODEL_NAME", str(tmp_path))
    monkeypatch.setenv("SLIME_SCRIPT_NUM_GPUS", "8")
    recipe = ("--config", "slime-geo3k-multi-turn")
    assert parsed() == RunConfig()
    assert parsed(*recipe).cluster.num_gpus == 4
    config = parsed(*recipe, "--from-slime", "--num-servers", "2")
    assert (config.model.model, config.cluster.num_gpus, config.engine.num_servers) == (str(tmp_path), 8, 2)
    monkeypatch.setenv("TRUETURN_NUM_GPUS", "1")
    assert parsed("--from-slime").cluster.num_gpus == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NUM_GPUS", "four", "SLIME_SCRIPT_NUM_GPUS: must be a valid integer"),
        ("EXTERNAL_RAY", "1", "SLIME_SCRIPT_EXTERNAL_RAY: needs --num-gpus or --num-learners"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_variable(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"SLIME_SCRIPT_{name}", value)
    with pytest.raises(UserError, match=message):
        parsed("--from-slime")


def test_without_a_variable_the_flag_is_an_error_that_lists_them() -> None:
    with pytest.raises(UserError, match="got none; export one of SLIME_SCRIPT_MODEL_NAME, SLIME_SCRIPT_DATASET_NAME"):
        parsed("--from-slime")
