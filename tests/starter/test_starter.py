"""The starter: its recipe runs, its demonstrations teach what they say, and the weights that ship are the recipe's."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from agents.engines.hf import HFEngine
from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.rendering.images import ImageStore
from agents.rendering.renderer import Renderer
from agents.types import GenerateRequest, SamplingParams, Trajectory, Turn
from envs.config.cli import exit_code
from envs.errors import UserError
from envs.geo3k.problem import STYLES, Problem, read_as
from envs.geo3k.procedural import ProceduralGeo3k, split_of
from trainer.starter.__main__ import run
from trainer.starter.architecture import SHAPES, build_image_processor
from trainer.starter.attempts import wrong_beginnings
from trainer.starter.batches import Collator, SftBatch
from trainer.starter.demonstrations import Demonstration, Demonstrator, GridStore
from trainer.starter.lessons import Lessons, OwnAttempts, describe, draw_numbers
from trainer.starter.misreadings import Solutions, misreadings, wrong_attempts
from trainer.starter.plans import MIXED_HABITS, Attempt, Mixture, correction, tool_call, zoom_call, zoom_windows
from trainer.starter.progress import Probe
from trainer.starter.recipes import RECIPES, Numbers, Recipe, Stage
from trainer.starter.training import StarterRun, lr_at, sft_loss


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Renderer.from_checkpoint(STARTER_PATH).tokenizer


@pytest.fixture(scope="module")
def collator(tokenizer: Any) -> Collator:
    return Collator(tokenizer.convert_tokens_to_ids("<|image_pad|>"), tokenizer.pad_token_id)


def taught(tokenizer: Any, demonstration: Demonstration) -> str:
    return tokenizer.decode(demonstration.ids_T[demonstration.loss_mask_T])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the smoke recipe makes."""
    folder = tmp_path_factory.mktemp("smoke") / "starter"
    assert run(["--recipe", "smoke", "--out", str(folder), "--device", "cpu"]) == 0
    return folder


@pytest.mark.slow
def test_the_smoke_recipe_makes_a_checkpoint_with_report_and_card_whose_loss_has_fallen(smoke: Path) -> None:
    report = json.loads((smoke / "recipe.json").read_text())
    rows = [json.loads(line) for line in (smoke / "log.jsonl").read_text().splitlines()]
    # Nats per token; 6.5 is a guess among the vocabulary.
    assert rows[0]["loss"] > 6.0 and rows[-1]["loss"] < 4.0
    assert [stage["steps"] for stage in report["stages"]] == [stage.steps for stage in RECIPES["smoke"].stages]
    assert report["sha256"] == hashlib.sha256((smoke / "model.safetensors").read_bytes()).hexdigest()
    assert report["sha256"] in (smoke / "README.md").read_text()
    assert not (smoke / "state.pt").exists()
    model, renderer = PolicyModel.load(smoke), Renderer.from_checkpoint(smoke)
    assert model.image_token_id == renderer.image_token_id


@pytest.mark.slow
def test_a_finished_folder_is_not_trained_again(smoke: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(["--recipe", "smoke", "--out", str(smoke), "--device", "cpu"])) == 2
    assert "must not hold a finished starter" in capsys.readouterr().err


TINY = Recipe(
    "smoke",
    stages=(
        Stage(2, 2, 1e-3, 1, numbers_frac=1.0),
        Stage(4, 2, 1e-3, 1, problems={"levels": (1,)}, attempts_frac=0.5, num_attempts=2, num_readings=4, rounds=2),
    ),
    corpus_size=100,
    num_probes=2,
)


def test_a_training_that_stops_and_goes_on_makes_the_weights_of_one_that_does_not(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert StarterRun(TINY, tmp_path / "whole", cpu).train()
    parts = 1
    while not StarterRun(TINY, tmp_path / "parts", cpu).train(max_minutes=0.0):
        parts += 1
    assert parts > len(TINY.stages)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


def test_a_training_that_dies_goes_on_from_its_last_row_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, step = torch.device("cpu"), StarterRun._step
    monkeypatch.setattr("trainer.starter.training.SAVE_EVERY_S", 0)
    assert StarterRun(TINY, tmp_path / "whole", cpu).train()

    def dies(run: StarterRun, batch: SftBatch, lr: float) -> torch.Tensor:
        if (run.position.stage, run.position.step) == (1, 3):
            raise RuntimeError("the device is gone")
        return step(run, batch, lr)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="device is gone"):
        patch.setattr(StarterRun, "_step", dies)
        StarterRun(TINY, tmp_path / "parts", cpu).train()
    run = StarterRun(TINY, tmp_path / "parts", cpu)
    assert (run.position.stage, run.position.step) == (1, 3) and run.train()
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other


@pytest.mark.parametrize(("per_drawing", "bad", "also_bad"), [(1, {1}, {2}), (2, {0, 1}, {2, 3})])
def test_a_drawing_that_cannot_be_made_is_said_and_its_lessons_are_left_out(
    per_drawing: int,
    bad: set[int],
    also_bad: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages = tuple(replace(stage, lessons_per_drawing=per_drawing) for stage in TINY.stages)
    recipe, make = replace(TINY, stages=stages), Lessons.__getitem__

    def fails(lessons: Lessons, index: int) -> Any:
        if index in broken and len(lessons) > TINY.num_probes:
            raise ValueError("no layout")
        return make(lessons, index)

    monkeypatch.setattr(Lessons, "__getitem__", fails)
    broken = bad
    assert StarterRun(recipe, tmp_path / "one", torch.device("cpu")).train()
    assert "lesson 1 is left out: ValueError('no layout')" in capsys.readouterr().out
    broken = bad | also_bad  # no slip of one drawing: every lesson may be like that
    with pytest.raises(ValueError, match="no layout"):
        StarterRun(recipe, tmp_path / "two", torch.device("cpu")).train()


def test_a_state_of_another_recipe_is_refused(tmp_path: Path) -> None:
    assert not StarterRun(TINY, tmp_path, torch.device("cpu")).train(max_minutes=0.0)
    with pytest.raises(UserError, match="must hold a run of the same recipe"):
        StarterRun(replace(TINY, seed=18), tmp_path, torch.device("cpu"))


def test_what_the_policy_played_is_saved_and_read_again(tmp_path: Path) -> None:
    run = StarterRun(TINY, tmp_path, torch.device("cpu"))
    run.position.attempts = [OwnAttempts(3, (Attempt("47 + 65 = 122. ", "58"),))]
    run._save_state()
    assert StarterRun(TINY, tmp_path, torch.device("cpu")).position == run.position


class Hostile:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("content", ["code", "half", "text", "empty"])
def test_a_state_of_a_stranger_is_one_line_and_runs_no_code(content: str, tmp_path: Path) -> None:
    folder, state = tmp_path / "out", tmp_path / "out" / "state.pt"
    assert not StarterRun(TINY, folder, torch.device("cpu")).train(max_minutes=0.0)
    if content == "code":
        torch.save({"recipe": Hostile(tmp_path / "made")}, state)
    else:
        whole = state.read_bytes()
        state.write_bytes({"half": whole[: len(whole) // 2], "text": b"weights", "empty": b""}[content])
    with pytest.raises(UserError, match=r"--out: must hold a whole state\.pt of this command"):
        StarterRun(TINY, folder, torch.device("cpu"))
    assert not (tmp_path / "made").exists()


def test_a_stage_ends_once_its_pictures_are_read(tmp_path: Path) -> None:
    read = replace(TINY, stages=(replace(TINY.stages[0], steps=40, until=0.0),))
    assert StarterRun(read, tmp_path, torch.device("cpu")).train()
    (stage,) = json.loads((tmp_path / "recipe.json").read_text())["stages"]
    assert stage["steps"] == 1


def test_the_weights_that_ship_are_those_of_the_model_card() -> None:
    weights = (STARTER_PATH / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    assert len(weights) <= 15e6
    assert json.loads((STARTER_PATH / "recipe.json").read_text())["sha256"] == digest
    card = (STARTER_PATH / "README.md").read_text()
    assert digest in card
    assert f"{sum(p.numel() for p in PolicyModel.load(STARTER_PATH).parameters()):,}" in card


def test_the_recipe_that_ships_is_a_recipe_in_the_code() -> None:
    recorded = json.loads((STARTER_PATH / "recipe.json").read_text())["recipe"]
    recipe = RECIPES["starter"]
    assert recorded == json.loads(json.dumps(asdict(recipe)))
    config, shape = json.loads((STARTER_PATH / "config.json").read_text()), SHAPES[recipe.shape]
    assert (config["text_config"]["hidden_size"], config["vision_config"]["hidden_size"]) == (
        shape.hidden,
        shape.vision_hidden,
    )


def test_a_picture_of_numbers_shows_them_whole_and_from_left_to_right() -> None:
    many = Numbers(3, 3, (12, 112), unknown=True)
    for seed in range(200):
        texts, image = draw_numbers(many, random.Random(seed))
        grey = np.asarray(image)[:, :, 0]
        border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        assert image.size == (160, 128) and border.min() == 255, seed
        columns = np.array_split(grey, len(texts), axis=1)
        assert all(column.min() < 128 for column in columns), (seed, texts)


def test_a_reading_lesson_teaches_what_the_picture_shows_and_nothing_else(tokenizer: Any) -> None:
    figures = Lessons(tokenizer, Stage(10, 4, 1e-3, 1, figures_frac=1.0), seed=3)
    problems = figures.demonstrator.problems
    for index in range(20):
        problem, lesson = problems.problem(index), figures[index]
        assert taught(tokenizer, lesson) == f"{describe(problem)}<|im_end|>"
        assert (lesson.kind, lesson.family, lesson.givens) == (
            "figure",
            problem.family,
            tuple(map(str, problem.givens)),
        )
    numbers = Lessons(tokenizer, Stage(10, 4, 1e-3, 1, numbers=Numbers(3, 2), numbers_frac=1.0), seed=3)
    assert all(taught(tokenizer, numbers[i]) == f"{' '.join(numbers[i].givens)}<|im_end|>" for i in range(20))


def test_shares_of_a_stage_are_those_of_its_lessons(tokenizer: Any) -> None:
    stage = Stage(100, 4, 1e-3, 1, numbers_frac=0.3, figures_frac=0.2, attempts_frac=0.25)
    attempts = [OwnAttempts(7, (Attempt("", "1"),))]
    lessons = Lessons(tokenizer, stage, seed=1, attempts=attempts)
    kinds = Counter(lessons[index].kind for index in range(200))
    # Four standard deviations of a share of 200 are below 0.14.
    shares = {"numbers": 0.3, "figure": 0.2, "attempt": 0.25, "problem": 0.25}
    assert all(abs(kinds[kind] / 200 - share) < 0.14 for kind, share in shares.items()), kinds


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_zooms_have_their_share_and_neighbours_zoom_into_one_drawing(tokenizer: Any, share: float) -> None:
    lessons = Lessons(tokenizer, Stage(100, 4, 1e-3, 1, zoom_frac=share, figures_frac=1.0, blind_frac=0.0), seed=1)
    kinds = [lessons[index].kind for index in range(400)]
    assert abs(kinds.count("zoom") / 400 - share) < 0.23  # four standard deviations of 50 groups
    zooms = [
        lessons[index] for index in range(400) if kinds[index] == "zoom" and index // 8 == kinds.index("zoom") // 8
    ]
    assert len(zooms) > 1 and all(zoom is zooms[0] for zoom in zooms)


def test_second_attempts_are_at_the_problems_that_the_policy_played(tokenizer: Any) -> None:
    stage = Stage(100, 4, 1e-3, 1, textbook_frac=0.5, attempts_frac=1.0)
    played = Lessons(tokenizer, stage, seed=1)
    problems = {index: played.drawn(index)[0] for index in range(0, 160, stage.lessons_per_drawing)}
    for index, problem in problems.items():
        lesson = Lessons(tokenizer, stage, 1, attempts=[OwnAttempts(index, (Attempt("", "1"),))])[index + 3]
        assert (lesson.kind, lesson.family, lesson.level) == ("attempt", problem.family, problem.level)
        assert taught(tokenizer, lesson).endswith(f"\\boxed{{{problem.answer}}}<|im_end|>")
    styles = {style for style, known in STYLES.items() for problem in problems.values() if problem.family in known}
    assert {"plain", "textbook"} <= styles


def test_an_own_wrong_attempt_is_context_to_the_letter_and_what_follows_is_taught(tokenizer: Any) -> None:
    demonstrator = Demonstrator(tokenizer, 20, seed=5)
    for index in range(20):
        problem = demonstrator.problems.problem(index)
        wrong = Attempt("1 + 1 = 3. ", "nothing of the kind")
        lesson = demonstrator.after(index, [wrong])
        text = tokenizer.decode(lesson.ids_T)
        assert f"assistant\n{wrong.thought}{tool_call(wrong.answer)}<|im_end|>" in text
        start = f"{correction(wrong, problem)} {problem.reasoning} {tool_call(problem.answer)}<|im_end|>"
        assert taught(tokenizer, lesson) == f"{start}\\boxed{{{problem.answer}}}<|im_end|>"


def test_zooms_show_every_label_that_half_a_picture_can_show() -> None:
    boxes = [(0, 0, 30, 12), (60, 40, 80, 52), (130, 110, 160, 128), (75, 50, 95, 62)]
    windows = zoom_windows(boxes, 160, 128)
    assert len(windows) <= 3
    for left, top, right, bottom in boxes:
        seen = [x * 0.16 <= left and right <= (x + 500) * 0.16 and y * 0.128 <= top and bottom <= (y + 500) * 0.128
                for x, y in windows]  # fmt: skip
        assert any(seen), (left, top)
    assert zoom_windows([(0, 0, 120, 12)], 160, 128) == []  # wider than half a picture


@pytest.mark.parametrize("style", ["plain", "small_print"])
def test_a_zoom_demonstration_shows_each_window_then_solves_and_teaches_both(style: str, tokenizer: Any) -> None:
    demonstrator = Demonstrator(tokenizer, 12, seed=6, problems={"style": style})
    for index in range(12):
        problem, image, boxes = demonstrator.problems.drawn(index)
        windows = zoom_windows(boxes, *image.size)
        lesson = demonstrator.zoom(index, is_blind=False)
        calls = "".join(f"{zoom_call(*window)}<|im_end|>" for window in windows)
        answer = f"{problem.reasoning} \\boxed{{{problem.answer}}}<|im_end|>"
        assert taught(tokenizer, lesson) == calls + answer and len(lesson.images) == 1 + len(windows)
        assert taught(tokenizer, demonstrator.zoom(index, is_blind=True)) == answer


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
    problem = Problem("triangle_angles", 3, (47, 65), "x", "Find x.", "68", "47 + 65 = 112. 180 - 112 = 68.")
    assert correction(Attempt(thought, "0"), problem) == expected


def test_wrong_beginnings_are_calls_that_scored_nothing_and_can_be_repeated() -> None:
    def turn(text: str, score: float | None) -> Turn:
        info = {} if score is None else {"tool_score": score}
        return Turn(0, 1, text, "stop", (), 0, (), info, 0.0, 0.0)

    def beginnings(*turns: Turn) -> list[tuple[Attempt, ...]]:
        return wrong_beginnings(cast(Trajectory, SimpleNamespace(turns=turns)))

    first, second = Attempt("1 + 1 = 3. ", "3"), Attempt("", "4")
    wrong = turn(first.thought + tool_call("3"), 0.0)
    assert beginnings(wrong, turn(tool_call("4"), 0.0), turn("\\boxed{5}", None)) == [(first,), (first, second)]
    assert beginnings(wrong, turn(tool_call("2"), 1.0)) == [(first,)]
    assert beginnings(turn(tool_call("2"), 1.0)) == []
    assert beginnings(turn("\\boxed{3}", None)) == []
    assert beginnings(turn('<tool_call>{"name":"calc_score","arguments":{"answer":"3"}}</tool_call>', 0.0)) == []


def misread_by(
    reading: Callable[[int], Mapping[int, float]],
    lessons: Lessons,
    collator: Collator,
    monkeypatch: pytest.MonkeyPatch,
    size: int = 64,
) -> list[OwnAttempts]:
    """Return the misreadings of a policy that reads a digit as others, by their probabilities."""
    tokens = lessons.tokenizer.convert_tokens_to_ids(list("0123456789"))

    def logits(_: Any, batch: SftBatch) -> torch.Tensor:
        taught = batch.ids_BT[batch.loss_mask_BT].tolist()
        logits_NV = torch.full((len(taught), len(lessons.tokenizer)), -torch.inf)
        for place, token in enumerate(taught):
            shares = reading(tokens.index(token)) if token in tokens else {0: 1.0}
            for digit, share in shares.items():
                logits_NV[place, tokens[digit]] = math.log(share)
        return logits_NV

    monkeypatch.setattr("trainer.starter.misreadings.taught_logits", logits)
    solutions = Solutions(lessons, range(size), collator)
    batches = [solutions.collate([solutions[n] for n in range(k, k + 16)]) for k in range(0, size, 16)]
    return misreadings(cast(PolicyModel, None), lessons.tokenizer, batches, torch.device("cpu"))


@pytest.mark.parametrize("style", ["overprint", "textbook"])
def test_a_misreading_is_the_solution_of_the_problem_with_the_numbers_that_the_policy_reads(
    style: str, tokenizer: Any, collator: Collator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(100, 4, 1e-3, 1, problems={"style": "overprint"}, textbook_frac=float(style == "textbook"))
    lessons = Lessons(tokenizer, replace(stage, lessons_per_drawing=1), seed=1)
    found = misread_by(lambda digit: {digit % 9 + 1: 1.0}, lessons, collator, monkeypatch)
    assert len({own.index for own in found}) > 20
    for own in found:
        problem, attempt = lessons.problem(own.index), own.wrong[0]
        givens = list(problem.givens)
        for place in problem.drawn_givens:
            if str(givens[place]) in re.findall(r"\d+", problem.reasoning):
                givens[place] = int(str(givens[place]).translate(str.maketrans("0123456789", "1234567891")))
        wrong = read_as(problem, tuple(givens))
        assert wrong and attempt == Attempt(f"{wrong.reasoning} ", wrong.answer) and wrong.answer != problem.answer


def test_a_policy_misreads_what_it_takes_for_likeliest_and_then_the_next_likely(
    tokenizer: Any, collator: Collator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = {"families": ["linear_pair"], "levels": (1,)}
    lessons = Lessons(tokenizer, Stage(200, 4, 1e-3, 1, problems=problems, lessons_per_drawing=1), seed=1)

    def misread(shares: Callable[[int], Mapping[int, float]]) -> list[OwnAttempts]:
        return misread_by(shares, lessons, collator, monkeypatch)

    # An unlikely slip is no misreading; a likely one has the right number after it, if only one digit is wrong.
    assert misread(lambda digit: {digit: 0.6, (digit + 1) % 10: 0.4}) == []
    found = misread(lambda digit: {digit: 0.4 if digit == 5 else 0.9, (digit + 1) % 10: 0.6 if digit == 5 else 0.1})
    with_one_five = [n for n in range(64) if str(lessons.problem(n).givens[0]).count("5") == 1]
    assert {own.index for own in found} >= set(with_one_five) and with_one_five
    assert all(len(own.wrong) == 1 for own in found if own.index in with_one_five)
    # Where the next one is wrong too, it is the second attempt.
    found = misread(lambda digit: {digit: 0.1, digit % 9 + 1: 0.5, (digit + 1) % 9 + 1: 0.4})
    pairs = [own.wrong for own in found if len(own.wrong) == 2]
    assert len(pairs) > 20 and all(second.thought.startswith("Look again: ") for _, second in pairs)
    assert all(first.answer != second.answer for first, second in pairs)


def test_a_reading_that_is_right_or_answers_as_the_last_ends_the_wrong_attempts() -> None:
    problem = Problem("triangle_angles", 3, (47, 65), "x", "Find x.", "68", "47 + 65 = 112. 180 - 112 = 68.")
    one, other = read_as(problem, (41, 65)), read_as(problem, (47, 66))
    assert one and other and read_as(problem, (65, 47)) is None and read_as(problem, (147, 65)) is None
    first = Attempt("41 + 65 = 106. 180 - 106 = 74. ", "74")
    assert wrong_attempts([None, one]) == ()
    assert wrong_attempts([one, None]) == wrong_attempts([one, one]) == (first,)
    second = Attempt("Look again: 47, 66. 47 + 66 = 113. 180 - 113 = 67. ", "67")
    assert wrong_attempts([one, other]) == (first, second)


def test_demonstrations_show_only_problems_of_their_own_split() -> None:
    problems = ProceduralGeo3k("demonstrations", 200, seed=17)
    assert {split_of(problems.problem(i).key) for i in range(200)} == {"demonstrations"}


def test_a_demonstration_is_the_same_every_time(tokenizer: Any) -> None:
    one, other = (Demonstrator(tokenizer, 40, seed=3, mixture=MIXED_HABITS) for _ in range(2))
    for index in reversed(range(40)):
        assert one[index].ids_T.tolist() == other[index].ids_T.tolist()
        assert one[index].loss_mask_T.tolist() == other[index].loss_mask_T.tolist()
        assert np.array_equal(one[index].images, other[index].images)


def test_a_misreading_is_shown_but_never_taught(tokenizer: Any) -> None:
    always = Mixture(tools_offered=1.0, checks=1.0, first_wrong=1.0, second_wrong=1.0)
    demonstrator = Demonstrator(tokenizer, 30, seed=5, mixture=always)
    problems = ProceduralGeo3k("demonstrations", 30, seed=5)
    for index in range(30):
        problem, demonstration = problems.problem(index), demonstrator[index]
        text = tokenizer.decode(demonstration.ids_T)
        if text.count("is wrong") == 2:  # both misreadings were possible
            assert taught(tokenizer, demonstration) == f"{problem.reasoning} \\boxed{{{problem.answer}}}<|im_end|>"
        assert "<tool_call>" not in taught(tokenizer, demonstration) or "is right" in text


@pytest.mark.parametrize(
    ("mixture", "pattern"),
    [
        (Mixture(tools_offered=0.0), "{reasoning} \\boxed{{{answer}}}<|im_end|>"),
        (Mixture(tools_offered=0.0, reasons=0.0), "\\boxed{{{answer}}}<|im_end|>"),
        (Mixture(tools_offered=1.0, checks=0.0, reasons=0.0), "\\boxed{{{answer}}}<|im_end|>"),
    ],
)
def test_each_habit_is_shown_as_its_mixture_says(mixture: Mixture, pattern: str, tokenizer: Any) -> None:
    demonstrator = Demonstrator(tokenizer, 20, seed=8, mixture=mixture)
    problems = ProceduralGeo3k("demonstrations", 20, seed=8)
    for index in range(20):
        problem = problems.problem(index)
        expected = pattern.format(reasoning=problem.reasoning, answer=problem.answer)
        assert taught(tokenizer, demonstrator[index]) == expected


def test_giving_up_repeats_the_wrong_answer(tokenizer: Any) -> None:
    mixture = Mixture(tools_offered=1.0, checks=1.0, first_wrong=1.0, gives_up=1.0)
    demonstrator = Demonstrator(tokenizer, 20, seed=9, mixture=mixture)
    shown = [(tokenizer.decode(d.ids_T), taught(tokenizer, d)) for d in (demonstrator[i] for i in range(20))]
    wrong = [(text, last) for text, last in shown if "is wrong" in text]
    assert len(wrong) > 15
    for text, last in wrong:
        called = json.loads(text.split("<tool_call>")[2].split("</tool_call>")[0])["arguments"]["answer"]
        assert last == f"\\boxed{{{called}}}<|im_end|>"


def test_packed_demonstrations_have_the_loss_that_they_have_alone(tokenizer: Any, collator: Collator) -> None:
    model = PolicyModel.load(STARTER_PATH)
    demonstrations = [Demonstrator(tokenizer, 8, seed=2)[i] for i in range(8)]
    with torch.no_grad():
        together = sft_loss(model, collator(demonstrations)).item()
        sums = [(sft_loss(model, collator([d])).item(), int(d.loss_mask_T.sum())) for d in demonstrations]
    assert together == pytest.approx(sum(loss * n for loss, n in sums) / sum(n for _, n in sums), rel=1e-5)


def test_patches_are_those_of_the_image_processor_whatever_the_sizes(collator: Collator) -> None:
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((128, 160), (96, 64))]
    images = [Image.fromarray(picture) for picture in pictures]
    expected = build_image_processor()(images=images, return_tensors="np")["pixel_values"]
    pad = [collator.pad_id]
    ids_T = np.array([*pad, *[collator.image_token_id] * 20, *pad, *[collator.image_token_id] * 6, *pad])
    lesson = Demonstration(ids_T, np.zeros(len(ids_T), dtype=np.bool_), tuple(pictures))
    batch = replace(collator, picture_step=4, patch_step=64)([lesson])
    pixels = batch.vision(26).pixels_PD.numpy()
    assert np.abs(pixels[: len(expected)] - expected).max() < 1e-6
    assert len(batch.grids) % 4 == 0 and len(pixels) % 64 == 0
    assert sum(height * width for _, height, width in batch.grids) == len(pixels)


def test_a_picture_that_the_model_sees_smaller_is_shown_smaller() -> None:
    large = Image.fromarray(np.random.default_rng(1).integers(0, 256, (512, 640, 3), dtype=np.uint8))
    expected, shown = ImageStore(build_image_processor(), 2).process(large), GridStore().process(large)
    assert (shown.grid_thw, shown.num_tokens) == (expected.grid_thw, expected.num_tokens)
    assert shown.picture is not None and expected.picture is not None
    assert np.array_equal(np.asarray(shown.picture), np.asarray(expected.picture))


def test_padding_changes_no_loss(tokenizer: Any, collator: Collator) -> None:
    model = PolicyModel.load(STARTER_PATH)
    demonstrations = [Demonstrator(tokenizer, 3, seed=2)[i] for i in range(3)]
    padded = replace(collator, row_step=4, picture_step=8, patch_step=1024)(demonstrations)
    assert padded.ids_BT.shape[0] == 4 and len(padded.grids) == 8
    with torch.no_grad():
        assert sft_loss(model, padded).item() == pytest.approx(
            sft_loss(model, collator(demonstrations)).item(), rel=1e-5
        )


def test_a_probe_counts_what_a_greedy_policy_would_write_to_the_letter(tokenizer: Any, collator: Collator) -> None:
    model, cpu = PolicyModel.load(STARTER_PATH), torch.device("cpu")
    recipe = replace(TINY, stages=(Stage(1, 8, 1e-3, 1, problems={"levels": (1,)}),), num_probes=8)
    probe = Probe(tokenizer, recipe, 0, collator)
    right = []
    for lesson in probe.lessons:
        prompt = lesson.ids_T[~lesson.loss_mask_T]
        request = GenerateRequest(
            tuple(int(i) for i in prompt),
            (ImageStore(build_image_processor(), 2).process(Image.fromarray(lesson.images[0])),),
            len(lesson.ids_T),
            SamplingParams(0.0, (tokenizer.eos_token_id,)),
            0,
        )
        right.append(asyncio.run(_generate(model, request)) == tuple(lesson.ids_T[lesson.loss_mask_T]))
    scores = probe.measure(model, cpu)
    assert scores.exact == sum(right) / 8
    assert 0.3 < scores.reading <= 1.0  # the bundled starter can read


async def _generate(model: PolicyModel, request: GenerateRequest) -> tuple[int, ...]:
    async with HFEngine(model).session() as session:
        return (await session.generate(request)).ids


def test_the_learning_rate_warms_up_and_falls_to_a_hundredth() -> None:
    stage = RECIPES["starter"].stages[9]
    assert lr_at(0, stage) == pytest.approx(stage.lr / stage.warmup_steps)
    assert lr_at(stage.warmup_steps, stage) == pytest.approx(stage.lr)
    assert lr_at(stage.steps, stage) == pytest.approx(stage.lr / 100)
    assert lr_at(stage.steps, replace(stage, final_lr=1.0)) == pytest.approx(stage.lr)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--recipe", "smok"], "did you mean 'smoke'"),
        (["--max-minutes", "-1"], "greater than or equal to 0"),
        (["--device", "gpu"], "--device: must be usable by torch, got gpu; give cpu"),
        (["--recipe", "smoke", "--device", "cpu", "--out", __file__], "--out: must be a folder that can be written"),
    ],
)
def test_bad_arguments_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(argv)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line
