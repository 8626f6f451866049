"""Claims about the card of a model folder: which settings it shows, and how it says that a run ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainer.checkpoint.model_card import ModelCard, ending_of, shared_name


def card(base_model: str = "starter", *data: str) -> str:
    return ModelCard(
        name="first",
        task="reinforcement learning in the environment `geo3k`",
        tags=("reinforcement-learning",),
        base_model=base_model,
        data=data,
        step=30,
        ending="It took all 30 steps.",
        tables=(("Accuracy", [["", "before"], ["with tool", "0.1 | 0.2"]]),),
        sees_images=True,
    ).text()


def test_a_card_names_model_and_data_of_the_hub_and_what_is_here_by_its_last_part_only(tmp_path: Path) -> None:
    text = card("Qwen/Qwen3-VL-2B-Instruct", "hiyouga/geometry3k")
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen3-VL-2B-Instruct" and front["datasets"] == ["hiyouga/geometry3k"]
    text = card(str(tmp_path / "mine"), str(tmp_path / "rows.jsonl"))
    front = yaml.safe_load(text.split("---")[1])
    assert "base_model" not in front and "datasets" not in front
    assert "\nmine after 30 steps of" in text and "Data: rows.jsonl." in text and str(tmp_path) not in text


def test_a_cell_cannot_break_a_table() -> None:
    assert "| with tool | 0.1   0.2 |" in card()


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (ending_of(30, 30, "", False), "The run took all 30 steps."),
        (ending_of(20, 30, "", True), "The run was interrupted after step 20 of 30."),
        (ending_of(20, 30, "Stop: enough", False), "The run stopped after step 20 of 30: Stop: enough."),
        (ending_of(20, 30, "", False), "An error ended the run after step 20 of 30."),
    ],
)
def test_a_card_says_how_the_run_ended(ending: str, said: str) -> None:
    assert ending == said


def test_the_name_of_a_model_folder_is_its_last_part() -> None:
    assert [shared_name(name) for name in ("starter", "/a/b/c", "a/b")] == ["starter", "c", "a/b"]
