"""Claims about the problems that a run plays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.check import CheckConfig
from envs.config.cli import parse
from envs.errors import UserError
from envs.execution.load import load_env
from envs.problems import RowsConfig
from envs.registry import get_spec
from trainer.config.inputs import DataConfig, EnvConfig
from trainer.setup.problems import check_command, load_problems, probe_tools


def test_the_command_that_checks_an_environment_reads_the_same_rows() -> None:
    data = DataConfig(
        data="rows.parquet", answer_key="reward_model.ground_truth", allow_outside_images=True, train_size=8
    )
    words = check_command(EnvConfig(env=("geo3k",)), data).split()
    assert words[:3] == ["python", "-m", "envs.check"]
    config = parse(CheckConfig, words[3:], "", "")
    assert config.id == ("geo3k",)
    assert {name: getattr(config.problems, name) for name in RowsConfig.model_fields} == {
        name: getattr(data, name) for name in RowsConfig.model_fields
    }


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": f"Find {n}.", "answer": str(n)}) + "\n" for n in range(20)))
    return str(path)


@pytest.mark.parametrize(
    ("data", "num_train", "num_held_out"),
    [
        ({}, 1024, 256),
        ({"train_size": 6, "eval_size": 3}, 6, 3),
        ({"data": "rows", "eval_data": "rows"}, 20, 20),
        ({"data": "rows", "eval_data": "rows", "train_size": 6, "eval_size": 3}, 6, 3),
        ({"data": "rows", "eval_data": "rows", "train_size": 600, "eval_size": 300}, 20, 20),
        ({"data": "rows", "eval_data": "rows", "eval_size": 0}, 20, None),
        ({"data": "rows"}, 20, None),
    ],
    ids=str,
)
def test_sizes_count_the_first_rows_of_files_and_the_environments_own_problems(
    data: dict, num_train: int, num_held_out: int | None, rows: str
) -> None:
    files = {name: rows for name, value in data.items() if value == "rows"}
    train, held_out = load_problems(get_spec("geo3k"), DataConfig(**{**data, **files}), seed=0)
    assert (len(train), None if held_out is None else len(held_out)) == (num_train, num_held_out)
    if files:
        assert [sample.label for sample in train] == [str(n) for n in range(num_train)]


def test_a_number_of_held_out_problems_that_a_file_does_not_have_is_refused(rows: str) -> None:
    with pytest.raises(UserError, match="--eval-size: needs held-out problems, which --data does not have, got 8"):
        load_problems(get_spec("geo3k"), DataConfig(data=rows, eval_size=8), seed=0)


def test_held_out_problems_that_are_not_wanted_are_not_read(tmp_path: Path, rows: str) -> None:
    data = DataConfig(data=rows, eval_data=str(tmp_path / "nowhere.jsonl"))
    assert load_problems(get_spec("geo3k"), data, seed=0, with_held_out=False)[1] is None


@pytest.mark.parametrize(
    ("key", "refused"), [("", False), ("on_tool_fault: drop", False), ("on_tool_fault: observe", True)]
)
def test_only_an_entry_that_asks_to_observe_the_faults_of_a_step_without_tools_is_refused_before_a_run(
    key: str, refused: bool, tmp_path: Path
) -> None:
    fields = f"entry_point: envs.guess:GuessEnv, dataset: envs.guess:samples, description: x, max_turns: 3, {key}"
    (tmp_path / "registry.yaml").write_text(f"game: {{{fields}}}")
    spec = EnvConfig(env="game", registry=(tmp_path / "registry.yaml",), max_turns=2).resolve()
    samples = spec.load_dataset("train", 1, 0)
    if not refused:
        assert probe_tools(spec, load_env(spec), "hermes", samples, "") == {"game": ()}
        return
    with pytest.raises(UserError, match=r"environment 'game' on_tool_fault: needs a ToolEnv, .*, got observe; write"):
        probe_tools(spec, load_env(spec), "hermes", samples, "")
