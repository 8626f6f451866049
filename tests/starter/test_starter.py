"""Claims about how the bundled model is made: its lessons, its recipe, and the files that ship."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.types import Trajectory, Turn
from envs.check import run as check
from envs.config.cli import exit_code
from envs.errors import UserError
from envs.geo3k.problem import Problem
from envs.geo3k.procedural import ProceduralGeo3k, split_of
from starter.__main__ import make, run
from starter.architecture import SHAPES
from starter.attempts import OwnAttempts, own_attempts, wrong_beginnings
from starter.demonstrations import Row, solved, zoomed
from starter.lessons import Lessons, NumberImages, describe, draw_numbers
from starter.plans import (
    MIXED_HABITS,
    Attempt,
    Mixture,
    Plan,
    boxed,
    correction,
    score_call,
    written,
    zoom_call,
    zoom_windows,
)
from starter.recipes import RECIPES, Numbers, Recipe, Stage
from starter.textbook.problems import problems_of
from tests.paths import ROOT

PROBLEM = Problem("triangle_angles", 3, (47, 65), "x", "Find x.", "68", "47 + 65 = 112. 180 - 112 = 68.")


def spoken(row: Row, is_taught: bool = True) -> list[str]:
    """Return the turns of a row that are taught, or those that are not, as the model writes them."""
    turns = [message for message in row["messages"] if message["role"] == "assistant"]
    return [
        turn["content"] + "".join(written(call["function"]) for call in turn.get("tool_calls", ()))
        for turn in turns
        if turn.get("train", True) == is_taught
    ]


def drawn(count: int, mixture: Mixture, seed: int = 5, **options: Any) -> list[tuple[Problem, Row]]:
    """Return problems, each with a demonstration of some habits."""
    problems = ProceduralGeo3k("demonstrations", count, seed, **options)
    found = []
    for index in range(count):
        problem, image = problems.item(index)
        found.append((problem, solved(problem, image, Plan.draw(problem, mixture, random.Random(index)))))
    return found


@pytest.mark.slow
def test_the_smoke_recipe_makes_a_model_whose_loss_falls_in_every_stage(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["--recipe", "smoke", "--out", str(tmp_path / "smoke"), "--device", "cpu"]
    assert run(argv) == 0
    folders = sorted(path.parent for path in (tmp_path / "smoke").glob("*/summary.json"))
    assert [folder.name for folder in folders] == ["01-rung-0", "02-figures", "03-habits"]
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["eval_loss_after"] < summary["eval_loss_before"], folder
    model, renderer = PolicyModel.load(folders[-1] / "model"), Renderer.from_checkpoint(folders[-1] / "model")
    assert model.image_token_id == renderer.image_token_id
    capfd.readouterr()
    assert run(argv) == 0  # nothing is left to do
    assert capfd.readouterr().out == f"done: {folders[-1] / 'model'}\n"


def test_a_recipe_goes_on_with_the_stage_that_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def sft(argv: list[str]) -> int:
        calls.append(argv)
        flags = dict(zip(argv[::2], argv[1::2], strict=True))
        folder = Path(flags.get("--resume") or Path(flags["--out"]) / flags["--name"])
        folder.mkdir(exist_ok=True)
        is_interrupted = len(calls) == 2
        (folder / "summary.json").write_text(json.dumps({"interrupted": is_interrupted}))
        return 130 if is_interrupted else 0

    monkeypatch.setattr("trainer.sft.__main__.run", sft)
    stages = tuple(Stage(name, 4, {"numbers": 1.0}, batch_size=2) for name in ("one", "two", "three"))
    recipe = Recipe("smoke", stages, corpus_size=100, num_heldout=2)
    assert make(recipe, tmp_path, "cpu") == 130
    assert make(recipe, tmp_path, "cpu") == 0
    first, second, resumed, third = calls
    assert first[:2] == ["--model", str(tmp_path / "untrained")]
    assert second[:2] == ["--model", str(tmp_path / "01-one" / "model")]
    assert resumed == ["--resume", str(tmp_path / "02-two")]
    assert third[:2] == ["--model", str(tmp_path / "02-two" / "model")]
    assert len((tmp_path / "03-three.jsonl").read_text().splitlines()) == 4
    with pytest.raises(UserError, match="must hold a run of the same recipe"):
        make(replace(recipe, seed=18), tmp_path, "cpu")


def test_the_weights_that_ship_are_those_of_the_model_card() -> None:
    weights = (STARTER_PATH / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    assert len(weights) <= 15e6
    assert json.loads((STARTER_PATH / "recipe.json").read_text())["sha256"] == digest
    card = (STARTER_PATH / "README.md").read_text()
    assert digest in card
    assert f"{sum(p.numel() for p in PolicyModel.load(STARTER_PATH).parameters()):,}" in card


def test_the_network_that_ships_has_the_shape_of_the_recipe() -> None:
    config, shape = json.loads((STARTER_PATH / "config.json").read_text()), SHAPES[RECIPES["starter"].shape]
    assert (config["text_config"]["hidden_size"], config["vision_config"]["hidden_size"]) == (
        shape.hidden,
        shape.vision_hidden,
    )


def test_a_image_of_numbers_shows_them_whole_and_from_left_to_right() -> None:
    many = Numbers(3, 3, (12, 112), unknown=True)
    for seed in range(200):
        texts, image = draw_numbers(many, random.Random(seed))
        grey = np.asarray(image)[:, :, 0]
        border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        assert image.size == (160, 128) and border.min() == 255, seed
        columns = np.array_split(grey, len(texts), axis=1)
        assert all(column.min() < 128 for column in columns), (seed, texts)


def test_a_reading_lesson_teaches_what_the_image_shows_and_nothing_else() -> None:
    figures = Lessons(Stage("figures", 20, {"figure": 1.0}), seed=3)
    problems = ProceduralGeo3k("demonstrations", 20, 3)
    numbers = Lessons(Stage("numbers", 20, {"numbers": 1.0}, rung=4), seed=3)
    labels = [sample.label for sample in NumberImages("demonstrations", 20, 3, rung=4)]
    for index in range(20):
        assert spoken(figures.row(index)) == [describe(problems.problem(index))]
        assert spoken(numbers.row(index)) == [labels[index]]


@pytest.mark.parametrize("name", ["starter_digits", "starter_smaller_digits"])
def test_reading_is_a_sound_environment_so_that_a_policy_can_be_evaluated(name: str) -> None:
    assert check([name, "--registry", str(ROOT / "starter" / "registry.yaml")]) == 0


def test_shares_of_a_stage_are_those_of_its_lessons() -> None:
    shares = {"numbers": 0.3, "figure": 0.2, "problem": 0.15, "zoom": 0.1, "attempt": 0.25}
    wrong = OwnAttempts(*ProceduralGeo3k("demonstrations", 1, 9).item(0), (Attempt("1 + 1 = 3. ", "no number"),))
    lessons = Lessons(Stage("all", 200, shares, mixture=Mixture(checks=0.0)), 1, attempts=[wrong])

    def kind(row: Row) -> str:
        text = json.dumps(row["messages"])
        if "Read the" in text:
            return "numbers" if "numbers" in text else "figure"
        if "no number" in text:
            return "attempt"
        return "zoom" if "Use zoom" in text else "problem"

    counts = Counter(kind(lessons.row(index)) for index in range(200))
    # Four standard deviations of a share of 200 are below 0.14.
    assert all(abs(counts[name] / 200 - share) < 0.14 for name, share in shares.items()), counts


def test_a_lesson_is_the_same_every_time_and_shows_a_problem_of_its_own_split() -> None:
    stage = Stage("habits", 30, {"problem": 1.0}, mixture=MIXED_HABITS)
    one, other = Lessons(stage, 3), Lessons(stage, 3)
    rows = [one.row(index) for index in range(30)]
    assert [other.row(index) for index in reversed(range(30))] == rows[::-1]
    assert {split_of(row["id"]) for row in rows} == {"demonstrations"}
    assert {split_of(Lessons(stage, 3, "validation").row(index)["id"]) for index in range(9)} == {"validation"}


def test_a_lesson_that_cannot_be_drawn_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> Any:
        raise AssertionError("no layout fits")

    monkeypatch.setattr(ProceduralGeo3k, "item", fails)
    assert Lessons(Stage("problems", 2, {"problem": 1.0}), 1).line(1) == ""
    assert "lesson 1 is left out: AssertionError('no layout fits')" in capsys.readouterr().out


def test_an_own_wrong_attempt_is_context_to_the_letter_and_what_follows_is_taught() -> None:
    wrong = Attempt("1 + 1 = 3. ", "nothing of the kind")
    problems = ProceduralGeo3k("demonstrations", 20, seed=5)
    for index in range(20):
        problem, image = problems.item(index)
        own = OwnAttempts(problem, image, (wrong,))
        row = Lessons(Stage("again", 20, {"attempt": 1.0}), 1, attempts=[own]).row(index)
        assert spoken(row, is_taught=False) == [wrong.thought + written(score_call(wrong.answer))]
        second = f"{correction(wrong, problem)} {problem.reasoning} {written(score_call(problem.answer))}"
        assert spoken(row) == [second, boxed(problem.answer)]


def test_the_attempts_of_a_policy_are_wrong_answers_to_the_problems_that_it_played() -> None:
    problems = ProceduralGeo3k("demonstrations", 16, 2, style="overprint")
    found = own_attempts(STARTER_PATH, [problems.item(index) for index in range(16)], "cpu", seed=0)
    assert found
    keys = {problems.problem(index).key for index in range(16)}
    for own in found:
        assert own.problem.key in keys
        assert own.problem.answer not in [attempt.answer for attempt in own.wrong]
        assert spoken(solved(own.problem, own.image, Plan.after(own.wrong, own.problem, Mixture(), random.Random(0))))


def test_zooms_show_every_label_that_half_a_image_can_show() -> None:
    boxes = [(0, 0, 30, 12), (60, 40, 80, 52), (130, 110, 160, 128), (75, 50, 95, 62)]
    windows = zoom_windows(boxes, 160, 128)
    assert len(windows) <= 3
    for left, top, right, bottom in boxes:
        seen = [x * 0.16 <= left and right <= (x + 500) * 0.16 and y * 0.128 <= top and bottom <= (y + 500) * 0.128
                for x, y in windows]  # fmt: skip
        assert any(seen), (left, top)
    assert zoom_windows([(0, 0, 120, 12)], 160, 128) == []  # wider than half an image


@pytest.mark.parametrize("style", ["plain", "small_print"])
def test_a_zoom_demonstration_shows_each_window_then_solves_and_teaches_both(style: Any) -> None:
    problems = problems_of("demonstrations", 12, 6, style)
    for index in range(12):
        problem, image, boxes = problems.drawn(index)
        windows = zoom_windows(boxes, *image.size)
        row = zoomed(problem, image, boxes)
        answer = f"{problem.reasoning} {boxed(problem.answer)}"
        assert spoken(row) == [*(written(zoom_call(*window)) for window in windows), answer]
        assert len(row["images"]) == 1 + len(windows) and row["tools"][0]["function"]["name"] == "zoom"
        assert spoken(zoomed(problem, image, ())) == [answer]


@pytest.mark.parametrize(
    ("thought", "expected"),
    [
        ("", "Step by step."),
        ("41 + 65 = 106. 180 - 106 = 74. ", "Look again: 47."),
        ("41 + 66 = 107. 180 - 107 = 73. ", "Look again: 47, 65."),
        ("47 + 65 = 102. 180 - 102 = 78. ", "Compute again."),
        ("65 - 47 = 18. ", "Another way."),
    ],
)
def test_a_second_attempt_says_what_was_wrong_with_the_first(thought: str, expected: str) -> None:
    assert correction(Attempt(thought, "0"), PROBLEM) == expected


def test_wrong_beginnings_are_calls_that_scored_nothing_and_can_be_repeated() -> None:
    def call(answer: str) -> str:
        return written(score_call(answer))

    def turn(text: str, score: float | None) -> Turn:
        info = {} if score is None else {"tool_score": score}
        return Turn(0, 1, text, "stop", (), 0, (), info, 0.0, 0.0)

    def beginnings(*turns: Turn) -> list[tuple[Attempt, ...]]:
        return wrong_beginnings(cast(Trajectory, SimpleNamespace(turns=turns)))

    first, second = Attempt("1 + 1 = 3. ", "3"), Attempt("", "4")
    wrong = turn(first.thought + call("3"), 0.0)
    assert beginnings(wrong, turn(call("4"), 0.0), turn("\\boxed{5}", None)) == [(first,), (first, second)]
    assert beginnings(wrong, turn(call("2"), 1.0)) == [(first,)]
    assert beginnings(turn(call("2"), 1.0)) == []
    assert beginnings(turn("\\boxed{3}", None)) == []
    assert beginnings(turn('<tool_call>{"name":"calc_score","arguments":{"answer":"3"}}</tool_call>', 0.0)) == []
    assert beginnings(turn('<tool_call>{"name": "calc_score", "arguments": {"answer": 3}}</tool_call>', 0.0)) == []


def test_a_misreading_is_shown_but_never_taught() -> None:
    always = Mixture(tools_offered=1.0, checks=1.0, first_wrong=1.0, second_wrong=1.0)
    for problem, row in drawn(30, always):
        text = json.dumps(row["messages"])
        if text.count("is wrong") == 2:  # both misreadings were possible
            assert spoken(row) == [f"{problem.reasoning} {boxed(problem.answer)}"]
        assert not any("<tool_call>" in turn for turn in spoken(row)) or "is right" in text


@pytest.mark.parametrize(
    ("mixture", "pattern"),
    [
        (Mixture(tools_offered=0.0), "{reasoning} \\boxed{{{answer}}}"),
        (Mixture(tools_offered=0.0, reasons=0.0), "\\boxed{{{answer}}}"),
        (Mixture(tools_offered=1.0, checks=0.0, reasons=0.0), "\\boxed{{{answer}}}"),
    ],
)
def test_each_habit_is_shown_as_its_mixture_says(mixture: Mixture, pattern: str) -> None:
    for problem, row in drawn(20, mixture):
        assert spoken(row) == [pattern.format(reasoning=problem.reasoning, answer=problem.answer)]
        assert ("tools" in row) == bool(mixture.tools_offered)


def test_giving_up_repeats_the_wrong_answer() -> None:
    rows = [row for _, row in drawn(20, Mixture(tools_offered=1.0, checks=1.0, first_wrong=1.0, gives_up=1.0))]
    wrong = [row for row in rows if "is wrong" in json.dumps(row["messages"])]
    assert len(wrong) > 15
    for row in wrong:
        (call,) = spoken(row, is_taught=False)
        found = re.search(r"<tool_call>(.*)</tool_call>", call)
        assert found and spoken(row) == [boxed(json.loads(found[1])["arguments"]["answer"])]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe", "smok"], "did you mean 'smoke'"),
        (["--num-workers", "0"], "greater than or equal to 1"),
        (["--device", "gpu"], "--device: must be usable by torch, got gpu; give cpu"),
        (["--recipe", "smoke", "--device", "cpu", "--out", __file__], "--out: must be a folder that can be written"),
    ],
)
def test_bad_arguments_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(argv)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line
